"""nvfp4 on a GPU: numbers in units of their block by quotients in float32; where these leave a doubt, in float64.

A block's unit is its own scale times the tensor's. It has more bits than float32, so block_programs.py goes through float64,
whose conversions and quotients take most of a kernel's time. Here the unit and the product with a number are rounded to
float32, with relative errors of 2^-24, and the inverse has one of 2^-23; the quotient that is rounded to a scale has 2^-22. An
element is in doubt where the quotient lies so near the middle between two elements that these errors, or that of the
comparison itself, could matter (`TOLERANCE`); the code of a block's scale likewise. A kernel computes tiles with a doubt
again, by the functions of block_programs.py: with normal numbers one tile of 2,048 in 100.

(On a CPU block_steps.py has no doubts and is faster.)
"""

import torch
from torch import Tensor

from lowp.tensor import block_steps
from lowp.tensor import grid as grids
from lowp.tensor.block_programs import BlockProgram
from lowp.tensor.carrier import CARRIERS, F32
from lowp.tensor.lists import byte_codes
from lowp.tensor.lists.four_bits import TOLERANCE


def suits(program: BlockProgram) -> bool:
    """For few elements without special values, counted in a scale times the tensor's."""
    fmt = program.fmt
    usual = fmt.tensor_scale and block_steps.few_elements(fmt) and program.exact_in_float32
    in_range = usual and fmt.scale.max * block_steps.lowest_whole(fmt) < 2.0**-80
    return in_range and program.scale_grid.suits_addition and program.saturating_grid.suits_addition


def scale(program: BlockProgram, largest: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`program.scale`, and which of the codes are in doubt; the block's scale without the tensor's, and one divided by both.

    All are in doubt where float32 might not have all bits of products with the unit, or of their errors, or a reciprocal none:
    far from 1.
    """
    code, unsure = program.scale_about(largest, whole)
    own = grids.decode(code, program.scale_grid, finite=True).view(torch.float32)
    unit = own * whole
    return code, unsure | (unit < 2.0**-80) | (unit > 2.0**80), own, torch.reciprocal(unit)


def code(program: BlockProgram, x: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """`program.code`, and which of the codes are in doubt."""
    if byte_codes.suits(program.fmt.element, x):
        own = CARRIERS[x.dtype]
        code, unsure = byte_codes.codes_about(x.to(torch.float32), inverse, own.bits(x.view(own.storage)))
        return block_steps.code_without_nan(program, x, code.to(own.storage)), unsure
    quotient = x.to(torch.float32).abs() * inverse
    rank, unsure = grids.encode_about(quotient.view(torch.int32) & F32.magnitude, program.saturating_grid, TOLERANCE)
    return block_steps.signed_code(program, x, rank), unsure


def rounded(program: BlockProgram, x: Tensor, own: Tensor, inverse: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """`program.rounded`, and which of the numbers are in doubt."""
    element, unsure = grids.nearest_about(x.to(torch.float32).abs() * inverse, program.saturating_grid, TOLERANCE)
    near, error = block_steps.product(element, own, [whole])
    if x.dtype != torch.float32:
        near = block_steps.to_odd(near, error)
    value = near.to(x.dtype).view(CARRIERS[x.dtype].storage)
    return block_steps.with_sign(program, x, value), unsure
