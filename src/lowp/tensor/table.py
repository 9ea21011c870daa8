"""Formats that are tables: codebooks, and floats that are no plain grid (e8m0fnu, unsigned ones, ones without subnormals).

Rounding is a staircase: as a magnitude grows, the result climbs from entry to entry. The steps are found once, exactly, by
asking the reference; after that a magnitude finds its entry with one look-up and one addition: its leading bits select a cell
that holds at most one step, and what is added to its bits there lets them carry into the entry's number from the step on.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lowp.formats import reference
from lowp.formats.base import Format, Rounding
from lowp.tensor.carrier import F64, Carrier

MAX_CELLS = 1 << 22


def number_of_bits(bits: int, carrier: Carrier) -> float:
    """The magnitude with these bits (float32 or float64)."""
    kind, integer = ("<d", "<q") if carrier is F64 else ("<f", "<i")
    return struct.unpack(kind, struct.pack(integer, bits))[0]


def bits_of_number(value: float, carrier: Carrier) -> int:
    """The bits of a number that the carrier holds exactly, as a signed integer."""
    if math.isnan(value):
        return carrier.nan
    kind, integer = ("<d", "<q") if carrier is F64 else ("<f", "<i")
    return struct.unpack(integer, struct.pack(kind, value))[0]


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers that a kernel looks up, before they are a tensor on some device."""

    values: Sequence[float]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> Tensor:
        return torch.tensor(self.values, dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class Staircase:
    """For one sign after the other: cells, and entries.

    The `tables` that every mode needs are, in this order:
    - cells: a number whose sum with a magnitude's bits, cut at `shift`, is the entry. From the magnitude at which the next
      entry begins on, the sum has one carry more. Cells of negative numbers follow those of positive ones.
    - entries: the carrier's bits of the value; its code.

    There are cells between `lowest` and `highest`; magnitudes below and above them are rounded like these.

    Two more are for the modes that start toward zero and may then go one entry up. To odd: is the entry's rank `even`?
    Stochastic: the `gaps` above entries.
    """

    shift: int
    lowest: int
    highest: int
    tables: "tuple[Table, ...]"
    even: Table
    gaps: "tuple[Table, ...]"
    gap_lengths: "tuple[float, ...]"  # above each entry; infinite where there is nowhere to go

    def find(self, magnitude: Tensor, negative: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        """The entry that each magnitude is rounded to (`tensors` are this staircase's tables, on the magnitudes' device)."""
        inside = magnitude.clamp(self.lowest, self.highest)
        first, count = self.lowest >> self.shift, len(self.tables[0].values) // 2
        cell = (inside >> self.shift) - first + (negative & count)
        return (tensors[0][cell] + inside) >> self.shift


def _steps(fmt: Format, carrier: Carrier, mode: Rounding, saturate: bool, negative: bool) -> tuple[list[int], list[float]]:
    """The magnitude bits at which the result changes, and the results, by bisection between points where they differ."""

    def result(bits: int) -> float:
        value = number_of_bits(bits, carrier)
        return reference.round(-value if negative else value, fmt, mode, saturate=saturate)

    def same(a: float, b: float) -> bool:
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))

    # Both ends may be the same NaN, so the search starts from points between which results only grow; and from where steps
    # are to be expected, so that it is short.
    known = {0, 1, bits_of_number(fmt.smallest, carrier), bits_of_number(fmt.max, carrier), carrier.infinity}
    points = sorted(known | _about(_thresholds(fmt, mode, negative), carrier))
    steps: list[int] = []
    results = [result(0)]
    stack = [(low, high, result(low), result(high)) for low, high in pairwise(points)][::-1]
    while stack:
        low, high, at_low, at_high = stack.pop()
        if same(at_low, at_high):
            continue
        if high - low == 1:
            steps.append(high)
            results.append(at_high)
            continue
        middle = (low + high) // 2
        at_middle = result(middle)
        stack.append((middle, high, at_middle, at_high))
        stack.append((low, middle, at_low, at_middle))  # popped first: steps come out ascending
    return steps, results


