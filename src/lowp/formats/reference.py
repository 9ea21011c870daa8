"""The oracle: scalar, exact, slow, obviously right. Every fast path is tested against it.

Numbers are Python floats (float64 holds every input and every value of every format exactly); all decisions are taken in
`Fraction`s. Nothing here shares code with the tensor operations.

    round(x, format, mode)   the value of the format that x becomes
    encode(x, format, mode)  its code
    decode(code, format)     the value of a code
    neighbours(m, format)    the two values around a magnitude, and the point at which "nearest" changes over

How a number is rounded, in every family:

1. NaN stays NaN. An infinity stays one where the format has it, else becomes NaN where it has that, else the largest value.
2. Find the neighbours `low <= |x| <= high`. Above the largest value, `high` is an imaginary next value, one step further:
   a result there is an overflow.
3. The mode picks one of the two (on signed axes: `up` and `down` look at the sign).
4. An overflow becomes infinity, else NaN, else the largest value; `saturate` clamps to the largest value instead,
   infinities included.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from lowp.formats.base import Format, Rounding
from lowp.formats.block import BlockFormat
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import FloatFormat
from lowp.formats.posit import PositFormat


@dataclass(frozen=True)
class Neighbours:
    """Around a magnitude: `low` has rank `rank`, `high` the next one; `tie` is where nearest goes from one to the other."""

    rank: int
    low: Fraction
    high: Fraction
    tie: Fraction


def decode(code: int, fmt: Format) -> float:
    """The value of a code."""
    if not 0 <= code < 1 << fmt.bits:
        raise ValueError(f"{code} is not a code of {fmt}: codes are 0..{(1 << fmt.bits) - 1}")
    return fmt.value(code)


@lru_cache(maxsize=64)
def _ladder(fmt: Format, negative: bool) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The magnitudes on one side of zero, ascending from zero, and the (lowest) code of each."""
    lowest_code: dict[float, int] = {}
    for code in fmt.codes:
        value = fmt.value(code)
        if math.isfinite(value) and (value == 0 or (value < 0) == negative):
            if value == 0 and fmt.has_negative_zero and (math.copysign(1, value) < 0) != negative:
                continue
            lowest_code.setdefault(abs(value), code)
    magnitudes = tuple(sorted(lowest_code))
    return magnitudes, tuple(lowest_code[m] for m in magnitudes)


def _grid_step(magnitude: Fraction, fmt: FloatFormat | FixedFormat) -> Fraction:
    """The distance between neighbours at a magnitude, on a grid that goes on beyond the largest value."""
    if isinstance(fmt, FixedFormat):
        return Fraction(1, 1 << fmt.fraction_bits)
    exponent = fmt.min_exponent
    if magnitude:
        floor_log2 = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        floor_log2 -= magnitude < Fraction(2) ** floor_log2
        exponent = max(exponent, floor_log2)
    return Fraction(2) ** (exponent - fmt.mantissa_bits)


def neighbours(magnitude: Fraction, fmt: Format, negative: bool = False) -> Neighbours:
    """The values around a magnitude on one side of zero. Beyond the largest value, `high` is one imaginary step further."""
    largest = abs(Fraction(_largest(fmt, negative)))
    if magnitude >= largest:
        rank = encode_magnitude(largest, fmt, negative)
        # Tables and posits end at their largest value: there is no step to go on with, so nothing overflows.
        step = _grid_step(largest, fmt) if isinstance(fmt, (FloatFormat, FixedFormat)) else Fraction(0)
        return Neighbours(rank, largest, largest + step, largest + step / 2)
    if fmt.bits > 16:
        assert isinstance(fmt, (FloatFormat, FixedFormat))
        step = _grid_step(magnitude, fmt)
        low = magnitude // step * step
        return Neighbours(encode_magnitude(low, fmt, negative), low, low + step, low + step / 2)
    magnitudes, _ = _ladder(fmt, negative)
    rank = _rank_of(magnitude, magnitudes)
    if rank < 0:  # below the smallest value of a format without zero: it is the only neighbour
        only = Fraction(magnitudes[0])
        return Neighbours(0, only, only, only)
    low, high = Fraction(magnitudes[rank]), Fraction(magnitudes[rank + 1])
    return Neighbours(rank, low, high, _tie(low, high, rank, fmt))


def _rank_of(magnitude: Fraction, magnitudes: tuple[float, ...]) -> int:
    """How many magnitudes are no larger, less one. Floats are compared far sooner than fractions, where nothing is lost."""
    number = float(magnitude) if magnitude <= magnitudes[-1] else math.inf
    return bisect_right(magnitudes, number if number == magnitude else magnitude) - 1


