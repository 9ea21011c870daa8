"""e2m1fn on CUDA: numbers to bytes of two codes each, and back, four bytes at a time, in NVIDIA's assembly.

As operations on integers, rounding to a code takes 12 instructions and decoding 6. Here two numbers share most of them.

**To a code.** With y the magnitude, there are seven limits between the ranks of 0, .5, 1, 1.5, 2, 3, 4, 6. A tie goes to the
even rank: up at .75, 1.75 and 3.5, down at .25, 1.25, 2.5 and 5.

1. z = y * 2^-14 * (1 + 2^-9) in float32, then rounded to float16, two numbers at once. 2^-14 makes float16 subnormal where
   e2m1fn is, so that a step of e2m1fn is 2^9 steps of float16 in every binade. A limit is k half steps of e2m1fn, k being odd:
   so 2^-9 of it is k halves of a step of float16. It becomes a middle between two float16 numbers: what is below it stays
   below, what is above it stays above, and the tie goes to the even float16 number, which is the right one at all seven. (The
   product is exact at a limit, and monotone.)
2. 1022 + z * 2^14 * (1 - 2^-9), rounded once: below 1024 the last bit of float16 is worth .5, above it 1. The bits count ranks
   up to 4, z = 2 having those of 1024. 1025 + z * 2^14 * 1226 / 4096 has the bits of rank 6 from 4 to 5, those of rank 7 and
   more from there on, and no less than the right ones before. The least of the two and of the largest is the rank. The factors
   put limits between the two float16 numbers beside them.

NaN becomes the largest element. (tests/tensor/test_four_bits.py tries all float16 numbers, and float32 numbers at limits.)

**To a number.** An instruction selects four bytes of eight by three bits each: the upper bytes of float16 numbers.
"""

import torch
from torch import Tensor

from lowp.formats import Format
from lowp.formats.floats import E2M1FN
from lowp.tensor.backend import backend_of
from lowp.tensor.carrier import F32
from lowp.tensor.lists.tracing import Statement, record
from lowp.tensor.table import bits_of_number

BYTES, ALL_BYTES, ABOUT, DOUBT, LOW, HIGH = "e2m1_bytes", "e2m1_all_bytes", "e2m1_about", "e2m1_doubt", "e2m1_low", "e2m1_high"
OPERATIONS = (BYTES, ALL_BYTES, ABOUT, DOUBT, LOW, HIGH)

UNIT = 2.0**-14 * (1 + 2.0**-9)
"""What numbers are multiplied by for `ranks`, beside what they are multiplied by to be elements."""

TOLERANCE = 2.0**-21
"""Of products and quotients in float32: those that would be others with so much more or less are in doubt."""


def suits(fmt: Format, numbers: Tensor) -> bool:
    """Is what runs now being printed for CUDA, for a chip that can, and is this the format?"""
    return fmt == E2M1FN and backend_of(numbers).halves


def to_bytes(low: Tensor, high: Tensor, *factors: Tensor) -> Tensor:
    """The codes of two vectors of float32 numbers, to nearest, saturated: bytes with the first vector's in the low bits.

    `factors`: of each vector, powers of two by which its numbers are multiplied first.
    """
    if not factors:
        return record(ALL_BYTES, torch.int8, low, high)
    return record(BYTES, torch.int8, low, high, *(factor * UNIT for factor in factors))


def to_bytes_about(low: Tensor, high: Tensor, low_factor: Tensor, high_factor: Tensor) -> tuple[Tensor, Tensor]:
    """`to_bytes` where the factors are any, with a relative error of up to 1.5 * 2^-23; and which bytes are in doubt.

    Three roundings to float32 make an error of up to 3 * 2^-23 of it. The ranks of products that are less by 2^-21, and more,
    are equal where there is no doubt.
    """
    least, most = ([factor * (UNIT * (1 + t)) for factor in (low_factor, high_factor)] for t in (-TOLERANCE, TOLERANCE))
    doubt = record(DOUBT, torch.int32, low, high, *least, *most)
    return record(ABOUT, torch.int8, low, high, *most), doubt != 0