def _thresholds(fmt: Format, mode: Rounding, negative: bool) -> list[float]:
    """Where a mode steps, more or less: in the middle between values, or at values."""
    values = sorted({abs(value) for value in fmt.values if value == 0 or (value < 0) == negative})
    if mode not in (Rounding.NEAREST, Rounding.NEAREST_AWAY):
        return values
    return [low / 2 + high / 2 for low, high in pairwise(values)]


def _about(magnitudes: list[float], carrier: Carrier) -> set[int]:
    """The bits of the carrier's numbers at and beside each magnitude.

    By numpy: a format's first call may be traced by torch's compiler, where torch's tensors have no numbers.
    """
    number, integer = (np.float64, np.int64) if carrier is F64 else (np.float32, np.int32)
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        found = np.array(magnitudes, dtype=np.float64).astype(number).view(integer).tolist()
    return {near for bits in found for near in (bits - 1, bits, bits + 1) if 0 <= near <= carrier.infinity}


@lru_cache(maxsize=4096)
def staircase(fmt: Format, carrier: Carrier, mode: Rounding, saturate: bool) -> Staircase:
    """The staircase of a format under one mode (not stochastic or to odd: `_Rounder` makes them of the one toward zero)."""
    sides = [_steps(fmt, carrier, mode, saturate, negative) for negative in (False, True)]
    entries, width = sum(len(values) for _, values in sides), carrier.compute.itemsize * 8
    shift = min(carrier.fraction_bits, width - 1 - entries.bit_length())  # an entry's number fits above
    while any(len({s >> shift for s in steps}) < len(steps) for steps, _ in sides):
        shift -= 1
    places = [s >> shift for steps, _ in sides for s in steps]
    # Before the first step there is a cell without one, if the first can be at its cell's beginning.
    first, last = (max(min(places) - 1, 0), max(places)) if places else (0, 0)
    if shift < 0 or last - first >= MAX_CELLS:
        raise ValueError(f"{fmt} is too irregular for a table: its neighbours lie too close together")
    cells: list[int] = []
    results: list[float] = []
    for steps, values in sides:
        at_cell = {s >> shift: s for s in steps}
        entry = len(results)
        for cell in range(first, last + 1):
            step = at_cell.get(cell, cell + 1 << shift)
            cells.append((entry + 1 << shift) - step)
            entry += cell in at_cell
        results += values
    negative = [side == 1 and fmt.signed for side, (_, values) in enumerate(sides) for _ in values]
    gaps = [_gap(value, fmt, below, saturate) for value, below in zip(results, negative, strict=True)]
    even = [gap is not None and _is_even(value, fmt, below) for value, below, gap in zip(results, negative, gaps, strict=True)]
    tables = (
        Table(cells, carrier.compute),
        Table([bits_of_number(value, carrier) for value in results], carrier.compute),
        Table([_code(value, fmt) for value in results], carrier.compute),
    )
    highest = min((last + 1 << shift) - 1, carrier.magnitude)
    return Staircase(
        shift, first << shift, highest, tables, Table(even, torch.bool), gap_tables(gaps, carrier),
        tuple(math.inf if gap is None else gap[1] - gap[0] for gap in gaps),
    )  # fmt: skip


def _code(value: float, fmt: Format) -> int:
    return reference.encode(value, fmt, nan="zero")


def _is_even(value: float, fmt: Format, negative: bool) -> bool:
    return math.isfinite(value) and reference.encode_magnitude(abs(Fraction(value)), fmt, negative) % 2 == 0


Gap = tuple[float, float] | None  # a magnitude and the next larger one; None where there is nowhere to go


def _gap(value: float, fmt: Format, negative: bool, saturate: bool) -> Gap:
    if not math.isfinite(value):
        return None
    near = reference.neighbours(abs(Fraction(value)), fmt, negative)
    ends = near.high == near.low or (saturate and value == (fmt.min if negative else fmt.max))
    return None if ends else (float(near.low), float(near.high))


_NARROW = 1 << 28  # units in a gap
_MORE = 7  # bits that the gap above zero has more


