"""Partial sums that travel around a ring."""

from collections.abc import Callable
from dataclasses import dataclass

from lowp.wire.plan import Shard
from lowp.wire.reductions.base import ChunkJob, MessageBuffers, Reduction, Steps
from lowp.wire.reductions.two_shot import Fold
from lowp.wire.rules import Load, Rules, Stage


def ring_sum(job: ChunkJob, members: list[int], addend: Callable[[int], Load], totals: MessageBuffers) -> Steps:
    """Sum shards 0 .. len(members) - 1 over the members of a ring; `addend(index)` is this rank's part in a shard.

    1. Shard s starts at member s. Each member adds its own numbers, rounds, and passes the sum on.
    2. After n - 1 hops shard s is whole at member s - 1, which encodes it as the total.
    3. Totals go around the same way, as the same bytes, and are put into `totals`.
    """
    count, mine = len(members), members.index(job.link.rank)
    following, preceding = members[(mine + 1) % count], members[mine - 1]
    total = job.rules.begin(addend(mine), job.chunk.shards[mine], mine)
    for hop in range(1, count):
        index, coming = (mine - hop + 1) % count, (mine - hop) % count
        message = job.buffer(coming, Stage.PARTIAL)
        yield job.link.send_receive({following: job.write(index, Stage.PARTIAL, total, mine)}, {preceding: message})
        shard = job.chunk.shards[coming]
        total = job.rules.add(job.read(message, coming, Stage.PARTIAL), addend(coming), shard, mine)
    index = (mine + 1) % count
    job.rules.write(total, job.chunk.shards[index], Stage.TOTAL, 0, totals[index])
    for hop in range(1, count):
        index = (mine - hop + 1) % count
        yield job.link.send_receive({following: totals[(index + 1) % count]}, {preceding: totals[index]})


@dataclass(frozen=True)
class Ring(Reduction):
    """The bandwidth-optimal classic: every partial sum is rounded to the wire's format, W - 1 times in all."""

    def __str__(self) -> str:
        return "ring"

    def steps(self, world: int) -> int:
        return 2 * (world - 1)

    def reduce(self, job: ChunkJob) -> Steps:
        def addend(index: int) -> Load:
            return job.rules.addend(job.load(index), job.chunk.shards[index], job.link.rank)

        totals = job.totals()
        yield from ring_sum(job, list(range(job.link.world)), addend, totals)
        job.finish(totals)

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Fold:
        return Fold(shard, rules, travels=True)

    def owner(self, index: int | None, world: int) -> int:
        assert index is not None
        return (index - 1) % world

    def turn(self, rank: int, index: int, world: int) -> int:
        return int(rank < index)
