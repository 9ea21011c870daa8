"""Kernels of block formats against the integers of block.py, bit for bit. (test_blocks.py has these against the reference.)"""

import math
from unittest.mock import patch

import pytest
import torch

import lowp
from block_cases import DTYPES, FORMATS, check, check_stochastic, numbers, same
from lowp.tensor import block, block_draws, block_steps, kernels
from lowp.tensor.block_programs import BlockProgram, block_program
from lowp.tensor.block_stages import BlockOperation
from lowp.tensor.noise import key_tensor

FLAGS = ((True, "zero"), (False, "raise"), (False, "saturate"))


def by_program(program: BlockProgram, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """quantize, codes of elements and scales, decode: a block in each row, in plain operations."""
    magnitude = x.float().view(torch.int32) & 0x7FFFFFFF
    finite = torch.where(magnitude < 0x7F800000, magnitude, 0).to(torch.int32)
    whole = (program.tensor_scale(finite.amax().view(torch.float32)),) if program.fmt.tensor_scale else ()
    scale = program.scale(finite.amax(1, keepdim=True).view(torch.float32), *whole)
    unit, inverse = program.unit(scale, *whole), program.inverse(scale, *whole)
    poisoned = program.is_poisoned(magnitude.amax(1, keepdim=True)) & program.can_poison
    rounded, code = program.rounded(x, unit, inverse), program.code(x, inverse)
    marked = program.poisoned_code(scale, poisoned)
    value = program.value(code, program.unit(marked, *whole), x.dtype)
    if block_steps.suits(program.fmt):
        scales = program.scale_value(scale), whole, x.dtype
        steps, multiples = block_steps.steps(program.fmt, *scales), block_steps.multiples(program.fmt, *scales)
        same(block_steps.rounded(program, x, steps, multiples), rounded)
        same(block_steps.code(program, x, steps).to(torch.int32), code)
        multiples = block_steps.foreign_multiples(program.fmt, program.scale_value(marked), whole, x.dtype)
        same(block_steps.value(program, code.to(multiples[0].dtype), multiples, x.dtype), value)
    return torch.where(poisoned, torch.full_like(x, math.nan), rounded), code, marked, value


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_programs_equal_the_integers(fmt):
    for dtype in DTYPES:
        x = numbers().to(dtype)
        x = x[: len(x) // fmt.size * fmt.size].view(-1, fmt.size)
        for saturate, nan in FLAGS:
            rounded, code, scale, value = by_program(block_program(fmt, "nearest", saturate, nan), x)
            same(rounded, block.quantize(x, fmt, "nearest", None, saturate, -1, False))
            wanted = block.encode(x, fmt, "nearest", None, nan, False, saturate, -1, False)
            same(code.to(wanted.elements.dtype), wanted.elements)
            same(scale.to(wanted.scales.dtype), wanted.scales)
            same(value, block.decode(wanted, fmt, dtype, None, -1, False))


def test_formats_without_a_program():
    for text in ("block(posit8, 16, e8m0fnu)", "block(nf4, 16, e4m3fn, fp32)", "block(fp16, 16, e8m0fnu)"):
        assert block_program(lowp.format(text)) is None
    assert block_program(lowp.format("mxfp4"), "stochastic") is None


@pytest.fixture
def built():
    """Kernels at the first call; none may fail to be built."""
    lowp.set_kernel_policy("always")
    yield
    found = [kernel for (operation, _), kernel in kernels._state.kernels.items() if isinstance(operation, BlockOperation)]
    assert found
    assert None not in found


CASES = (  # packed or not: a kernel takes a second to build
    ("mxfp8_e4m3", torch.float32, False, "raise", False),
    ("mxfp6_e3m2", torch.bfloat16, True, "zero", True),
    ("mxfp4", torch.bfloat16, False, "raise", True),
    ("nvfp4", torch.float32, False, "raise", True),
    ("block(int8, 16, e5m2, fp32)", torch.float16, False, "saturate", False),
)


@pytest.mark.parametrize(("name", "dtype", "saturate", "nan", "pack"), CASES, ids=[case[0] for case in CASES])
def test_kernels_equal_the_integers(built, name, dtype, saturate, nan, pack):
    fmt, x = lowp.format(name), numbers().to(dtype)
    check(x, fmt, saturate, nan, packs=(pack,))
    check(x[1:4000].view(3, 1333), fmt, saturate, nan, packs=(pack,))  # short last blocks, no alignment
    check(x[:4000].view(4, 5, 200), fmt, saturate, nan, axis=1, packs=(pack,))
    check(x[:4000].view(40, 100).t(), fmt, saturate, nan, packs=(pack,))
    check(x[:7], fmt, saturate, nan, packs=(pack,))
    check(x[:0].view(3, 0), fmt, saturate, nan, packs=(pack,))


def test_kernels_of_odd_blocks(built):
    x = numbers()[: 83 * 171].view(83, 171)
    same(
        lowp.quantize(x, "block(e4m3fn, 5, bf16)"),
        block.quantize(x, lowp.format("block(e4m3fn, 5, bf16)"), "nearest", None, False, -1, False),
    )


def test_foreign_scales(built):
    """Scales that other programs wrote: every code of the scale and of the element, and any scale of the tensor."""
    fmt = lowp.format("nvfp4")
    elements, scales = torch.arange(16, dtype=torch.uint8).repeat(256, 1), torch.arange(256).to(torch.uint8).view(256, 1)
    for whole in (1.0, 1.2345678, -0.3, 0.0, math.inf, -math.inf, math.nan, 1e-45, 1e-40, 3e38):
        codes = lowp.BlockCodes(elements, scales, torch.tensor(whole))
        for dtype in (torch.float32, torch.bfloat16):
            same(lowp.decode(codes, fmt, dtype=dtype), block.decode(codes, fmt, dtype, None, -1, False))


def test_tiny_tensors(built):
    """From where steps would not be exact on, and below."""
    for exponent in (-90, -102, -103, -104, -105, -106, -120, -140):
        x = torch.linspace(-1, 1, 64).view(2, 32) * 2.0**exponent
        same(lowp.quantize(x, "nvfp4"), block.quantize(x, lowp.format("nvfp4"), "nearest", None, False, -1, False))


def test_large_results_are_those_of_their_parts():
    """Results of 32 MiB and more lie in large pages, where the system has them (memory.py)."""
    lowp.set_kernel_policy("always")
    x = torch.randn(1 << 13, 1 << 10, generator=torch.Generator().manual_seed(5))
    for operation in (lambda x: lowp.quantize(x, "mxfp4"), lambda x: lowp.quantize(x, "e4m3fn")):
        assert torch.equal(operation(x), torch.cat([operation(part) for part in x.split(1 << 10)]))


NOISE = lowp.Noise(3, 4, 5, 6)


@pytest.mark.parametrize(("name", "dtype", "saturate", "nan", "pack"), CASES, ids=[case[0] for case in CASES])
def test_stochastic_kernels_equal_the_integers(built, name, dtype, saturate, nan, pack):
    fmt, x = lowp.format(name), numbers().to(dtype)
    check_stochastic(x, fmt, saturate, nan, NOISE, pack=pack)
    check_stochastic(x[1:4000].view(3, 1333), fmt, saturate, nan, NOISE, pack=pack)  # short last blocks, no alignment
    check_stochastic(x[:4000].view(4, 5, 200), fmt, saturate, nan, NOISE, axis=1, pack=pack)  # noise counts in x's own order
    check_stochastic(x[:4000].view(40, 100).t(), fmt, saturate, nan, NOISE, axis=0, pack=pack)
    check_stochastic(x[:7], fmt, saturate, nan, NOISE, pack=pack)
    check_stochastic(x[:0].view(3, 0), fmt, saturate, nan, NOISE, pack=pack)
    check_stochastic(x[:4000], fmt, saturate, nan, lowp.Noise(1, offset=(1 << 30) - 9), pack=pack)  # two keys: no kernel


def test_stochastic_rounding_of_tensors_of_any_size(built):
    """Where float32 has a unit and its inverse, and where it does not; zeros; enough numbers that some are in doubt."""
    for name in ("mxfp4", "nvfp4"):
        for size in (1e-44, 1e-40, 2.0**-104, 1e-6, 1.0, 1e30, 1e38):
            x = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * size
            x[3], x[:, 5] = 0, 0
            for axis in (-1, 0):
                check_stochastic(x, lowp.format(name), False, "raise", NOISE, axis)
    x = torch.randn(1 << 11, 1 << 10, generator=torch.Generator().manual_seed(1))  # 8 in doubt are to be expected
    found = lowp.quantize(x, "nvfp4", "stochastic", seed=NOISE)
    lowp.set_kernel_policy("never")
    same(found, lowp.quantize(x, "nvfp4", "stochastic", seed=NOISE))


def test_what_is_in_doubt_is_settled_by_the_integers(monkeypatch):
    """All of it is in doubt here, and what few operations find is wrong: a kernel of its own, in a state of its own."""
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))
    drawn = block_draws.drawn

    def wrong(*arguments):
        element, unsure = drawn(*arguments)
        return element * 0.0 + 1.0, (unsure | ~unsure)

    fmt = lowp.format("nvfp4")
    with patch.object(block_draws, "drawn", wrong):
        for dtype in (torch.float32, torch.bfloat16):
            check_stochastic(numbers().to(dtype), fmt, False, "raise", NOISE)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_is_sure_is_right(fmt):
    """In plain operations, a block in each row: where `drawn` is sure, and `settled` everywhere."""
    assert block_draws.suits(fmt)
    key = key_tensor(NOISE, 0, torch.device("cpu"))
    usual = torch.randn(1 << 14, generator=torch.Generator().manual_seed(2))
    for x in (usual, *(numbers().to(dtype) for dtype in DTYPES)):
        rows = x[: len(x) // fmt.size * fmt.size].view(-1, fmt.size)
        program = block_program(fmt, "nearest", True, "zero")
        magnitude = rows.float().view(torch.int32) & 0x7FFFFFFF
        finite = torch.where(magnitude < 0x7F800000, magnitude, 0).to(torch.int32)
        whole = (program.tensor_scale(finite.amax().view(torch.float32)),) if fmt.tensor_scale else ()
        scale = program.scale(finite.amax(1, keepdim=True).view(torch.float32), *whole)
        element, unsure = block_draws.drawn(program, rows, key, *block_draws.inverse(program, scale, *whole))
        poisoned = program.is_poisoned(magnitude.amax(1, keepdim=True)) & program.can_poison
        wanted = block.quantize(rows, fmt, "stochastic", NOISE, True, -1, False)
        found = program.value_of(rows, element, program.unit(scale, *whole))
        settled = block_draws.settled(program, "quantize", rows, scale, whole, key).view(x.dtype)
        for each, known in ((found, ~unsure), (settled, torch.ones_like(unsure))):
            same(torch.where(known & ~poisoned, each, wanted), wanted)
        assert x is not usual or unsure.float().mean() < 0.01


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_repeated_calls_are_made_at_once(built, name):
    """Other data, shapes and seeds than in the first call; and what must be looked at in full."""
    fmt = lowp.format(name)
    for x in (
        torch.ones(4, 64),
        torch.randn(3, 5, 100, requires_grad=True),
        torch.randn(7),
        torch.ones(2, 0),
        torch.tensor(3.0),
    ):
        plain = x.detach()
        found = lowp.quantize(x, name)
        same(found, block.quantize(plain, fmt, "nearest", None, False, -1, False))
        assert not found.requires_grad
        for seed in (3, -1, lowp.Noise(3, 4, 5, 6), lowp.Noise(torch.tensor(3), 4), lowp.Noise(1, offset=(1 << 30) - 3)):
            noise = seed if isinstance(seed, lowp.Noise) else lowp.Noise(seed)
            found = lowp.quantize(x, name, "stochastic", seed=seed)
            same(found, block.quantize(plain, fmt, "stochastic", noise, False, -1, False))
        codes, wanted = lowp.encode(x, name), block.encode(plain, fmt, "nearest", None, "raise", False, False, -1, False)
        for each, right in zip(codes[: 2 + fmt.tensor_scale], wanted, strict=False):
            same(each, right)
        same(lowp.decode(codes, name), block.decode(wanted, fmt, torch.float32, None, -1, False))
        assert torch.equal(lowp.decode(codes, name, out=torch.empty_like(plain)), lowp.decode(codes, name))
    codes = lowp.encode(torch.ones(4, 64), name)
    with pytest.raises(ValueError, match="needs scales of shape"):
        lowp.decode(lowp.BlockCodes(codes.elements, codes.scales[:3], codes.tensor_scale), name)
    with pytest.raises(ValueError, match="seed"):
        lowp.quantize(torch.ones(4, 64), name, "stochastic", seed=1 << 64)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_results_go_to_where_out_says(name, rounding):
    """Written by the kernel where that is possible: other memory of the same layout, blocks along the last axis."""
    lowp.set_kernel_policy("always")
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    seed = {"seed": NOISE} if rounding == "stochastic" else {}
    wanted = lowp.quantize(x, name, rounding, **seed)
    out = torch.full_like(x, math.nan)
    version = out._version
    assert lowp.quantize(x, name, rounding, out=out, **seed) is out
    assert out._version > version
    same(out, wanted)
    for room in (x.clone(), torch.empty(96, 64).t(), torch.empty(128, 96)[::2], torch.empty(64, 96, dtype=torch.float64)):
        given = room.copy_(x) if room.dtype == x.dtype else x
        assert lowp.quantize(given, name, rounding, out=room, **seed) is room
        same(room.to(torch.float32).contiguous(), wanted)
    square = x[:, :64].contiguous()
    out = torch.empty_like(square)
    lowp.quantize(square, name, rounding, axis=0, out=out, **seed)
    same(out, lowp.quantize(square, name, rounding, axis=0, **seed))
    row = x.flatten()[:4096].clone()  # memory that is read and written, 32 numbers apart
    whole = lowp.quantize(row[:-32], name, rounding, **seed)
    lowp.quantize(row[:-32], name, rounding, out=row[32:], **seed)
    same(row[32:], whole)