def gap_tables(gaps: Sequence[Gap], carrier: Carrier) -> tuple[Table, ...]:
    """What `goes_up` looks up for each entry.

    A gap's unit is the last place of the carrier's numbers at its lower end: all numbers in the gap are integers times that.
    Two tables of int32: the lower end in units (24 bits) before the unit's exponent as a field of the carrier (8 bits), and the
    length in units. Above zero, where numbers have ever smaller units, the unit is the last place of the upper end, and the
    length is counted in 2^-7 of it.
    Where a gap has too many units, and for float64 numbers, two tables of float64: the ends.
    """
    lowest = carrier.min_exponent - carrier.fraction_bits
    counted = []
    for gap in gaps:
        if gap is None:
            counted.append((-1, 0))  # a lower end that nothing is above
            continue
        low, high = gap
        unit = max(math.frexp(low or high)[1] - carrier.fraction_bits - 1, lowest)
        start, end = (math.ldexp(number, -unit) for number in gap)
        packed = int(start) << 8 | unit - lowest + 1
        counted.append((packed - (packed >> 31 << 32), int((end - start) * (1 if low else 1 << _MORE))))
        if end != int(end) or (low and end - start >= _NARROW):
            counted.clear()
            break
    if carrier is F64 or not counted:
        ends = [gap or (math.inf, math.inf) for gap in gaps]
        return tuple(Table(column, torch.float64) for column in zip(*ends, strict=True))
    return tuple(Table(column, torch.int32) for column in zip(*counted, strict=True))


def goes_up(magnitude: Tensor, gap: Sequence[Tensor], noise: Tensor, carrier: Carrier) -> Tensor:
    """Stochastic rounding between two neighbours whose gap is no power of two: is the draw under the share covered?

    The share is (x - low) / (high - low), compared as draw * (high - low) < (x - low) * 2^30, exactly.
    False where there is nowhere to go. `gap` is what `gap_tables` has for each element.

    In units of the gap x - low is an integer D, the length an integer G, and draw * G < D * 2^30 is (draw * G >> 30) < D.
    Above zero, x is D units of its own, each 2^-n of the gap's: (draw * G >> 30 - n) < D. G has seven bits more there, so that
    it is not below D where n is so large that only a draw of zero is under the share.
    """
    span = 1 << carrier.noise_bits
    drawn = span - 1 - noise
    if gap[0].dtype == torch.float64:
        low, high = gap
        covered, length = to_float64(magnitude, carrier) - low, high - low
        if carrier is F64:
            return drawn.to(torch.float64) * length < covered * float(span)
        # Products of half a draw are exact in float64, and so is their difference where it is small.
        upper, lower = ((drawn >> 15).to(torch.float64), (drawn & 0x7FFF).to(torch.float64))
        return (upper * length - covered * 2.0**15) * 2.0**15 + lower * length < 0
    packed, length = gap
    start = (packed >> 8) & 0xFFFFFF
    field = (magnitude >> carrier.fraction_bits).clamp(min=1)
    significand = magnitude - (field - 1 << carrier.fraction_bits)
    above = field - (packed & 0xFF)
    # Beyond the largest number, six places more are more than any gap has.
    covered = (significand << above.clamp(0, 6)) - start
    shift = (above.clamp(max=0) + carrier.noise_bits + (start == 0).to(above.dtype) * _MORE).clamp(min=0)
    return (drawn.to(torch.int64) * length.to(torch.int64)) >> shift.to(torch.int64) < covered.to(torch.int64)


def to_float64(magnitude: Tensor, carrier: Carrier) -> Tensor:
    """Magnitude bits as float64. Subnormals go through their integer, since a chip may be told to read them as zero."""
    if carrier is F64:
        return magnitude.view(torch.float64)
    step = 2.0 ** (carrier.min_exponent - carrier.fraction_bits)
    subnormal = magnitude < 1 << carrier.fraction_bits
    return torch.where(subnormal, magnitude.to(torch.float64) * step, magnitude.view(carrier.dtype).to(torch.float64))
