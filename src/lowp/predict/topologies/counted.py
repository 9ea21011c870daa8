"""lowp's own reductions: their rounds are counted by running them (wire/traffic.py), not stated again.

Counting thousands of ranks one by one would take seconds. But nodes are alike: with every further node, the numbers of rounds,
of messages and of shards grow by the same. So a reduction is counted on 3, 4 and 5 nodes, and what grew evenly goes on growing;
where something does not, and for trees, whose rounds grow with the logarithm, the ranks that are asked for are counted
themselves.

Which ranks are counted: where all ranks wait equally often, those of one node, round by round side by side. Where some wait for
others (trees, leaders of nodes), rank 0, which is the root, and on the longest way.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import lcm

import numpy as np

from lowp.predict.cluster import Arrangement
from lowp.predict.topologies.base import IN, MESSAGES, OUT, SHARDS, Amount, Pattern, Round, Topology
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.hierarchical import Hierarchical
from lowp.wire.reductions.tree import Tree
from lowp.wire.rules import Stage
from lowp.wire.traffic import Wait, waits_of

_COUNTED = (3, 4, 5)  # nodes


@dataclass(frozen=True)
class CountedReduction(Topology):
    """Printed as the reduction is."""

    reduction: Reduction
    kahan: bool = False

    def __str__(self) -> str:
        return str(self.reduction)

    def of_size(self, elements: int) -> "CountedReduction":
        return replace(self, reduction=self.reduction.of_size(elements))

    def addends(self, ranks: int) -> int:
        return self.reduction.addends(ranks)

    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        return (_pattern(self.reduction, self.kahan, arrangement),)


@lru_cache(maxsize=1024)
def _pattern(reduction: Reduction, kahan: bool, arrangement: Arrangement) -> Pattern:
    ranks = arrangement.ranks
    own = reduction.size if isinstance(reduction, Hierarchical) else 1
    unit = lcm(arrangement.alike, own)
    if isinstance(reduction, Tree) or ranks % unit or ranks <= unit * _COUNTED[-1]:
        return counted_pattern(reduction, kahan, arrangement)
    fewer = [replace(arrangement, sizes=(*arrangement.sizes[:-1], nodes * unit)) for nodes in _COUNTED]
    some = [_pattern(reduction, kahan, each) for each in fewer]
    grown = _grown(some, ranks // unit - _COUNTED[0])
    return counted_pattern(reduction, kahan, arrangement) if grown is None else replace(grown, shards=reduction.shards(ranks))


def _grown(some: list[Pattern], steps: int) -> Pattern | None:
    """The pattern so many steps after the first of three, if each step adds the same."""
    if len({len(each.rounds) for each in some}) > 1:
        return None
    rounds = []
    for a, b, c in zip(*(each.rounds for each in some), strict=True):
        times, loads, work = c.times - b.times, c.loads - b.loads, _work_growth(a.work, b.work, c.work)
        if times != b.times - a.times or a.stage != c.stage or not np.array_equal(loads, b.loads - a.loads) or work is None:
            return None
        done = tuple((what, stage, count + steps * more) for (what, stage, count), more in zip(a.work, work, strict=True))
        rounds.append(Round(a.times + steps * times, a.stage, done, a.loads + steps * loads, a.point_to_point))
    last = _work_growth(*(each.last_work for each in some))
    if last is None:
        return None
    first = some[0].last_work
    done = tuple((what, stage, count + steps * more) for (what, stage, count), more in zip(first, last, strict=True))
    return Pattern(0, tuple(rounds), done)


def _work_growth(a: tuple[Amount, ...], b: tuple[Amount, ...], c: tuple[Amount, ...]) -> list[float] | None:
    alike = [each[:2] for each in a] == [each[:2] for each in b] == [each[:2] for each in c]
    if not alike or any(z[2] - y[2] != y[2] - x[2] for x, y, z in zip(a, b, c, strict=True)):
        return None
    return [z[2] - y[2] for y, z in zip(b, c, strict=True)]


def counted_pattern(reduction: Reduction, kahan: bool, arrangement: Arrangement) -> Pattern:
    """Counted on these very ranks."""
    ranks = arrangement.ranks
    led = reduction.steps(ranks) is None
    waits = [waits_of(reduction, rank, ranks, kahan) for rank in ([0] if led else range(arrangement.alike))]
    rounds: list[Round] = []
    work: Counter[tuple[str, Stage]] = Counter()
    for side_by_side in zip(*waits, strict=True):
        work += _most_work(side_by_side)
        if any(wait.sent or wait.received for wait in side_by_side):  # a node alone has nobody to wait for
            rounds.append(_round(side_by_side, _amounts(work), arrangement))
            work.clear()
    if isinstance(reduction, Tree):
        rounds = [one for each in rounds for one in _one_by_one(each)]
    merged = []
    for _, alike in groupby(rounds, key=lambda each: (each.stage, each.work, each.point_to_point, each.loads.tobytes())):
        same = list(alike)
        merged.append(replace(same[0], times=len(same)))
    return Pattern(reduction.shards(ranks), tuple(merged), _amounts(work))


def _round(waits: tuple[Wait, ...], work: tuple[Amount, ...], arrangement: Arrangement) -> Round:
    loads = np.zeros((2, len(waits), len(arrangement.levels), 2))
    stages = set()
    for rank, wait in enumerate(waits):
        for way, parcels in ((OUT, wait.sent), (IN, wait.received)):
            for parcel in parcels:
                stages.add(parcel.stage)
                level = arrangement.level(rank, parcel.peer)
                loads[way, rank, level, MESSAGES] += 1
                loads[way, rank, level, SHARDS] += parcel.shards
    (stage,) = stages  # of a round all messages are at one
    return Round(1, stage, work, loads, not all(wait.gathers for wait in waits))


def _most_work(waits: tuple[Wait, ...]) -> Counter[tuple[str, Stage]]:
    """By the busiest rank."""
    most: Counter[tuple[str, Stage]] = Counter()
    for wait in waits:
        for what, stage, count in wait.work:
            most[what, stage] = max(most[what, stage], count)
    return most


def _amounts(work: Counter[tuple[str, Stage]]) -> tuple[Amount, ...]:
    return tuple((what, stage, float(count)) for (what, stage), count in sorted(work.items()))


def _one_by_one(each: Round) -> list[Round]:
    """On its way down a tree the total leaves the root once for every branch, one message after the other, the longest branch
    first. Who has it passes it on meanwhile: with the root's last message the last rank of every branch has its own."""
    found = []
    for level in reversed(range(each.loads.shape[2])):
        messages = int(each.loads[OUT, 0, level, MESSAGES])
        loads = np.zeros_like(each.loads)
        loads[OUT, 0, level] = each.loads[OUT, 0, level] / max(1, messages)
        found += [replace(each, loads=loads)] * messages
    if len(found) <= 1:
        return [each]
    return [found[0], *(replace(one, work=()) for one in found[1:])]
