"""Block formats: elements in units of a scale that their block shares.

1. The scale of a block comes from its largest finite magnitude (BlockFormat says how).
2. Elements are divided by it, clamped to the element format's range, and rounded to that format. Infinities and NaN follow
   the element format: they are kept where it has them.
3. Values are elements times scale.

All of this is done in float64, where scaling by any of these scales is exact or, for scales with a mantissa, correctly
rounded to far more bits than an element has; no chip differs there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.formats import BlockFormat, Format
from lowp.formats.floats import FP32
from lowp.tensor.carrier import CARRIERS, F64, exponent_below
from lowp.tensor.core import (
    code_dtype,
    code_storage,
    convert,
    decode_operation,
    encode_operation,
    quantize_operation,
)
from lowp.tensor.inline import apply_inline as _apply
from lowp.tensor.noise import Noise
from lowp.tensor.packing import pack as pack_codes
from lowp.tensor.packing import unpack


class BlockCodes(NamedTuple):
    """What a block format's `encode` returns: codes of the elements and of the scales, one for each block of each row."""

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor | None = None  # one float32, for formats that have a scale for the whole tensor


def quantize(x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, saturate: bool = False) -> Tensor:
    """Round to the format, in x's dtype."""
    numbers = _to_float64(x)
    unit = _unit(*_scales(numbers, fmt), numbers.shape[-1], fmt)
    operation = quantize_operation(fmt.element, torch.float64, rounding, saturate, torch.float64)
    elements = _apply(operation, _in_units(numbers, unit, fmt), noise).view(torch.float64)
    return _from_float64(elements * unit, x.dtype).reshape(x.shape)


def encode(
    x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, nan: str, packed: bool, saturate: bool = False
) -> BlockCodes:
    """Codes of elements (of x's shape, or packed) and of scales (one a block)."""
    numbers = _to_float64(x)
    scales, tensor_scale = _scales(numbers, fmt)
    unit = _unit(scales, tensor_scale, numbers.shape[-1], fmt)
    operation = encode_operation(fmt.element, torch.float64, rounding, saturate, "zero" if nan == "raise" else nan)
    elements = _apply(operation, _in_units(numbers, unit, fmt), noise).view(code_dtype(fmt.element)).reshape(x.shape)
    if packed and fmt.element.bits < 8:
        elements = pack_codes(elements, fmt.element)
    to_code = encode_operation(fmt.scale, torch.float64, "nearest", True, "zero")
    return BlockCodes(elements, _apply(to_code, scales.view(torch.int64), None).view(code_dtype(fmt.scale)), tensor_scale)


