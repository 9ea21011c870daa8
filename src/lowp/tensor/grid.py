"""Rounding to floats and fixed point on the bits of a carrier.

A grid has `m` mantissa bits and a lowest binade of exponent `emin`, whose spacing 2^(emin - m) goes on down to zero (the
subnormals). Fixed point is a grid that consists of its lowest binade alone, so one piece of code serves both.

A magnitude's bits, read as an integer, grow with the magnitude, and cutting off the lowest `t` of them rounds it to a
multiple of 2^(t - F) of its own binade (F: the carrier's fraction bits). So rounding to the grid is cutting off `F - m` bits,
and one more for each binade that the magnitude lies under `emin`; a carry into the exponent is just what it should be.
"""

import enum
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats.base import Rounding
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import FloatFormat
from lowp.tensor.backend import Backend, backend_of
from lowp.tensor.carrier import F64, Carrier, grid_shape
from lowp.tensor.rounding import away_from_zero, cut, first_above_zero
from lowp.tensor.table import bits_of_number, number_of_bits

GridFormat = FloatFormat | FixedFormat


@dataclass(frozen=True)
class Grid:
    """All constants of one format on one carrier, under one mode: plain integers, so that a compiler sees nothing else."""

    carrier: Carrier
    mode: Rounding
    fixed: bool
    bits: int
    mantissa_bits: int
    lowest_field: int  # the carrier's exponent field of the lowest binade
    max_code: int
    inf_code: int  # -1: none
    nan_code: int  # -1: none
    nan_is_minus_zero: bool  # fnuz, inuz
    overflow_code: int  # where a result beyond the largest value goes, for modes and signs that lead away from zero
    infinity_code: int  # where an infinite input goes
    has_negative_zero: bool
    max_bits: int
    overflow_bits: int
    infinity_bits: int
    smallest_bits: int
    half_smallest_bits: int
    flips_parity: bool  # see `_is_odd`

    @property
    def dropped(self) -> int:
        """How many bits are cut off a number with a full mantissa."""
        return self.carrier.fraction_bits - self.mantissa_bits

    @property
    def shares_lowest_binade(self) -> bool:
        """Carrier and format have the same subnormals: the same number of bits goes everywhere."""
        return self.lowest_field == 1

    @property
    def powers_of_two(self) -> bool:
        """Are the values powers of two, of a binade each that the carrier has as normal numbers?"""
        return self.mantissa_bits == 0 and not self.shares_lowest_binade

    @property
    def suits_float_unit(self) -> bool:
        """May steps be counted by `_in_steps`: float32 bits, and a scale that is a normal number in every binade?"""
        c = self.carrier
        top_field = (self.max_bits >> c.fraction_bits) + 1
        return c.dtype == torch.float32 and not self.shares_lowest_binade and top_field < 2 * c.bias + self.mantissa_bits

    @property
    def suits_addition(self) -> bool:
        """May `nearest_in_floats` round: does an even number of steps have an even code, and is the largest c finite?"""
        top_field = max(self.max_bits >> self.carrier.fraction_bits, self.lowest_field)
        in_range = self.dropped >= 2 and top_field + self.dropped <= 2 * self.carrier.bias
        return self.mode is Rounding.NEAREST and self.mantissa_bits > 0 and in_range

    @property
    def first_over_bits(self) -> int:
        """Of the first magnitude that overflows to nearest. A tie with the largest value goes there if that is even."""
        c = self.carrier
        top_field = max(self.max_bits >> c.fraction_bits, self.lowest_field)
        tie = number_of_bits(self.max_bits, c) + math.ldexp(1.0, top_field - c.bias - self.mantissa_bits - 1)
        return bits_of_number(tie, c) + (self.max_code % 2 == 0)


