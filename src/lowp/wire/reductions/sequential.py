"""One addition after the other, each rounded: what a low-precision adder does."""

from dataclasses import dataclass

from lowp.wire.reductions.two_shot import TwoShot


@dataclass(frozen=True)
class Sequential(TwoShot):
    """As two_shot, but the owner rounds its sum to the wire's format after every addition, in rank order.

    The setting of the APS paper (and of in-network adders): s = Q(Q(Q(g0 + g1) + g2) + ...), with or without Kahan.
    """

    sums_in_format = True

    def __str__(self) -> str:
        return "sequential"
