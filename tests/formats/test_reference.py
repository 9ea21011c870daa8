"""The oracle itself: against brute force on fractions, and the vectorised copy of it that the exhaustive tests use."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp.formats import FORMATS, BlockFormat, FloatFormat, PositFormat, Rounding, Specials, format, reference
from oracle import DETERMINISTIC, round_all, same

NUMBER_FORMATS = [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)]
NARROW = [fmt for fmt in NUMBER_FORMATS if fmt.bits <= 16]


def staircase_points(fmt, most=600):
    """Values, ties and the numbers just beside them: a monotone staircase that agrees here agrees everywhere."""
    values = [value for value in fmt.values if value >= 0]
    values = values[:: max(1, len(values) // most)] + values[-3:]
    points = set()
    for value in values:
        near = reference.neighbours(Fraction(value), fmt)
        for point in (near.low, near.tie, near.high):
            exact = float(point)
            points |= {exact, math.nextafter(exact, 0), math.nextafter(exact, math.inf)}
    points |= {0.0, 5e-324, 1e-310, 1e300, math.inf, fmt.max * 1.5, fmt.smallest / 3}
    return np.array(sorted(points) + [-point for point in sorted(points)] + [math.nan])


@pytest.mark.parametrize("mode", DETERMINISTIC, ids=str)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_vectorised_oracle_is_the_reference(fmt, mode):
    points = staircase_points(fmt, most=80)
    for saturate in (False, True):
        want = np.array([reference.round(x, fmt, mode, saturate=saturate) for x in points.tolist()])
        got = round_all(points, fmt, mode, saturate)
        wrong = ~same(got, want)
        assert not wrong.any(), (points[wrong][:3], got[wrong][:3], want[wrong][:3])


@pytest.mark.parametrize("fmt", [fmt for fmt in NARROW if fmt.bits <= 8 and not isinstance(fmt, PositFormat)], ids=str)
def test_nearest_is_nearest(fmt):
    """Brute force: no value of the format is closer."""
    values = [Fraction(value) for value in fmt.values]
    for x in staircase_points(fmt, most=12).tolist():
        if math.isnan(x) or not abs(x) <= fmt.max or (x <= 0 and not fmt.signed):
            continue
        got = Fraction(reference.round(x, fmt))
        assert abs(got - Fraction(x)) == min(abs(value - Fraction(x)) for value in values)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_codes_and_values_agree(fmt):
    step = 1 if fmt.bits <= 8 else 37
    for code in list(fmt.codes)[::step]:
        value = reference.decode(code, fmt)
        if math.isfinite(value) and not fmt.min <= value <= fmt.max:
            continue  # the one code of fixed point that is never produced
        again = reference.decode(reference.encode(value, fmt), fmt)
        assert struct.pack("d", again) == struct.pack("d", value) or (math.isnan(again) and math.isnan(value))


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(1, 8),
    st.integers(0, 23),
    st.sampled_from(list(Specials)),
    st.sampled_from(DETERMINISTIC),
)
def test_rounding_brackets_the_number(x, exponent_bits, mantissa_bits, specials, mode):
    """In any split: exact numbers stay, directions are kept, rounding twice changes nothing."""
    try:
        fmt = FloatFormat(exponent_bits, mantissa_bits, specials=specials)
    except ValueError:
        return
    result = reference.round(x, fmt, mode, saturate=True)
    assert reference.round(result, fmt, mode, saturate=True) == result
    if abs(x) <= fmt.max:
        if mode is Rounding.UP:
            assert result >= x
        elif mode is Rounding.DOWN:
            assert result <= x
        elif mode is Rounding.TOWARD_ZERO:
            assert abs(result) <= abs(x)
        if mode in (Rounding.NEAREST, Rounding.NEAREST_AWAY) and result != x:
            down, up = (reference.round(x, fmt, m, saturate=True) for m in (Rounding.DOWN, Rounding.UP))
            assert abs(Fraction(result) - Fraction(x)) == min(abs(Fraction(y) - Fraction(x)) for y in (down, up))


def test_stochastic_goes_up_under_the_share_covered():
    fmt = format("e4m3fn")
    assert reference.round(1.03125, fmt, "stochastic", draw=Fraction(1, 4)) == 1.0  # a quarter of the way
    assert reference.round(1.03125, fmt, "stochastic", draw=Fraction(1, 4) - Fraction(1, 2**40)) == 1.125
    with pytest.raises(ValueError, match="draw"):
        reference.round(1.03125, fmt, "stochastic")


def test_posit_rounds_on_the_bit_string():
    """Between 2^20 and 2^24 of posit8 no exponent bit is left: the tie is the 9-bit posit 2^22, not the middle."""
    fmt = format("posit8")
    assert reference.round(2.0**22, fmt) == 2.0**20  # whose rank, 126, is even
    assert reference.round(2.0**22 + 1, fmt) == 2.0**24
    assert reference.round(1e-300, fmt) == fmt.smallest
    assert reference.round(1e300, fmt) == fmt.max
    assert math.isnan(reference.round(math.inf, fmt))


def test_wrong_code_is_refused():
    with pytest.raises(ValueError, match=r"0\.\.255"):
        reference.decode(256, format("e4m3fn"))