@lru_cache(maxsize=4096)
def grid(fmt: GridFormat, carrier: Carrier, mode: Rounding, saturate: bool) -> Grid:
    """The constants of a format on a carrier that it fits (`carrier.grid_fits`)."""
    mantissa_bits, min_exponent = grid_shape(fmt)
    lowest_field = min_exponent + carrier.bias
    inf_code = -1 if fmt.inf_code is None else fmt.inf_code
    nan_code = -1 if fmt.nan_code is None else fmt.nan_code
    special = inf_code if inf_code >= 0 else (nan_code if nan_code >= 0 else fmt.max_code)
    if saturate:
        special = fmt.max_code
    # Toward zero never leaves the range; to odd stops at the largest value if that is odd.
    inward = mode is Rounding.TOWARD_ZERO or (mode is Rounding.TO_ODD and fmt.max_code % 2 == 1)
    to_bits = {inf_code: carrier.infinity, nan_code: carrier.nan, fmt.max_code: _bits_of(fmt.max, carrier)}
    overflow_code = fmt.max_code if inward else special
    smallest_exponent = min_exponent - mantissa_bits
    return Grid(
        carrier=carrier,
        mode=mode,
        fixed=isinstance(fmt, FixedFormat),
        bits=fmt.bits,
        mantissa_bits=mantissa_bits,
        lowest_field=lowest_field,
        max_code=fmt.max_code,
        inf_code=inf_code,
        nan_code=nan_code,
        nan_is_minus_zero=isinstance(fmt, FloatFormat) and fmt.nan_code == 1 << (fmt.bits - 1),
        overflow_code=overflow_code,
        infinity_code=special,
        has_negative_zero=fmt.has_negative_zero,
        max_bits=to_bits[fmt.max_code],
        overflow_bits=to_bits[overflow_code],
        infinity_bits=to_bits[special],
        smallest_bits=carrier.power_of_two(smallest_exponent),
        half_smallest_bits=carrier.power_of_two(max(smallest_exponent - 1, carrier.min_exponent - carrier.fraction_bits)),
        flips_parity=(lowest_field - mantissa_bits) % 2 == 0,
    )


def _bits_of(value: float, carrier: Carrier) -> int:
    """The bits of a positive normal number of the carrier."""
    significand, exponent = math.frexp(value)
    fraction = int(math.ldexp(significand, carrier.fraction_bits + 1)) - (1 << carrier.fraction_bits)
    return (exponent - 1 + carrier.bias << carrier.fraction_bits) + fraction


def _full(like: Tensor, value: int) -> Tensor:
    """A constant of the same integer dtype (a Python number beside another would make `where` compute in 64 bits)."""
    return torch.full_like(like, value)


def _sign_of(bits: Tensor) -> Tensor:
    """-1 where negative, else 0."""
    return bits >> (bits.dtype.itemsize * 8 - 1)


def _significand(magnitude: Tensor, field: Tensor, carrier: Carrier) -> Tensor:
    """The fraction with its leading one, or without it for the carrier's subnormals (`field` is the exponent, at least 1)."""
    return magnitude - (field - 1 << carrier.fraction_bits)


class Algorithm(enum.Enum):
    """How numbers are rounded to a grid. All give the same bits (but see `nearest_in_floats` for NaN)."""

    CUT = enum.auto()  # every mode, in integers: low bits are cut off (rounding.py)
    SUM = enum.auto()  # to nearest: the chip rounds the sum with a large number (`nearest_in_floats`, `_nearest_rank`)
    STEPS = enum.auto()  # stochastic: magnitudes are counted in the grid's steps, as floats (`_in_steps`)
    CONVERSION = enum.auto()  # to nearest, between numbers and codes: an instruction; as numbers: SUM


# What GPUs convert float32 to by an instruction, what is too large to the largest value: (bits, m, lowest field, largest code).
# Four elements are converted by two instructions where integers take some forty.
_CONVERTED = {(8, 2, 113, 0x7B): torch.float8_e5m2, (8, 3, 121, 0x7E): torch.float8_e4m3fn}


def rounding_for(g: Grid, backend: Backend) -> Algorithm:
    """The algorithm that is the fastest where operations go to `backend`. It is decided here alone.

    SUM and STEPS take half as many instructions as CUT, or fewer: scaling by a power of two and rounding are done by the chip.
    (GPUs have twice as many units for floats as for integers, besides.)
    """
    if not backend.floats or g.carrier.dtype != torch.float32:
        return Algorithm.CUT
    if g.mode is Rounding.STOCHASTIC:
        return Algorithm.STEPS if g.suits_float_unit else Algorithm.CUT
    if g.mode is Rounding.NEAREST and backend.converts and _conversion(g) is not None:
        return Algorithm.CONVERSION
    return Algorithm.SUM if g.suits_addition else Algorithm.CUT