def decode(codes: BlockCodes, fmt: BlockFormat, dtype: torch.dtype, size: int | None) -> Tensor:
    """The values, in `dtype`."""
    if not isinstance(codes, tuple) or len(codes) != 3:
        raise TypeError(f"codes of {fmt} are lowp.BlockCodes(elements, scales, tensor_scale), not {type(codes).__name__}")
    codes = BlockCodes(*codes)
    elements = codes.elements if size is None else unpack(codes.elements, fmt.element, size)
    if elements.dtype != code_dtype(fmt.element) or codes.scales.dtype != code_dtype(fmt.scale):
        raise TypeError(f"codes of {fmt} are {code_dtype(fmt.element)} elements and {code_dtype(fmt.scale)} scales")
    if (codes.tensor_scale is None) == fmt.tensor_scale:
        raise ValueError(f"{fmt} {'needs a' if fmt.tensor_scale else 'has no'} tensor_scale")
    rows = elements.reshape(1) if elements.dim() == 0 else elements
    expected = (*rows.shape[:-1], -(-rows.shape[-1] // fmt.size))
    if codes.scales.shape != expected:
        raise ValueError(f"{fmt} needs scales of shape {tuple(expected)} for these elements, not {tuple(codes.scales.shape)}")
    values = _decoded(rows, fmt.element)
    unit = _unit(_decoded(codes.scales, fmt.scale), codes.tensor_scale, rows.shape[-1], fmt)
    return _from_float64(values * unit, dtype).reshape(elements.shape)


def _decoded(codes: Tensor, fmt: Format) -> Tensor:
    return _apply(decode_operation(fmt, torch.float64), codes.view(code_storage(fmt)), None).view(torch.float64)


def _rounded(numbers: Tensor, fmt: Format) -> Tensor:
    """To nearest, saturating, in float64."""
    operation = quantize_operation(fmt, torch.float64, "nearest", True, torch.float64)
    return _apply(operation, numbers.view(torch.int64), None).view(torch.float64)


def _to_float64(x: Tensor) -> Tensor:
    """Exactly, float32's subnormals too where a chip is told to flush them; a single number becomes a row of one."""
    own = CARRIERS[x.dtype]
    return convert(own.bits(x.view(own.storage)), own, F64).view(torch.float64).reshape(x.shape or (1,))


def _from_float64(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    target = CARRIERS[dtype]
    return target.store(convert(numbers.view(torch.int64), F64, target)).view(dtype)


def _scales(numbers: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """The scale of each block, in float64, and the tensor's own."""
    magnitude = numbers.abs()
    finite = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    filled = torch.nn.functional.pad(finite, (0, -numbers.shape[-1] % fmt.size))
    largest = filled.unflatten(-1, (-1, fmt.size)).amax(-1)
    if fmt.power_of_two_scale:
        return _power_of_two_scales(largest, fmt), None
    tensor_scale = None
    if fmt.tensor_scale:
        whole = finite.amax() if numbers.numel() else finite.sum()
        tensor_scale = _rounded(whole / (fmt.element.max * fmt.scale.max), FP32)
        tensor_scale = torch.where(tensor_scale > 0, tensor_scale, torch.ones_like(tensor_scale))
    unit = fmt.element.max if tensor_scale is None else tensor_scale * fmt.element.max
    scales = _rounded(largest / unit, fmt.scale).clamp(min=fmt.scale.smallest)
    return scales, None if tensor_scale is None else _from_float64(tensor_scale, torch.float32)


def _power_of_two_scales(largest: Tensor, fmt: BlockFormat) -> Tensor:
    """2^(exponent of the largest - exponent of the element format's maximum), from the exponent's bits."""
    lowest, highest = (F64.power_of_two(exponent_below(bound)) for bound in (fmt.scale.smallest, fmt.scale.max))
    exponent = largest.view(torch.int64) & F64.infinity
    return (exponent - (fmt.max_exponent << F64.fraction_bits)).clamp(lowest, highest).view(torch.float64)


def _unit(scales: Tensor, tensor_scale: Tensor | None, count: int, fmt: BlockFormat) -> Tensor:
    """What each of the `count` elements of a row counts in.

    Looked up by block number: written as a view (expand, flatten, crop), inductor's loop splitting on CPU (torch 2.13) loses
    the last block of rows whose length is no multiple of the block's.
    """
    unit = scales[..., torch.arange(count, device=scales.device) // fmt.size]
    return unit if tensor_scale is None else unit * _to_float64(tensor_scale)


def _in_units(numbers: Tensor, unit: Tensor, fmt: BlockFormat) -> Tensor:
    """The bits of elements in units of their scale; finite ones clamped to the range, so that rounding cannot lead out of it.

    A quotient that float64 has no normal number for becomes its smallest: not zero, whatever the chip does with subnormals.
    """
    scaled = numbers / unit
    bits = torch.where(numbers.isinf(), scaled, scaled.clamp(fmt.element.min, fmt.element.max)).view(torch.int64)
    smallest = 1 << F64.fraction_bits
    lost = ((numbers.view(torch.int64) & F64.magnitude) > 0) & ((bits & F64.magnitude) < smallest)
    return torch.where(lost, (numbers.view(torch.int64) & F64.sign) | smallest, bits)
