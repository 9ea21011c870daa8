"""Codes of a byte each on CUDA: numbers in units of their block to e2m1fn and e4m3fn, four at a time, in NVIDIA's assembly.

Signs are those of other bits: conversions lose NaN's. What is too large becomes the largest value, and so does NaN in e2m1fn.
"""

import torch
from torch import Tensor

from lowp.formats import Format
from lowp.formats.floats import E2M1FN, E4M3FN
from lowp.tensor.backend import backend_of
from lowp.tensor.carrier import F32
from lowp.tensor.lists.four_bits import TOLERANCE, UNIT, constants, doubt, gathered, ranks
from lowp.tensor.lists.tracing import Statement, record
from lowp.tensor.table import bits_of_number

FOUR, FOUR_DOUBT, EIGHT, FINITE_EIGHT, ABOUT = "e2m1_codes", "e2m1_doubts", "e4m3_codes", "e4m3_finite_codes", "e4m3_about"
OPERATIONS = (FOUR, FOUR_DOUBT, EIGHT, FINITE_EIGHT, ABOUT)


def suits(fmt: Format, numbers: Tensor) -> bool:
    """Is what runs now being printed for CUDA, for a chip that can, and is this one of the formats?"""
    backend = backend_of(numbers)
    return (fmt == E2M1FN and backend.halves) or (fmt == E4M3FN and backend.converts)


def codes(fmt: Format, x: Tensor, factor: Tensor, sign: Tensor, saturate: bool) -> Tensor:
    """int8: of float32 numbers times a power of two, to nearest. `sign`: int32 with the signs in the first bit.

    Infinities become e4m3fn's NaN, or what is too large (`saturate`).
    """
    if fmt == E2M1FN:
        return record(FOUR, torch.int8, x, factor * UNIT, sign)
    return record(EIGHT if saturate else FINITE_EIGHT, torch.int8, x, factor, sign)


def codes_about(x: Tensor, factor: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """int8: of numbers times any factor, in e2m1fn; and which are in doubt: the first of four neighbours says it for all.

    The factor's error may be that of `four_bits.to_bytes_about`'s, and the tolerance is the same.
    """
    least, most = (factor * (UNIT * (1 + t)) for t in (-TOLERANCE, TOLERANCE))
    return record(FOUR, torch.int8, x, most, sign), record(FOUR_DOUBT, torch.int32, x, least, most) != 0


def e4m3_about(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes (int32) in e4m3fn of positive numbers with a relative error of up to 2^-22, and which are in doubt."""
    found = record(ABOUT, torch.int32, numbers)
    return found & 0xFF, found > 0xFF


def triton_expression(s: Statement) -> str:
    """The call of a Triton kernel that carries out one of `OPERATIONS`."""
    arguments = ", ".join(argument.name for argument in s.arguments)
    if s.operation == ABOUT:
        return f'tl.inline_asm_elementwise("{_about()}", "=r,f", [{arguments}], dtype=tl.int32, is_pure=True, pack=1)'
    if s.operation == FOUR_DOUBT:
        text, kinds = doubt(4), ",".join(["=r"] * 4 + ["f"] * 12)
        return f'tl.inline_asm_elementwise("{text}", "{kinds}", [{arguments}], dtype=tl.int32, is_pure=True, pack=4)'
    text = _four() if s.operation == FOUR else _eight(s.operation == FINITE_EIGHT)
    kinds = ",".join(["=r"] + ["f"] * 8 + ["r"] * 4)
    return f'tl.inline_asm_elementwise("{text}", "{kinds}", [{arguments}], dtype=tl.int8, is_pure=True, pack=4)'


_SIGNS = gathered("sign", [f"${i}" for i in range(9, 13)], 3, "more")


def _four() -> str:
    """Four numbers, from $1 on, times those from $5 on, with signs from $9 on, to the four bytes of $0."""
    lines = [
        *constants(),
        ".reg .b32 rank, sign, more",
        *ranks(1, 5, "r", count=4),
        "prmt.b32 rank, r0, r1, 0x6420",
        *_SIGNS,
        "shr.u32 sign, sign, 4",
        "lop3.b32 rank, rank, sign, 0x07070707, 0xE4",  # the first where the mask is set, else the second
        "xor.b32 rank, rank, 0x04040404",
        "and.b32 $0, rank, 0x0F0F0F0F",
    ]
    return "{ " + "; ".join(lines) + "; }"


def _eight(finite: bool) -> str:
    """The same; infinities become NaN where only `finite` numbers are to have codes."""
    lines = [".reg .b32 word, sign, more", ".reg .f32 y0, y1, y2, y3", ".reg .b16 low, high"]
    for i in range(4):
        lines += [f"mul.rn.f32 y{i}, ${1 + i}, ${5 + i}"]
        lines += [f"fma.rn.f32 y{i}, y{i}, 0f00000000, y{i}"] if finite else []
    lines += [
        "cvt.rn.satfinite.e4m3x2.f32 low, y1, y0",
        "cvt.rn.satfinite.e4m3x2.f32 high, y3, y2",
        "mov.b32 word, {low, high}",
        *_SIGNS,
        "lop3.b32 $0, word, sign, 0x7F7F7F7F, 0xE4",
    ]
    return "{ " + "; ".join(lines) + "; }"


def _about() -> str:
    """The number $1 to its code in e4m3fn; with more bits above it, where others within the tolerance have another."""
    low, high = (f"0f{bits_of_number(1 + t, F32):08X}" for t in (-TOLERANCE, TOLERANCE))
    lines = [
        ".reg .f32 low, high",
        ".reg .b16 pair",
        ".reg .b32 both, differ",
        f"mul.rn.f32 low, $1, {low}",
        f"mul.rn.f32 high, $1, {high}",
        "cvt.rn.satfinite.e4m3x2.f32 pair, high, low",
        "cvt.u32.u16 both, pair",
        "shr.u32 differ, both, 8",
        "xor.b32 differ, differ, both",
        "prmt.b32 $0, both, differ, 0x2241",
    ]
    return "{ " + "; ".join(lines) + "; }"
