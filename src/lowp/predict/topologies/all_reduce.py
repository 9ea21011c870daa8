"""torch's own all-reduce, as NCCL does it: along rings or up and down trees, whichever is faster for the message.

Rings: every link out of a node has a ring of its own, which carries its part of the message, so that all of them are used. In a
round a rank passes one shard on: on the ring that leaves the node at this rank, to the next node, on all others to its
neighbour.

Trees: inside a node a chain, between nodes two binary trees over half of the message each, so that every node is a leaf in one
of them. Messages are cut into slices that follow each other, so that a rank sends each byte once on the way up and once on the
way down; what grows with the number of nodes is the latency alone. (NCCL 2.4, "double binary trees".)
"""

from dataclasses import dataclass

import numpy as np

from lowp.predict.cluster import Arrangement
from lowp.predict.topologies.base import IN, OUT, Pattern, Round, Topology, even
from lowp.wire.rules import Stage


@dataclass(frozen=True)
class AllReduce(Topology):
    """`way`: "ring" or "tree" alone, as older versions of NCCL had only rings."""

    way: str = ""

    def __str__(self) -> str:
        return f"all_reduce({self.way})" if self.way else "all_reduce"

    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        ways = {"ring": ring_pattern, "tree": tree_pattern}
        return tuple(make(arrangement) for way, make in ways.items() if self.way in ("", way))


def ring_pattern(arrangement: Arrangement) -> Pattern:
    """P - 1 rounds in which sums travel, P - 1 in which totals do."""
    ranks, outer = arrangement.ranks, len(arrangement.levels) - 1
    if outer == 0:
        loads = even(arrangement, (0, 1, 1))
    else:
        loads = np.zeros((2, arrangement.alike, outer + 1, 2))
        inner, shared = arrangement.sizes[-2], arrangement.levels[outer].shared
        rings = max(1, inner // shared)
        for ring in range(rings):
            last, first = (ring + 1) * shared - 1, ring * shared
            for rank in range(inner):
                loads[OUT, rank, outer if rank == last else _inside(rank, arrangement)] += (1 / rings, 1 / rings)
                loads[IN, rank, outer if rank == first else _inside(rank, arrangement)] += (1 / rings, 1 / rings)
    sums = Round(ranks - 1, Stage.PARTIAL, (("add", Stage.PARTIAL, 1.0),), loads)
    return Pattern(ranks, (sums, Round(ranks - 1, Stage.TOTAL, (), loads)))


def _inside(rank: int, arrangement: Arrangement) -> int:
    """The level on which a rank reaches its neighbour, short of the outermost."""
    inner = arrangement.sizes[:-1]
    return next((at for at, size in enumerate(inner) if (rank + 1) % size), len(inner) - 1)


def tree_pattern(arrangement: Arrangement) -> Pattern:
    """In units of the whole message: slices follow each other, so that all levels carry theirs at the same time. As many rounds
    as hops on the longest way; in each of them a rank sends its part of the message."""
    hops: dict[int, tuple[int, int]] = {}  # of each level: how many there are, and the ranks that share what goes out
    below = 1  # ranks of a group that is one member at this level
    for at, size in enumerate(arrangement.sizes):
        members = size // below
        chain = at == 0 and arrangement.levels[0].ranks is not None
        hops[at] = (members - 1 if chain else (members - 1).bit_length()), below
        below = size
    whole = sum(count for count, _ in hops.values())
    loads = even(arrangement, *((at, count / whole, 1 / (own * whole)) for at, (count, own) in hops.items() if count))
    return Pattern(1, tuple(Round(whole, stage, (), loads) for stage in (Stage.PARTIAL, Stage.TOTAL)))