def converts(numbers: Tensor, g: Grid) -> bool:
    """Does an instruction encode to this grid? (What is too large becomes the largest value.)"""
    return g.overflow_code == g.max_code and rounding_for(g, backend_of(numbers)) is Algorithm.CONVERSION


def _conversion(g: Grid) -> torch.dtype | None:
    return None if g.fixed else _CONVERTED.get((g.bits, g.mantissa_bits, g.lowest_field, g.max_code))


def quantize(bits: Tensor, g: Grid, noise: Tensor | None) -> Tensor:
    """The bits of the nearest (or as the mode says) numbers of the grid.

    1. Cut off as many bits as the magnitude's binade demands; what is under the smallest value is taken for that.
    2. Unless it rounds to zero.
    3. Beyond the largest value, overflow; infinities as the format has them.
    4. Put the sign back; NaN passes as it is.
    """
    c, mode = g.carrier, g.mode
    magnitude, negative = bits & c.magnitude, _sign_of(bits)
    if rounding_for(g, backend_of(bits)) is Algorithm.STEPS:
        steps, binade = _in_steps(magnitude, g)
        step = (binade - (g.mantissa_bits << c.fraction_bits)).view(c.dtype)
        return _finish((_stochastic_steps(steps, noise, g) * step).view(c.storage), bits, magnitude, negative, g)
    # NaN counts as infinity here: what is added cannot overflow then, with which compilers take liberties.
    above = magnitude.clamp(0 if g.shares_lowest_binade else g.smallest_bits, c.infinity)
    drop = _bits_to_drop(above, g)
    result = cut(above, drop, lambda: _is_odd(above, drop, g), mode, negative, noise, c.noise_bits) << drop
    if not g.shares_lowest_binade:
        result = torch.where(_becomes_zero(magnitude, negative, g, noise), torch.zeros_like(result), result)
    return _finish(result, bits, magnitude, negative, g)


def _finish(result: Tensor, bits: Tensor, magnitude: Tensor, negative: Tensor, g: Grid) -> Tensor:
    """From rounded magnitudes to results: overflow, sign, NaN."""
    c = g.carrier
    result = _overflow(result, magnitude, negative, g.max_bits, g.overflow_bits, g.infinity_bits, g)
    sign = bits & c.sign
    if not g.has_negative_zero:
        sign = torch.where(result == 0, torch.zeros_like(sign), sign)
    return torch.where(magnitude > c.infinity, bits, result | sign)


def _bits_to_drop(magnitude: Tensor, g: Grid) -> Tensor | int:
    """How many bits lie below the grid's spacing, for magnitudes from the smallest value up: at most all fraction bits."""
    if g.shares_lowest_binade or g.mantissa_bits == 0:
        return g.dropped
    field = magnitude >> g.carrier.fraction_bits
    return (g.dropped + g.lowest_field - field).clamp(min=g.dropped)


def _is_odd(magnitude: Tensor, drop: Tensor | int, g: Grid) -> Tensor:
    """1 where the value just below has an odd rank: the lowest kept bit.

    Where no fraction bit is kept, that bit is the exponent's lowest instead, while the rank is 1, odd, in the lowest such
    binade: flip it if the two disagree.
    """
    if g.flips_parity and not (g.shares_lowest_binade and g.mantissa_bits):
        magnitude = magnitude ^ (1 << g.carrier.fraction_bits)
    return (magnitude >> drop) & 1


