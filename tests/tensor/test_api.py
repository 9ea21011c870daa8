"""The public operations as a user meets them: every dtype, shape, stride, option, error and torch mode."""

import copy
import math
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.formats import BlockFormat, reference
from lowp.tensor.noise import Domain

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODES = tuple(mode.value for mode in lowp.Rounding)
DETERMINISTIC = tuple(mode for mode in MODES if mode != "stochastic")
PLAIN = tuple(fmt for fmt in lowp.FORMATS if not isinstance(fmt, BlockFormat))
BLOCKS = tuple(fmt for fmt in lowp.FORMATS if isinstance(fmt, BlockFormat))
# A staircase takes half a second to build for each mode, a second in float64: these are tested in float32, some modes only by
# `make test-slow`. nf4 is small enough to be tested in full.
TABLES = ("dynamic8", "e8m0fnu", "static8", "mantissa8", "linear8", "bnb_dynamic8")
REPRESENTATIVE = ("e4m3fn", "int8", "posit8", "nf4", "mxfp4", "nvfp4")

every_format = pytest.mark.parametrize("fmt", lowp.FORMATS, ids=str)
every_plain_format = pytest.mark.parametrize("fmt", PLAIN, ids=str)
every_format_and_mode = pytest.mark.parametrize(
    ("fmt", "mode"),
    [
        pytest.param(fmt, mode, id=f"{fmt}-{mode}", marks=[pytest.mark.slow] * (str(fmt) in TABLES[2:] and number > 0))
        for fmt in lowp.FORMATS
        for number, mode in enumerate(MODES)
    ],
)
every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def options(mode: str, seed: int = 7) -> dict:
    return {"seed": seed} if mode == "stochastic" else {}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(INTEGER_OF_SIZE[x.element_size()])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Dtype, shape and every bit; one NaN is as good as another."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    different = bits(got) != bits(want)
    if got.is_floating_point():
        different &= ~(got.isnan() & want.isnan())
    assert not different.any(), (got[different], want[different])


def assert_same_codes(got, want) -> None:
    if not isinstance(want, tuple):
        return assert_same(got, want)
    for mine, other in zip(got, want, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert_same(mine, other)
    return None


def numbers(dtype: torch.dtype = torch.float32, count: int = 500, span: float = 30.0) -> torch.Tensor:
    """Both signs, many binades, and what is special: zeros, ones, ties, the ends of the dtype, infinities."""
    generator = torch.Generator().manual_seed(count)
    random = torch.randn(count, generator=generator, dtype=torch.float64)
    random *= torch.exp2((torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1) * span)
    info = torch.finfo(dtype)
    ends = [info.max, info.tiny, info.smallest_normal * info.eps, info.eps, math.inf]
    special = torch.tensor([0.0, 1.0, 1.5, 1.25, 1.0625, 0.5, 3.5, 127.5, 448.0, 464.0, *ends], dtype=torch.float64)
    return torch.cat([special, -special, random]).to(dtype)


def with_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.tensor([math.nan, -math.nan], dtype=x.dtype)])


# Shapes, dtypes, strides


@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1), (13,), (7, 1, 5), (2,) * 10], ids=str)
@pytest.mark.parametrize("name", ["e4m3fn", "posit8", "nf4", "mxfp4"])
def test_shapes_and_dtypes(dtype, shape, name):
    x = numbers(dtype, count=1024)[: math.prod(shape)].nan_to_num().reshape(shape)
    got = lowp.quantize(x, name)
    assert got.dtype == dtype
    assert got.shape == shape
    decoded = lowp.decode(lowp.encode(x, name), name, dtype=dtype)
    assert_same(decoded, got)
    if name != "mxfp4":
        assert_same(got.reshape(-1), lowp.quantize(x.reshape(-1), name))
        assert_same(lowp.encode(x, name).reshape(-1), lowp.encode(x.reshape(-1), name))