def to_numbers(bytes: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_bytes`."""
    return record(LOW, torch.float32, bytes), record(HIGH, torch.float32, bytes)


def triton_expression(s: Statement) -> str:
    """The call of a Triton kernel that carries out one of `OPERATIONS`."""
    text, outputs, dtype = {
        BYTES: (_bytes(), 1, "tl.int8"),
        ALL_BYTES: (_bytes(scaled=False), 1, "tl.int8"),
        ABOUT: (_bytes(), 1, "tl.int8"),
        DOUBT: (doubt(8), 4, "tl.int32"),
        LOW: (_numbers(low=True), 4, "tl.float32"),
        HIGH: (_numbers(low=False), 4, "tl.float32"),
    }[s.operation]
    decodes = s.operation in (LOW, HIGH)
    kinds = ["=f" if decodes else "=r"] * outputs + (["r"] if decodes else ["f"] * 4 * len(s.arguments))
    arguments = ", ".join(argument.name for argument in s.arguments)
    constraints = ",".join(kinds)
    return f'tl.inline_asm_elementwise("{text}", "{constraints}", [{arguments}], dtype={dtype}, is_pure=True, pack=4)'


_CONSTANTS = {"to_steps": 0x73FC73FC, "base": 0x63FC63FC, "to_last": 0x6CCA6CCA, "last_base": 0x64016401, "largest": 0x64036403}


def ranks(first: int, factors: int | None, name: str, count: int = 8) -> list[str]:
    """Of `count` numbers, from argument `first` on, times those from `factors` on, if any.

    z is in `{name}z0` and so on, each of two numbers; in `{name}0` and so on are words of 16 bits that end with a rank less 4.
    """
    registers = ", ".join(f"{name}{i}, {name}z{i}" for i in range(count // 2))
    lines, unit = [f".reg .b32 {registers}"], f"0f{bits_of_number(UNIT, F32):08X}"
    for i in range(count // 2):
        z, rank = f"{name}z{i}", f"{name}{i}"
        lines += [
            f"mul.rn.f32 x, ${first + 2 * i}, {unit if factors is None else f'${factors + 2 * i}'}",
            f"mul.rn.f32 y, ${first + 2 * i + 1}, {unit if factors is None else f'${factors + 2 * i + 1}'}",
            f"cvt.rn.f16x2.f32 {z}, y, x",
            f"abs.f16x2 size, {z}",
            f"fma.rn.f16x2 {rank}, size, to_steps, base",
            "fma.rn.f16x2 size, size, to_last, last_base",
            f"min.f16x2 {rank}, {rank}, size",
            f"min.f16x2 {rank}, {rank}, largest",
        ]
    return lines


def constants() -> list[str]:
    """The registers that `ranks` wants."""
    names = ", ".join(_CONSTANTS)
    return [f".reg .b32 x, y, size, {names}", *(f"mov.b32 {name}, 0x{bits:08X}" for name, bits in _CONSTANTS.items())]


def _bytes(scaled: bool = True) -> str:
    """Eight numbers, from $1 on, times those from $9 on, if `scaled`, to the four bytes of $0."""
    # Of each byte: a rank in the lowest bits; the sign in the highest.
    gathered = [
        f"prmt.b32 {target}, r{source}{first}, r{source}{first + 1}, {bytes}"
        for first, more in ((0, ""), (2, "_high"))
        for target, source, bytes in ((f"rank{more}", "", "0x6420"), (f"sign{more}", "z", "0x7531"))
    ]
    lines = [
        *constants(),
        ".reg .b32 rank, rank_high, sign, sign_high",
        *ranks(1, 9 if scaled else None, "r"),
        *gathered,
        "shr.u32 sign, sign, 4",
        "shl.b32 rank_high, rank_high, 4",
        "lop3.b32 rank, rank, sign, 0x07070707, 0xE4",  # the first where the mask is set, else the second
        "lop3.b32 rank_high, rank_high, sign_high, 0x70707070, 0xE4",
        "lop3.b32 rank, rank, rank_high, 0x0F0F0F0F, 0xE4",
        "xor.b32 $0, rank, 0x44444444",
    ]
    return "{ " + "; ".join(lines) + "; }"


def doubt(count: int) -> str:
    """Are ranks of `count` numbers, from $4 on, times those behind them others than times those behind these? $0 is not zero
    then, for all four."""
    least, most = ranks(4, 4 + count, "l", count), ranks(4, 4 + 2 * count, "r", count)
    lines = [*constants(), *least, *most, "xor.b32 $0, l0, r0"]
    lines += [line for i in range(1, count // 2) for line in (f"xor.b32 x, l{i}, r{i}", "or.b32 $0, $0, x")]
    lines += [f"mov.b32 ${i}, 0" for i in range(1, 4)]
    return "{ " + "; ".join(lines) + "; }"


def gathered(target: str, registers: list[str], byte: int, spare: str) -> list[str]:
    """The same byte of four registers, as one word."""
    pair = f"0x00{byte + 4}{byte}"
    return [
        f"prmt.b32 {target}, {registers[0]}, {registers[1]}, {pair}",
        f"prmt.b32 {spare}, {registers[2]}, {registers[3]}, {pair}",
        f"prmt.b32 {target}, {target}, {spare}, 0x5410",
    ]


def _numbers(low: bool) -> str:
    """Four bytes, $4, to the four numbers of their low or high codes."""
    lines = [
        ".reg .b32 s, m, few, many, p, q, f",
        ".reg .b16 h0, h1",
        "and.b32 m, $4, 0x77777777",
        "shr.u32 s, m, 16",
        "mov.b32 few, 0x3E3C3800",  # the upper bytes of float16, whose lower ones are zero: 0, .5, 1, 1.5
        "mov.b32 many, 0x46444240",  # 2, 3, 4, 6
        "prmt.b32 p, few, many, m",
        "prmt.b32 q, few, many, s",
    ]
    # Two codes that are 16 bits apart; 8 in a selector is the sign of a byte, which is zero here.
    for i, (shift, bytes) in enumerate(((12, "0x4808"), (4, "0x6828")) if low else ((8, "0x5818"), (0, "0x7838"))):
        lines += [
            f"shl.b32 s, $4, {shift}",
            f"prmt.b32 f, p, q, {bytes}",
            "lop3.b32 f, s, 0x80008000, f, 0xEA",  # (s & mask) | f
            "mov.b32 {h0, h1}, f",
            f"cvt.f32.f16 ${i}, h0",
            f"cvt.f32.f16 ${i + 2}, h1",
        ]
    return "{ " + "; ".join(lines) + "; }"
