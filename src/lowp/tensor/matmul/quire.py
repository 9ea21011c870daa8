"""A quire: the exact sum of all products, rounded once.

Products have 48 bits at most, a float64 adds 53 exactly. So the exponents of all products, from the lowest bit of the
smallest to the top of the largest, are cut into bins of w binades, and every product is cut at their borders:

1. From the top down, `high = (x + c) - c` with c = 1.5 * 2^52 times a bin's unit is x rounded to a multiple of that unit;
   it goes to the bin, and the rest, exactly, further down.
2. Every part is at most 2^w units of its bin. With w = 51 - log2(number of addends) their sum stays under 2^52 units:
   exact.
3. In the end every bin passes on to the next what is a multiple of that one's unit. What remains in a bin is then at most
   half of the next one's unit. So the bins can be added from the top down, rounding to odd: once a sum is inexact, it lies
   at least one unit of the bin away from its neighbours in float64, and all that is still to come is less than that.
4. That number, rounded to odd, is rounded to the format.

An infinity or NaN goes to the top bin and stays there, as in any sum. Where the data's range allows, one bin is enough, and
a step is one addition.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.carrier import F64
from lowp.tensor.matmul.rounding import odd_sum
from lowp.tensor.matmul.steps import Steps

MOST_BINS = 32


def bin_width(addends: int) -> int:
    """w, for so many addends."""
    return 51 - max(addends, 1).bit_length()


@dataclass(frozen=True, eq=False)
class Quire(Steps):
    """The state is the bins, the lowest first; the uniforms are the c's of all bins but the lowest."""

    @property
    def states(self) -> int:
        return self.lanes.bins

    @property
    def uniforms(self) -> int:
        return self.lanes.bins - 1

    @property
    def roundings_of_product(self) -> int:
        return int(self.arithmetic.multiply is not None)

    @property
    def roundings_of_sum(self) -> int:
        return 0

    @property
    def roundings_at_end(self) -> int:
        return 1

    def _binned(self, x: Tensor, bins: "list[Tensor]", cuts: "list[Tensor]") -> tuple[Tensor, ...]:
        bins = list(bins)
        rest = x
        for i in range(len(cuts), 0, -1):
            high = (rest + cuts[i - 1]) - cuts[i - 1]
            rest = rest - high
            bins[i] = bins[i] + high
            if i == len(cuts):
                rest = torch.where(x.abs() < torch.inf, rest, torch.zeros_like(rest))
        bins[0] = bins[0] + rest
        return tuple(bins)

    def multiply_add(self, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *state, numbers, _, tables = rest
        x = self.product(a, b, tables, self._draws(numbers, state[0]))
        return self._binned(x, state[: self.states], state[self.states :])

    def add(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *state, _, _, _ = rest
        return self._binned(x, state[: self.states], state[self.states :])

    add_exactly = add

    def finish(self, *rest: Any) -> tuple[Tensor, ...]:
        *state, numbers, _, tables = rest
        bins, cuts = state[: self.states], state[self.states :]
        for i, cut in enumerate(cuts):
            carried = (bins[i] + cut) - cut
            bins[i] = bins[i] - carried
            bins[i + 1] = bins[i + 1] + carried
        total = bins[-1]
        for part in reversed(bins[:-1]):
            total = odd_sum(total, part, F64)
        total = torch.where(total == 0, torch.zeros_like(total), total)
        draws = self._draws(numbers, total)
        return (self._to_sum(total, self._sum_tables(tables), draws.next()),)
