"""Two roundings, whatever the world size."""

from dataclasses import dataclass

from lowp.wire.plan import Shard
from lowp.wire.reductions.base import Job, Reduction, Steps
from lowp.wire.rules import Load, Rules, Stage


class Fold:
    """Addends in the order in which they come. With `travels`, the sum is sent on before every addition but the first."""

    def __init__(self, shard: Shard, rules: Rules, travels: bool = False) -> None:
        self._shard = shard
        self._rules = rules
        self._travels = travels
        self._total: Load | None = None
        self._holder = 0  # who has the sum so far

    def add(self, rank: int, load: Load) -> None:
        self.add_sum(rank, self._rules.addend(load, self._shard, rank))

    def add_sum(self, actor: int, load: Load) -> None:
        rules, shard = self._rules, self._shard
        if self._total is None:
            self._total = rules.begin(load, shard, actor)
        else:
            total = rules.sent_on(self._total, shard, self._holder) if self._travels else self._total
            self._total = rules.add(total, load, shard, actor)
        self._holder = actor

    def total(self) -> Load:
        assert self._total is not None
        return self._total


@dataclass(frozen=True)
class TwoShot(Reduction):
    """Every rank adds up one shard.

    1. Encode this rank's numbers, one message for each owner of a shard.
    2. Exchange: every owner receives its shard from every rank.
    3. Decode and add in `accumulate` (float32), in rank order, so that the order is the same everywhere.
    4. Encode the sum once and send it to everybody. All decode the same bytes, the owner too: replicas stay identical.

    A ring would round W - 1 times: at 256 ranks and e5m2 its error is 10 times larger.
    """

    one_order = True
    sums_in_format = False

    def __str__(self) -> str:
        return "two_shot"

    def steps(self, world: int) -> int:
        return 2

    def exchange(self, job: Job) -> Steps:
        me, ranks = job.link.rank, range(job.link.world)
        sent = {rank: job.write(rank, Stage.ADDEND) for rank in ranks}
        received = {rank: sent[me] if rank == me else job.room(me, Stage.ADDEND) for rank in ranks}
        yield job.link.exchange(sent, received)
        messages = [received[rank] for rank in ranks]
        total = job.rules.fold_messages(messages, job.chunk.shards[me], Stage.ADDEND, ranks)
        mine = job.write(me, Stage.TOTAL, total, actor=0)
        totals = {rank: mine if rank == me else job.room(rank, Stage.TOTAL) for rank in ranks}
        yield job.link.exchange(dict.fromkeys(ranks, mine), totals)
        for rank in ranks:
            job.finish(totals[rank], rank)

    def adder(self, shard: Shard, index: int, rules: Rules) -> Fold:
        return Fold(shard, rules)
