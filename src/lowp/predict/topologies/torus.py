"""A torus of two dimensions: rings along rows, then along columns (arXiv 1811.05233, 1811.06992).

1. Every row adds up: each of its R ranks has 1 / R of the row's sum after R - 1 rounds.
2. Every column all-reduces that part around a ring of C ranks, in 2 (C - 1) rounds.
3. Rows hand their parts around.

Where a cluster has nodes, a row is a node: then this is the reduce-scatter variant of a reduction in two levels. On ranks that
are all alike the torus is as square as it can be.
"""

from dataclasses import dataclass
from math import isqrt

from lowp.predict.cluster import Arrangement
from lowp.predict.topologies.base import Pattern, Round, Topology, even
from lowp.wire.rules import Stage


@dataclass(frozen=True)
class Torus(Topology):
    def __str__(self) -> str:
        return "torus"

    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        ranks = arrangement.ranks
        row = arrangement.sizes[-2] if len(arrangement.sizes) > 1 else _side(ranks)
        column = ranks // row
        along_row, along_column = arrangement.level(0, row - 1), arrangement.level(0, ranks - 1)
        first = _work(column)
        rounds = [
            Round(row - 1, Stage.PARTIAL, first, even(arrangement, (along_row, 1, column))),
            Round(column - 1, Stage.PARTIAL, _work(1), even(arrangement, (along_column, 1, 1))),
            Round(column - 1, Stage.TOTAL, (), even(arrangement, (along_column, 1, 1))),
            Round(row - 1, Stage.TOTAL, (), even(arrangement, (along_row, 1, column))),
        ]
        return (Pattern(ranks, tuple(each for each in rounds if each.times), (("decode", Stage.TOTAL, ranks),)),)


def _work(shards: float) -> tuple[tuple[str, Stage, float], ...]:
    return (("encode", Stage.PARTIAL, shards), ("add", Stage.PARTIAL, shards))


def _side(ranks: int) -> int:
    return next(side for side in range(isqrt(ranks), 0, -1) if ranks % side == 0)
