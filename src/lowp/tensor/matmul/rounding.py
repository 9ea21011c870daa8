"""Exact sums and single roundings, elementwise, in the lanes of a carrier (float32 or float64 numbers).

R(x + y) has to be ONE rounding of the exact sum, while a lane's own addition rounds already. Two ways out:

- *to odd*: TwoSum gives the lane's sum and, exactly, what it lost. If that is not zero and the sum's last bit is even, the
  neighbour on the side of the loss, whose last bit is odd, takes its place. An inexact sum is then never a number with fewer
  bits than the lane's, so it lies on the same side of every number (and of every tie) of a format with two bits less: rounding
  it to that format gives what rounding the exact sum would.
- *plainly*, where `lanes.py` proves that the lane's rounding does no harm.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import Format, Rounding
from lowp.formats.floats import FP32
from lowp.tensor import grid as grids
from lowp.tensor.carrier import F32, Carrier, is_grid
from lowp.tensor.core import Quantize, Tables
from lowp.tensor.table import Table, bits_of_number, number_of_bits


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


class _Quantize(Quantize):
    """`Quantize` that is given its noise instead of the key to draw it with."""

    def _enter(self, stored: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return stored, key


@dataclass(frozen=True)
class _Nearest:
    """Rounding to a grid to nearest by adding and taking away again a number so large that the lane cuts off what it should.

    1. The binade of z, at least the lowest: 2^e. (For fixed point it is the lowest.)
    2. z + c - c with c = 1.5 * 2^(F - m) * 2^e, F being the lane's fraction bits and m the format's: the sum's last bit is
       worth 2^(e - m), the grid's step there, and the lane rounds to it, ties to even. 1.5 keeps the sum in c's binade for
       both signs. The products being exact, printers make one instruction of each with its sum.
    3. From the first magnitude that overflows on: what the format makes of it. (c may be infinite there; NaN fails the
       comparison.)
    4. The sign back, which zeros have lost.

    Eight instructions; `grids.quantize`, in integers, takes some twenty.
    """

    carrier: Carrier
    lowest: float | None  # binade; None: the only one
    anchor: float  # c of the binade 2^0, or of the only one
    first_over: float
    over_bits: int
    signed_zero: bool

    def __call__(self, z: Tensor) -> Tensor:
        c = self.carrier
        bits = z.view(c.storage)
        if self.lowest is None:
            rounded = (z + self.anchor) - self.anchor
        else:
            binade = (bits & c.infinity).view(c.dtype).clamp(min=self.lowest)
            rounded = (z + binade * self.anchor) + binade * -self.anchor
        beyond, sign = z.abs() >= self.first_over, bits & c.sign
        over = torch.full_like(bits, self.over_bits)
        if self.signed_zero:
            return (torch.where(beyond, over, rounded.view(c.storage)) | sign).view(c.dtype)
        return torch.where(beyond, over | sign, rounded.view(c.storage)).view(c.dtype)


def _nearest(fmt: Format, carrier: Carrier) -> _Nearest | None:
    """For grids with a mantissa (without one, an even rank is not an even number of steps) whose c stays below infinity."""
    if not is_grid(fmt):
        return None
    g = grids.grid(fmt, carrier, Rounding.NEAREST, False)
    shift = g.dropped
    top_field = max(g.max_bits >> carrier.fraction_bits, g.lowest_field)
    if g.mantissa_bits == 0 or shift < 2 or top_field + shift > 2 * carrier.bias:
        return None
    largest = number_of_bits(g.max_bits, carrier)
    tie = largest + math.ldexp(1.0, max(top_field, g.lowest_field) - carrier.bias - g.mantissa_bits - 1)
    first_over = bits_of_number(tie, carrier) + (g.max_code % 2 == 0)  # a tie goes to the largest value where that is even
    lowest = number_of_bits(g.lowest_field << carrier.fraction_bits, carrier)
    anchor = math.ldexp(1.5, shift)
    return _Nearest(
        carrier=carrier,
        lowest=None if g.fixed else lowest,
        anchor=anchor * lowest if g.fixed else anchor,
        first_over=number_of_bits(first_over, carrier),
        over_bits=g.overflow_bits,
        signed_zero=g.has_negative_zero,
    )


class Rounder:
    """One rounding to a format, of numbers in the lanes of a carrier: the bits of `lowp.quantize`."""

    def __init__(self, fmt: Format, mode: Rounding, carrier: Carrier) -> None:
        self.is_lane = fmt == FP32 and carrier is F32  # the lane's own rounding was it
        self._nearest = _nearest(fmt, carrier) if mode is Rounding.NEAREST else None
        self._quantize = _Quantize(fmt, carrier.dtype, mode, False, carrier.dtype)
        self._carrier = carrier

    @property
    def tables(self) -> tuple[Table, ...]:
        return () if self.is_lane or self._nearest is not None else self._quantize.tables

    def __call__(self, z: Tensor, tables: Tables, noise: Tensor | None) -> Tensor:
        if self.is_lane:
            return z
        if self._nearest is not None:
            return self._nearest(z)
        return self._quantize(z.view(self._carrier.storage), tables, noise).view(self._carrier.dtype)


@lru_cache(maxsize=256)
def rounder(fmt: Format, mode: Rounding, carrier: Carrier) -> Rounder:
    return Rounder(fmt, mode, carrier)


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