def _tie(low: Fraction, high: Fraction, rank: int, fmt: Format) -> Fraction:
    """The point between two neighbours: the middle, except for posits, where it is the posit with one bit more."""
    if isinstance(fmt, PositFormat):
        return Fraction(fmt.decode_body(2 * rank + 1, fmt.width)) if rank else Fraction(0)
    return (low + high) / 2


def encode_magnitude(magnitude: Fraction, fmt: Format, negative: bool) -> int:
    """The rank of a magnitude that the format has."""
    if fmt.bits <= 16:
        magnitudes, _ = _ladder(fmt, negative)
        rank = _rank_of(magnitude, magnitudes)
        assert magnitudes[rank] == magnitude
        return rank
    assert isinstance(fmt, (FloatFormat, FixedFormat))
    step = _grid_step(magnitude, fmt)
    steps = magnitude / step
    assert steps.denominator == 1
    if isinstance(fmt, FixedFormat):
        return steps.numerator
    above_lowest = step / Fraction(2) ** (fmt.min_exponent - fmt.mantissa_bits)  # a power of two
    return steps.numerator + ((above_lowest.numerator.bit_length() - 1) << fmt.mantissa_bits)


def _goes_up(magnitude: Fraction, near: Neighbours, mode: Rounding, negative: bool, draw: Fraction | None) -> bool:
    """Does the mode pick `high` (away from zero)?"""
    if magnitude == near.low:
        return False
    odd = near.rank % 2 == 1
    match mode:
        case Rounding.NEAREST:
            return magnitude > near.tie or (magnitude == near.tie and odd)
        case Rounding.NEAREST_AWAY:
            return magnitude >= near.tie
        case Rounding.TOWARD_ZERO:
            return False
        case Rounding.UP:
            return not negative
        case Rounding.DOWN:
            return negative
        case Rounding.TO_ODD:
            return not odd
        case Rounding.STOCHASTIC:
            if draw is None:
                raise ValueError("stochastic rounding needs draw: a Fraction in [0, 1), uniform")
            gap = near.high - near.low
            return gap > 0 and draw < (magnitude - near.low) / gap


def round(
    x: float, fmt: Format, mode: Rounding | str = Rounding.NEAREST, *, saturate: bool = False, draw: Fraction | None = None
) -> float:
    """The value of `fmt` that `x` becomes. Stochastic rounding goes up when `draw` is under the share of the gap covered."""
    mode = Rounding(mode)
    negative = math.copysign(1, x) < 0
    if math.isnan(x):
        return x
    if x == 0:
        return _zero(fmt, negative)
    if negative and not fmt.signed:
        return math.nan if fmt.has_nan else _zero(fmt, False)
    if math.isinf(x):
        return _largest(fmt, negative) if saturate else _overflow(fmt, negative, infinite=True)
    magnitude = abs(Fraction(x))
    near = neighbours(magnitude, fmt, negative)
    result = near.high if _goes_up(magnitude, near, mode, negative, draw) else near.low
    if result > abs(Fraction(_largest(fmt, negative))):
        return _largest(fmt, negative) if saturate else _overflow(fmt, negative, infinite=False)
    if result == 0:
        return _zero(fmt, negative)
    return -float(result) if negative else float(result)


def _zero(fmt: Format, negative: bool) -> float:
    if not fmt.has_zero:
        return math.nan if fmt.has_nan else fmt.smallest
    return -0.0 if negative and fmt.has_negative_zero else 0.0


def _largest(fmt: Format, negative: bool) -> float:
    return fmt.min if negative else fmt.max


def _overflow(fmt: Format, negative: bool, infinite: bool) -> float:
    """What a number beyond the range becomes: posits saturate numbers, though not infinities."""
    special = math.inf if fmt.has_inf else math.nan if fmt.has_nan else fmt.max
    value = special if infinite else fmt.overflow
    return _largest(fmt, negative) if math.isfinite(value) else math.copysign(value, -1 if negative else 1)


