"""Block formats: elements in units of a scale that their block shares.

1. The scale of a block comes from its largest finite magnitude (BlockFormat says how).
2. Elements are divided by it, clamped to the element format's range, and rounded to that format.
3. Values are elements times scale.

What is not finite stays visible. An infinity stays one where elements have infinities, else it is NaN. NaN is the element's
NaN where elements have one; else the scale's, and then the whole block is NaN; where neither has one, `quantize` returns NaN
for that number alone, and `encode` refuses it or does what `nan=` says (its docstring has the table).

Here all of this is done in integers, on the bits of float64 (exact.py, block_integers.py). Power-of-two scales are added to
exponents. Other quotients are cut off, and a last bit says so: rounded to an element, or to a scale, they give what the exact
quotient gives. Eager calls have a kernel where there is one (block_kernels.py): most formats, to nearest and stochastically,
in up to 32 bits. The rest, small tensors before it pays to compile, and whatever a compiler or a transform has to see, is
computed with what is here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.formats import BlockFormat, Format
from lowp.formats.block import TENSOR_SCALE_BITS, significant_bits
from lowp.formats.floats import FP32
from lowp.tensor import block_kernels
from lowp.tensor.block_integers import code_of, narrow, unit_of, unit_width, value_of
from lowp.tensor.carrier import CARRIERS, F64, exponent_below
from lowp.tensor.core import apply_inline as _apply
from lowp.tensor.core import code_dtype, code_storage, decode_operation, encode_operation, quantize_operation
from lowp.tensor.exact import FRACTION, divide, multiply, multiply_any, widen
from lowp.tensor.interchange import PAIRS, as_codes
from lowp.tensor.noise import Noise
from lowp.tensor.packing import check_packed, unpack
from lowp.tensor.packing import pack as pack_codes
from lowp.tensor.table import bits_of_number

_PIECE = (1 << 15) + 32  # elements for each thread; with 32768 or fewer torch does not use a second one


class BlockCodes(NamedTuple):
    """What a block format's `encode` returns: codes of the elements and of the scales, one for each block of each row.

    The bytes are those of torch's dtypes: `elements.view(torch.float8_e4m3fn)`, packed e2m1fn as `torch.float4_e2m1fn_x2`,
    `scales.view(torch.float8_e8m0fnu)`. `decode` takes either. `lowp.to_128x4(scales)` has the order that cuBLAS reads.
    """

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor | None = None  # one float32, for formats that have a scale for the whole tensor


@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut into blocks along one of its dimensions."""

    shape: tuple[int, ...]
    axis: int  # from 0
    size: int

    @staticmethod
    def of(shape: tuple[int, ...], axis: int, size: int) -> "_Cut":
        shape = tuple(shape) or (1,)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"there is no axis {axis} in a tensor of shape {shape}")
        return _Cut(shape, axis % len(shape), size)

    @property
    def count(self) -> int:
        """Blocks along the axis."""
        return -(-self.shape[self.axis] // self.size)

    @property
    def even(self) -> bool:
        return self.shape[self.axis] % self.size == 0

    def maxima(self, x: Tensor) -> Tensor:
        """The largest of each block, of integers that are not negative."""
        missing = self.count * self.size - self.shape[self.axis]
        filled = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - self.axis) + (0, missing)) if not self.even else x
        return filled.unflatten(self.axis, (self.count, self.size)).amax(self.axis + 1)

    def split(self, x: Tensor) -> Tensor:
        """So that what `spread` returns can be applied to it."""
        return x.unflatten(self.axis, (self.count, self.size)) if self.even else x

    def spread(self, of_blocks: Tensor) -> Tensor:
        """One number of each block for each of its elements.

        Where the last block is shorter, they are looked up by block number: written as a view (expand, flatten, crop),
        inductor's loop splitting on CPU (torch 2.13) loses that block.
        """
        if self.even:
            return of_blocks.unsqueeze(self.axis + 1)
        numbers = torch.arange(self.shape[self.axis], device=of_blocks.device) // self.size
        return of_blocks[(slice(None),) * self.axis + (numbers,)]


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    rounding: str,
    noise: Noise | None,
    saturate: bool,
    axis: int,
    eager: bool,
    into: Tensor | None = None,
) -> Tensor:
    """Round to the format, in x's dtype. `eager`: nothing has to see the operations: kernels and pieces of x will do. `into` is
    memory that a kernel may write to, and then the result."""
    _Cut.of(x.shape, axis, fmt.size)
    if eager and (done := block_kernels.quantize(x, fmt, rounding, noise, saturate, axis, into)) is not None:
        return done
    operation = quantize_operation(fmt.element, torch.float64, rounding, saturate, torch.float64)
    tensor_scale = _tensor_scale(x, fmt)

    def rounded(piece: Tensor, noise: Noise | None) -> tuple[Tensor]:
        cut = _Cut.of(piece.shape, axis, fmt.size)
        scales, poisoned = _scales(piece, tensor_scale, fmt, cut, saturate)
        unit = cut.spread(unit_of(scales, tensor_scale, fmt))
        values = value_of(cut.split(piece), unit, fmt, saturate, lambda bits: _apply(operation, bits, noise))
        if poisoned is not None:
            values = torch.where(cut.spread(poisoned), torch.full_like(values, F64.nan), values)
        return (narrow(values, x.dtype).reshape(piece.shape),)

    return _in_pieces(rounded, (x.reshape(x.shape or (1,)),), noise, fmt, axis, eager)[0].reshape(x.shape)


