"""e2m1fn on CUDA: numbers to bytes of two codes each, and back, four bytes at a time, in NVIDIA's assembly.

A GPU has half as many units for integers as for floats, and a number of 4 bits has time for some five integer instructions.
As operations on integers, rounding to a code takes 12 of them and decoding 6. Here both take 2, the rest are products and sums.

**To a code.** With y the magnitude, the rank among 0, .5, 1, 1.5, 2, 3, 4, 6 is

    round(4 clamp(y / 2)) + round(2 clamp(y / 2 - 1)) + round(clamp(y / 2 - 2))

where clamp is to 0 .. 1 (`.sat`: no instruction of its own) and `round` to nearest, ties to even: each sum so far is even where
the next term begins. Adding to 1.5 * 2^23 rounds to an integer, which is then in the last bits. Everything before that rounding
is exact. 16 times the second rank is added as a float; signs are put in for four bytes at once.

**To a number.** The bits of a code, put where float16 has its sign, the last two bits of its exponent and the first of its
mantissa, are the number times 2^-14, subnormal ones too.

What becomes of NaN does not matter: it is a zero.
"""

import torch
from torch import Tensor

from lowp.formats import Format
from lowp.formats.floats import E2M1FN
from lowp.tensor.backend import backend_of
from lowp.tensor.lists.tracing import Statement, record

BYTES, ABOUT, LOW, HIGH = "e2m1_bytes", "e2m1_about", "e2m1_low", "e2m1_high"
OPERATIONS = (BYTES, ABOUT, LOW, HIGH)

_ANCHOR = "0f4B400000"  # 1.5 * 2^23


def suits(fmt: Format, numbers: Tensor) -> bool:
    """Is what runs now being printed for CUDA, and is this the format?"""
    return fmt == E2M1FN and backend_of(numbers).assembly


def to_bytes(low: Tensor, high: Tensor, *halves: Tensor) -> Tensor:
    """The codes of two vectors of float32 numbers, to nearest, saturated: bytes with the first vector's in the low bits.

    `halves`: of each vector, half of what its numbers are multiplied by first, powers of two.
    """
    return record(BYTES, torch.int8, low, high, *halves)


def to_bytes_about(low: Tensor, high: Tensor, low_half: Tensor, high_half: Tensor) -> tuple[Tensor, Tensor]:
    """`to_bytes` where the halves have a relative error of up to 2^-21; and which bytes are in doubt."""
    found = record(ABOUT, torch.int32, low, high, low_half, high_half)
    return found.to(torch.int8), found > 0xFF