def _becomes_zero(magnitude: Tensor, negative: Tensor, g: Grid, noise: Tensor | None) -> Tensor:
    """Below the smallest value: which magnitudes go down to zero instead of up to it."""
    c, mode = g.carrier, g.mode
    if mode is Rounding.STOCHASTIC:
        assert noise is not None
        # The share of the gap that is covered, as an integer of as many bits as the noise has.
        field = (magnitude >> c.fraction_bits).clamp(min=1)
        up_to_one = c.noise_bits - c.fraction_bits - 1
        shift = field - (g.smallest_bits >> c.fraction_bits) + up_to_one + 1
        covered = _significand(magnitude, field, c) << shift.clamp(0, up_to_one) >> (-shift).clamp(0, c.noise_bits)
        return (magnitude < g.smallest_bits) & (noise <= ((1 << c.noise_bits) - 1) - covered)
    first = first_above_zero(g.half_smallest_bits, mode)
    if first is None:
        return magnitude < g.smallest_bits
    outward = away_from_zero(mode, negative)
    if isinstance(outward, bool):
        return magnitude < first
    return magnitude < torch.where(outward, _full(magnitude, first), _full(magnitude, g.smallest_bits))


def _overflow(result: Tensor, magnitude: Tensor, negative: Tensor, largest: int, over: int, infinite: int, g: Grid) -> Tensor:
    """Results beyond the largest value become `over` where the mode leads outward, else the largest value."""
    outward = away_from_zero(g.mode, negative)
    if over == largest or outward is False:
        result = result.clamp(max=largest)
    else:
        target = _full(result, over)
        if not isinstance(outward, bool):
            target = torch.where(outward, target, _full(result, largest))
        result = torch.where(result > largest, target, result)
    if infinite != over or (not isinstance(outward, bool) and infinite != largest):
        result = torch.where(magnitude == g.carrier.infinity, _full(result, infinite), result)
    return result


def encode(bits: Tensor, g: Grid, noise: Tensor | None, nan_to: str) -> Tensor:
    """The codes of the nearest (or as the mode says) numbers of the grid.

    A code is its value's rank: the binades below it, 2^m codes each, and the steps within its own. NaN becomes the format's
    NaN, or in a format without one, zero or the largest value (`nan_to`). With `nan_to="any"` it does not matter what NaN
    becomes.
    """
    c, how = g.carrier, rounding_for(g, backend_of(bits))
    if nan_to == "any" and converts(bits, g):
        dtype = _conversion(g)
        assert dtype is not None
        return bits.view(torch.float32).to(dtype).view(torch.int8).to(c.compute)
    magnitude, negative = bits & c.magnitude, _sign_of(bits)
    in_floats = how in (Algorithm.SUM, Algorithm.CONVERSION)
    capped = None  # the rank of all that is too large, NaN included, if it has one at once
    if in_floats or (g.powers_of_two and g.mode is Rounding.NEAREST and c.dtype == torch.float32):
        capped = min(g.overflow_code, g.max_code + 1)
        magnitude = magnitude.clamp(max=g.max_bits if capped == g.max_code else g.first_over_bits)
    else:
        # NaN as infinity: what is added later cannot overflow then, with which compilers take liberties.
        magnitude = magnitude.clamp(max=c.infinity)
    if in_floats:
        rank = _nearest_rank(magnitude, g)
    elif g.shares_lowest_binade:
        rank = cut(magnitude, g.dropped, lambda: (magnitude >> g.dropped) & 1, g.mode, negative, noise, c.noise_bits)
    else:
        rank = _rank(magnitude, negative, g, noise, how)
    if capped != g.overflow_code:
        rank = _overflow(rank, magnitude, negative, g.max_code, g.overflow_code, g.infinity_code, g)
    nan_rank = g.nan_code if g.nan_code >= 0 else (0 if nan_to == "zero" else g.max_code)
    is_nan = (bits & c.magnitude) > c.infinity
    if not capped == g.overflow_code == nan_rank and nan_to != "any":
        rank = torch.where(is_nan, _full(rank, nan_rank), rank)
    if g.fixed:
        code = (rank ^ negative) - negative  # two's complement
        return code & ((1 << g.bits) - 1)
    sign = negative & (1 << (g.bits - 1))
    if not g.has_negative_zero or (g.nan_code < 0 and nan_to == "zero"):
        unsigned = (rank == 0) if not g.has_negative_zero else is_nan
        sign = torch.where(unsigned, torch.zeros_like(sign), sign)
    return rank | sign


