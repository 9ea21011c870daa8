"""What caught other libraries."""

import ast
import math
from pathlib import Path

import pytest
import torch

import lowp
from lowp.formats import FORMATS, BlockFormat, format

SOURCE = Path(lowp.__file__).parent
NUMBERS = [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)]


def quantized(value, name, dtype=torch.float32, **extra):
    return lowp.quantize(torch.tensor([value], dtype=dtype), name, **extra).item()


def test_overflow_is_decided_after_rounding():
    assert quantized(61440.0, "e5m2") == math.inf  # not 65536, which the format does not have
    assert quantized(61439.0, "e5m2") == 57344
    assert quantized(464.0, "e4m3fn") == 448
    assert math.isnan(quantized(464.1, "e4m3fn"))
    assert quantized(65520.0, "fp16") == math.inf
    assert quantized(65519.0, "fp16") == 65504


def test_formats_without_mantissa_tie_to_even_codes():
    fmt = format("e5m0")
    for code in range(1, 29):
        low, high = fmt.value(code), fmt.value(code + 1)
        assert quantized((low + high) / 2, fmt) == (low if code % 2 == 0 else high)
    assert quantized(3.0, "e8m0fnu") == 2.0  # codes 128 and 129


def test_bf16_keeps_the_subnormals_of_fp32():
    assert quantized(2.0**-133, "bf16") == 2.0**-133
    assert quantized(1.5 * 2.0**-133, "bf16") == 2.0**-132
    assert quantized(2.0**-134, "bf16") == 0.0
    assert quantized(2.0**-127, "e8m0fnu") == 2.0**-127


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_nan_stays_nan(fmt):
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for saturate in (False, True):
        for x in (nans, nans.double(), nans.half(), nans.bfloat16()):
            assert lowp.quantize(x, fmt, saturate=saturate).isnan().all()


@pytest.mark.parametrize("fmt", NUMBERS, ids=str)
def test_minus_zero(fmt):
    tiny = -(2.0**-149) if fmt.family != "posit" and fmt.has_zero and str(fmt) != "fp32" else -0.0
    result = lowp.quantize(torch.tensor([-0.0, tiny]), fmt)
    if not fmt.has_zero:
        assert result.isnan().all()
    else:
        assert (result == 0).all()
        assert torch.signbit(result).all() == fmt.has_negative_zero


def test_float64_is_rounded_once():
    """Just above a tie of e4m3fn, by less than float32 can tell: through float32 this would be a tie, and go down."""
    x = 1.0 + 2.0**-4 + 2.0**-40
    assert quantized(x, "e4m3fn", torch.float64) == 1.125
    assert quantized(torch.tensor(x, dtype=torch.float64).float().item(), "e4m3fn") == 1.0
    assert quantized(1.0 + 2.0**-24 + 2.0**-50, "fp32", torch.float64) == 1.0 + 2.0**-23


def test_exponents_come_from_bits():
    """A logarithm is off by one near powers of two; nothing in the package takes one of a tensor."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("log2", "log", "log10", "log1p", "frexp", "ldexp"):
                owner = ast.unparse(node.func.value)
                assert owner in ("math", "np", "self._run") or "cli" in path.parts, f"{path}: {owner}.{node.func.attr}"
    for exponent in range(-120, 120):
        below = torch.nextafter(torch.tensor(2.0**exponent), torch.tensor(0.0))
        assert lowp.quantize(below.reshape(1), "tf32").item() == 2.0**exponent
        assert lowp.quantize(below.reshape(1), "tf32", "toward_zero").item() < 2.0**exponent


@pytest.fixture
def flush_denormal():
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush denormals: the trap cannot be tested")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["fp32", "bf16", "e8m2", "e5m2", "e4m3fn", "e8m0fnu", "int8", "posit8", "dynamic8", "mxfp8_e4m3"]
)
def test_flushing_denormals_changes_nothing(name, dtype, request):
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(1 << 15), 1 << 15, (4000, dtype.itemsize // 2), generator=generator).to(torch.int16)
    x = words.view(dtype).reshape(-1)
    small = torch.arange(1, 300, dtype=torch.int16) if dtype.itemsize == 2 else torch.arange(1, 3000)
    small = small.to({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(dtype)
    x = torch.cat([x[~x.isnan()], small, -small])
    cases = [("nearest", {}), ("up", {}), ("stochastic", {"seed": 5})]
    want = [lowp.quantize(x, name, mode, **extra) for mode, extra in cases]
    request.getfixturevalue("flush_denormal")
    for (mode, extra), expected in zip(cases, want, strict=True):
        got = lowp.quantize(x, name, mode, **extra)
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(got.view(integer), expected.view(integer)), mode


def test_default_dtype_and_precision_settings_change_nothing():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 100
    want = lowp.quantize(x, "e4m3fn"), lowp.quantize(x, "posit8"), lowp.quantize(x, "mxfp4")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        for got, expected in zip([lowp.quantize(x, name) for name in ("e4m3fn", "posit8", "mxfp4")], want, strict=True):
            assert torch.equal(got, expected) or (got.isnan() == expected.isnan()).all()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
