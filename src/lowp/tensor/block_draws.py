"""Stochastic rounding of block formats in few operations on float32; where these leave a doubt, in integers.

A magnitude in units of its block, counted in the steps of the element's grid, is a whole number k and a share of a step. The
element above k is taken where the share and the noise, which is a share of a step too, add up to one or more.

Integers (block.py) compare a share and noise of up to 62 bits. Here the share is known with an error: none for scales that are
powers of two, else three roundings to float32 (the unit, its inverse, the product). And of the noise only the first 30 bits are
drawn. So where the sum comes within a `tolerance` of a whole number, it is in doubt what the integers would find: `drawn` says
so, and the kernel asks them (`settled`). This holds at the edges as well: where the error has moved k itself to the next number
or the next binade, and where a magnitude is cut off at the largest element, share and noise add up to about a whole number
whenever the two ways could differ.

One number in 2^29 is in doubt for mx formats, one in 2^18 for nvfp4.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowp.formats import BlockFormat
from lowp.formats.base import Rounding
from lowp.tensor import block_integers
from lowp.tensor import grid as grids
from lowp.tensor.block_programs import BlockProgram
from lowp.tensor.carrier import CARRIERS, F32
from lowp.tensor.core import encode_operation, quantize_operation
from lowp.tensor.exact import widen
from lowp.tensor.noise import draw

_SPAN = 1 << F32.noise_bits


def suits(fmt: BlockFormat) -> bool:
    """May steps be counted in float32? For formats that have a `block_program`."""
    return _grid(fmt).suits_float_unit


def _grid(fmt: BlockFormat) -> grids.Grid:
    return grids.grid(fmt.element, F32, Rounding.STOCHASTIC, True)  # type: ignore[arg-type]  # a grid


def inverse(program: BlockProgram, code: Tensor, *whole: Tensor) -> list[Tensor]:
    """int32 codes of scales -> one divided by the unit, in float32, and the tolerance (int32, in 2^-30 of a step) if not 1.

    Where float32 has no normal number for the unit and for its inverse, all is in doubt.
    """
    if program.fmt.power_of_two_scale:
        return [program.inverse(code)]
    unit = program.scale_value(code)
    unit = unit * whole[0] if whole else unit
    usable = (unit > 2.0**-125) & (unit < 2.0**125)
    one = torch.ones_like(unit)
    # Fewer than 2^(m + 1) steps, each rounding to within 2^-24: together less than 2^(m + 9 - 30).
    tolerance = torch.full_like(code, 1 << _grid(program.fmt).mantissa_bits + 9)
    return [one / torch.where(usable, unit, one), torch.where(usable, tolerance, torch.full_like(code, _SPAN >> 1))]


def drawn(program: BlockProgram, x: Tensor, key: Tensor, inverse: Tensor, tolerance: Tensor | int = 1) -> tuple[Tensor, Tensor]:
    """Numbers -> the elements that they are rounded to, as float32 numbers with the sign of x, and which are in doubt.

    What becomes of NaN does not matter; infinities are the largest element.
    """
    g, c, x = _grid(program.fmt), F32, x.to(torch.float32)
    size = (x.abs() * inverse).view(torch.int32).clamp(max=g.max_bits)
    lowest = g.lowest_field << c.fraction_bits
    binade = torch.full_like(size, lowest) if g.fixed else (size & c.infinity).clamp(min=lowest)
    steps = size.view(torch.float32) * ((2 * c.bias + g.mantissa_bits << c.fraction_bits) - binade).view(torch.float32)
    whole = torch.floor(steps)
    total = ((steps - whole) * float(_SPAN)).to(torch.int32) + draw(key, size, c.noise_bits)
    unsure = ((total - tolerance) & (_SPAN - 1)) >= _SPAN - tolerance * 2
    steps = torch.where(total >= _SPAN, whole + 1.0, whole)
    step = (binade - (g.mantissa_bits << c.fraction_bits)).view(torch.float32)
    return program.signed(steps * step, x), unsure


def settled(program: BlockProgram, kind: str, x: Tensor, code: Tensor, whole: Sequence[Tensor], key: Tensor) -> Tensor:
    """What integers make of a number in a block with that code of its scale, which is not poisoned: stored bits."""
    fmt, saturate, noisy = program.fmt, program.saturate, "stochastic"
    unit = block_integers.unit_of(block_integers.scale_of_code(code, fmt), widen(whole[0]) if whole else None, fmt)
    if kind == "quantize":
        rounder = quantize_operation(fmt.element, torch.float64, noisy, saturate, torch.float64)
        values = block_integers.value_of(x, unit, fmt, saturate, lambda bits: rounder(bits, (), key))
        return block_integers.narrow(values, x.dtype).view(CARRIERS[x.dtype].storage)
    nan = "zero" if program.nan == "raise" else program.nan
    encoder = encode_operation(fmt.element, torch.float64, noisy, saturate, nan)
    return block_integers.code_of(x, unit, fmt, saturate, lambda bits: encoder(bits, (), key))
