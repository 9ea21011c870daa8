"""Formats as data: names, derived figures, special values, errors that speak."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowp
from lowp.formats import FORMATS, BlockFormat, FixedFormat, FloatFormat, PositFormat, Specials, format


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_text_round_trips(fmt):
    assert format(str(fmt)) == fmt
    assert format(fmt) is fmt
    assert str(format(str(fmt).upper())) == str(fmt)
    assert pickle.loads(pickle.dumps(fmt)) == fmt


@given(
    st.integers(1, 8),
    st.integers(0, 23),
    st.one_of(st.none(), st.integers(-200, 200)),
    st.booleans(),
    st.sampled_from(list(Specials)),
    st.booleans(),
    st.booleans(),
)
def test_every_float_has_a_text_of_its_own(e, m, bias, subnormals, specials, signed, zero):
    try:
        fmt = FloatFormat(e, m, bias, subnormals, specials, signed, zero)
    except ValueError:
        return
    assert format(str(fmt)) == fmt


@given(st.integers(0, 23), st.integers(0, 23))
def test_every_fixed_point_has_a_text(i, f):
    if 1 <= i + f <= 23:
        assert format(str(FixedFormat(i, f))) == FixedFormat(i, f)


def test_names():
    assert format("e5m10") == format("fp16")
    assert str(format("e8m7")) == "bf16"
    assert format("int8") == FixedFormat(7)
    assert format("posit8") == PositFormat(8, 2)
    assert format("block(e2m1fn,32,e8m0fnu)") == format("mxfp4")
    assert format("block(e2m1fn, 16, e4m3fn, fp32)") == format("nvfp4")
    assert str(BlockFormat(format("int8"), 64, format("bf16"))) == "block(int8, 64, bf16)"
    assert format("e2m1fn").specials is Specials.NONE
    assert format("e2m1nan").specials is Specials.NAN_ONLY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m3fm", "did you mean 'e4m3fn'"),
        ("nf5", "'nf4'"),
        ("mxfp5", "mxfp4"),
        ("zzz", "lowp formats"),
        ("e9m2", "1 to 8 exponent bits"),
        ("e5m24", "0 to 23 mantissa bits"),
        ("e0m3", "1 to 8 exponent bits"),
        ("e1m0", "no finite number"),
        ("int1", "int<N> takes N from 2"),
        ("fixed0.0", "I \\+ F from 1"),
        ("posit2", "n from 3 to 16"),
        ("posit17", "n from 3 to 16"),
        ("block(mxfp4, 4, fp32)", "elements of a block"),
        ("block(e4m3fn, 0, fp32)", "block size 0"),
        ("block(fp32, 8, fp32)", "at most 16 bits"),
        ("e4m3b999", "bias 999"),
    ],
)
def test_wrong_names_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        format(text)


def test_a_format_is_a_name():
    with pytest.raises(TypeError, match="not int"):
        lowp.format(8)


@pytest.mark.parametrize(
    ("name", "bits", "largest", "min_normal", "min_subnormal", "epsilon"),
    [
        ("fp32", 32, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23),
        ("bf16", 16, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7),
        ("fp16", 16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
        ("e5m2", 8, 57344.0, 2.0**-14, 2.0**-16, 0.25),
        ("e4m3", 8, 240.0, 2.0**-6, 2.0**-9, 0.125),
        ("e4m3fn", 8, 448.0, 2.0**-6, 2.0**-9, 0.125),
        ("e4m3fnuz", 8, 240.0, 2.0**-7, 2.0**-10, 0.125),
        ("e5m2fnuz", 8, 57344.0, 2.0**-15, 2.0**-17, 0.25),
        ("e4m3b11fnuz", 8, 30.0, 2.0**-10, 2.0**-13, 0.125),
        ("e3m4", 8, 15.5, 0.25, 2.0**-6, 0.0625),
        ("e2m1fn", 4, 6.0, 1.0, 0.5, 0.5),
        ("e2m3fn", 6, 7.5, 1.0, 0.125, 0.125),
        ("e3m2fn", 6, 28.0, 0.25, 0.0625, 0.25),
        ("e8m0fnu", 8, 2.0**127, 2.0**-127, None, 1.0),
        ("e1m6", 8, 1.96875, None, 0.03125, 0.03125),
    ],
)
def test_derived_figures(name, bits, largest, min_normal, min_subnormal, epsilon):
    fmt = format(name)
    assert (fmt.bits, fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.epsilon) == (
        bits,
        largest,
        min_normal,
        min_subnormal,
        epsilon,
    )


@pytest.mark.parametrize("fmt", [f for f in FORMATS if not isinstance(f, BlockFormat) and f.bits <= 16], ids=str)
def test_derived_figures_follow_from_the_values(fmt):
    """Whatever a family says by formula must be what its list of values says."""
    assert fmt.max == max(fmt.values)
    assert fmt.min == min(fmt.values)
    assert fmt.smallest == min(value for value in fmt.values if value > 0)
    assert fmt.count == len(fmt.values)
    above = [value for value in fmt.values if value > 1]
    epsilon = above[0] - 1 if 1.0 in fmt.values and above else math.nan
    assert fmt.epsilon == epsilon or (math.isnan(fmt.epsilon) and math.isnan(epsilon))
    assert fmt.has_nan == any(math.isnan(value) for value in fmt.table)
    assert fmt.has_inf == any(math.isinf(value) for value in fmt.table)
    assert fmt.has_negative_zero == any(value == 0 and math.copysign(1, value) < 0 for value in fmt.table)
    for name, code in fmt.special_codes.items():
        value = fmt.value(code)
        expected = {"zero": 0.0, "-zero": -0.0, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}[name]
        assert str(value) == str(expected)


def test_special_codes_are_the_hardware_ones():
    assert format("e5m2").special_codes == {"zero": 0, "-zero": 0x80, "inf": 0x7C, "-inf": 0xFC, "nan": 0x7E}
    assert format("e4m3fn").special_codes == {"zero": 0, "-zero": 0x80, "nan": 0x7F}
    assert format("e4m3fnuz").special_codes == {"zero": 0, "nan": 0x80}
    assert format("e8m0fnu").special_codes == {"nan": 0xFF}
    assert format("posit16").special_codes == {"zero": 0, "nan": 0x8000}


def test_wide_formats_are_not_listed():
    with pytest.raises(ValueError, match="up to 16 bits"):
        _ = format("fp32").values


def test_codebooks():
    dynamic = format("dynamic8")
    assert dynamic.value(126) == 0
    assert dynamic.value(127) == 1
    assert dynamic.value(125) == pytest.approx(0.99140625)
    assert dynamic.value(0) == pytest.approx(0.275e-5)
    assert len(format("bnb_dynamic8").values) == 256
    assert format("mantissa8").max == 150
    assert format("static8").value(16) == pytest.approx(1e-5)
    assert format("linear8").values[1] == pytest.approx(-126 / 127)
    assert format("nf4").values[0] == -1


@pytest.mark.parametrize(("name", "bits"), [("mxfp8_e4m3", 8.25), ("mxfp6_e3m2", 6.25), ("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_block_formats_count_their_scales(name, bits):
    assert format(name).bits == bits


def test_formats_are_data():
    assert replace(format("e4m3fn"), bias=11).max == 28.0
    assert len({*FORMATS}) == len(FORMATS)
    with pytest.raises(AttributeError):
        format("e5m2").bias = 3