@every_dtype
@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "int8", "posit8", "nf4", "e7m0"])
def test_every_dtype_equals_the_reference(dtype, mode, name):
    x, fmt = with_nan(numbers(dtype, count=40)), lowp.format(name)
    want = [reference.round(value, fmt, mode) for value in x.tolist()]
    assert_same(lowp.quantize(x, name, mode), torch.tensor(want, dtype=torch.float64).to(dtype))
    codes = [reference.encode(value, fmt, mode, nan="zero") for value in x.tolist()]
    assert_same(lowp.encode(x, name, mode, nan="zero"), torch.tensor(codes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("name", "dtype"), [("e2m1fn", torch.uint8), ("e4m3", torch.uint8), ("fp16", torch.int16), ("e6m9", torch.int16)]
)
def test_code_dtypes_of_narrow_formats(name, dtype):
    assert lowp.encode(torch.ones(3), name).dtype == dtype


@pytest.mark.parametrize("name", ["fp32", "tf32", "int24", "e8m20"])
def test_wide_codes_are_bit_patterns_in_int32(name):
    x = torch.tensor([-1.5, 0.0, 3.0])
    codes = lowp.encode(x, name)
    assert codes.dtype == torch.int32
    want = [reference.encode(value, lowp.format(name)) for value in x.tolist()]
    mask = (1 << lowp.format(name).bits) - 1
    assert [code & mask for code in codes.tolist()] == want
    assert_same(lowp.decode(codes, name), lowp.quantize(x, name))


def test_fp32_codes_are_float32s_own_bits():
    x = with_nan(numbers(count=100))[:-2]
    assert torch.equal(lowp.encode(x, "fp32"), x.view(torch.int32))
    assert torch.equal(lowp.encode(x.half(), "fp16"), x.half().view(torch.int16))
    assert torch.equal(lowp.encode(x.bfloat16(), "bf16"), x.bfloat16().view(torch.int16))


VIEWS = {
    "transposed": lambda x: x.view(24, 20).t(),
    "channels_last": lambda x: x.view(2, 3, 8, 10).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(4, 6, 20).permute(2, 0, 1),
    "every_third": lambda x: x[::3],
    "columns": lambda x: x.view(24, 20)[:, 3:9],
    "rows_and_columns": lambda x: x.view(24, 20)[1::2, ::4],
    "offset": lambda x: x[1:],
    "expanded": lambda x: x.view(24, 20)[:, :1].expand(24, 7),
    "expanded_scalar": lambda x: x[5].expand(3, 4),
    "diagonal": lambda x: x.view(24, 20).diagonal(),
    "unfolded": lambda x: x.unfold(0, 8, 3),
    "one_row_of_many": lambda x: x.view(24, 20)[3:4, ::2],
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


def base(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """480 finite numbers."""
    return numbers(dtype, count=500, span=6)[-480:].clone()


@every_view
@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_strides_do_not_matter(view, name, mode):
    x = view(base())
    dense = x.clone(memory_format=torch.contiguous_format)
    assert_same(lowp.quantize(x, name, mode, **options(mode)), lowp.quantize(dense, name, mode, **options(mode)))
    codes = lowp.encode(dense, name, mode, **options(mode))
    assert_same_codes(lowp.encode(x, name, mode, **options(mode)), codes)


@every_view
def test_decode_takes_any_strides(view):
    codes = torch.arange(480).to(torch.uint8)
    assert_same(lowp.decode(view(codes), "posit8"), lowp.decode(view(codes).contiguous(), "posit8"))


def test_channels_last_stays_channels_last():
    x = base().view(2, 3, 8, 10).to(memory_format=torch.channels_last)
    assert lowp.quantize(x, "e4m3fn").is_contiguous(memory_format=torch.channels_last)
    assert lowp.encode(x, "e4m3fn").is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("fmt", REPRESENTATIVE)
@every_mode
def test_the_input_is_never_changed(fmt, mode):
    x = numbers(count=50)
    kept, version = x.clone(), x._version
    lowp.quantize(x, fmt, mode, **options(mode))
    lowp.encode(x, fmt, mode, nan="zero", **options(mode))
    assert torch.equal(bits(x), bits(kept))
    assert x._version == version


def test_codes_are_never_changed():
    codes = torch.arange(256).to(torch.uint8)
    lowp.decode(codes, "posit8")
    lowp.decode(codes, "e2m1fn", size=512)
    assert torch.equal(codes, torch.arange(256).to(torch.uint8))


# out=


@every_dtype
@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_out_in_place(dtype, name, mode):
    x = base(dtype)
    want = lowp.quantize(x, name, mode, **options(mode))
    assert lowp.quantize(x, name, mode, out=x, **options(mode)) is x
    assert_same(x, want)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@every_dtype
@pytest.mark.parametrize("name", ["e4m3fn", "bf16", "posit8", "mxfp4"])
def test_out_of_another_dtype(dtype, out_dtype, name):
    x = base(dtype)
    out = torch.full_like(x, 7, dtype=out_dtype)
    assert lowp.quantize(x, name, out=out) is out
    # Through float64 everything is exact; the one rounding is the last.
    assert_same(out, lowp.quantize(x.double(), name).to(out_dtype))


NOT_DENSE = ("every_third", "columns", "rows_and_columns", "diagonal", "one_row_of_many")


@pytest.mark.parametrize(
    ("name", "mode", "x_view"),
    [
        pytest.param(name, mode, view)
        for name in ("e4m3fn", "mxfp4")
        for mode in ("nearest", "stochastic")
        for view in VIEWS
        if "expanded" not in view and view != "unfolded"
    ],
)
def test_out_with_the_inputs_own_strides(x_view, name, mode):
    view = VIEWS[x_view]
    memory, x = torch.full((480,), 99.0), view(base())
    out = view(memory)
    want = lowp.quantize(x.contiguous(), name, mode, **options(mode))
    assert lowp.quantize(x, name, mode, out=out, **options(mode)) is out
    assert_same(out.contiguous(), want)
    if x_view != "channels_last":  # that view is a copy
        assert (memory == 99.0).sum() == 480 - x.numel(), "written outside of out"


@pytest.mark.parametrize(
    "view",
    [pytest.param(view) for view in ("transposed", "permuted", "every_third", "columns", "offset", "diagonal")],
)
def test_out_in_place_on_a_view(view):
    memory = base()
    before, x = memory.clone(), VIEWS[view](memory)
    want = lowp.quantize(x.contiguous(), "e4m3fn")
    lowp.quantize(x, "e4m3fn", out=x)
    assert_same(x.contiguous(), want)
    VIEWS[view](before).copy_(want)
    assert_same(memory, before)


def test_out_with_other_strides():
    x, out = base().view(24, 20), torch.empty(20, 24).t()
    lowp.quantize(x, "e4m3fn", out=out)
    assert_same(out.contiguous(), lowp.quantize(x, "e4m3fn"))
    out = torch.empty(24, 40)[:, ::2]
    lowp.quantize(x.t().contiguous().t(), "e4m3fn", out=out)
    assert_same(out.contiguous(), lowp.quantize(x, "e4m3fn"))


@pytest.mark.parametrize("shift", [-3, -1, 1, 3, 100])
def test_out_overlapping_the_input(shift):
    memory = base()
    x, out = memory[200:350], memory[200 + shift : 350 + shift]
    want = lowp.quantize(x.clone(), "e4m3fn")
    lowp.quantize(x, "e4m3fn", out=out)
    assert_same(out, want)


def test_out_that_is_the_input_transposed():
    x = base()[:400].view(20, 20)
    want = lowp.quantize(x.clone(), "e4m3fn")
    lowp.quantize(x, "e4m3fn", out=x.t())
    assert_same(x.t().contiguous(), want)


def test_codes_written_over_their_own_input():
    x = base()
    want = lowp.encode(x, "e4m3fn")
    out = x.view(torch.uint8)[480:960]
    assert lowp.encode(x, "e4m3fn", out=out) is out
    assert_same(out, want)


def test_out_that_is_expanded_is_refused():
    with pytest.raises(RuntimeError, match="single memory location"):
        lowp.quantize(torch.ones(4), "e4m3fn", out=torch.empty(1).expand(4))


def test_out_for_encode_and_decode():
    x = base()
    out = torch.empty(480, dtype=torch.uint8)
    assert lowp.encode(x, "e4m3fn", out=out) is out
    assert_same(out, lowp.encode(x, "e4m3fn"))
    values = torch.empty(480, dtype=torch.bfloat16)
    assert lowp.decode(out, "e4m3fn", out=values) is values
    assert_same(values, lowp.quantize(x, "e4m3fn").bfloat16())
    packed = torch.empty(240, dtype=torch.uint8)
    assert lowp.encode(x, "e2m1fn", pack=True, out=packed) is packed
    assert_same(packed, lowp.encode(x, "e2m1fn", pack=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_out_for_block_formats(dtype):
    x, out = base(), torch.empty(480, dtype=dtype)
    assert lowp.quantize(x, "mxfp4", out=out) is out
    assert_same(out, lowp.quantize(x, "mxfp4").to(dtype))
    again = torch.empty(480, dtype=dtype)
    assert lowp.decode(lowp.encode(x, "mxfp4"), "mxfp4", out=again) is again
    assert_same(again, out)


OUT_ERRORS = {
    "shape": lambda x: lowp.quantize(x, "e4m3fn", out=torch.empty(5)),
    "broadcast": lambda x: lowp.quantize(x, "e4m3fn", out=torch.empty(2, 4)),
    "integer": lambda x: lowp.quantize(x, "e4m3fn", out=torch.empty(4, dtype=torch.int32)),
    "device": lambda x: lowp.quantize(x, "e4m3fn", out=torch.empty(4, device="meta")),
    "block": lambda x: lowp.quantize(x, "mxfp4", out=torch.empty(2, 4)),
    "codes_dtype": lambda x: lowp.encode(x, "e4m3fn", out=torch.empty(4)),
    "codes_shape": lambda x: lowp.encode(x, "e4m3fn", out=torch.empty(2, 4, dtype=torch.uint8)),
    "wide_codes": lambda x: lowp.encode(x, "fp16", out=torch.empty(4, dtype=torch.uint8)),
    "decode_shape": lambda x: lowp.decode(lowp.encode(x, "e4m3fn"), "e4m3fn", out=torch.empty(2, 4)),
    "packed_shape": lambda x: lowp.encode(x, "e2m1fn", pack=True, out=torch.empty(3, 2, dtype=torch.uint8)),
    "packed_dtype": lambda x: lowp.encode(x, "e2m1fn", pack=True, out=torch.empty(2)),
    "decode_block": lambda x: lowp.decode(lowp.encode(x, "mxfp4"), "mxfp4", out=torch.empty(3, 4)),
}


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=name) for name, call in OUT_ERRORS.items()],
)
def test_out_of_the_wrong_kind(call):
    with pytest.raises(
        ValueError, match=r"^out must be torch\.\w+ .*of shape \([24],\) on cpu, not torch\.\w+ of \(.*\) on \w+$"
    ):
        call(torch.ones(4))


def test_out_that_requires_grad():
    out = torch.empty(4, requires_grad=True)
    with pytest.raises(ValueError, match="out= does not support tensors that require a gradient"):
        lowp.quantize(torch.ones(4), "e4m3fn", out=out)
    with torch.no_grad():  # as an optimizer does
        assert lowp.quantize(torch.full((4,), 1.01), "e4m3fn", out=out) is out
    assert out.tolist() == [1.0] * 4
    assert out.requires_grad


def test_a_parameter_in_place():
    parameter = torch.nn.Parameter(torch.full((4,), 1.01))
    with torch.no_grad():
        assert lowp.quantize(parameter, "e4m3fn", out=parameter) is parameter
    assert parameter.tolist() == [1.0] * 4
    assert parameter.requires_grad
    assert parameter.is_leaf


@pytest.mark.parametrize("name", ["e4m3fn", "mxfp4"])
def test_autograd_notices_writing_to_out(name):
    x = torch.randn(5, requires_grad=True)
    y = x.exp()  # saves its result
    lowp.quantize(torch.ones(5), name, out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Errors


ONES = torch.ones(4)
ERRORS = [
    (lambda: lowp.quantize([1.0], "e4m3fn"), TypeError, r"^quantize takes a tensor, not list$"),
    (lambda: lowp.encode(1.0, "e4m3fn"), TypeError, r"^encode takes a tensor, not float$"),
    (lambda: lowp.quantize(torch.arange(3), "e4m3fn"), TypeError, r"not torch\.int64$"),
    (lambda: lowp.quantize(ONES > 0, "e4m3fn"), TypeError, r"not torch\.bool$"),
    (lambda: lowp.encode(ONES.cfloat(), "e4m3fn"), TypeError, r"takes float64, .* not torch\.complex64$"),
    (lambda: lowp.quantize(ONES.to(torch.float8_e5m2), "e4m3fn"), TypeError, r"not torch\.float8_e5m2$"),
    (lambda: lowp.quantize(ONES.to_sparse(), "e4m3fn"), TypeError, r"takes dense tensors, not torch\.sparse_coo$"),
    (lambda: lowp.quantize(ONES, "e4m3fm"), ValueError, r"unknown format 'e4m3fm'; did you mean 'e4m3fn'"),
    (lambda: lowp.quantize(ONES, "mxfp5"), ValueError, r"did you mean 'mxfp4'"),
    (lambda: lowp.quantize(ONES, "???"), ValueError, r"unknown format .* names look like"),
    (lambda: lowp.quantize(ONES, "e9m3"), ValueError, r"takes X from 1 to 8"),
    (lambda: lowp.quantize(ONES, None), TypeError, r"a format is a name .* not NoneType"),
    (lambda: lowp.quantize(ONES, "int8", "up_"), ValueError, r"unknown rounding 'up_'; it is one of nearest, .*stochastic"),
    (lambda: lowp.quantize(ONES, "int8", None), ValueError, r"unknown rounding None"),
    (lambda: lowp.quantize(ONES, "int8", "stochastic"), ValueError, r"stochastic rounding needs seed="),
    (lambda: lowp.encode(ONES, "mxfp4", "stochastic"), ValueError, r"stochastic rounding needs seed="),
    (lambda: lowp.fake_quantize(ONES, "int8", rounding="stochastic"), ValueError, r"stochastic rounding needs seed="),
    (lambda: lowp.quantize(ONES, "int8", seed=0), ValueError, r"seed is for stochastic rounding; 'nearest' draws nothing"),
    (lambda: lowp.encode(ONES, "int8", nan="keep"), ValueError, r"unknown nan='keep'; it is 'raise', 'zero' or 'saturate'"),
    (lambda: lowp.encode(ONES, "mxfp4", out=ONES), ValueError, r"out= is not for block formats"),
    (lambda: lowp.decode(ONES, "e4m3fn"), TypeError, r"codes of e4m3fn are torch\.uint8 tensors, not torch\.float32"),
    (lambda: lowp.decode(ONES.to(torch.int8), "e4m3fn"), TypeError, r"not torch\.int8"),
    (lambda: lowp.decode(ONES.byte(), "fp16"), TypeError, r"codes of fp16 are torch\.int16 tensors, not torch\.uint8"),
    (lambda: lowp.decode([1, 2], "e4m3fn"), TypeError, r"not list"),
    (lambda: lowp.decode(ONES.byte(), "mxfp4"), TypeError, r"codes of mxfp4 are lowp\.BlockCodes"),
    (lambda: lowp.decode(lowp.encode(ONES, "mxfp4"), "e2m1fn"), TypeError, r"not BlockCodes"),
    (lambda: lowp.decode(ONES.byte(), "e4m3fn", dtype=torch.int32), TypeError, r"decode gives float64, .* not torch\.int32"),
    (lambda: lowp.decode(ONES.byte(), "e2m1fn", size=4), ValueError, r"4 codes of 4 bits are 2 bytes a row, .* have 4"),
    (lambda: lowp.decode(lowp.encode(ONES, "fp16"), "fp16", size=4), ValueError, r"packing is for codes of up to 8 bits"),
    (lambda: lowp.encode(torch.tensor(1.0), "e2m1fn", pack=True), ValueError, r"at least one dimension"),
    (lambda: lowp.Noise(1, offset=-1), ValueError, r"offset counts elements and cannot be -1"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors_speak(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("seed", [1.5, "a", torch.tensor(1.0), torch.tensor([1, 2])], ids=repr)
def test_a_seed_that_is_no_integer(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        lowp.quantize(ONES, "int8", "stochastic", seed=seed)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"forward": "e4m3fm"}, "unknown format"),
        pytest.param({"backward": "e4m3fm"}, "unknown format"),
        ({"forward": "e5m2", "rounding": "bogus"}, "unknown rounding"),
        pytest.param({"backward": "e5m2", "backward_rounding": "bogus"}, "unknown rounding"),
        pytest.param({"forward": "e5m2", "seed": 3}, "seed is for stochastic rounding"),
    ],
    ids=str,
)
def test_fake_quantize_finds_mistakes_at_once(arguments, text):
    with pytest.raises(ValueError, match=text):
        lowp.fake_quantize(ONES, **arguments)


@pytest.mark.parametrize("x", [[1.0], torch.arange(3)], ids=["list", "integers"])
@pytest.mark.parametrize("name", [pytest.param(None), "e4m3fn"])
def test_fake_quantize_takes_floating_point_tensors(x, name):
    with pytest.raises(TypeError, match="takes"):
        lowp.fake_quantize(x, name)


# NaN, minus zero, overflow


@every_format
def test_quantize_keeps_nan(fmt):
    x = torch.tensor([math.nan, 1.0, -math.nan])
    # In blocks whose elements have no NaN the scale says it, for all of them (test_nonfinite_blocks.py).
    all_of_them = isinstance(fmt, lowp.BlockFormat) and not fmt.element.has_nan
    for mode in ("nearest",) if str(fmt) in TABLES[2:] else ("nearest", "stochastic"):
        assert lowp.quantize(x, fmt, mode, **options(mode)).isnan().tolist() == [True, all_of_them, True]


NO_NAN = tuple(fmt for fmt in lowp.FORMATS if not fmt.has_nan)


@pytest.mark.parametrize("fmt", NO_NAN, ids=str)
def test_encode_refuses_nan_where_there_is_none(fmt):
    x = torch.tensor([1.0, math.nan])
    with pytest.raises(ValueError, match=r"x holds NaN and .* has none; say nan='zero' or nan='saturate'"):
        lowp.encode(x, fmt)
    lowp.encode(x[:1], fmt)
    lowp.encode(x[:0], fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in NO_NAN if not isinstance(fmt, BlockFormat)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_nan_becomes_on_request(fmt, dtype):
    x = torch.tensor([math.nan, -math.nan, 1.0, math.copysign(math.nan, -1)], dtype=dtype)
    zero = lowp.decode(lowp.encode(x, fmt, nan="zero"), fmt)
    assert zero[[0, 1, 3]].tolist() == [0.0] * 3
    assert not zero[[0, 1, 3]].signbit().any(), "plus zero, whatever the NaN's sign"
    signs = x.signbit()
    saturated = lowp.decode(lowp.encode(x, fmt, nan="saturate"), fmt)[[0, 1, 3]]
    assert saturated.tolist() == [fmt.min if signs[i] else fmt.max for i in (0, 1, 3)]


@pytest.mark.parametrize("fmt", [fmt for fmt in PLAIN if fmt.has_nan], ids=str)
def test_encode_keeps_nan_where_there_is_one(fmt):
    x = torch.tensor([math.nan, math.copysign(math.nan, -1)])
    codes = lowp.encode(x, fmt)
    assert lowp.decode(codes, fmt).isnan().all()
    mask = (1 << fmt.bits) - 1
    assert [code & mask for code in codes.tolist()] == [reference.encode(value, fmt) for value in x.tolist()]


# Signed floats but fnuz and e8m0fnu; codebooks with a sign bit. Blocks as their elements.
KEEP_MINUS_ZERO = {
    *("fp32", "tf32", "bf16", "fp16", "e6m9", "e1m6", "e2m5", "e3m4", "e4m3", "e5m2", "e6m1", "e7m0", "e3m0"),
    *("e4m3fn", "e3m2fn", "e2m3fn", "e2m1fn", "dynamic8", "static8", "mantissa8", "linear8"),
    *("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"),
}


@every_format
@pytest.mark.parametrize("x", [-0.0, -1e-30], ids=["minus_zero", "tiny"])
def test_minus_zero(fmt, x):
    if str(fmt).startswith("posit") and x:
        return  # posits never round to zero
    tensor = torch.tensor([x, 1.0])  # the 1 keeps the scale of a block up
    got = lowp.quantize(tensor, fmt)[:1]
    decoded = lowp.decode(lowp.encode(tensor, fmt), fmt)[:1]
    assert_same(decoded, got)
    if str(fmt) == "e8m0fnu":
        assert got.isnan()
    elif str(fmt) not in ("fp32", "tf32", "bf16") or not x:
        assert got.item() == 0
        assert got.signbit().item() == (str(fmt) in KEEP_MINUS_ZERO)


def around_the_largest(fmt) -> torch.Tensor:
    """Values, ties and beyond, in float64 where that is cheap."""
    step = fmt.max - reference.round(math.nextafter(fmt.max, 0), fmt, "toward_zero")
    points = [fmt.max - step, fmt.max - step / 2, fmt.max]
    points += [fmt.max + step * share for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)] + [fmt.max * 4, fmt.max * 1e6, math.inf]
    if str(fmt) in TABLES:
        points = [struct.unpack("f", struct.pack("f", p))[0] for p in points if p < 3e38] + [math.inf]
    double = torch.tensor(points, dtype=torch.float64)
    around = torch.cat([double, torch.nextafter(double, torch.zeros(())), torch.nextafter(double, torch.full((), math.inf))])
    around = torch.cat([around, -around])
    return around.float() if str(fmt) in TABLES else around


@every_plain_format
@pytest.mark.parametrize("saturate", [False, True], ids=["", "saturate"])
def test_overflow_equals_the_reference(fmt, saturate):
    if saturate and str(fmt) in TABLES[2:]:
        return  # codebooks end at their largest value anyway; one of them, dynamic8, is enough
    x = around_the_largest(fmt)
    for mode in DETERMINISTIC[: 1 if str(fmt) in TABLES else None]:
        check_overflow(x, fmt, mode, saturate)


def check_overflow(x, fmt, mode, saturate):
    want = [reference.round(value, fmt, mode, saturate=saturate) for value in x.tolist()]
    got = lowp.quantize(x, fmt, mode, saturate=saturate)
    assert_same(got, torch.tensor(want, dtype=torch.float64).to(x.dtype))
    decoded = lowp.decode(lowp.encode(x, fmt, mode, saturate=saturate, nan="zero"), fmt, dtype=x.dtype)
    assert_same(decoded, got)
    if saturate and str(fmt) != "e8m0fnu":
        assert got.isfinite().all()
        assert got.max() == fmt.max


@every_plain_format
def test_stochastic_overflow(fmt):
    """Beyond the largest value the outcomes are that value and the overflow; saturated, only the first."""
    x = around_the_largest(fmt)[:12].nan_to_num(posinf=fmt.max).repeat(20)
    x = x[x >= fmt.max]
    got = lowp.quantize(x, fmt, "stochastic", seed=3)
    allowed = (got == fmt.max) | (got.isnan() if math.isnan(fmt.overflow) else got == fmt.overflow)
    assert allowed.all()
    if str(fmt) not in TABLES:
        assert (lowp.quantize(x, fmt, "stochastic", seed=3, saturate=True) == fmt.max).all()


@pytest.mark.parametrize(
    ("name", "plain", "saturated"),
    [
        ("e5m2", math.inf, 57344.0),
        ("e4m3fn", math.nan, 448.0),
        ("e4m3fnuz", math.nan, 240.0),
        ("e2m1fn", 6.0, 6.0),
        ("int8", 127.0, 127.0),
        ("posit8", math.nan, 2.0**24),
        ("nf4", 1.0, 1.0),
        ("e8m0fnu", math.nan, 2.0**127),
    ],
)
def test_infinity(name, plain, saturated):
    x = torch.tensor([math.inf])
    assert lowp.quantize(x, name).tolist() == pytest.approx([plain], nan_ok=True)
    assert lowp.quantize(x, name, saturate=True).item() == saturated
    assert lowp.decode(lowp.encode(x, name, saturate=True), name).item() == saturated


# Laws


@every_format_and_mode
def test_decode_of_encode_is_quantize(fmt, mode):
    x = numbers()
    x = with_nan(x) if fmt.has_nan else x
    want = lowp.quantize(x, fmt, mode, **options(mode))
    codes = lowp.encode(x, fmt, mode, **options(mode))
    assert_same(lowp.decode(codes, fmt), want)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        if fmt.family == "posit" and fmt.bits > 8:
            continue  # the table of 2^16 values takes seconds to build
        assert_same(lowp.decode(codes, fmt, dtype=dtype), lowp.decode(codes, fmt, dtype=torch.float64).to(dtype))
    if fmt.bits < 8 or (isinstance(fmt, BlockFormat) and fmt.element.bits < 8):
        packed = lowp.encode(x, fmt, mode, pack=True, **options(mode))
        assert_same(lowp.decode(packed, fmt, size=x.numel()), want)


@every_format_and_mode
def test_values_of_the_format_stay(fmt, mode):
    if str(fmt) == "nvfp4":
        return  # its scales follow from the largest value, which rounding may change
    once = lowp.quantize(base() if isinstance(fmt, BlockFormat) else numbers(), fmt, mode, **options(mode))
    assert_same(lowp.quantize(once, fmt, mode, **options(mode, seed=8)), once)


MIRRORED = {"up": "down", "down": "up"}
ASYMMETRIC = ("e8m0fnu", "nf4", "bnb_dynamic8")


@every_format_and_mode
def test_signs_are_symmetric(fmt, mode):
    if str(fmt) in ASYMMETRIC:
        return
    x = numbers()
    x = x[x != 0]
    mirrored = MIRRORED.get(mode, mode)
    got, want = lowp.quantize(-x, fmt, mode, **options(mode)), -lowp.quantize(x, fmt, mirrored, **options(mirrored))
    assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0))  # == : -0 and 0 may stand for each other


@every_mode
@pytest.mark.parametrize("fmt", [fmt for fmt in lowp.FORMATS if str(fmt) not in TABLES], ids=str)
def test_float64_rounds_like_narrower_dtypes(fmt, mode):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = with_nan(numbers(dtype))
        wide = lowp.quantize(x.double(), fmt, mode, **options(mode))
        assert_same(wide.to(dtype), lowp.quantize(x, fmt, mode, **options(mode)))
        codes = lowp.encode(x.double(), fmt, mode, nan="zero", **options(mode))
        assert_same_codes(codes, lowp.encode(x, fmt, mode, nan="zero", **options(mode)))


@pytest.mark.parametrize(("name", "mode"), [("dynamic8", "nearest"), ("dynamic8", "stochastic"), ("e8m0fnu", "up")])
def test_float64_rounds_like_float32_in_tables(name, mode):
    x = with_nan(numbers())
    assert_same(lowp.quantize(x.double(), name, mode, **options(mode)).float(), lowp.quantize(x, name, mode, **options(mode)))


@pytest.mark.parametrize("name", ["int8", "e4m3fn", "posit8", "nf4", "mxfp4"])
def test_stochastic_rounding_lands_on_a_neighbour(name):
    x = base()
    down, up = lowp.quantize(x, name, "down"), lowp.quantize(x, name, "up")
    got = lowp.quantize(x, name, "stochastic", seed=11)
    assert ((got == down) | (got == up)).all()
    assert (got != lowp.quantize(x, name, "stochastic", seed=12)).any()
    inexact = down != up
    assert 0.25 < (got == up)[inexact].float().mean() < 0.75


# Autograd and torch's modes


@every_format
def test_quantize_is_detached(fmt):
    x = torch.rand(8, requires_grad=True)
    assert not lowp.quantize(x, fmt).requires_grad
    assert not lowp.quantize(x.exp(), fmt).requires_grad
    codes = lowp.encode(x, fmt, nan="zero")
    assert not any(c.requires_grad for c in (codes if isinstance(codes, tuple) else (codes,)) if c is not None)


@every_dtype
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_fake_quantize_passes_the_gradient_straight_through(name, dtype):
    x = base(dtype)[:37].requires_grad_()
    incoming = base(dtype)[100:137]
    y = lowp.fake_quantize(x, name)
    assert_same(y.detach(), lowp.quantize(x, name))
    y.backward(incoming)
    assert_same(x.grad, incoming)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_fake_quantize_quantizes_the_gradient(name):
    x = base()[:37].requires_grad_()
    incoming = base()[100:137]
    y = lowp.fake_quantize(x, None, name, "toward_zero")
    assert_same(y.detach(), x.detach())
    y.backward(incoming)
    assert_same(x.grad, lowp.quantize(incoming, name, "toward_zero"))


def test_fake_quantize_both_ways_with_different_roundings():
    x = base()[:50].requires_grad_()
    incoming = base()[100:150]
    y = lowp.fake_quantize(x, "e4m3fn", "e5m2", "up", backward_rounding="down", saturate=True)
    y.backward(incoming * 1e6)
    assert_same(y.detach(), lowp.quantize(x, "e4m3fn", "up", saturate=True))
    assert_same(x.grad, lowp.quantize(incoming * 1e6, "e5m2", "down", saturate=True))


def test_fake_quantize_draws_apart_for_value_and_gradient():
    x = torch.full((1000,), 0.5, requires_grad=True)
    y = lowp.fake_quantize(x, "int8", "int8", "stochastic", seed=lowp.Noise(3, 4, 5, 6))
    own = lowp.Noise(3, 4, 5, 6, domain=Domain.USER_GRADIENT)
    y.backward(torch.full((1000,), 0.5))
    assert_same(y.detach(), lowp.quantize(x, "int8", "stochastic", seed=lowp.Noise(3, 4, 5, 6)))
    assert_same(x.grad, lowp.quantize(torch.full((1000,), 0.5), "int8", "stochastic", seed=own))
    assert (y.detach() != x.grad).any()


def test_stochastic_gradient_only():
    x = torch.full((100,), 0.5, requires_grad=True)
    y = lowp.fake_quantize(x, "int8", "int8", backward_rounding="stochastic", seed=1)
    y.sum().backward()
    assert_same(y.detach(), torch.zeros(100))
    assert_same(x.grad, torch.ones(100))


def test_fake_quantize_without_formats_changes_nothing():
    x = torch.randn(5, requires_grad=True)
    y = lowp.fake_quantize(x)
    assert y is not x
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(5))


