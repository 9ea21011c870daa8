"""Exact sums and single roundings, elementwise, in the lanes of a carrier (float32 or float64 numbers).

R(x + y) has to be ONE rounding of the exact sum, while a lane's own addition rounds already. Two ways out:

- *to odd*: TwoSum gives the lane's sum and, exactly, what it lost. If that is not zero and the sum's last bit is even, the
  neighbour on the side of the loss, whose last bit is odd, takes its place. An inexact sum is then never a number with fewer
  bits than the lane's, so it lies on the same side of every number (and of every tie) of a format with two bits less: rounding
  it to that format gives what rounding the exact sum would.
- *plainly*, where `lanes.py` proves that the lane's rounding does no harm.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import Format, Rounding
from lowp.formats.floats import FP32
from lowp.tensor import grid as grids
from lowp.tensor.carrier import F32, Carrier, is_grid
from lowp.tensor.core import Quantize, Tables
from lowp.tensor.table import Table


def sign_of_zero_down(total: Tensor, x: Tensor, y: Tensor, carrier: Carrier) -> Tensor:
    """x + y = 0 rounds to minus zero in the mode "down", unless both are plus zero."""
    signs = (x.view(carrier.storage) | y.view(carrier.storage)) & carrier.sign
    return torch.where(total == 0, signs.view(carrier.dtype), total)


def odd_sum(x: Tensor, y: Tensor, carrier: Carrier) -> Tensor:
    """x + y, rounded to odd. Infinities and NaN as in any sum: what is lost there is NaN, which is not above zero."""
    total = x + y
    part = total - x
    lost = (x - (total - part)) + (y - part)
    bits = total.view(carrier.storage)
    toward = ((bits ^ lost.view(carrier.storage)) >> (carrier.storage.itemsize * 8 - 1)) | 1  # 1: away from zero; -1: back
    if_even = (bits & 1) - 1
    return torch.where(lost.abs() > 0, bits + (toward & if_even), bits).view(carrier.dtype)


class _QuantizeWithNoise(Quantize):
    """`Quantize` that is given its noise instead of the key to draw it with."""

    def _enter(self, stored: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return stored, key


class SumRounder:
    """One rounding to a format, of numbers in the lanes of a carrier: the bits of `lowp.quantize`."""

    def __init__(self, fmt: Format, mode: Rounding, carrier: Carrier) -> None:
        self.is_lane = fmt == FP32 and carrier is F32  # the lane's own rounding was it
        constants = grids.grid(fmt, carrier, mode, False) if is_grid(fmt) else None
        self._in_floats = constants if constants is not None and constants.suits_addition else None
        self._quantize = _QuantizeWithNoise(fmt, carrier.dtype, mode, False, carrier.dtype)
        self._carrier = carrier

    @property
    def tables(self) -> tuple[Table, ...]:
        return () if self.is_lane or self._in_floats is not None else self._quantize.tables

    def __call__(self, z: Tensor, tables: Tables, noise: Tensor | None) -> Tensor:
        if self.is_lane:
            return z
        if self._in_floats is not None:
            return grids.nearest_in_floats(z, self._in_floats)
        return self._quantize(z.view(self._carrier.storage), tables, noise).view(self._carrier.dtype)


@lru_cache(maxsize=256)
def rounder(fmt: Format, mode: Rounding, carrier: Carrier) -> SumRounder:
    return SumRounder(fmt, mode, carrier)


_ONE, _INFINITY, _SMALLEST = 0x3F800000, F32.infinity, 1 << F32.fraction_bits


def integer_add(a: Tensor, b: Tensor) -> Tensor:
    """The product of float32 numbers by one addition of their bits (arXiv 2012.03458): the exponents add up, and so do the
    fractions, (1 + f)(1 + g) being taken for 1 + f + g.

    Zero and subnormal operands give zero, and so does a result below the normal numbers; one too large is infinite.
    """
    first, second = a.view(torch.int32), b.view(torch.int32)
    sign = (first ^ second) & F32.sign
    first, second = first & F32.magnitude, second & F32.magnitude
    # Neither difference leaves 32 bits, and their smaller one adds up to infinity at most.
    total = torch.minimum(first - _ONE, _INFINITY - second) + second
    zero = torch.minimum(first, second) < _SMALLEST
    larger = torch.maximum(first, second)
    magnitude = torch.where(zero | (total < _SMALLEST), torch.zeros_like(total), total)
    invalid = (larger > _INFINITY) | zero
    special = torch.where(invalid, torch.full_like(total, F32.nan), torch.full_like(total, _INFINITY))
    return (torch.where(larger >= _INFINITY, special, magnitude) | sign).view(torch.float32)
