"""Elements of block formats in integers, on the bits of float64: numbers in units of their block, rounded, and back.

What block.py computes with, for every dtype, mode and format. Kernels that round stochastically ask it where few operations
leave a doubt (block_draws.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.formats import BlockFormat
from lowp.formats.block import TENSOR_SCALE_BITS, significant_bits
from lowp.tensor.carrier import CARRIERS, F64
from lowp.tensor.core import code_storage, convert, decode_operation
from lowp.tensor.exact import LEADING, ONE, divide, multiply, widen
from lowp.tensor.table import bits_of_number

Rounded = Callable[[Tensor], Tensor]  # bits of float64 -> those of an element, or its code


def value_of(x: Tensor, unit: Tensor, fmt: BlockFormat, saturate: bool, rounded: Rounded) -> Tensor:
    """The bits, in float64, of x rounded to elements times `unit`."""
    return _times(rounded(in_units(widen(x), unit, fmt, saturate)), unit, fmt)


def code_of(x: Tensor, unit: Tensor, fmt: BlockFormat, saturate: bool, encoded: Rounded) -> Tensor:
    return encoded(in_units(widen(x), unit, fmt, saturate))


def narrow(bits: Tensor, dtype: torch.dtype) -> Tensor:
    target = CARRIERS[dtype]
    return target.store(convert(bits, F64, target)).view(dtype)


def unit_of(scales: Tensor, tensor_scale: Tensor | None, fmt: BlockFormat) -> Tensor:
    """What the elements of each block count in."""
    return scales if tensor_scale is None else multiply(scales, tensor_scale, significant_bits(fmt.scale), TENSOR_SCALE_BITS)


def scale_of_code(code: Tensor, fmt: BlockFormat) -> Tensor:
    """The scale of a block whose code, in int32, is not that of NaN: the inverse of what block.py's `_scale_codes` does."""
    if not fmt.power_of_two_scale:
        return decode_operation(fmt.scale, torch.float64)(code.to(code_storage(fmt.scale)), ())
    return (code + (F64.bias - fmt.scale.bias)).to(torch.int64) << F64.fraction_bits  # type: ignore[operator]


def unit_width(fmt: BlockFormat) -> int:
    return significant_bits(fmt.scale) + TENSOR_SCALE_BITS * fmt.tensor_scale


def _times(elements: Tensor, unit: Tensor, fmt: BlockFormat) -> Tensor:
    return multiply(elements, unit, significant_bits(fmt.element), unit_width(fmt))


def in_units(bits: Tensor, unit: Tensor, fmt: BlockFormat, saturate: bool) -> Tensor:
    """Elements in units of their scale; finite ones clamped to the range, so that rounding cannot lead out of it.

    A quotient below float64's normal numbers becomes its smallest, not zero: rounding up must see it. An infinity that elements
    have neither an infinity nor a NaN for is made NaN here, unless it saturates.
    """
    lowest, highest = (bits_of_number(abs(end), F64) for end in (fmt.element.min, fmt.element.max))
    magnitude = bits & F64.magnitude
    limit: int | Tensor = highest
    if lowest != highest and fmt.element.min < 0:
        limit = torch.where(bits < 0, torch.full_like(bits, lowest), torch.full_like(bits, highest))
    if fmt.power_of_two_scale:
        shift = unit - ONE
        inside = (torch.minimum(magnitude, limit + shift) - shift).clamp(min=LEADING)  # the limit first: nothing overflows
        inside = torch.where(magnitude == 0, magnitude, inside)
    else:
        inside = divide(magnitude, unit, unit_width(fmt))
        inside = inside.clamp(max=limit) if isinstance(limit, int) else torch.minimum(inside, limit)
    inside = inside | (bits & F64.sign)
    if fmt.element.min >= 0:
        inside = torch.where((bits < 0) & (magnitude > 0), torch.full_like(bits, lowest), inside)
    lost = not (fmt.element.has_inf or fmt.element.has_nan or saturate)
    return torch.where(magnitude >= F64.infinity, bits | F64.nan if lost else bits, inside)
