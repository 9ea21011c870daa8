"""One addend at a time: what happens to a sum, written once, in elementwise torch operations.

A sum has a state of one number (Kahan: two; a quire: its bins). Two things happen to it:

    multiply_add(a, b, *state)   the product of a and b joins
    add(x, *state)               a number of the format joins: the sum of a chunk
    add_exactly(x, *state)       any float32 number joins: a bias

and `finish(*state)` is its number in the end. Everything else, the loops over k and over chunks, is in plain.py,
cpp.py and triton.py, of which the last two print what is traced here.

Noise: every rounding has a key of its own (keys.py), and every element of the result draws by its index. `numbers` holds the
keys of the roundings of one call, one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowp.formats import Rounding
from lowp.tensor.carrier import F32, F64, Carrier, carrier_for
from lowp.tensor.core import Tables, convert
from lowp.tensor.matmul.arithmetic import Arithmetic
from lowp.tensor.matmul.rounding import SumRounder, integer_add, odd_sum, rounder, sign_of_zero_down
from lowp.tensor.noise import KEY_SIZE, draw
from lowp.tensor.table import Table


@dataclass(frozen=True)
class Lanes:
    """In which numbers a step is carried out, and how they are added.

    `odd`: sums are rounded to odd before they are rounded to the format. `fused`: a product and the sum after it may be one
    instruction, which rounds once, because products are exact (or would have to be). `bins`: of a quire.
    """

    carrier: Carrier
    odd: bool = True
    fused: bool = True
    bins: int = 1


GENERAL = Lanes(F64)


class Draws:
    """The noise of one call's roundings, one after the other. (`numbers` is empty where nothing is drawn.)"""

    def __init__(self, numbers: Tensor, like: Tensor, carrier: Carrier, stochastic: bool) -> None:
        self._numbers, self._like, self._bits = numbers, like, carrier.noise_bits
        self._stochastic = stochastic
        self._used = 0

    def next(self) -> Tensor | None:
        if not self._stochastic:
            return None
        first = self._used * KEY_SIZE
        self._used += 1
        key: Sequence[Tensor] = [self._numbers[first + i] for i in range(KEY_SIZE)]
        return draw(key, self._like, self._bits)  # type: ignore[arg-type]  # looked up by place, as a tensor would be


@dataclass(frozen=True, eq=False)
class Steps:
    """What plain sums, chunks and Kahan's do; `Quire` (quire.py) has the same methods."""

    arithmetic: Arithmetic
    lanes: Lanes

    @property
    def carrier(self) -> Carrier:
        return self.lanes.carrier

    @property
    def operand_dtype(self) -> torch.dtype:
        """Of a and b: bits of float32 numbers are added where that stands for a product."""
        return torch.float32 if self.arithmetic.approximate else self.carrier.dtype

    @property
    def result_dtype(self) -> torch.dtype:
        """One that holds the numbers of `accumulate` exactly."""
        return torch.float32 if carrier_for(self.arithmetic.sum_format, torch.float32) is F32 else torch.float64

    def operand(self, x: Tensor) -> Tensor:
        """float32 numbers as a step takes them."""
        return x if self.operand_dtype == torch.float32 else _widened(x)

    def lane(self, x: Tensor) -> Tensor:
        """float32 numbers as addends."""
        return x if self.carrier is F32 else _widened(x)

    @property
    def states(self) -> int:
        return 2 if self.arithmetic.kahan else 1

    @property
    def uniforms(self) -> int:
        """How many numbers each step needs that are the same for all elements: none."""
        return 0

    @property
    def roundings_of_product(self) -> int:
        """Draws for one `multiply_add`."""
        return (self.arithmetic.multiply is not None) + self.roundings_of_sum

    @property
    def roundings_of_sum(self) -> int:
        """Draws for one `add`."""
        return 4 if self.arithmetic.kahan else 1

    @property
    def roundings_at_end(self) -> int:
        return 0

    @cached_property
    def _to_product(self) -> SumRounder | None:
        fmt = self.arithmetic.product_format
        return None if fmt is None else rounder(fmt, self.arithmetic.mode, self.carrier)

    @cached_property
    def _to_sum(self) -> SumRounder:
        return rounder(self.arithmetic.sum_format, self.arithmetic.mode, self.carrier)

    @cached_property
    def _product_tables(self) -> tuple[Table, ...]:
        return () if self._to_product is None else self._to_product.tables

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Of products, then of sums."""
        return self._product_tables + self._to_sum.tables

    def _sum_tables(self, tables: Tables) -> Tables:
        return tables[len(self._product_tables) :]

    def _draws(self, numbers: Tensor, like: Tensor) -> Draws:
        return Draws(numbers, like, self.carrier, self.arithmetic.stochastic)

    def product(self, a: Tensor, b: Tensor, tables: Tables, draws: Draws) -> Tensor:
        """P(a * b), or the exact product: `lanes` has seen to it that it is."""
        exact = integer_add(a, b).to(self.carrier.dtype) if self.arithmetic.approximate else a * b
        return exact if self._to_product is None else self._to_product(exact, tables[: len(self._product_tables)], draws.next())

    def _sum(self, x: Tensor, y: Tensor, tables: Tables, draws: Draws, odd: bool) -> Tensor:
        """R(x + y)."""
        total = odd_sum(x, y, self.carrier) if odd else x + y
        if self.arithmetic.mode is Rounding.DOWN:
            total = sign_of_zero_down(total, x, y, self.carrier)
        return self._to_sum(total, self._sum_tables(tables), draws.next())

    def _joined(self, x: Tensor, state: Sequence[Tensor], tables: Tables, draws: Draws, odd: bool) -> tuple[Tensor, ...]:
        """x joins; `odd` is for its sum with numbers of the format, which among themselves are added as the lanes say."""
        if not self.arithmetic.kahan:
            return (self._sum(x, state[0], tables, draws, odd),)
        total, lost = state
        y = self._sum(x, -lost, tables, draws, odd)
        new = self._sum(total, y, tables, draws, self.lanes.odd)
        gained = self._sum(new, -total, tables, draws, self.lanes.odd)
        return new, self._sum(gained, -y, tables, draws, self.lanes.odd)

    def multiply_add(self, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """rest: the state, the uniforms, `numbers`, `scalars` (none) and `tables`, as the tracer wants it."""
        *state, numbers, _, tables = rest
        draws = self._draws(numbers, state[0])
        return self._joined(self.product(a, b, tables, draws), state, tables, draws, self.lanes.odd)

    def add(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *state, numbers, _, tables = rest
        return self._joined(x, state, tables, self._draws(numbers, state[0]), self.lanes.odd)

    def add_exactly(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *state, numbers, _, tables = rest
        return self._joined(x, state, tables, self._draws(numbers, state[0]), not self._to_sum.is_lane)

    def finish(self, *rest: Any) -> tuple[Tensor, ...]:
        return (rest[0],)


def _widened(x: Tensor) -> Tensor:
    """In float64, by their bits: whatever the thread was told about subnormal numbers."""
    return convert(x.contiguous().view(torch.int32).to(torch.int64), F32, F64).view(torch.float64)
