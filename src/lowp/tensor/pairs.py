"""Rounding two bfloat16 numbers at once, as NVIDIA's assembly (from compute capability 8.0 on).

`grid.nearest_in_floats` takes nine instructions for a number. One of them, the conversion of a single float32 to bfloat16, has
an eighth of the speed of others. Elementwise kernels on bfloat16 move four bytes a number, and two roundings make them wait
for instructions instead of memory. In bfloat16 itself an instruction serves two numbers: seven or eight instructions round
both, and a conversion of two numbers is a fast one.

1. The binade of x, at least the lowest of the format: 2^e.
2. x + c - c with c = 1.5 * 2^(7 - m) * 2^e, as in `nearest_in_floats`. All products are exact.
3. Overflow. No comparison of two numbers at once gives something to choose by. So the result is multiplied by a factor that
   takes the format's largest value not quite to infinity, and the next step beyond it to infinity. For infinity: multiplied
   back. For NaN: times zero, and added. A format without both: limited to its largest value.
4. The sign back, which zeros have lost. (NaN's payload is lost.)
"""

import math
from functools import lru_cache

import torch

from lowp.tensor.carrier import CARRIERS, F32, exponent_below, grid_fits, is_grid
from lowp.tensor.core import Quantize
from lowp.tensor.grid import Grid, grid
from lowp.tensor.table import number_of_bits

BF16 = CARRIERS[torch.bfloat16]
_LIMIT = math.ldexp(2.0 - 2.0 ** -(BF16.fraction_bits + 1), BF16.max_exponent)  # from here on numbers round to infinity

# (operation, result, arguments): names are registers, integers are bits, floats are numbers, both for each half.
Instruction = tuple[str, str, tuple[str | int | float, ...]]
_NAMES = {"and": "and.b32", "or": "or.b32", "max": "max.NaN.bf16x2", "min": "min.NaN.bf16x2", "fma": "fma.rn.bf16x2"}


@lru_cache(maxsize=4096)
def pair_instructions(operation: Quantize) -> tuple[Instruction, ...] | None:
    """From "x" to "y"; None where this way does not serve the format, its rounding or its dtype."""
    fmt = operation.fmt
    if not (operation.dtype == operation.out_dtype == BF16.dtype and is_grid(fmt) and grid_fits(fmt, BF16)):
        return None
    g = grid(fmt, BF16, operation.mode, operation.saturate)
    if not g.suits_addition or g.fixed or not g.has_negative_zero or g.overflow_bits != g.infinity_bits:
        return None
    overflow = _overflow(g)
    anchor, top = math.ldexp(1.5, g.dropped), math.ldexp(1.0, exponent_below(_number(g.max_bits)) + 1)
    if overflow is None or anchor * top >= _LIMIT:
        return None
    return (
        ("and", "binade", ("x", BF16.infinity)),
        ("max", "binade", ("binade", _number(g.lowest_field << BF16.fraction_bits))),
        # Else the sum would be infinite, too, and the difference NaN, which is right for a format that overflows to NaN.
        *([] if g.overflow_bits == BF16.nan else [("min", "binade", ("binade", top))]),
        ("fma", "y", ("binade", anchor, "x")),
        ("fma", "y", ("binade", -anchor, "y")),
        *overflow,
        ("and", "sign", ("x", 1 << 15)),
        ("or", "y", ("y", "sign")),
    )  # type: ignore[return-value]  # of tuples in a conditional


def _overflow(g: Grid) -> list[Instruction] | None:
    largest = _number(g.max_bits)
    if g.overflow_bits == g.max_bits:
        return [("min", "y", ("y", largest)), ("max", "y", ("y", -largest))]
    factor = _to_infinity(g)
    if factor is None:
        return None
    if g.overflow_bits == BF16.nan:
        return [("fma", "over", ("y", factor, -0.0)), ("fma", "y", ("over", 0.0, "y"))]
    inverse = 1 / factor
    exact = math.frexp(factor)[0] == 0.5 and inverse >= math.ldexp(1.0, BF16.min_exponent)
    return [("fma", "y", ("y", factor, -0.0)), ("fma", "y", ("y", inverse, -0.0))] if exact else None


def _to_infinity(g: Grid) -> float | None:
    """A factor whose product with the largest value is finite, and with the next step beyond it is not: a power of two, if one
    will do."""
    largest, beyond = (_number(bits) for bits in (g.max_bits, g.max_bits + (1 << g.dropped)))
    for part in range(1 << BF16.fraction_bits):
        factor = math.ldexp(1 + part / (1 << BF16.fraction_bits), BF16.max_exponent - exponent_below(largest))
        if largest * factor < _LIMIT <= beyond * factor:
            return factor
    return None


def _number(bits: int) -> float:
    """The magnitude with these bits: float32 has 16 more, at the end."""
    return number_of_bits(bits << 16, F32)


def pair_assembly(instructions: tuple[Instruction, ...]) -> str:
    """In a line: $1 comes in, $0 goes out, 32 bits for two numbers."""
    registers, lines = {"x": "$1"}, []
    for number, (operation, result, arguments) in enumerate(instructions):
        operands = []
        for place, argument in enumerate(arguments):
            if isinstance(argument, str):
                operands.append(registers[argument])
            else:
                operands.append(f"lowp_c{number}_{place}")
                lines += [f".reg .b32 {operands[-1]}", f"mov.b32 {operands[-1]}, {_twice(argument)}"]
        registers[result] = f"lowp_r{number}"
        lines += [f".reg .b32 lowp_r{number}", f"{_NAMES[operation]} lowp_r{number}, {', '.join(operands)}"]
    return "{ " + "; ".join([*lines, f"mov.b32 $0, {registers['y']}"]) + "; }"


def _twice(constant: int | float) -> str:
    bits = constant if isinstance(constant, int) else int(torch.tensor(constant, dtype=BF16.dtype).view(torch.int16)) & 0xFFFF
    return f"0x{bits << 16 | bits:08X}"
