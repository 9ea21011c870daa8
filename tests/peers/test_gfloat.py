"""gfloat describes any float by its parameters, as we do: named formats, random ones, every rounding mode, and blocks."""

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo, RoundMode, Signedness
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_inputs import assert_same_codes, assert_same_values
from torch import Tensor

import lowp
from lowp.formats import FixedFormat, FloatFormat, Specials, reference

MODES = {
    "nearest": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
INT8 = FixedFormat(1, 6)
every_mode = pytest.mark.parametrize("mode", MODES)


def float_format(info: FormatInfo) -> FloatFormat | None:
    """The same format in our words, or None where it spends its codes as none of ours does."""
    mantissa_bits = info.precision - 1
    specials = {
        (Domain.Extended, (1 << mantissa_bits) - 1, True): Specials.IEEE,
        (Domain.Extended, 0, False): Specials.EXTENDED,
        (Domain.Extended, 1, not info.is_signed): Specials.EXTENDED,
        (Domain.Finite, 1, True): Specials.NAN_ONLY,
        (Domain.Finite, 0, True): Specials.NONE,
        (Domain.Finite, 0, False): Specials.FNUZ,
    }.get((info.domain, info.num_high_nans, info.has_nz or not info.is_signed))
    if specials is None or info.is_twos_complement or info.expBits > 8:
        return None
    return FloatFormat(
        info.expBits,
        mantissa_bits,
        bias=info.bias,
        specials=specials,
        signed=info.is_signed,
        subnormals=info.has_subnormals,
        zero=info.has_zero,
    )


def format_info(fmt: FloatFormat) -> FormatInfo:
    """The same format in gfloat's words."""
    return FormatInfo(
        str(fmt),
        k=fmt.bits,
        precision=fmt.mantissa_bits + 1,
        bias=fmt.bias,
        is_signed=fmt.signed,
        domain=Domain.Extended if fmt.specials in (Specials.IEEE, Specials.EXTENDED) else Domain.Finite,
        has_nz=fmt.signed and fmt.specials not in (Specials.FNUZ, Specials.EXTENDED),
        num_high_nans={
            Specials.IEEE: (1 << fmt.mantissa_bits) - 1,
            Specials.NAN_ONLY: 1,
            Specials.EXTENDED: 0 if fmt.signed else 1,
        }.get(fmt.specials, 0),
        has_subnormals=fmt.subnormals,
        is_twos_complement=False,
    )


def agrees_with_itself(info: FormatInfo) -> bool:
    """gfloat computes `max` apart from decoding, and wrongly where an IEEE format has one exponent bit (all subnormal)."""
    return info.max == gfloat.decode_float(info, info.code_of_max).fval


NAMED = {info.name: (info, fmt) for info in gfloat.formats.sample_formats if (fmt := float_format(info))}
every_named = pytest.mark.parametrize("name", NAMED)


@st.composite
def float_formats(draw: st.DrawFn) -> FloatFormat:
    specials = draw(st.sampled_from(Specials))
    signed = specials is Specials.FNUZ or draw(st.booleans())
    mantissa_bits = draw(st.integers(0, 12))
    # gfloat gives a format without subnormals a zero exactly where it has a mantissa. (Without zero, fnuz has no code for
    # -smallest, since NaN is there; gfloat rounds to that value all the same.)
    subnormals = specials in (Specials.FNUZ, Specials.EXTENDED) or draw(st.booleans())
    zero = subnormals or mantissa_bits > 0
    exponent_bits = draw(st.integers(1, 8))
    bias = draw(st.none() | st.integers(-255 if zero else -62, 255))  # gfloat's 2**-bias is a Python integer without zero
    if not (signed and subnormals):  # these become tables, which take a while to make: small ones
        exponent_bits, mantissa_bits = min(exponent_bits, 4), min(mantissa_bits, 2)
    if mantissa_bits == 0:  # one exponent bit and special values would leave no number but zero
        exponent_bits = max(exponent_bits, 2)
    return FloatFormat(exponent_bits, mantissa_bits, bias, subnormals, specials, signed, zero)


def inputs(fmt: FloatFormat, seed: int, count: int = 300) -> Tensor:
    """Values of the format, points between them and next to both, as float64, which is wider than every format here; and
    numbers of any size around its range, the infinities and zeros."""
    random = np.random.default_rng(seed)
    codes = np.unique(np.concatenate([random.integers(0, fmt.max_code, count), [0, 1, fmt.max_code - 1, fmt.max_code]]))
    values = np.array([abs(fmt.value(int(code))) for code in codes])
    above = np.array([abs(fmt.value(int(code) + 1)) if code < fmt.max_code else 2 * fmt.max for code in codes])
    overflow = fmt.max + np.ldexp([0.5, 1.0, 1.5], int(np.frexp(fmt.max)[1]) - 1 - fmt.mantissa_bits)
    points = np.concatenate([values, (values + above) / 2, overflow, random.uniform(values, above)])
    # Not the very next number: gfloat's scalar ties-to-away adds 0.5 in float64, which rounds 0.5 - 2^-54 up
    points = np.concatenate([points, points * (1 - 2.0**-50), points * (1 + 2.0**-50)])
    low, high = np.log2(fmt.smallest) - 4, np.log2(fmt.max) + 4
    points = np.concatenate([points, np.exp2(random.uniform(low, high, count)), [0.0, np.inf]])
    return torch.from_numpy(np.concatenate([points, -points]) if fmt.signed else points)


def comparable(x: Tensor, fmt: FloatFormat) -> Tensor:
    """gfloat lets formats without subnormals underflow without end: its result is then no value of the format."""
    if fmt.subnormals:
        return x
    enough = x.double().abs() >= fmt.smallest  # in float32 the smallest may be zero
    return x[enough | (x == 0)] if fmt.zero else x[enough]


def theirs(x: Tensor, info: FormatInfo, mode: str, saturate: bool) -> Tensor:
    return torch.from_numpy(gfloat.round_ndarray(info, x.numpy(), MODES[mode], saturate))


def compare(x: Tensor, fmt: FloatFormat, info: FormatInfo, mode: str, saturate: bool) -> None:
    # Unsigned formats and those without subnormals go through tables, slow to make for float64: there float32 has to do.
    for dtype in [torch.float32] if is_table(fmt) else [torch.float64, torch.float32]:
        narrow = comparable(x.to(dtype), fmt)
        # Where nothing stands for an overflow gfloat raises; ours then saturates in any case.
        peer = theirs(narrow.double(), info, mode, saturate or fmt.specials is Specials.NONE)
        assert_same_values(narrow, lowp.quantize(narrow, fmt, mode, saturate=saturate), peer.to(dtype))


def is_table(fmt: FloatFormat) -> bool:
    return not (fmt.signed and fmt.subnormals)


@every_named
@every_mode
@pytest.mark.parametrize("saturate", [False, True], ids=["", "saturate"])
def test_named_formats(name: str, mode: str, saturate: bool) -> None:
    info, fmt = NAMED[name]
    compare(inputs(fmt, seed=0), fmt, info, mode, saturate)


def test_which_named_formats_have_no_equal() -> None:
    """binary64 is our input type, int8 a fixed-point format here."""
    assert {info.name for info in gfloat.formats.sample_formats} - set(NAMED) == {"binary64", "ocp_int8"}


@pytest.mark.parametrize("signed", [True, False], ids=["s", "u"])
@pytest.mark.parametrize("extended", [True, False], ids=["e", "f"])
def test_p3109_by_name(signed: bool, extended: bool) -> None:
    """binary<k>p<p> in every width and precision up to 8 bits: every code, and back."""
    for k in range(3, 9):
        for p in range(1, k - 1):
            suffix = ("s" if signed else "u") + ("e" if extended else "f")
            fmt = lowp.format(f"binary{k}p{p}{suffix}")
            assert lowp.format(f"p3109_k{k}p{p}{suffix}") == lowp.format(str(fmt)) == fmt
            info = gfloat.formats.format_info_p3109(
                k, p, Signedness.Signed if signed else Signedness.Unsigned, Domain.Extended if extended else Domain.Finite
            )
            every = codes(fmt)
            peer = torch.from_numpy(gfloat.decode_ndarray(info, every.numpy().astype(np.int64)))
            assert_same_values(every.double(), lowp.decode(every, fmt, dtype=torch.float64), peer)
            assert [fmt.value(code) for code in fmt.codes if code != fmt.nan_code] == peer[~peer.isnan()].tolist()
            assert fmt.has_inf == extended
            if signed and fmt.bias + fmt.mantissa_bits < 120:
                numbers = ~peer.isnan()
                assert_same_codes(peer[numbers], lowp.encode(peer[numbers].float(), fmt), every[numbers])


@given(fmt=float_formats(), mode=st.sampled_from(list(MODES)), saturate=st.booleans(), seed=st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_random_formats(fmt: FloatFormat, mode: str, saturate: bool, seed: int) -> None:
    info = format_info(fmt)
    if agrees_with_itself(info):
        compare(inputs(fmt, seed), fmt, info, mode, saturate)


@given(fmt=float_formats(), mode=st.sampled_from(list(MODES)), saturate=st.booleans(), seed=st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_the_reference_on_random_formats(fmt: FloatFormat, mode: str, saturate: bool, seed: int) -> None:
    """Our scalar version against theirs, which gfloat writes apart from its vectorised one."""
    info = format_info(fmt)
    if not agrees_with_itself(info) or fmt.bits > 16:
        return
    x = comparable(inputs(fmt, seed, count=4), fmt)
    ours = torch.tensor([reference.round(value, fmt, mode, saturate=saturate) for value in x.tolist()], dtype=torch.float64)
    must_saturate = saturate or fmt.specials is Specials.NONE
    peer = [float(gfloat.round_float(info, value, MODES[mode], must_saturate)) for value in x.tolist()]
    assert_same_values(x, ours, torch.tensor(peer, dtype=torch.float64))


def codes(fmt: FloatFormat | FixedFormat) -> Tensor:
    return torch.arange(1 << fmt.bits).to(torch.uint8 if fmt.bits <= 8 else torch.int16 if fmt.bits <= 16 else torch.int32)


@given(fmt=float_formats().filter(lambda fmt: fmt.bits <= 11))
@settings(max_examples=60, deadline=None)
def test_decode_and_encode_every_code(fmt: FloatFormat) -> None:
    info = format_info(fmt)
    every = codes(fmt)
    peer = torch.from_numpy(gfloat.decode_ndarray(info, every.numpy().astype(np.int64)))
    ours = lowp.decode(every, fmt, dtype=torch.float64)
    assert_same_values(every.double(), ours, peer)
    numbers = ~ours.isnan()
    assert_same_codes(ours[numbers], lowp.encode(ours[numbers], fmt), every[numbers])


@every_mode
def test_int8(mode: str) -> None:
    """OCP's int8 reaches down to -2; ours is symmetric."""
    info = gfloat.formats.format_info_ocp_int8
    x = torch.linspace(-INT8.max, INT8.max, 9999, dtype=torch.float64)
    ours = lowp.quantize(x, INT8, mode)
    # Zero has one code, and gfloat one sign of it
    assert_same_values(x, ours + 0.0, theirs(x, info, mode, saturate=True))
    assert theirs(torch.tensor([-5.0]), info, mode, saturate=True).item() == -2.0
    assert lowp.quantize(torch.tensor([-5.0]), INT8, mode).item() == -INT8.max
    every = codes(INT8)
    peer = torch.from_numpy(gfloat.decode_ndarray(info, every.numpy().astype(np.int64)))
    assert_same_values(every.double(), lowp.decode(every, INT8), peer)


BLOCKS = {
    "mxfp8_e4m3": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
    "mxint8": gfloat.formats.format_info_mxint8,
}


@pytest.mark.parametrize("name", BLOCKS)
@every_mode
def test_blocks(name: str, mode: str) -> None:
    """OCP MX blocks of every size of scale, of zeros, and with an outlier."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((40, 32)) * np.exp2(random.integers(-130, 120, (40, 1)))
    rows[:, 5] *= np.exp2(random.integers(0, 8, 40))
    rows[0] = 0.0
    rows[1] = 2.0 ** random.integers(-8, 8, 32)
    rows[2, :] = np.float32(2) - np.float32(2) ** -23  # just under a power of two
    x = torch.from_numpy(rows).float()
    info = BLOCKS[name]
    peer = [gfloat.quantize_block(info, row, gfloat.compute_scale_amax, MODES[mode]) for row in x.double().numpy()]
    fmt = lowp.format(name)
    if fmt.element == INT8:  # OCP's reaches down to -2 times the scale; ours is symmetric
        scales = np.array([[gfloat.compute_scale_amax(info.etype.emax, row)] for row in x.double().numpy()])
        peer = np.maximum(peer, -INT8.max * scales)
    assert_same_values(x.flatten(), lowp.quantize(x, name, mode).flatten(), torch.from_numpy(np.array(peer)).float().flatten())
