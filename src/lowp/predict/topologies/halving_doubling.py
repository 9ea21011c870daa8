"""Recursive halving and doubling: few rounds, and no more bytes than a ring (Rabenseifner; Thakur and others, 2005).

1. In round j = 1, 2, ... log2(P), ranks at distance 2^(j-1) exchange and add halves of what they still have: n / 2^j. The
   largest messages stay between neighbours.
2. The same back, with the sums.

Where P is no power of two, the ranks beyond the last one give their numbers to a partner first, and get the sum at the end.
"""

from dataclasses import dataclass

from lowp.predict.cluster import Arrangement
from lowp.predict.topologies.base import Pattern, Round, Topology, even
from lowp.wire.rules import Stage


@dataclass(frozen=True)
class HalvingDoubling(Topology):
    def __str__(self) -> str:
        return "halving_doubling"

    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        ranks = arrangement.ranks
        power = 1 << (ranks.bit_length() - 1)
        level = {distance: arrangement.level(0, distance) for distance in (1 << j for j in range(power.bit_length() - 1))}
        sums, totals, shards = [], [], ranks / 2
        for distance, at in level.items():
            loads = even(arrangement, (at, 1, shards))
            work = (("encode", Stage.PARTIAL, shards), ("add", Stage.PARTIAL, shards))
            sums.append(Round(1, Stage.PARTIAL, work, loads))
            totals.append(
                Round(1, Stage.TOTAL, (("encode", Stage.TOTAL, 2 * shards),) if distance == power // 2 else (), loads)
            )
            shards /= 2
        rounds = [*sums, *reversed(totals)]
        if power < ranks:
            whole = even(arrangement, (arrangement.level(0, ranks - 1), 1, ranks))
            first = Round(1, Stage.ADDEND, (("encode", Stage.ADDEND, ranks),), whole)
            rounds = [first, *rounds, Round(1, Stage.TOTAL, (), whole)]
        return (Pattern(ranks, tuple(rounds), (("decode", Stage.TOTAL, ranks),)),)
