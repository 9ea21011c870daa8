"""NaN and infinity in block formats stay visible: in the element, in the scale, or as an error; never as a small number."""

import math

import pytest
import torch

import lowp
from lowp.formats import BlockFormat

INF, NAN = math.inf, math.nan
SIGNS = ("mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "mxfp4_rceil", "block(int8, 64, fp32)", "block(int4, 5, bf16)")
SILENT = ("block(int4, 16, e4m3finite)", "block(e2m1fn, 32, e5m0)", "block(nf4, 8, e3m2fn)")  # no NaN anywhere
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
carried_by_scale = pytest.mark.parametrize("name", SIGNS)
carried_by_nothing = pytest.mark.parametrize("name", SILENT)


def same(left, right):
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left[~left.isnan()], right[~right.isnan()])


@carried_by_scale
@every_dtype
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_the_scale_says_it_and_the_block_is_nan(name, dtype, value):
    """What the issue saw: 32 infinities in mxfp4 gave 3.5e-38."""
    fmt = lowp.format(name)
    assert lowp.quantize(torch.full((fmt.size,), value, dtype=dtype), name).isnan().all()
    x = torch.linspace(-3, 3, 5 * fmt.size + 1).to(dtype)
    clean = lowp.quantize(x, name)
    x[2 * fmt.size] = value
    got = lowp.quantize(x, name)
    block = slice(2 * fmt.size, 3 * fmt.size)
    assert got[block].isnan().all()
    got[block] = clean[block]
    assert torch.equal(got, clean), "another block has changed"
    codes = lowp.encode(x, name)
    assert lowp.decode(codes.scales, fmt.scale).isnan().tolist() == [False, False, True, False, False, False]
    assert same(lowp.decode(codes, name, dtype=dtype), lowp.quantize(x, name))


def test_mx_scales_are_the_nan_of_e8m0():
    assert lowp.encode(torch.tensor([INF, 1.0]), "mxfp4").scales.tolist() == [0xFF]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mxfp8_e5m2", [1.0, INF, -INF, NAN, 0.5]),  # elements have both
        ("mxfp8_e4m3", [1.0, NAN, NAN, NAN, 0.5]),  # elements have NaN
        ("block(posit8, 16, e8m0fnu)", [1.0, NAN, NAN, NAN, -1.0]),  # NaR
    ],
)
def test_elements_that_can_say_it_do(name, wanted):
    wanted = torch.tensor(wanted)
    x = torch.tensor([1.0, INF, -INF, NAN, wanted[4]])
    assert same(lowp.quantize(x, name), wanted)
    assert same(lowp.decode(lowp.encode(x, name), name), wanted)


def test_elements_with_infinity_alone():
    x = torch.tensor([1.0, INF, -INF, 0.5, 2.0, NAN])
    assert same(lowp.quantize(x[:5], "block(e3m0, 8, e8m0fnu)"), x[:5])
    assert lowp.quantize(x, "block(e3m0, 8, e8m0fnu)").isnan().all(), "the scale says it"
    assert same(lowp.quantize(x, "block(e3m0, 8, e5m0)"), x), "nobody can say it: NaN stays NaN in a float result"
    with pytest.raises(ValueError, match=r"x holds NaN and block\(e3m0, 8, e5m0\) has none"):
        lowp.encode(x, "block(e3m0, 8, e5m0)")
    assert same(lowp.decode(lowp.encode(x[:5], "block(e3m0, 8, e5m0)"), "block(e3m0, 8, e5m0)"), x[:5])


@carried_by_nothing
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_where_no_code_says_it_encode_refuses(name, value):
    x = torch.tensor([1.0, value, -0.5])
    got = lowp.quantize(x, name)
    assert got.isnan().tolist() == [False, True, False]
    assert torch.equal(got[[0, 2]], lowp.quantize(x[[0, 2]], name)), "the others do not suffer"
    with pytest.raises(ValueError, match=r"x holds NaN or an infinity and block\(.*\) has none; say nan='zero'"):
        lowp.encode(x, name)


@pytest.mark.parametrize("name", SIGNS + SILENT)
@pytest.mark.parametrize("value", [INF, -INF, NAN, -NAN])
def test_what_nan_says(name, value):
    """The table in encode's docstring: the block is as without the number, and its place is zero or the largest."""
    fmt = lowp.format(name)
    assert isinstance(fmt, BlockFormat)
    x = torch.tensor([1.0, value, -0.5, 0.25])
    rest = lowp.quantize(x[[0, 2, 3]], name)
    for nan, saturate in (("zero", False), ("saturate", False), ("zero", True)):
        codes = lowp.encode(x, name, nan=nan, saturate=saturate)
        got = lowp.decode(codes, name)
        assert torch.equal(got[[0, 2, 3]], rest)
        largest = lowp.decode(codes.elements, fmt.element)[1].item()
        negative = math.copysign(1, value) < 0
        if nan == "saturate" or (saturate and math.isinf(value)):
            assert largest == (fmt.element.min if negative else fmt.element.max)
        else:
            assert got[1] == 0


@pytest.mark.parametrize("name", SIGNS)
def test_saturate_clamps_infinities_and_leaves_nan(name):
    x = torch.tensor([1.0, INF, -INF])
    assert lowp.quantize(x, name, saturate=True).isfinite().all()
    x[0] = NAN
    assert lowp.quantize(x, name, saturate=True).isnan().all()
    assert same(lowp.decode(lowp.encode(x, name, saturate=True), name), lowp.quantize(x, name, saturate=True))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_large_tensors_go_in_pieces_and_small_ones_do_not(name):
    x = torch.randn(300, 300)
    x[17, 40], x[250, 299] = NAN, INF
    got = lowp.quantize(x, name, "stochastic", seed=lowp.Noise(1, offset=9))
    assert got.isnan().sum() == (32 + 12 if name == "mxfp4" else 16 + 12)
    if name == "mxfp4":  # nvfp4 has one scale for all
        for row in (0, 17, 99, 250):
            seed = lowp.Noise(1, offset=9 + 300 * row)
            assert same(got[row], lowp.quantize(x[row], name, "stochastic", seed=seed))
    flat = x.flatten()
    assert same(lowp.quantize(flat, name), torch.cat([lowp.quantize(flat, name)]))
    assert same(lowp.decode(lowp.encode(flat, name), name), lowp.quantize(flat, name))


@pytest.mark.parametrize(
    "name", ["mxfp4", "mxfp8_e5m2", "mxint8", "nvfp4", "block(int8, 64, fp32)", "block(int4, 16, e4m3finite)"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_see_no_wider_float(name, dtype):
    x = torch.linspace(-3, 3, 135).to(dtype)
    with lowp.audit(forbid=(torch.float32, torch.float64)):
        rounded = lowp.quantize(x, name)
        lowp.quantize(x, name, "stochastic", seed=1)
        codes = lowp.encode(x, name)
        decoded = lowp.decode(codes, name, dtype=dtype)
    assert torch.equal(rounded, lowp.quantize(x, name))
    assert torch.equal(decoded, rounded)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_simulated_layer_shows_it(name):
    """Activations that diverge must not come out finite."""
    model = torch.nn.Linear(64, 4, bias=False)
    x = torch.ones(1, 64)
    lowp.simulate(model, weights=name, activations=name)
    assert model(x).isfinite().all()
    x[0, 3] = INF
    assert model(x).isnan().all()
    lowp.restore(model)