def _rank(magnitude: Tensor, negative: Tensor, g: Grid, noise: Tensor | None, how: Algorithm) -> Tensor:
    c = g.carrier
    if how is Algorithm.STEPS:
        steps, binade = _in_steps(magnitude, g)
        return _stochastic_steps(steps, noise, g).to(c.compute) + _codes_below(binade, g)
    if g.powers_of_two:  # ranks are exponent fields, and as many bits go everywhere
        above = magnitude.clamp(min=g.smallest_bits)
        field = cut(above, g.dropped, lambda: _is_odd(above, g.dropped, g), g.mode, negative, noise, c.noise_bits)
        rank = field - (g.lowest_field - 1)
        return torch.where(_becomes_zero(magnitude, negative, g, noise), torch.zeros_like(rank), rank)
    field = (magnitude >> c.fraction_bits).clamp(min=1)
    significand = _significand(magnitude, field, c)
    under = g.dropped + g.lowest_field - field  # bits to cut off, before any limit
    if g.mode is Rounding.STOCHASTIC:
        drop = under.clamp(g.dropped, c.noise_bits)
        significand = significand >> (under - c.noise_bits).clamp(0, c.noise_bits)
    else:
        drop = under.clamp(g.dropped, c.fraction_bits + 2)  # from there on, a significand is less than half a step
    binades = (field.clamp(min=g.lowest_field) - g.lowest_field) << g.mantissa_bits
    return binades + cut(significand, drop, lambda: (significand >> drop) & 1, g.mode, negative, noise, c.noise_bits)


def _codes_below(binade: Tensor, g: Grid) -> Tensor:
    """How many codes the binades between the lowest and this one have."""
    return (binade - (g.lowest_field << g.carrier.fraction_bits)) >> g.dropped


def _nearest_rank(magnitude: Tensor, g: Grid) -> Tensor:
    """`_rank` to nearest where a grid `suits_addition`: `nearest_in_floats` begins in the same way.

    Adding c = 2^(F - m) * 2^e, e being the exponent of the binade, leaves the magnitude in steps, rounded, in the sum's last
    bits. (Magnitudes are capped at the first that overflows, which is of the largest value's binade.)
    """
    large, below = _large(magnitude, g)
    return (magnitude.view(g.carrier.dtype) + large.view(g.carrier.dtype)).view(g.carrier.storage) - large + below


def _large(magnitude: Tensor, g: Grid) -> tuple[Tensor, Tensor | int]:
    """The bits of c (see above), and how many codes the binades below have."""
    c, lowest = g.carrier, g.lowest_field << g.carrier.fraction_bits
    binade = _full(magnitude, lowest) if g.fixed else (magnitude & c.infinity).clamp(min=lowest)
    return binade + (g.dropped << c.fraction_bits), 0 if g.fixed else _codes_below(binade, g)


def encode_about(bits: Tensor, g: Grid, tolerance: float = 2.0**-18) -> tuple[Tensor, Tensor]:
    """The codes of numbers that are known with a relative error of half the tolerance, and which are in doubt: those
    of numbers that round to others where they are larger or smaller by the tolerance. (The products with 1 - t and 1 + t are
    rounded themselves.)

    For floats that saturate, to nearest, where the grid `suits_addition`. What becomes of NaN does not matter.
    """
    large, below, low, high = _sums_about(bits & g.carrier.magnitude, g, tolerance)
    return (high - large + below) | (_sign_of(bits) & (1 << (g.bits - 1))), high > low


def nearest_about(x: Tensor, g: Grid, tolerance: float) -> tuple[Tensor, Tensor]:
    """The same of positive numbers, as numbers."""
    c = g.carrier
    large, _, low, high = _sums_about(x.view(c.storage) & c.magnitude, g, tolerance)
    return high.view(c.dtype) - large.view(c.dtype), high > low