def encode(
    x: float,
    fmt: Format,
    mode: Rounding | str = Rounding.NEAREST,
    *,
    saturate: bool = False,
    draw: Fraction | None = None,
    nan: str = "raise",
) -> int:
    """The code of `round(x, ...)`. NaN in a format that has none: `raise`, or `zero`, or `saturate` (the largest value)."""
    value = round(x, fmt, mode, saturate=saturate, draw=draw)
    negative = math.copysign(1, value) < 0
    sign_bit = 1 << (fmt.bits - 1) if negative and fmt.signed else 0
    if math.isnan(value):
        if fmt.nan_code is not None:
            return fmt.nan_code | (sign_bit if isinstance(fmt, FloatFormat) else 0)
        if nan == "raise":
            raise ValueError(f"{fmt} has no NaN; say nan='zero' or nan='saturate'")
        value, negative = (_zero(fmt, False), False) if nan == "zero" else (_largest(fmt, negative), negative and fmt.signed)
    if math.isinf(value):
        assert fmt.inf_code is not None
        return fmt.inf_code | sign_bit
    rank = encode_magnitude(abs(Fraction(value)), fmt, negative)
    if fmt.bits <= 16:
        return _ladder(fmt, negative)[1][rank]
    if isinstance(fmt, FixedFormat):
        return -rank % (1 << fmt.bits) if negative else rank
    return rank | sign_bit


def block_scale(values: list[float], fmt: BlockFormat, tensor_scale: float = 1.0) -> float:
    """The scale that a block of numbers shares, from its largest finite magnitude (without `tensor_scale` applied)."""
    largest = max((abs(Fraction(v)) for v in values if math.isfinite(v)), default=Fraction(0))
    if fmt.power_of_two_scale:
        if not largest:
            return fmt.scale.smallest
        exponent = math.frexp(float(largest))[1] - 1 - fmt.max_exponent
        if fmt.rceil and largest > Fraction(fmt.element.max) * Fraction(2) ** exponent:
            exponent += 1
        lowest, highest = math.frexp(fmt.scale.smallest)[1] - 1, math.frexp(fmt.scale.max)[1] - 1
        return math.ldexp(1.0, min(max(exponent, lowest), highest))
    scale = _nearest_to(largest / (Fraction(tensor_scale) * Fraction(fmt.element.max)), fmt.scale)
    return max(scale, fmt.scale.smallest)


def tensor_scale(values: list[float], fmt: BlockFormat) -> float:
    """The one float32 scale of a whole tensor: the largest block's scale then just reaches the scale format's maximum."""
    largest = max((abs(Fraction(v)) for v in values if math.isfinite(v)), default=Fraction(0))
    scale = _nearest_to(largest / Fraction(fmt.element.max) / Fraction(fmt.scale.max), FloatFormat(8, 23))
    return scale if scale > 0 else 1.0


def _nearest_to(magnitude: Fraction, fmt: Format) -> float:
    """To nearest, saturating."""
    if magnitude >= Fraction(fmt.max):
        return fmt.max
    near = neighbours(magnitude, fmt)
    return float(near.high if _goes_up(magnitude, near, Rounding.NEAREST, False, None) else near.low)


def poisons(value: float, element: Format, saturate: bool = False) -> bool:
    """Is a number not finite, and elements of a block have no code that says so?"""
    if element.has_nan or math.isfinite(value):
        return False
    return math.isnan(value) or not (element.has_inf or saturate)


def round_block(
    values: list[float],
    fmt: BlockFormat,
    mode: Rounding | str = Rounding.NEAREST,
    *,
    whole_tensor_scale: float = 1.0,
    saturate: bool = False,
) -> list[Fraction | float]:
    """One block, exactly: elements are rounded in units of the scale, finite ones clamped to the element's range.

    1. A number that is not finite becomes what it becomes in the element format, if that shows it.
    2. If that does not, the block is NaN as a whole where the scale format has a NaN, else the number alone is.
    """
    poisoned = [poisons(value, fmt.element, saturate) for value in values]
    if any(poisoned) and fmt.scale.has_nan:
        return [math.nan] * len(values)
    unit = Fraction(block_scale(values, fmt, whole_tensor_scale)) * Fraction(whole_tensor_scale)
    results: list[Fraction | float] = []
    for value, bad in zip(values, poisoned, strict=True):
        if bad:
            results.append(math.nan)
            continue
        if not math.isfinite(value) or value == 0:
            special = round(value, fmt.element, mode, saturate=saturate)
            results.append(special if not math.isfinite(special) or special == 0 else Fraction(special) * unit)
            continue
        negative = value < 0
        if negative and not fmt.element.signed:
            results.append(Fraction(fmt.element.min) * unit)
            continue
        magnitude = min(abs(Fraction(value)) / unit, abs(Fraction(_largest(fmt.element, negative))))
        near = neighbours(magnitude, fmt.element, negative)
        picked = near.high if _goes_up(magnitude, near, Rounding(mode), negative, None) else near.low
        results.append((-picked if negative else picked) * unit if picked else _zero(fmt.element, negative))
    return results