def encode(
    x: Tensor,
    fmt: BlockFormat,
    rounding: str,
    noise: Noise | None,
    nan: str,
    packed: bool,
    saturate: bool,
    axis: int,
    eager: bool,
) -> BlockCodes:
    """Codes of elements (of x's shape, or packed along the axis) and of scales (one a block)."""
    _Cut.of(x.shape, axis, fmt.size)
    if eager and (found := block_kernels.encode(x, fmt, rounding, noise, saturate, nan, packed, axis)) is not None:
        return BlockCodes(*found)
    operation = encode_operation(fmt.element, torch.float64, rounding, saturate, "zero" if nan == "raise" else nan)
    tensor_scale = _tensor_scale(x, fmt)

    def codes(piece: Tensor, noise: Noise | None) -> tuple[Tensor, Tensor]:
        cut = _Cut.of(piece.shape, axis, fmt.size)
        scales, poisoned = _scales(piece, tensor_scale, fmt, cut, saturate)
        unit = cut.spread(unit_of(scales, tensor_scale, fmt))
        elements = code_of(cut.split(piece), unit, fmt, saturate, lambda bits: _apply(operation, bits, noise))
        if poisoned is not None and nan == "raise":
            scales = torch.where(poisoned, torch.full_like(scales, F64.nan), scales)
        return elements.view(code_dtype(fmt.element)).reshape(piece.shape), _scale_codes(scales, fmt).view(
            code_dtype(fmt.scale)
        )

    elements, scales = _in_pieces(codes, (x.reshape(x.shape or (1,)),), noise, fmt, axis, eager)
    elements = elements.reshape(x.shape)
    if packed and fmt.element.bits < 8:
        elements = pack_codes(elements.movedim(axis, -1), fmt.element).movedim(-1, axis)
    return BlockCodes(elements, scales, None if tensor_scale is None else narrow(tensor_scale, torch.float32))


