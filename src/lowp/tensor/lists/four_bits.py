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
from lowp.tensor import grid as grids
from lowp.tensor.lists.tracing import Statement, record

BYTES, ABOUT, LOW, HIGH = "e2m1_bytes", "e2m1_about", "e2m1_low", "e2m1_high"
OPERATIONS = (BYTES, ABOUT, LOW, HIGH)

_ANCHOR = "0f4B400000"  # 1.5 * 2^23


def suits(fmt: Format, numbers: Tensor) -> bool:
    """Is what runs now being printed for CUDA, and is this the format?"""
    return fmt == E2M1FN and numbers.device.type == "cuda" and grids.floats_pay(numbers)


def to_bytes(low: Tensor, high: Tensor) -> Tensor:
    """The codes of two vectors of float32 numbers, to nearest, saturated: bytes with the first vector's in the low bits."""
    return record(BYTES, torch.int8, low, high)


def to_bytes_about(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """`to_bytes` of numbers that are known with a relative error of 2^-20; and which bytes are in doubt."""
    found = record(ABOUT, torch.int32, low, high)
    return found.to(torch.int8), found > 0xFF


def to_numbers(bytes: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_bytes`."""
    return record(LOW, torch.float32, bytes), record(HIGH, torch.float32, bytes)


def triton_expression(s: Statement) -> str:
    """The call of a Triton kernel that carries out one of `OPERATIONS`."""
    text, outputs, inputs, dtype = {
        BYTES: ("{ " + _bytes("$0", 1) + "}", 1, 8, "tl.int8"),
        ABOUT: (_about(), 4, 8, "tl.int32"),
        LOW: (_numbers(low=True), 4, 1, "tl.float32"),
        HIGH: (_numbers(low=False), 4, 1, "tl.float32"),
    }[s.operation]
    kinds = ["=f" if s.operation in (LOW, HIGH) else "=r"] * outputs + ["f" if inputs == 8 else "r"] * inputs
    arguments = ", ".join(argument.name for argument in s.arguments)
    constraints = ",".join(kinds)
    return f'tl.inline_asm_elementwise("{text}", "{constraints}", [{arguments}], dtype={dtype}, is_pure=True, pack=4)'


def _bytes(word: str, first: int, factor: str = "") -> str:
    """Eight numbers, from argument `first` on, to the four bytes of `word`. The magnitudes are multiplied by `factor` first."""
    y, t, p, q, *sums = (f"{name}{factor[2:]}" for name in ("y", "t", "p", "q", *(f"s{i}_" for i in range(8))))
    lines = [f".reg .b32 {', '.join((y, t, p, q, *sums))}"]
    for i, total in enumerate(sums):
        lines += [f"abs.f32 {y}, ${first + i}", *([f"mul.rn.f32 {y}, {y}, {factor}"] if factor else [])]
        lines += [
            f"mul.rn.sat.f32 {t}, {y}, 0f3F000000",
            f"fma.rn.f32 {total}, {t}, 0f40800000, {_ANCHOR}",
            f"fma.rn.sat.f32 {t}, {y}, 0f3F000000, 0fBF800000",
            f"fma.rn.f32 {total}, {t}, 0f40000000, {total}",
            f"fma.rn.sat.f32 {t}, {y}, 0f3F000000, 0fC0000000",
            f"add.rn.f32 {total}, {total}, {t}",
        ]
    for low, high in zip(sums[:4], sums[4:], strict=True):
        lines += [f"sub.rn.f32 {high}, {high}, {_ANCHOR}", f"fma.rn.f32 {low}, {high}, 0f41800000, {low}"]
    lines += [*_gathered(word, sums[:4], 0, q), f"and.b32 {word}, {word}, 0x77777777"]
    lines += [*_gathered(p, [f"${first + i}" for i in range(4)], 3, q), f"shr.u32 {p}, {p}, 4"]
    lines += [f"lop3.b32 {word}, {p}, 0x08080808, {word}, 0xEA"]  # (p & mask) | word
    lines += _gathered(p, [f"${first + 4 + i}" for i in range(4)], 3, q)
    lines += [f"lop3.b32 {word}, {p}, 0x80808080, {word}, 0xEA"]
    return "; ".join(lines) + "; "


def _gathered(target: str, registers: list[str], byte: int, spare: str) -> list[str]:
    """The same byte of four registers, as one word."""
    pair = f"0x00{byte + 4}{byte}"
    return [
        f"prmt.b32 {target}, {registers[0]}, {registers[1]}, {pair}",
        f"prmt.b32 {spare}, {registers[2]}, {registers[3]}, {pair}",
        f"prmt.b32 {target}, {target}, {spare}, 0x5410",
    ]


def _about() -> str:
    """The bytes of numbers that are a little smaller; 256 more where one of those of a little larger ones is another."""
    smaller, larger = "0f3F7FFFC0", "0f3F800020"  # 1 - 2^-18, 1 + 2^-18
    lines = [
        ".reg .b32 one, two; .reg .pred differ; " + _bytes("one", 4, smaller) + _bytes("two", 4, larger),
        "setp.ne.b32 differ, one, two; selp.b32 two, 256, 0, differ; ",
        *(f"bfe.u32 ${i}, one, {8 * i}, 8; or.b32 ${i}, ${i}, two; " for i in range(4)),
    ]
    return "{ " + "".join(lines) + "}"


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
