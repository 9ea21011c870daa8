"""The same bits on a GPU as on the CPU: plain operations, kernels, aligned or not, and inside compiled functions. Run it there:

make test-gpu
"""

import pytest
import torch

import lowp
from lowp.formats import FORMATS, BlockFormat, Rounding, format
from lowp.tensor import kernels
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.lists import flat_triton
from lowp.tensor.packing import BitStream

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]

NUMBERS = [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)]
BLOCKS = [fmt for fmt in FORMATS if isinstance(fmt, BlockFormat)]
UNUSUAL = [format(text) for text in ("e4m3b20", "e8m2fn", "e5m0", "e3m3_ns", "e5m2_u_ns", "posit7_5", "e8m20", "e5m23")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ROW = 1 << 16


def numbers(count, dtype):
    """Random bit patterns, NaNs, infinities and subnormals among them."""
    width = dtype.itemsize * 8
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(1 << 15), 1 << 15, (count, width // 16), generator=generator).to(torch.int16)
    return words.view(dtype).reshape(count)


def bits(tensor):
    tensor = tensor.cpu()
    if tensor.dtype in CARRIERS:
        nan = tensor.isnan()
        tensor = tensor.view(CARRIERS[tensor.dtype].storage).masked_fill(nan, 12345)
    return tensor


def assert_same(on_gpu, on_cpu):
    assert torch.equal(bits(on_gpu), bits(on_cpu))


@pytest.mark.parametrize("fmt", ["int2", "e2m0", "e2m1fn", "e3m1", "e2m3fn", "posit7"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (3, 40_001), (1 << 20,), (20_000, 3)], ids=str)
def test_packing(fmt, shape):
    codes, size = torch.randint(0, 256, shape, dtype=torch.uint8), shape[-1]
    packed = lowp.pack(codes, fmt)
    kernels.set_kernel_policy("always")
    assert torch.equal(lowp.pack(codes.cuda(), fmt).cpu(), packed)
    assert torch.equal(lowp.unpack(packed.cuda(), fmt, size).cpu(), lowp.unpack(packed, fmt, size))
    assert any(what == BitStream(lowp.format(fmt).bits) and where.type == "cuda" for what, where in kernels._state.kernels)


def arguments(mode):
    return {"rounding": mode.value, "seed": lowp.Noise(3, 1, 4, 159) if mode is Rounding.STOCHASTIC else None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", NUMBERS + UNUSUAL, ids=str)
def test_plain_operations(fmt, dtype):
    x = numbers(5003, dtype)
    for mode in Rounding:
        for saturate in (False, True) if mode in (Rounding.NEAREST, Rounding.STOCHASTIC) else (False,):
            extra = arguments(mode) | {"saturate": saturate}
            assert_same(lowp.quantize(x.cuda(), fmt, **extra), lowp.quantize(x, fmt, **extra))
            codes = lowp.encode(x, fmt, nan="saturate", **extra)
            assert_same(lowp.encode(x.cuda(), fmt, nan="saturate", **extra), codes)
        assert_same(lowp.decode(codes.cuda(), fmt, dtype=dtype), lowp.decode(codes, fmt, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_blocks(fmt, dtype):
    x = numbers(97 * 53, dtype).reshape(53, 97)
    x = torch.where(x.isnan(), torch.ones_like(x), x)
    assert_same(lowp.quantize(x.cuda(), fmt), lowp.quantize(x, fmt))
    on_gpu, on_cpu = lowp.encode(x.cuda(), fmt), lowp.encode(x, fmt)
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a is b is None or torch.equal(a.cpu(), b)
    assert_same(lowp.decode(on_gpu, fmt, dtype=dtype), lowp.decode(on_cpu, fmt, dtype=dtype))


KERNELS = ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "e7m0", "bf16", "int8", "posit8", "dynamic8", "e8m0fnu"]


@pytest.mark.parametrize("mode", [Rounding.NEAREST, Rounding.STOCHASTIC], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, mode):
    """Full tiles, a part of one, both, and memory that starts between aligned addresses."""
    whole = numbers(3 * ROW + 1001, torch.float32)
    on_gpu = whole.cuda()
    extra = arguments(mode)
    for start, stop in ((0, 3 * ROW), (0, 3 * ROW + 1001), (0, 17), (1, 2 * ROW + 1), (3, ROW + 10)):
        x, y = whole[start:stop], on_gpu[start:stop]
        want, codes = lowp.quantize(x, name, **extra), lowp.encode(x, name, nan="zero", **extra)
        lowp.set_kernel_policy("always")
        assert_same(lowp.quantize(y, name, **extra), want)
        assert_same(lowp.encode(y, name, nan="zero", **extra), codes)
        if mode is Rounding.NEAREST:
            assert_same(lowp.decode(codes.cuda(), name), lowp.decode(codes, name))
        lowp.set_kernel_policy("never")
    assert_same(on_gpu, whole)


def check_kernels(x, fmt, modes, saturate):
    """Quantize, encode and decode, compiled, against the CPU."""
    for mode in modes:
        extra = arguments(mode) | {"saturate": saturate}
        want, codes = lowp.quantize(x, fmt, **extra), lowp.encode(x, fmt, nan="zero", **extra)
        lowp.set_kernel_policy("always")
        try:
            assert_same(lowp.quantize(x.cuda(), fmt, **extra), want)
            assert_same(lowp.encode(x.cuda(), fmt, nan="zero", **extra), codes)
            assert_same(lowp.decode(codes.cuda(), fmt, dtype=x.dtype), lowp.decode(codes, fmt, dtype=x.dtype))
        finally:
            lowp.set_kernel_policy("never")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_every_dtype(name, dtype):
    check_kernels(numbers(5003, dtype), format(name), [Rounding.NEAREST, Rounding.STOCHASTIC], False)


@pytest.mark.parametrize("fmt", NUMBERS + UNUSUAL, ids=str)
def test_kernels_of_every_format(fmt):
    check_kernels(numbers(5003, torch.float32), fmt, [Rounding.NEAREST], True)


@pytest.mark.parametrize("mode", list(Rounding), ids=str)
def test_kernels_of_every_rounding(mode):
    for name in ("e4m3fn", "e2m1fn", "dynamic8"):
        check_kernels(numbers(5003, torch.float32), format(name), [mode], False)


def borders(name, dtype):
    """Every number of a codebook, the middles between neighbours, their doubles, and the numbers beside all of these."""
    fmt = format(name)
    values = lowp.decode(torch.arange(1 << fmt.bits).to(torch.uint8), fmt, dtype=torch.float64).unique()
    marks = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 2]).to(dtype).view(CARRIERS[dtype].storage)
    return torch.cat([marks - 1, marks, marks + 1]).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nf4", "dynamic8", "linear8", "bnb_dynamic8"])
def test_kernels_of_codebooks_at_their_borders(name, dtype):
    check_kernels(borders(name, dtype), format(name), list(Rounding), False)


def test_functions_of_flat_tensors():
    """Numbers of several dtypes, a shift (on the host, or on the device) and a table."""

    def function(codes, x, numbers, tables):
        found = tables[0][(codes.to(torch.int32) + numbers[0]) & 0xF]
        return x.to(torch.float32) + found

    codes = torch.randint(0, 256, (ROW + 1003,), dtype=torch.uint8)
    x, shift = numbers(ROW + 1003, torch.bfloat16), torch.tensor([3], dtype=torch.int32)
    table = torch.randn(16)
    run = flat_triton.build(function, [torch.uint8, torch.bfloat16], torch.float32, 1, [table.cuda()])
    for start in (0, 1):
        want = function(codes[start:], x[start:], shift, [table])
        for own in (shift, shift.cuda()):
            out = torch.empty(ROW + 1003 - start, device="cuda")
            run([codes[start:].cuda(), x[start:].cuda()], out, own, [table.cuda()])
            assert_same(out, want)


def test_kernels_work_in_place_and_on_strides():
    lowp.set_kernel_policy("always")
    x = numbers(4 * 6 * 128 * 130, torch.float32).reshape(4, 6, 128, 130)
    want = lowp.quantize(x, "e5m2")
    channels_last = x.cuda().to(memory_format=torch.channels_last)
    assert_same(lowp.quantize(channels_last, "e5m2"), want)
    assert_same(lowp.quantize(x.cuda()[:, ::2], "e5m2"), want[:, ::2])
    y = x.cuda()
    assert lowp.quantize(y, "e5m2", out=y) is y
    assert_same(y, want)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "posit8", "dynamic8", "mxfp4", "nvfp4", "int8"])