def _in_pieces(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor, ...],
    noise: Noise | None,
    fmt: BlockFormat,
    axis: int,
    eager: bool,
) -> tuple[Tensor, ...]:
    """`function(*tensors, noise)`, whole or, where `eager`, in pieces along the first dimension that stay in the cache.

    A hundred operations on a tensor in memory take up to three times as long as on one in the processor's cache. The first of
    the tensors has elements, others have blocks.
    """
    x = tensors[0]
    unit = fmt.size if axis % x.dim() == 0 else 1  # rows that must not be parted
    rows = max(_PIECE * torch.get_num_threads() * x.shape[0] // max(x.numel(), 1) // unit, 1) * unit
    if not eager or x.device.type != "cpu" or rows >= x.shape[0]:
        return function(*tensors, noise)
    row = x.numel() // x.shape[0]
    results = []
    for first in range(0, x.shape[0], rows):
        draws = None if noise is None else replace(noise, offset=noise.offset + first * row)
        others = (tensor[first // unit : (first + rows) // unit] for tensor in tensors[1:])
        results.append(function(x[first : first + rows], *others, draws))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def decode(codes: BlockCodes, fmt: BlockFormat, dtype: torch.dtype, size: int | None, axis: int, eager: bool) -> Tensor:
    """The values, in `dtype`."""
    if not isinstance(codes, tuple) or len(codes) != 3:
        raise TypeError(f"codes of {fmt} are lowp.BlockCodes(elements, scales, tensor_scale), not {type(codes).__name__}")
    codes = BlockCodes(*codes)
    elements, scales = as_codes(codes.elements, fmt.element), as_codes(codes.scales, fmt.scale)
    if elements is None or scales is None:
        raise TypeError(f"codes of {fmt} are {code_dtype(fmt.element)} elements and {code_dtype(fmt.scale)} scales")
    if codes.elements.dtype in PAIRS and size is None:
        size = 2 * elements.shape[axis]
    shape = list(elements.shape)
    if size is not None:
        check_packed(elements.movedim(axis, -1), fmt.element, size)
        shape[axis] = size
    if (codes.tensor_scale is None) == fmt.tensor_scale:
        raise ValueError(f"{fmt} {'needs a' if fmt.tensor_scale else 'has no'} tensor_scale")
    if codes.tensor_scale is not None and (codes.tensor_scale.dtype != torch.float32 or codes.tensor_scale.numel() != 1):
        raise ValueError(f"the tensor_scale of {fmt} is one float32 number")
    cut = _Cut.of(tuple(shape), axis, fmt.size)
    expected = (*cut.shape[: cut.axis], cut.count, *cut.shape[cut.axis + 1 :])
    if scales.shape != expected:
        hint = "; packed elements need size=" if size is None and fmt.element.bits < 8 else ""
        raise ValueError(f"{fmt} needs scales of shape {tuple(expected)} for these elements, not {tuple(scales.shape)}{hint}")
    if eager:
        done = block_kernels.decode(elements, scales, codes.tensor_scale, fmt, dtype, size, axis)
        if done is not None:
            return done
    if size is not None:
        elements = unpack(elements.movedim(axis, -1), fmt.element, size).movedim(-1, axis)
    whole = None if codes.tensor_scale is None else widen(codes.tensor_scale.reshape(()))

    def values(elements: Tensor, scales: Tensor, noise: None) -> tuple[Tensor]:
        cut = _Cut.of(elements.shape, axis, fmt.size)
        unit = _decoded(scales, fmt.scale)
        if whole is not None:
            unit = multiply_any(unit, whole, significant_bits(fmt.scale), TENSOR_SCALE_BITS)
        numbers = cut.split(_decoded(elements, fmt.element))
        numbers = multiply_any(numbers, cut.spread(unit), significant_bits(fmt.element), unit_width(fmt))
        return (narrow(numbers, dtype).reshape(elements.shape),)

    return _in_pieces(values, (elements.reshape(cut.shape), scales), None, fmt, axis, eager)[0].reshape(elements.shape)


def _decoded(codes: Tensor, fmt: Format) -> Tensor:
    return _apply(decode_operation(fmt, torch.float64), codes.contiguous().view(code_storage(fmt)), None)


def _rounded(bits: Tensor, fmt: Format) -> Tensor:
    """To nearest, saturating."""
    return _apply(quantize_operation(fmt, torch.float64, "nearest", True, torch.float64), bits, None)


def _tensor_scale(x: Tensor, fmt: BlockFormat) -> Tensor | None:
    """The scale of the whole tensor, for formats that have one."""
    if not fmt.tensor_scale:
        return None
    finite = _finite_magnitudes(x)
    whole = finite.amax() if x.numel() else finite.sum(dtype=finite.dtype)
    width = significant_bits(fmt.element) + significant_bits(fmt.scale)
    scale = _rounded(divide(widen(whole.view(x.dtype)), _constant(fmt.element.max * fmt.scale.max, x), width), FP32)
    return torch.where(scale > 0, scale, _constant(1.0, x))


def _finite_magnitudes(x: Tensor) -> Tensor:
    """The bits of magnitudes in x's own integers; zero for what is not finite."""
    own = CARRIERS[x.dtype]
    magnitude = x.view(own.storage) & own.magnitude
    return torch.where(magnitude < own.infinity, magnitude, torch.zeros_like(magnitude))


def _scales(
    x: Tensor, tensor_scale: Tensor | None, fmt: BlockFormat, cut: _Cut, saturate: bool
) -> tuple[Tensor, Tensor | None]:
    """The scale of each block, and which blocks should have NaN for one (None: none can have)."""
    own, poisoned = CARRIERS[x.dtype], None
    if fmt.scale.has_nan and not fmt.element.has_nan:
        largest = cut.maxima(x.view(own.storage) & own.magnitude)
        poisoned = largest > own.infinity if fmt.element.has_inf or saturate else largest >= own.infinity
    largest = widen(cut.maxima(_finite_magnitudes(x)).view(x.dtype))
    if fmt.power_of_two_scale:
        return _power_of_two_scales(largest, fmt), poisoned
    unit, width = _constant(fmt.element.max, x), significant_bits(fmt.element)
    if tensor_scale is not None:
        unit = multiply(tensor_scale, unit, TENSOR_SCALE_BITS, width)
        width += TENSOR_SCALE_BITS
    scales = _rounded(divide(largest, unit, max(width, 2)), fmt.scale)
    return scales.clamp(min=bits_of_number(fmt.scale.smallest, F64)), poisoned


def _constant(number: float, like: Tensor) -> Tensor:
    return torch.full((), bits_of_number(number, F64), dtype=torch.int64, device=like.device)


def _power_of_two_scales(largest: Tensor, fmt: BlockFormat) -> Tensor:
    """2^(exponent of the largest - exponent of the element format's maximum), from the exponent's bits.

    By the ceiling rule, one more where the largest exceeds that maximum, both seen without their exponents.
    """
    lowest, highest = (F64.power_of_two(exponent_below(bound)) for bound in (fmt.scale.smallest, fmt.scale.max))
    exponent = (largest & F64.infinity) - (fmt.max_exponent << F64.fraction_bits)
    if fmt.rceil:
        beyond = (largest & FRACTION) > (bits_of_number(fmt.element.max, F64) & FRACTION)
        exponent = exponent + (beyond.to(torch.int64) << F64.fraction_bits)
    return exponent.clamp(lowest, highest)


def _scale_codes(scales: Tensor, fmt: BlockFormat) -> Tensor:
    if not fmt.power_of_two_scale:
        return _apply(encode_operation(fmt.scale, torch.float64, "nearest", True, "zero"), scales, None)
    codes = (scales >> F64.fraction_bits) + (fmt.scale.bias - F64.bias)  # type: ignore[operator]
    if fmt.scale.nan_code is not None:
        codes = torch.where(scales > F64.infinity, torch.full_like(codes, fmt.scale.nan_code), codes)
    return codes.to(code_storage(fmt.scale))
