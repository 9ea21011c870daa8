"""Partial sums that travel up a binomial tree: the fewest steps, for small messages."""

from dataclasses import dataclass

from lowp.wire.plan import Shard
from lowp.wire.reductions.base import ChunkJob, Reduction, Steps
from lowp.wire.rules import Load, Rules, Stage


class Stack:
    """Sums of 1, 2, 4 ... neighbours, merged as soon as two are of one size: memory grows with the logarithm of the ranks."""

    def __init__(self, shard: Shard, rules: Rules) -> None:
        self._shard = shard
        self._rules = rules
        self._sums: list[tuple[int, int, Load]] = []  # (first rank, how many, their sum)

    def add(self, rank: int, load: Load) -> None:
        rules = self._rules.at(rank)
        self._sums.append((rank, 1, rules.begin(rules.addend(load, self._shard, rank), self._shard, rank)))
        while len(self._sums) > 1 and self._sums[-1][1] == self._sums[-2][1]:
            self._merge()

    def _merge(self) -> None:
        sender, right_count, right = self._sums.pop()
        first, count, left = self._sums.pop()
        right = self._rules.at(sender).sent_on(right, self._shard, sender)
        self._sums.append((first, count + right_count, self._rules.at(first).add(left, right, self._shard, sender)))

    def total(self) -> Load:
        while len(self._sums) > 1:
            self._merge()
        return self._sums[0][2]


@dataclass(frozen=True)
class Tree(Reduction):
    """A binomial tree, up and down.

    1. In round j = 1, 2, 4 ... a rank that is an odd multiple of j sends its sum to rank - j and is done; the other adds.
    2. Rank 0 encodes the total, and it goes down the same tree as the same bytes.

    Sums of log2(W) roundings, in 2 log2(W) steps; but every step moves the whole message.
    """

    def __str__(self) -> str:
        return "tree"

    def shards(self, world: int) -> int:
        return 1

    def reduce(self, job: ChunkJob) -> Steps:
        me, world, rules = job.link.rank, job.link.world, job.rules
        shard = job.chunk.shards[0]
        total = rules.begin(rules.addend(job.load(0), shard, me), shard, me)
        reach = 1
        while reach < world and me % (2 * reach) == 0:
            if me + reach < world:
                message = job.buffer(0, Stage.PARTIAL)
                yield job.link.send_receive({}, {me + reach: message})
                total = rules.add(total, job.read(message, 0, Stage.PARTIAL), shard, me + reach)
            reach *= 2
        totals = job.totals()
        if me == 0:
            rules.write(total, shard, Stage.TOTAL, 0, totals[0])
        else:
            yield job.link.send_receive({me - reach: job.write(0, Stage.PARTIAL, total)}, {})
            yield job.link.send_receive({}, {me - reach: totals[0]})
        below = {me + reach // 2**i: totals[0] for i in range(1, reach.bit_length()) if me + reach // 2**i < world}
        if below:
            yield job.link.send_receive(below, {})
        job.finish(totals)

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Stack:
        return Stack(shard, rules)

    def owner(self, index: int | None, world: int) -> int:
        return 0