def _sums_about(magnitude: Tensor, g: Grid, tolerance: float) -> tuple[Tensor, Tensor | int, Tensor, Tensor]:
    """`_large` of magnitudes, and the bits of its sums with the least and the greatest that each may stand for."""
    c = g.carrier
    magnitude = magnitude.clamp(max=g.max_bits)
    large, below = _large(magnitude, g)
    number, anchor = magnitude.view(c.dtype), large.view(c.dtype)
    low, high = ((number * factor + anchor).view(c.storage) for factor in (1 - tolerance, 1 + tolerance))
    return large, below, low, high


def _in_steps(magnitude: Tensor, g: Grid) -> tuple[Tensor, Tensor]:
    """Magnitudes counted in the grid's steps, as floats, and the bits of 2^e, e being the exponent of their binade.

    For kernels, where bits are seen as floats for nothing: scaling by a power of two and rounding in floats takes half as many
    instructions (and GPUs have twice as many float units as integer units). Exact: the product is at most 2^(m+1) and has the
    magnitude's own bits. What is too large is capped beyond the largest value.
    """
    c = g.carrier
    capped = magnitude.clamp(max=g.max_bits + (1 << c.fraction_bits))
    binade = (capped & c.infinity).clamp(min=g.lowest_field << c.fraction_bits)
    inverse = (2 * c.bias + g.mantissa_bits << c.fraction_bits) - binade
    return capped.view(c.dtype) * inverse.view(c.dtype), binade


def nearest_in_floats(x: Tensor, g: Grid) -> Tensor:
    """`quantize` to nearest of a carrier's numbers (`suits_addition`), in eight instructions where integers take some twenty.

    1. The binade of x, at least the lowest: 2^e. (For fixed point it is the lowest.)
    2. x + c - c with c = 1.5 * 2^(F - m) * 2^e, F being the carrier's fraction bits and m the format's: the sum's last bit is
       worth 2^(e - m), the grid's step there, and the chip rounds to it, ties to even. 1.5 keeps the sum in c's binade for both
       signs. The products being exact, compilers may make one instruction of each with its sum.
    3. From the first magnitude that overflows on: what the format makes of it. (c may be infinite there; NaN fails the
       comparison.)
    4. The sign back, which zeros have lost.

    On an H200 an activation that is rounded in passing has time for no more. (NaN's payload is lost.)
    """
    c = g.carrier
    bits, lowest, anchor = x.view(c.storage), g.lowest_field << c.fraction_bits, math.ldexp(1.5, g.dropped)
    if g.fixed:
        large = anchor * number_of_bits(lowest, c)
        rounded = (x + large) - large
    else:
        binade = (bits & c.infinity).clamp(min=lowest).view(c.dtype)
        rounded = (x + binade * anchor) + binade * -anchor
    beyond, sign = x.abs() >= number_of_bits(g.first_over_bits, c), bits & c.sign
    over = _full(bits, g.overflow_bits)
    if g.has_negative_zero:
        return (torch.where(beyond, over, rounded.view(c.storage)) | sign).view(c.dtype)
    return torch.where(beyond, over | sign, rounded.view(c.storage)).view(c.dtype)


def _stochastic_steps(steps: Tensor, noise: Tensor | None, g: Grid) -> Tensor:
    """Whole steps: up where the noise, added to the share covered in as many bits, reaches one."""
    assert noise is not None
    span = 1 << g.carrier.noise_bits
    whole = torch.floor(steps)
    covered = ((steps - whole) * float(span)).to(g.carrier.compute)
    return torch.where(noise + covered >= span, whole + 1.0, whole)