@pytest.mark.parametrize("backward", [None, "e5m2"])
def test_double_backward(backward):
    """Second derivatives pass straight through as well; on their way they meet the gradient's format again."""
    x = torch.tensor([1.3, -0.7, 3.1], requires_grad=True)
    y = lowp.fake_quantize(x, "e4m3fn", backward)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    q = lowp.quantize(x, "e4m3fn")
    for got, want in ((first.detach(), 3 * q**2), (second, 6 * q)):
        assert_same(got, want if backward is None else lowp.quantize(want, backward))


def test_gradient_accumulates_into_parameters():
    weight = torch.nn.Parameter(base()[:20].view(4, 5))
    result = lowp.quantize(weight, "e4m3fn")
    assert type(result) is torch.Tensor
    assert_same(result, lowp.quantize(weight.detach(), "e4m3fn"))
    (torch.ones(2, 5) @ lowp.fake_quantize(weight, "e4m3fn").t()).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 5), 2.0))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_grad_modes(mode, name):
    want = lowp.quantize(base(), name)
    with mode():
        x = base()
        assert_same(lowp.quantize(x, name), want)
        assert_same(lowp.decode(lowp.encode(x, name), name), want)
        assert_same(lowp.fake_quantize(x, name, name), want)
        lowp.quantize(x, name, out=x)
        assert_same(x, want)
    assert_same(lowp.quantize(x, name), lowp.quantize(want, name))  # an inference tensor outside


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_autocast_changes_nothing(name):
    x = base()
    want = lowp.quantize(x, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(lowp.quantize(x, name), want)
        assert_same(lowp.fake_quantize(x, name), want)
        assert_same(lowp.decode(lowp.encode(x, name), name), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_default_dtype_changes_nothing(dtype):
    wanted = [lowp.quantize(base(), name) for name in REPRESENTATIVE]
    torch.set_default_dtype(dtype)
    try:
        for name, want in zip(REPRESENTATIVE, wanted, strict=True):
            assert_same(lowp.quantize(base(), name), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("in_dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["e4m3fn", "int8", "posit8", "nf4", "mxfp4"])
def test_vmap(name, in_dim):
    x = base().view(8, 6, 10)
    examples = x.movedim(in_dim, 0)

    def vmapped(function):
        return torch.func.vmap(function, in_dims=in_dim)(x)

    want = lowp.quantize(examples, name)
    assert_same(vmapped(lambda t: lowp.quantize(t, name)), want)
    assert_same(vmapped(lambda t: lowp.fake_quantize(t, name)), want)
    round_trip = vmapped(lambda t: lowp.decode(lowp.encode(t, name, nan="zero"), name))
    assert_same(round_trip, want)


@pytest.mark.parametrize("name", ["e4m3fn", "posit8", "mxfp4"])
def test_under_vmap_every_example_is_rounded_as_if_alone(name):
    x = base().view(8, 60)
    got = torch.func.vmap(lambda t: lowp.quantize(t, name, "stochastic", seed=1))(x)
    assert_same(got, torch.stack([lowp.quantize(row, name, "stochastic", seed=1) for row in x]))
    own = torch.func.vmap(lambda t, seed: lowp.quantize(t, name, "stochastic", seed=seed))(x, torch.arange(8))
    assert_same(own, torch.stack([lowp.quantize(row, name, "stochastic", seed=i) for i, row in enumerate(x)]))


def test_vmap_has_to_be_told_what_nan_becomes():
    with pytest.raises(ValueError, match=r"inside torch\.func transforms NaN cannot be looked for; int8"):
        torch.func.vmap(lambda t: lowp.encode(t, "int8"))(torch.ones(3, 4))


def test_gradient_under_vmap():
    x = base().view(8, 60)

    def loss(t):
        return (lowp.fake_quantize(t, "e4m3fn", "e5m2") ** 2).sum()

    per_example = torch.func.vmap(torch.func.grad(loss))(x)
    want = lowp.quantize(2 * lowp.quantize(x, "e4m3fn"), "e5m2")
    assert_same(per_example, want)
    assert_same(torch.func.grad(loss)(x), want)
    assert_same(torch.func.grad(lambda t: torch.func.vmap(loss)(t).sum())(x), want)


def test_jacobians():
    x = torch.tensor([1.3, -0.7])
    q = lowp.quantize(x, "e4m3fn")
    assert torch.equal(torch.func.jacrev(lambda t: lowp.fake_quantize(t, "e4m3fn") ** 2)(x), torch.diag(2 * q))
    cubic = torch.func.jacrev(torch.func.jacrev(lambda t: (lowp.fake_quantize(t, "e4m3fn") ** 3).sum()))
    assert torch.equal(cubic(x), torch.diag(6 * q))
    assert torch.equal(torch.func.grad(lambda t: (lowp.quantize(t, "e4m3fn") * t).sum())(x), q)


def test_forward_mode():
    """quantize has no tangent."""
    x = torch.tensor([1.3, -0.7])
    value, tangent = torch.func.jvp(lambda t: lowp.quantize(t, "e4m3fn"), (x,), (torch.ones(2),))
    assert_same(value, lowp.quantize(x, "e4m3fn"))
    assert torch.equal(tangent, torch.zeros(2))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_dispatch_modes_see_every_operation(name):
    x = base()
    want = lowp.quantize(x, name)
    with Counting() as mode:
        got = lowp.quantize(x, name)
        decoded = lowp.decode(lowp.encode(x, name), name)
    assert_same(got, want)
    assert_same(decoded, want)
    assert len(mode.seen) > 10
    assert "where" in mode.seen


class Tagged(torch.Tensor):
    """Counts the functions that it is given to."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_subclasses_see_every_operation_and_survive(name):
    x, before = base().as_subclass(Tagged), Tagged.seen
    got = lowp.quantize(x, name)
    assert isinstance(got, Tagged)
    assert Tagged.seen > before + 5
    assert_same(got.as_subclass(torch.Tensor), lowp.quantize(base(), name))


@pytest.mark.parametrize("name", ["e4m3fn", "mxfp4"])
def test_negative_views(name):
    """The imaginary part of a conjugate is real, with torch's lazy minus sign on it."""
    imaginary = torch.complex(torch.zeros(4), torch.tensor([1.3, -2.7, 0.1, 9.9])).conj().imag
    for x in (imaginary, imaginary[:1], torch._neg_view(torch.ones(3))):
        assert x.is_neg()
        plain = x.resolve_neg()
        assert_same(lowp.quantize(x, name), lowp.quantize(plain, name))
        assert_same_codes(lowp.encode(x, name), lowp.encode(plain, name))
        out = torch._neg_view(torch.zeros(x.shape))
        lowp.quantize(plain, name, out=out)
        assert_same(out.resolve_neg(), lowp.quantize(plain, name))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_meta_tensors_give_shapes(name):
    x = torch.empty(3, 5, device="meta")
    assert lowp.quantize(x, name).shape == (3, 5)
    codes = lowp.encode(x, name, nan="zero")
    assert lowp.decode(codes, name, dtype=torch.bfloat16).dtype == torch.bfloat16


# The world around


@every_format
def test_formats_survive_copying(fmt):
    x = base()
    want = lowp.quantize(x, fmt)
    assert_same(lowp.quantize(x, copy.deepcopy(fmt)), want)
    assert_same(lowp.quantize(x, pickle.loads(pickle.dumps(fmt))), want)
    assert_same(lowp.quantize(x, str(fmt).upper()), want)


def test_noise_and_codes_survive_pickling():
    noise = lowp.Noise(1, 2, 3, 4)
    assert pickle.loads(pickle.dumps(noise)) == noise
    codes = lowp.encode(base(), "nvfp4")
    again = pickle.loads(pickle.dumps(codes))
    assert isinstance(again, lowp.BlockCodes)
    assert_same(lowp.decode(again, "nvfp4"), lowp.quantize(base(), "nvfp4"))


def test_threads_do_not_disturb_each_other():
    names = (*REPRESENTATIVE, "e3m3", "posit7", "fixed2.3")
    work = [(name, mode) for name in names for mode in ("nearest", "up", "stochastic")]
    x = base()

    def round_trip(item):
        name, mode = item
        q = lowp.quantize(x, name, mode, **options(mode))
        return q, lowp.decode(lowp.encode(x, name, mode, **options(mode)), name)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(round_trip, work * 4))
    for item, (q, decoded) in zip(work * 4, results, strict=True):
        assert_same(q, round_trip(item)[0])
        assert_same(decoded, q)


@pytest.fixture
def flushed():
    """Call a function while the processor is told to take subnormal numbers for zero."""
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormals: test_traps fails here as well"
    torch.set_flush_denormal(False)

    def call(function):
        torch.set_flush_denormal(True)
        try:
            return function()
        finally:
            torch.set_flush_denormal(False)

    yield call
    torch.set_flush_denormal(False)


def subnormals(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    magnitudes = [0.0, smallest, smallest * 2, smallest * 3, info.tiny / 2, info.tiny, info.tiny * 1.5, 2.0**-133, 1.0]
    x = torch.tensor(magnitudes, dtype=torch.float64)
    return torch.cat([x, -x]).to(dtype).repeat(20)


FLUSHED = ("bf16", "fp32", "e4m3fn", "e8m2", "int8", "posit8", "nf4", "mxfp8_e4m3", "block(int8, 8, fp32)")


@every_mode
@pytest.mark.parametrize("name", FLUSHED)
def test_flushing_subnormals_changes_nothing(flushed, name, mode):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_flushed(flushed, name, mode, dtype)


NOTICED = {("nf4", "to_odd")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(name, mode, id=f"{name}-{mode}") for name in FLUSHED for mode in MODES],
)
def test_flushing_float64s_subnormals_changes_nothing(flushed, name, mode):
    check_flushed(flushed, name, mode, torch.float64)


def check_flushed(flushed, name, mode, dtype):
    for x in (subnormals(dtype), subnormals(dtype)[:8]):  # in blocks: beside a large number, and alone

        def call(x=x):
            codes = lowp.encode(x, name, mode, **options(mode))
            return lowp.quantize(x, name, mode, **options(mode)), codes, lowp.decode(codes, name, dtype=dtype)

        want, codes, _ = call()
        got, got_codes, decoded = flushed(call)
        assert_same(got, want)
        assert_same_codes(got_codes, codes)
        assert_same(decoded, want)


def test_float32_subnormals_are_kept_by_bf16():
    x = torch.tensor([2.0**-133, 3 * 2.0**-133, 2.0**-134, 2.0**-126 * 0.5])
    assert lowp.quantize(x, "bf16").tolist() == [2.0**-133, 3 * 2.0**-133, 0.0, 2.0**-127]