def to_numbers(bytes: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_bytes`."""
    return record(LOW, torch.float32, bytes), record(HIGH, torch.float32, bytes)


def triton_expression(s: Statement) -> str:
    """The call of a Triton kernel that carries out one of `OPERATIONS`."""
    floats = 4 * len(s.arguments)
    text, outputs, inputs, dtype = {
        BYTES: ("{ " + _bytes(floats > 8) + "}", 1, floats, "tl.int8"),
        ABOUT: (_about(), 4, floats, "tl.int32"),
        LOW: (_numbers(low=True), 4, 1, "tl.float32"),
        HIGH: (_numbers(low=False), 4, 1, "tl.float32"),
    }[s.operation]
    kinds = ["=f" if s.operation in (LOW, HIGH) else "=r"] * outputs + ["r" if s.operation in (LOW, HIGH) else "f"] * inputs
    arguments = ", ".join(argument.name for argument in s.arguments)
    constraints = ",".join(kinds)
    return f'tl.inline_asm_elementwise("{text}", "{constraints}", [{arguments}], dtype={dtype}, is_pure=True, pack=4)'


_SUMS = tuple(f"s{i}" for i in range(8))


def _bytes(scaled: bool) -> str:
    """Eight numbers, from $1 on, to the four bytes of $0; `scaled`: times twice the numbers from $9 on."""
    lines = [f".reg .b32 y, t, p, q, {', '.join(_SUMS)}"]
    for i, total in enumerate(_SUMS):
        half = f"${9 + i}" if scaled else "0f3F000000"
        lines += [
            f"abs.f32 y, ${1 + i}",
            f"mul.rn.sat.f32 t, y, {half}",
            f"fma.rn.f32 {total}, t, 0f40800000, {_ANCHOR}",
            f"fma.rn.sat.f32 t, y, {half}, 0fBF800000",
            f"fma.rn.f32 {total}, t, 0f40000000, {total}",
            f"fma.rn.sat.f32 t, y, {half}, 0fC0000000",
            f"add.rn.f32 {total}, {total}, t",
        ]
    lines += [f"sub.rn.f32 {high}, {high}, {_ANCHOR}" for high in _SUMS[4:]]
    return "; ".join([*lines, *_put_together("$0", 1)]) + "; "


def _put_together(word: str, first: int) -> list[str]:
    """The four bytes of ranks: four that are in the last bits, and four that are numbers. The signs are those of the numbers
    from argument `first` on."""
    lines = [f"fma.rn.f32 {low}, {high}, 0f41800000, {low}" for low, high in zip(_SUMS[:4], _SUMS[4:], strict=True)]
    lines += [*_gathered(word, list(_SUMS[:4]), 0, "q"), f"and.b32 {word}, {word}, 0x77777777"]
    lines += [*_gathered("p", [f"${first + i}" for i in range(4)], 3, "q"), "shr.u32 p, p, 4"]
    lines += [f"lop3.b32 {word}, p, 0x08080808, {word}, 0xEA"]  # (p & mask) | word
    lines += _gathered("p", [f"${first + 4 + i}" for i in range(4)], 3, "q")
    return [*lines, f"lop3.b32 {word}, p, 0x80808080, {word}, 0xEA"]


def _gathered(target: str, registers: list[str], byte: int, spare: str) -> list[str]:
    """The same byte of four registers, as one word."""
    pair = f"0x00{byte + 4}{byte}"
    return [
        f"prmt.b32 {target}, {registers[0]}, {registers[1]}, {pair}",
        f"prmt.b32 {spare}, {registers[2]}, {registers[3]}, {pair}",
        f"prmt.b32 {target}, {target}, {spare}, 0x5410",
    ]


def _about() -> str:
    """Eight numbers, from $4 on, times twice those from $12 on, to four bytes; 256 more where one of the codes is in doubt.

    The three terms of a rank are added up before they are rounded, which is not exact. Numbers have an error of less than
    2^-20.8 of themselves, which is 2^-18.8 of a rank; sums and products add less than 2^-20. So a rank that is 2^-18 or further
    from the middle between two is rounded as the exact one would be.
    """
    lines = [f".reg .b32 word, y, t, a, b, p, q, most, doubt, {', '.join(_SUMS)}", ".reg .pred doubtful", "mov.b32 most, 0"]
    for i, total in enumerate(_SUMS):
        lines += [
            f"abs.f32 y, ${4 + i}",
            f"mul.rn.sat.f32 t, y, ${12 + i}",
            f"fma.rn.sat.f32 a, y, ${12 + i}, 0fBF800000",
            f"fma.rn.sat.f32 b, y, ${12 + i}, 0fC0000000",
            "fma.rn.f32 t, t, 0f40800000, b",
            "fma.rn.f32 t, a, 0f40000000, t",
            f"add.rn.f32 {total}, t, {_ANCHOR}",
            f"sub.rn.f32 b, {total}, {_ANCHOR}",
            "sub.rn.f32 t, t, b",
            "abs.f32 t, t",
            "max.f32 most, most, t",
            *([f"mov.b32 {total}, b"] if i >= 4 else []),
        ]
    lines += _put_together("word", 4)
    lines += ["setp.ge.f32 doubtful, most, 0f3EFFFF80", "selp.b32 doubt, 256, 0, doubtful"]  # 1/2 - 2^-18
    lines += [line for i in range(4) for line in (f"bfe.u32 ${i}, word, {8 * i}, 8", f"or.b32 ${i}, ${i}, doubt")]
    return "{ " + "; ".join(lines) + "; }"


def _numbers(low: bool) -> str:
    """Four bytes, $4, to the four numbers of their low or high codes."""
    lines = [".reg .b32 p, f, power", ".reg .b16 h0, h1", "mov.b32 power, 0x74007400"]  # 2^14, twice
    for i, bytes in enumerate(("0x1404", "0x3424")):  # two bytes, each the upper one of 16 bits
        lines += [f"prmt.b32 p, $4, 0, {bytes}"]
        lines += ["shl.b32 f, p, 1", "shl.b32 p, p, 4"] if low else ["shr.u32 f, p, 3"]
        lines += [
            "and.b32 f, f, 0x0E000E00",
            "lop3.b32 f, p, 0x80008000, f, 0xEA",
            "mul.rn.f16x2 f, f, power",
            "mov.b32 {h0, h1}, f",
            f"cvt.f32.f16 ${2 * i}, h0",
            f"cvt.f32.f16 ${2 * i + 1}, h1",
        ]
    return "{ " + "; ".join(lines) + "; }"