def decode(code: Tensor, g: Grid, finite: bool = False, any_nan: bool = False) -> Tensor:
    """The bits of the values of codes (computing integers; bits above the format's are ignored). The mode does not matter.

    With `finite` it does not matter what the codes of infinities and of NaN become, with `any_nan` which of all NaN comes out.
    """
    carrier = g.carrier
    if (finite or any_nan) and rounding_for(g, backend_of(code)) is Algorithm.CONVERSION:
        dtype = _conversion(g)
        assert dtype is not None
        return code.to(torch.int8).view(dtype).to(torch.float32).view(torch.int32)
    if g.fixed:
        shift = code.dtype.itemsize * 8 - g.bits
        number = code << shift >> shift  # spread the sign
        negative = _sign_of(number)
        rank = (number ^ negative) - negative
        sign = negative & carrier.sign
    else:
        rank = code & ((1 << (g.bits - 1)) - 1)
        shifted = code << (code.dtype.itemsize * 8 - g.bits)  # its sign bit is the computing integer's
        sign = (shifted if code.dtype == carrier.storage else _sign_of(shifted)) & carrier.sign
    bits = _bits_of_rank(rank, g) | sign
    if finite or (g.inf_code < 0 and g.nan_code < 0):
        return bits
    if g.nan_is_minus_zero:
        is_nan = (code & ((1 << g.bits) - 1)) == g.nan_code
        if g.inf_code >= 0:
            bits = torch.where(rank == g.inf_code, _full(bits, carrier.infinity) | sign, bits)
        return torch.where(is_nan, _full(bits, carrier.nan), bits)
    if g.inf_code < 0:
        return torch.where(rank == g.nan_code, _full(bits, carrier.nan) | sign, bits)
    # The format's largest exponent is the carrier's: infinity, or NaN with its mantissa.
    return torch.where(rank > g.max_code, (rank << g.dropped) | carrier.infinity | sign, bits)


def _bits_of_rank(rank: Tensor, g: Grid) -> Tensor:
    c, backend = g.carrier, backend_of(rank)
    if g.shares_lowest_binade:
        return rank << g.dropped
    on_gpu = backend.floats and not backend.vectors
    if on_gpu and not g.fixed and c.dtype == torch.float32 and g.lowest_field - 1 <= c.bias:
        # One product, exact also of subnormal numbers (with which a CPU would be slow).
        return ((rank << g.dropped).view(c.dtype) * 2.0 ** (g.lowest_field - 1)).view(c.storage)
    normal = (rank << g.dropped) + (g.lowest_field - 1 << c.fraction_bits)
    if g.mantissa_bits == 0:
        return torch.where(rank == 0, rank, normal)
    if backend.vectors and c.dtype == torch.float32:
        # A subnormal is a normal number of the lowest binade without its leading one.
        one = g.lowest_field << c.fraction_bits
        subnormal = (((rank << g.dropped) + one).view(c.dtype) - number_of_bits(one, c)).view(c.storage)
    else:
        # It is an integer number of smallest steps: that integer as a float, times a power of two.
        subnormal = bits_of_integer(rank, g.mantissa_bits, c) + (g.lowest_field - g.mantissa_bits - c.bias << c.fraction_bits)
        subnormal = torch.where(rank == 0, rank, subnormal)
    return subnormal if g.fixed else torch.where(rank < 1 << g.mantissa_bits, subnormal, normal)


def bits_of_integer(number: Tensor, width: int, carrier: Carrier) -> Tensor:
    """The carrier's bits of the integers 1 .. 2^width - 1 (zero gives nonsense).

    Kernels convert, in registers. Plain operations stay in integers: what they make is a tensor, and 16-bit numbers must not
    become wide floats. They count the bits of small integers, and halve the range of others.
    """
    if backend_of(number).kernel:
        if carrier is F64:
            return number.to(torch.float64).view(torch.int64)
        assert width <= 24
        single = number.to(torch.float32).view(torch.int32)
        return (single >> (23 - carrier.fraction_bits)) + (carrier.bias - 127 << carrier.fraction_bits)
    if width <= 7:
        top = torch.zeros_like(number)  # the place of the highest bit that is set
        for bit in range(1, width):
            top = top + (number >> bit).clamp(max=1)
        return (top + (carrier.bias - 1) << carrier.fraction_bits) + (number << (carrier.fraction_bits - top))
    significand, moved = normalized(number, width)
    return (carrier.bias + width - 2 - moved << carrier.fraction_bits) + (significand << carrier.fraction_bits + 1 - width)


def normalized(number: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Integers of up to `width` bits (at most 32) shifted left until they have as many, and how far they were moved."""
    total = torch.zeros_like(number)
    for shift in (16, 8, 4, 2, 1):
        if shift < width:
            moved = (number < 1 << (width - shift)).to(number.dtype) * shift
            number, total = number << moved, total + moved
    return number, total
