"""Two roundings, whatever the world size."""

from dataclasses import dataclass

from lowp.wire.plan import Shard
from lowp.wire.reductions.base import ChunkJob, Reduction, Steps
from lowp.wire.rules import Load, Rules


class Fold:
    """Addends in the order in which they come, added by one rank: the rules are its own.

    With `travels`, every addend's rank adds it to the sum that the one before has sent on.
    """

    def __init__(self, shard: Shard, rules: Rules, travels: bool = False) -> None:
        self._shard = shard
        self._rules = rules
        self._travels = travels
        self._total: Load | None = None
        self._holder = 0, 0  # actor and rank that have the sum so far

    def add(self, rank: int, load: Load) -> None:
        self.add_sum(rank, self._rules.at(rank).addend(load, self._shard, rank), rank)

    def add_sum(self, actor: int, load: Load, rank: int) -> None:
        shard = self._shard
        rules = self._rules.at(rank) if self._travels else self._rules
        if self._total is None:
            self._total = rules.begin(load, shard, actor)
        else:
            last, holder = self._holder
            total = rules.at(holder).sent_on(self._total, shard, last) if self._travels else self._total
            self._total = rules.add(total, load, shard, actor)
        self._holder = actor, rank

    def total(self) -> Load:
        assert self._total is not None
        return self._total


@dataclass(frozen=True)
class TwoShot(Reduction):
    """Every rank adds up one shard.

    1. Encode this rank's numbers, one message for each owner of a shard.
    2. Send and receive: every owner gets its shard from every rank.
    3. Decode and add in `sum_format` (float32), in rank order, so that the order is the same everywhere.
    4. Encode the sum once and send it to everybody. All decode the same bytes, the owner too: replicas stay identical.

    A ring would round W - 1 times: at 256 ranks and e5m2 its error is 10 times larger.
    """

    one_order = True
    sums_in_format = False

    def __str__(self) -> str:
        return "two_shot"

    def steps(self, world: int) -> int:
        return 2

    def reduce(self, job: ChunkJob) -> Steps:
        me, ranks = job.link.rank, range(job.link.world)
        buffers = job.write_to_owners()
        yield job.link.send_receive(buffers.sent, buffers.received)
        shard, totals = job.chunk.shards[me], job.totals()
        job.rules.fold_to_total(buffers.rows, shard, ranks, totals[me])
        yield job.link.share(totals.rows, totals.lengths)
        job.finish(totals)

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Fold:
        return Fold(shard, rules.at(self.owner(index, rules.world)))

    def owner(self, index: int | None, world: int) -> int | None:
        return index
