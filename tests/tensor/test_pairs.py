"""Rounding two bfloat16 numbers at once, carried out by torch instead of a GPU: every bfloat16 number has quantize's bits."""

import pytest
import torch

import lowp
from lowp import compat
from lowp.tensor.pairs import pair_assembly, pair_instructions
from lowp.tensor.pointwise import pointwise

BF16 = torch.bfloat16
EVERYTHING = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
FORMATS = ["e4m3fn", "e5m2", "e3m4", "e4m3", "e2m5", "e6m1", "e3m2fn", "e2m3fn", "e2m1fn"]


def instructions_of(format: str, rounding: str = "nearest", dtype: torch.dtype = BF16):
    operation = pointwise(format, rounding, dtype)
    assert operation is not None
    return pair_instructions(operation)


def carried_out(instructions, x: torch.Tensor) -> torch.Tensor:
    """One by one. A fused multiply-add is exact in float64 here, or so far from a tie that rounding twice is rounding once."""
    registers = {"x": x}

    def number(argument) -> torch.Tensor:
        return registers[argument] if isinstance(argument, str) else torch.tensor(argument, dtype=BF16)

    def bits(argument) -> torch.Tensor:
        stored = registers[argument].view(torch.int16).to(torch.int32) if isinstance(argument, str) else torch.tensor(argument)
        return stored & 0xFFFF

    for operation, result, arguments in instructions:
        if operation in ("and", "or"):
            first, second = map(bits, arguments)
            found = (first & second if operation == "and" else first | second).to(torch.int16).view(BF16)
        elif operation == "fma":
            first, second, third = (number(argument).to(torch.float64) for argument in arguments)
            found = (first * second + third).to(BF16)
        else:
            found = getattr(torch, {"max": "maximum", "min": "minimum"}[operation])(*map(number, arguments))
        registers[result] = found
    return registers["y"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_number_has_the_bits_of_quantize(format):
    found, wanted = carried_out(instructions_of(format), EVERYTHING), lowp.quantize(EVERYTHING, format)
    nan = found.isnan() & wanted.isnan()
    assert torch.equal(found.view(torch.int16)[~nan], wanted.view(torch.int16)[~nan])
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize(
    ("format", "rounding", "dtype"),
    [
        ("e4m3fn", "up", BF16),
        ("e4m3fn", "nearest", torch.float32),
        ("e4m3fn", "nearest", torch.float16),
        ("e4m3fnuz", "nearest", BF16),  # no minus zero
        ("fp16", "nearest", BF16),  # more digits than bfloat16 has
        ("int8", "nearest", BF16),
        ("posit8", "nearest", BF16),
    ],
)
def test_others_are_not(format, rounding, dtype):
    assert instructions_of(format, rounding, dtype) is None


def test_assembly_is_one_line_of_known_instructions():
    text = pair_assembly(instructions_of("e5m2"))
    assert "\n" not in text
    assert "'" not in text
    assert text.count("{") == text.count("}") == 1
    words = {line.split()[0] for line in text.strip("{} ").split("; ")}
    assert words <= {".reg", "mov.b32", "and.b32", "or.b32", "max.NaN.bf16x2", "min.NaN.bf16x2", "fma.rn.bf16x2", ";"}


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")
def test_blocks_of_one_number_in_torch_2_11(monkeypatch):
    """Triton refuses two numbers at once in a block of one. Where torch does not see to it, `pack` depends on the block."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.runtime import triton_helpers

    monkeypatch.delattr(triton_helpers, "inline_asm_pack", raising=False)
    monkeypatch.setattr(TritonOverrides, "inline_asm_elementwise", staticmethod(lambda *inputs, pack, asm: (inputs, asm, pack)))
    compat.let_one_number_be_packed()
    written = TritonOverrides.inline_asm_elementwise
    assert written("tmp3", asm="text", pack=2) == (("tmp3",), "text", "2 if tmp3.numel > 1 else 1")
    assert written("tmp3", asm="text") == (("tmp3",), "text", 1)
