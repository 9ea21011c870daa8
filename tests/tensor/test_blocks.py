"""Block formats against the exact reference, block by block, and against the rules of OCP MX 1.0 and NVFP4."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowp
from lowp.formats import BlockFormat, reference

REGISTERED = tuple(fmt for fmt in lowp.FORMATS if isinstance(fmt, BlockFormat))
OTHERS = (
    *("block(int8, 64, fp32)", "block(e4m3fn, 5, bf16)", "block(posit8, 16, e8m0fnu)", "block(e5m2, 1, fp16)"),
    *("mxfp4_rceil", "mxfp8_e4m3_rceil", "block(int4, 16, e4m3finite)", "block(e3m0, 8, e5m0)"),
)
BLOCKS = (*REGISTERED, *(lowp.format(text) for text in OTHERS))
MX = tuple(fmt for fmt in REGISTERED if fmt.power_of_two_scale)
DETERMINISTIC = tuple(mode.value for mode in lowp.Rounding if mode.value != "stochastic")

every_block = pytest.mark.parametrize("fmt", BLOCKS, ids=str)
every_mx = pytest.mark.parametrize("fmt", MX, ids=str)


def rows_by_reference(x: torch.Tensor, fmt: BlockFormat, mode: str = "nearest") -> torch.Tensor:
    """Every block of every row through the exact reference; in float64."""
    whole = reference.tensor_scale(x.flatten().tolist(), fmt) if fmt.tensor_scale else 1.0
    results = []
    for row in x.reshape(-1, x.shape[-1] if x.dim() else 1).tolist():
        for start in range(0, len(row), fmt.size):
            results += reference.round_block(row[start : start + fmt.size], fmt, mode, whole_tensor_scale=whole)
    exact = [float(value) for value in results]
    assert all(Fraction(e) == v for e, v in zip(exact, results, strict=True) if math.isfinite(v))
    return torch.tensor(exact, dtype=torch.float64).reshape(x.shape)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    same = ((got == want) & (got.signbit() == want.signbit())) | (got.isnan() & want.isnan())
    assert same.all(), (got[~same], want[~same])


def check(x: torch.Tensor, fmt: BlockFormat, mode: str = "nearest") -> None:
    """quantize and decode(encode) give the reference's numbers, in x's dtype."""
    want = rows_by_reference(x, fmt, mode)
    assert_same(lowp.quantize(x.double(), fmt, mode), want)
    assert_same(lowp.quantize(x, fmt, mode), lowp.quantize(x.double(), fmt, mode, out=torch.empty_like(x)))
    if fmt.has_nan or not any(reference.poisons(value, fmt.element) for value in x.flatten().tolist()):
        assert_same(lowp.decode(lowp.encode(x, fmt, mode), fmt, dtype=torch.float64), want)
    else:
        with pytest.raises(ValueError, match=r"x holds NaN.* say nan='zero' or nan='saturate'"):
            lowp.encode(x, fmt, mode)


def random(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * spread)


INPUTS = {
    "random": random(4, 96),
    "ragged": random(3, 67, seed=1),
    "outlier": torch.cat([random(63, seed=2) * 1e-4, torch.tensor([1e4])]),
    "zero": torch.zeros(2, 40),
    "minus_zero": torch.full((40,), -0.0),
    "zero_block_beside_another": torch.cat([torch.zeros(64), random(64, seed=3)]),
    "tiny": random(70, seed=4) * 2.0**-140,  # float32's subnormals
    "smallest": torch.full((33,), 2.0**-149),
    "huge": random(70, seed=5) * 2.0**110,
    "largest": torch.full((33,), torch.finfo(torch.float32).max),
    "largest_of_both_signs_and_tiny": torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 1.0]),
    "infinite": torch.tensor([1.0, math.inf, -math.inf, 0.5, -3.0]),
    "only_infinite": torch.tensor([math.inf, -math.inf]),
    "nan": torch.tensor([1.0, math.nan, 0.5, -3.0, math.inf]),
    "only_nan": torch.tensor([math.nan] * 3),
    "single": torch.tensor([0.3]),
    "column": random(5, 1, seed=6),
    "scalar": torch.tensor(-1.7),
    "powers_of_two": torch.exp2(torch.arange(-130.0, 127.0)),
    "four_dimensions": random(2, 1, 3, 35, seed=7),
}
every_input = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())


@every_block
@every_input
def test_nearest_equals_the_reference(fmt, x):
    check(x, fmt)


@every_block
@pytest.mark.parametrize("mode", DETERMINISTIC[1:])
def test_modes_equal_the_reference(fmt, mode):
    for name in ("ragged", "tiny", "infinite", "outlier"):
        check(INPUTS[name], fmt, mode)
    check(INPUTS["powers_of_two"][::3], fmt, mode)


@pytest.mark.parametrize("name", ["random", "ragged", "zero", "tiny", "infinite", "single"])
def test_codebooks_in_blocks(name):
    """As 8-bit optimizers store their state."""
    x = INPUTS[name]
    x = x.repeat(1, 4) if name == "random" else x  # blocks of 256, and a rest
    fmt = lowp.format("block(dynamic8, 256, fp32)")
    check(x, fmt)
    largest = x[x.isfinite()].abs().max()
    if name in ("random", "ragged"):
        assert lowp.quantize(x, fmt).abs().max() == largest, "the largest number is kept: 1 times a float32 scale"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_block
def test_dtypes(fmt, dtype):
    x = random(3, 50, spread=2).to(dtype)
    check(x, fmt)
    assert lowp.quantize(x, fmt).dtype == dtype


def test_float64_beyond_float32():
    for fmt in MX:
        check(torch.tensor([1e300, -1e-300, 1.0, 5e-324], dtype=torch.float64), fmt)


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.sampled_from(BLOCKS), st.lists(finite, min_size=1, max_size=70), st.sampled_from(DETERMINISTIC))
@settings(max_examples=200, deadline=None)
def test_any_finite_row(fmt, row, mode):
    check(torch.tensor(row), fmt, mode)


@given(st.sampled_from(BLOCKS), st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_row(fmt, row):
    check(torch.tensor(row), fmt)


# OCP MX 1.0: shared exponent = floor(log2(largest)) - emax of the element, clamped to E8M0; elements saturate.

MX_RULES = [
    ("mxfp8_e4m3", 8, 448.0),
    ("mxfp8_e5m2", 15, 57344.0),
    ("mxfp6_e3m2", 4, 28.0),
    ("mxfp6_e2m3", 2, 7.5),
    ("mxfp4", 2, 6.0),
    ("mxint8", 0, 127 / 64),
]


@pytest.mark.parametrize(("name", "emax", "largest"), MX_RULES)
@pytest.mark.parametrize("exponent", [-160, -140, -127, -126, -1, 0, 1, 100, 127])
def test_mx_shared_exponent(name, emax, largest, exponent):
    for significand in (1.0, 1.5, 1.999):
        check_shared_exponent(name, emax, largest, exponent, significand)


def check_shared_exponent(name, emax, largest, exponent, significand):
    x = torch.tensor([significand * 2.0**exponent, 0.0, -(2.0**exponent)], dtype=torch.float64)
    codes = lowp.encode(x, name)
    shared = min(max(exponent - emax, -127), 127)
    assert codes.scales.tolist() == [shared + 127]
    assert codes.tensor_scale is None
    assert lowp.format(name).element.max == largest
    assert lowp.decode(codes, name, dtype=torch.float64).abs().max() <= largest * 2.0**shared


@pytest.mark.parametrize(("name", "emax", "largest"), MX_RULES)
def test_mx_elements_saturate(name, emax, largest):
    """Just under the next power of two: more than the largest element in units of the shared scale."""
    x = torch.tensor([1.9999, -1.9999])
    if largest * 2.0**-emax < 1.9999:
        assert lowp.quantize(x, name).tolist() == [largest * 2.0**-emax, -largest * 2.0**-emax]
    for mode in DETERMINISTIC:
        assert lowp.quantize(x, name, mode).isfinite().all()
    assert lowp.quantize(x.repeat(50), name, "stochastic", seed=1).isfinite().all()


@every_mx
def test_mx_block_is_32_wide(fmt):
    x = torch.ones(3, 70)
    x[:, 32] = 1e6  # shifts the second block's scale alone
    codes = lowp.encode(x, fmt)
    assert codes.scales.shape == (3, 3)
    assert (codes.scales[:, 0] == codes.scales[:, 2]).all()
    assert (codes.scales[:, 1] > codes.scales[:, 0]).all()


def test_mxint8_is_symmetric_with_six_fraction_bits():
    x = torch.tensor([1.984375, -2.0 + 2**-20, 1 / 64, -1 / 128, 3 / 128])
    assert lowp.quantize(x, "mxint8").tolist() == [127 / 64, -127 / 64, 1 / 64, 0.0, 2 / 64]


def test_power_of_two_inputs_are_exact():
    x = torch.tensor([1.0, 2.0, 4.0, -0.5] * 8)
    for fmt in MX:
        assert torch.equal(lowp.quantize(x, fmt), x)


# NVFP4: e2m1 elements, e4m3 scales for 16 of them, one float32 for the tensor.


def test_nvfp4_has_two_levels_of_scale():
    x = random(4, 48, seed=9)
    codes = lowp.encode(x, "nvfp4")
    largest = x.abs().max().item()
    assert codes.tensor_scale.dtype == torch.float32
    assert codes.tensor_scale.shape == ()
    assert codes.tensor_scale.item() == torch.tensor(largest / (6 * 448), dtype=torch.float64).float().item()
    assert codes.scales.shape == (4, 3)
    scales = lowp.decode(codes.scales, "e4m3fn")
    assert scales.max() == 448.0
    blocks = x.view(4, 3, 16).abs().amax(-1).double()
    want = lowp.quantize(blocks / (6 * codes.tensor_scale.double()), "e4m3fn").clamp(min=2.0**-9)
    assert torch.equal(scales.double(), want)
    elements = lowp.decode(codes.elements, "e2m1fn").double()
    values = elements * scales.double().repeat_interleave(16, -1) * codes.tensor_scale.double()
    assert torch.equal(lowp.decode(codes, "nvfp4", dtype=torch.float64), values)


def test_nvfp4_of_zeros():
    codes = lowp.encode(torch.zeros(2, 20), "nvfp4")
    assert codes.tensor_scale.item() == 1.0
    assert not lowp.decode(codes, "nvfp4").any()


def test_nvfp4_scale_of_quiet_blocks_does_not_vanish():
    x = torch.cat([torch.full((16,), 1e6), torch.full((16,), 1e-6)])
    codes = lowp.encode(x, "nvfp4")
    assert (codes.scales > 0).all()
    assert_same(lowp.decode(codes, "nvfp4"), lowp.quantize(x, "nvfp4"))


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1.0, 3.4e38])
def test_nvfp4_of_extreme_tensors(value):
    x = torch.tensor([value, -value, value / 2, 0.0])
    check(x, lowp.format("nvfp4"))


# int8 with float32 scales


def test_int8_blocks_keep_their_largest():
    x = random(5, 150, seed=11)
    fmt = lowp.format("block(int8, 64, fp32)")
    codes = lowp.encode(x, fmt)
    assert codes.scales.dtype == torch.int32  # float32's own bits
    scales = codes.scales.view(torch.float32)
    assert scales.shape == (5, 3)
    assert torch.equal(scales[:, 0], (x[:, :64].abs().amax(-1).double() / 127).float())
    assert (codes.elements.view(torch.int8).abs()[:, :64].amax(-1) == 127).all()


# Shapes, packing, options


@every_block
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (65,), (2, 33), (0,), (3, 0), (0, 40), (2, 0, 5), (1, 1, 1)], ids=str)
def test_shapes_of_codes(fmt, shape):
    x = random(*shape)
    codes = lowp.encode(x, fmt)
    assert isinstance(codes, lowp.BlockCodes)
    assert codes.elements.shape == shape
    rows = shape if shape else (1,)
    assert codes.scales.shape == (*rows[:-1], math.ceil(rows[-1] / fmt.size))
    assert (codes.tensor_scale is not None) == fmt.tensor_scale
    got = lowp.decode(codes, fmt)
    assert got.shape == shape
    assert_same(got, lowp.quantize(x, fmt))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxint8", "block(int4, 5, bf16)"])
@pytest.mark.parametrize("shape", [(1,), (33,), (3, 31), (2, 3, 64), (0, 8), (4, 0)], ids=str)
def test_packed_blocks(name, shape):
    x, fmt = random(*shape), lowp.format(name)
    packed = lowp.encode(x, fmt, pack=True)
    plain = lowp.encode(x, fmt)
    assert packed.elements.shape == (*shape[:-1], math.ceil(shape[-1] * fmt.element.bits / 8))
    assert torch.equal(packed.elements, lowp.pack(plain.elements, fmt.element))
    assert torch.equal(packed.scales, plain.scales)
    assert_same(lowp.decode(packed, fmt, size=shape[-1]), lowp.quantize(x, fmt))


def test_a_plain_tuple_will_do_as_codes():
    x = random(40)
    assert_same(lowp.decode(tuple(lowp.encode(x, "nvfp4")), "nvfp4"), lowp.quantize(x, "nvfp4"))


@pytest.mark.parametrize("fmt", [lowp.format("mxfp8_e4m3"), lowp.format("mxfp8_e5m2"), lowp.format("mxfp4")], ids=str)
def test_saturate_is_for_infinities(fmt):
    x = torch.tensor([math.inf, 1.0, -math.inf])
    got = lowp.quantize(x, fmt, saturate=True)
    largest = fmt.element.max * 2.0**-fmt.max_exponent
    assert got.tolist() == [largest, 1.0, -largest]
    assert_same(lowp.decode(lowp.encode(x, fmt, saturate=True), fmt), got)


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCKS if not fmt.tensor_scale], ids=str)  # those have one scale for all
def test_a_block_does_not_depend_on_its_neighbours(fmt):
    x = random(6, 4 * fmt.size, seed=13)
    pieces = x.view(6, 4, fmt.size)
    assert_same(lowp.quantize(x, fmt).view_as(pieces), torch.stack([lowp.quantize(p, fmt) for p in pieces.unbind(1)], 1))


@every_block
def test_stochastic_elements_land_on_a_neighbour(fmt):
    x = random(8, 70, seed=14, spread=1)
    down, up = lowp.quantize(x, fmt, "down"), lowp.quantize(x, fmt, "up")
    got = lowp.quantize(x, fmt, "stochastic", seed=5)
    assert ((got == down) | (got == up)).all()
    assert_same(lowp.decode(lowp.encode(x, fmt, "stochastic", seed=5), fmt), got)
    if fmt.size > 1:  # alone in its block, an element may well be exact
        inexact = down != up
        assert 0.2 < (got == up)[inexact].float().mean() < 0.8


ONES = torch.ones(40)
ERRORS = [
    (lambda: lowp.decode(lowp.encode(ONES, "mxfp4")[:2], "mxfp4"), TypeError, r"BlockCodes\(elements, scales, tensor_scale\)"),
    (lambda: _with(scales=torch.zeros(3, dtype=torch.uint8)), ValueError, r"mxfp4 needs scales of shape \(2,\) .* not \(3,\)"),
    (lambda: _with(scales=torch.zeros(2)), TypeError, r"codes of mxfp4 are torch\.uint8 elements and torch\.uint8 scales"),
    (lambda: _with(elements=torch.zeros(40)), TypeError, r"codes of mxfp4 are torch\.uint8 elements"),
    pytest.param(lambda: _with(tensor_scale=torch.tensor(2.0)), ValueError, r"tensor.scale"),
    pytest.param(lambda: _with("nvfp4", tensor_scale=None), ValueError, r"tensor.scale"),
    (lambda: lowp.decode(lowp.encode(ONES, "mxfp4"), "mxfp4", size=40), ValueError, r"40 codes of 4 bits are 20 bytes"),
    (lambda: lowp.encode(torch.tensor(1.0), "mxfp4", pack=True), ValueError, r"at least one dimension"),
    (lambda: lowp.quantize(ONES, "block(e2m1fn, 0, fp32)"), ValueError, r"block size 0 is outside 1\.\."),
    (lambda: lowp.quantize(ONES, "block(fp32, 8, fp32)"), ValueError, r"at most 16 bits"),
    (lambda: lowp.quantize(ONES, "block(int8, 8, int8)"), ValueError, r"its scale is a float format"),
]


def _with(name="mxfp4", **changes):
    return lowp.decode(lowp.encode(ONES, name)._replace(**changes), name)


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[f"{i}" for i in range(len(ERRORS))])
def test_errors_speak(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
