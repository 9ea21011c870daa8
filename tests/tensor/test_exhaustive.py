"""Bit for bit: every float16 and bfloat16 number, every format of up to 16 bits, every mode; every step for 32 and 64 bits."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import lowp
from lowp.formats import FORMATS, BlockFormat, Rounding, format, reference
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.noise import draw, key_tensor
from oracle import DETERMINISTIC, round_all, same

NUMBERS = [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)]
NARROW = [fmt for fmt in NUMBERS if fmt.bits <= 16]
BYTE = [fmt for fmt in NUMBERS if fmt.bits <= 8]
# Beyond the registry: other biases, special values, signs, and splits that float32 cannot carry.
UNUSUAL = [
    *("e4m3b20", "e3m2b-3", "e5m2fn", "e5m3finite", "e2m3fnuz", "e5m0", "e4m0fn", "e1m3", "e8m2fn", "e6m1b60"),
    *("e3m3_ns", "e4m2fn_u", "e5m2_u_ns", "e4m3b130", "fixed0.7", "int3", "posit5_0", "posit10_3", "posit7_5"),
]
DTYPES_16 = [torch.float16, torch.bfloat16]


def all_numbers(dtype):
    """All 65,536 of them, NaNs of both signs included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def in_dtype(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounded to nearest into a dtype, without trusting its casts."""
    if dtype == torch.float64:
        return values
    if dtype == torch.float32:
        with np.errstate(over="ignore"):
            return values.astype(np.float32).astype(np.float64)
    return round_all(values, FORMAT_OF_DTYPE[dtype], Rounding.NEAREST)


def assert_same(got: torch.Tensor, want: np.ndarray, x: torch.Tensor):
    wrong = ~same(got.double().numpy(), want)
    assert not wrong.any(), (
        wrong.sum(),
        x.numpy(force=True)[wrong][:3] if x.dtype != torch.bfloat16 else x[wrong][:3],
        want[wrong][:3],
    )


def code_values(fmt, codes):
    table = np.array(fmt.table)
    return table[codes.to(torch.int64).numpy() & ((1 << fmt.bits) - 1)]


@pytest.mark.parametrize("dtype", DTYPES_16, ids=str)
@pytest.mark.parametrize("fmt", NARROW + [format(text) for text in UNUSUAL], ids=str)
def test_all_16_bit_numbers(fmt, dtype):
    x = all_numbers(dtype)
    exact = x.double().numpy()
    for mode in DETERMINISTIC:
        want = round_all(exact, fmt, mode)
        assert_same(lowp.quantize(x, fmt, mode), in_dtype(want, dtype), x)
        codes = lowp.encode(x, fmt, mode, nan="zero")
        decoded = code_values(fmt, codes)
        number = ~np.isnan(exact)
        assert same(decoded[number], want[number]).all()
        assert (np.isnan(decoded[~number]) if fmt.has_nan else decoded[~number] == 0).all()
        assert_same(lowp.decode(codes, fmt, dtype=torch.float64), decoded, x)


@pytest.mark.parametrize("dtype", DTYPES_16, ids=str)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_all_16_bit_numbers_saturating(fmt, dtype):
    x = all_numbers(dtype)
    for mode in (Rounding.NEAREST, Rounding.UP, Rounding.TO_ODD):
        want = round_all(x.double().numpy(), fmt, mode, saturate=True)
        assert_same(lowp.quantize(x, fmt, mode, saturate=True), in_dtype(want, dtype), x)


def edge_numbers(fmt, dtype):
    """Every neighbour and tie of a format and the numbers beside them in `dtype`, overflow's too, and dtype's own edges."""
    points = []
    for negative in (False, True):
        for value in fmt.values:
            if value == 0 or (value < 0) == negative:
                near = reference.neighbours(abs(Fraction(value)), fmt, negative)
                sign = -1.0 if negative else 1.0
                points += [sign * float(near.low), sign * float(near.tie), sign * float(near.high)]
    info = torch.finfo(dtype)
    points += [0.0, -0.0, info.tiny, info.smallest_normal / 2, info.max, math.inf, info.max / 3, 1 / 3, fmt.smallest / 2]
    if dtype == torch.float32:
        points += [2.0**-149, 2.0**-148, 2.0**-127, 2.0**-126 * 1.5]
    exact = torch.tensor(points, dtype=torch.float64).to(dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    beside = torch.cat([exact, torch.nextafter(exact, up), torch.nextafter(exact, down)])
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32).to(dtype)
    return torch.cat([beside, -beside, nans])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("fmt", BYTE + [format(text) for text in UNUSUAL if format(text).bits <= 8], ids=str)
def test_every_step(fmt, dtype):
    x = edge_numbers(fmt, dtype)
    exact = x.double().numpy()
    for mode in DETERMINISTIC:
        for saturate in (False, True):
            want = in_dtype(round_all(exact, fmt, mode, saturate), dtype)
            assert_same(lowp.quantize(x, fmt, mode, saturate=saturate), want, x)
        codes = lowp.encode(x, fmt, mode, nan="zero")
        number = ~np.isnan(exact)
        assert same(code_values(fmt, codes)[number], round_all(exact, fmt, mode)[number]).all()


@pytest.mark.parametrize("fmt", [fmt for fmt in NUMBERS if fmt.bits > 8] + [format("e8m20"), format("e5m23")], ids=str)
def test_wide_formats_against_the_scalar_reference(fmt):
    """Random bit patterns, and for float64 inputs also numbers just beside float32's ties: a double rounding would show."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (300,), generator=generator).to(torch.int32)
    single = bits.view(torch.float32)
    near = reference.neighbours
    beside = []
    for value in single[single.isfinite()][:60].tolist():
        tie = float(near(abs(Fraction(value)), fmt).tie) if abs(value) <= fmt.max else abs(value)
        beside += [tie, math.nextafter(tie, 0), math.nextafter(tie, math.inf)]
    double = torch.cat([single.double(), torch.tensor(beside, dtype=torch.float64)])
    for x in (single, double):
        for mode in DETERMINISTIC:
            want = np.array([reference.round(value, fmt, mode) for value in x.double().tolist()])
            assert_same(lowp.quantize(x, fmt, mode), in_dtype(want, x.dtype), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", [f for f in NUMBERS if f.bits <= 8 or f.bits == 16], ids=str)
def test_stochastic_follows_its_draws(fmt, dtype):
    """Given the very numbers that were drawn, the reference goes the same way."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.randint(-6, 7, (400,), generator=generator).double())
    x = (torch.randn(400, generator=generator, dtype=torch.float64) * scale * fmt.smallest * 4).to(dtype)
    x = torch.cat([x, (torch.rand(200, generator=generator, dtype=torch.float64) * fmt.max * 1.1).to(dtype)])
    noise = lowp.Noise(7, step=3, stream=2, offset=11)
    width = 30 if dtype == torch.float32 and not _needs_float64(fmt) else 62
    drawn = draw(key_tensor(noise, 0, x.device), x, width)
    draws = [Fraction((1 << width) - 1 - int(number), 1 << width) for number in drawn]
    want = [reference.round(v, fmt, "stochastic", draw=u) for v, u in zip(x.double().tolist(), draws, strict=True)]
    assert_same(lowp.quantize(x, fmt, "stochastic", seed=noise), in_dtype(np.array(want), dtype), x)
    codes = lowp.encode(x, fmt, "stochastic", seed=noise, nan="zero")
    assert same(code_values(fmt, codes), np.array(want)).all()


def _needs_float64(fmt):
    from lowp.tensor.carrier import F64, carrier_for

    return carrier_for(fmt, torch.float32) is F64