def test_inlined_in_compiled_functions(name):
    def function(x):
        y = lowp.quantize(x * 2, name) + 1
        codes = lowp.encode(y, name, nan="zero")
        return y, lowp.decode(codes, name)

    x = torch.randn(37, 130, generator=torch.Generator().manual_seed(0)).cuda()
    for got, want in zip(torch.compile(function, fullgraph=True)(x), function(x), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("how", [{"forward": "e4m3fn", "backward": "e5m2"}, {"forward": "e2m1fn", "saturate": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_quantize_in_compiled_functions(how, dtype):
    def function(x):
        return lowp.fake_quantize(x * 2, **how)

    x = torch.randn(37, 130, generator=torch.Generator().manual_seed(0)).mul(100).to("cuda", dtype)
    found = []
    for call in (function, torch.compile(function, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        value = call(leaf)
        value.backward(x + 1)
        found.append((value.detach(), leaf.grad))
    for want, got in zip(*found, strict=True):
        assert_same(got, want)


def test_stochastic_inlined():
    def function(x, seed):
        return lowp.quantize(x, "e4m3fn", "stochastic", seed=lowp.Noise(seed, step=2))

    x = torch.randn(37, 131, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(function, fullgraph=True)
    for seed in (1, 2, 3):
        want = function(x, seed)
        assert_same(compiled(x.cuda(), seed), want)
        assert_same(function(x.cuda(), torch.tensor(seed)), want)
        assert_same(compiled(x.cuda(), torch.tensor(seed, device="cuda")), want)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="has none"):
        lowp.encode(torch.tensor([1.0, float("nan")], device="cuda"), "int8")


def test_tf32_and_fast_math_change_nothing():
    x = numbers(ROW, torch.float32)
    want = lowp.quantize(x, "e4m3fn")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch._inductor.config.patch(use_fast_math=True):
            compiled = torch.compile(lambda x: lowp.quantize(x, "e4m3fn"), fullgraph=True)
            assert_same(compiled(x.cuda()), want)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3fn", "posit8", "dynamic8"])
def test_a_repeated_call_goes_to_its_kernel(fmt, dtype, monkeypatch):
    """The same bits for other data, and not by way of the checks of a first call."""
    lowp.set_kernel_policy("always")
    x = numbers(ROW + 5, dtype)
    on_gpu, expected = x.cuda(), lowp.quantize(x, fmt)
    codes = lowp.encode(x, fmt, nan="saturate")
    decoded = lowp.decode(codes, fmt, dtype=dtype)

    def calls(start=0, out=None, requires_grad=False):
        part = on_gpu[start:].requires_grad_(requires_grad)
        return lowp.quantize(part, fmt, out=out), lowp.encode(part, fmt, nan="saturate")

    calls()
    lowp.quantize(on_gpu, fmt, out=torch.empty_like(on_gpu))
    lowp.decode(codes.cuda(), fmt, dtype=dtype)
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "run", None)  # what a call that is checked in full would call
        for start in (0, 1, 4):  # aligned and not
            out = torch.full_like(on_gpu[start:].clone(), 7)
            version = out._version
            for given in (None, out):
                rounded, encoded = calls(start, given, requires_grad=given is None)
                assert not rounded.requires_grad
                assert_same(rounded, expected[start:])
                assert_same(encoded, codes[start:])
            assert rounded is out
            assert out._version > version
        assert_same(lowp.decode(codes.cuda(), fmt, dtype=dtype), decoded)
        changed = on_gpu.detach().clone()
        assert lowp.quantize(changed, fmt, out=changed) is changed
        assert_same(changed, expected)
    # What does not suit takes the long way: other strides, memory that is shared in part, nothing at all.
    pairs = on_gpu.detach()[:100].view(10, 10)
    assert_same(lowp.quantize(pairs.T, fmt), expected[:100].view(10, 10).T)
    shared = on_gpu.detach().clone()
    lowp.quantize(shared[:-1], fmt, out=shared[1:])
    assert_same(shared[1:], expected[:-1])
    assert lowp.quantize(on_gpu[:0], fmt).numel() == 0


def test_a_repeated_call_that_refuses_nan_looks_each_time():
    lowp.set_kernel_policy("always")
    x = torch.randn(ROW, device="cuda")
    lowp.encode(x, "e2m1fn")
    x[17] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="holds NaN"):
            lowp.encode(x, "e2m1fn")
