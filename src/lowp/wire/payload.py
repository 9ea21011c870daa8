"""Numbers of one format as bytes, and back.

Codes of 8 bits are sent as they are, narrower ones in planes. Codes of 9 to 15 bits are a plane of low bytes and the packed
rest; 16 bits and float32 are their own bits. A block format sends its elements, then its scales.
"""

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat, Format
from lowp.formats.floats import BF16, FP16, FP32
from lowp.tensor import kernels
from lowp.tensor.block import BlockCodes
from lowp.tensor.core import code_storage, decode_operation, encode_operation
from lowp.tensor.noise import Noise
from lowp.tensor.ops import decode, encode
from lowp.wire.planes import pack_planes, padded, planar_bytes, unpack_planes
from lowp.wire.scratch import room

TORCH_DTYPES = {FP16: torch.float16, BF16: torch.bfloat16, FP32: torch.float32}
"""Formats that torch itself casts to, correctly rounded and fast."""


def check_format(fmt: AnyFormat) -> AnyFormat:
    """A format that gradients can travel in."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if not element.signed:
        raise ValueError(f"gradients have signs, and {fmt} has none")
    if element.bits > 16 and fmt != FP32:
        raise ValueError(f"formats on the wire have up to 16 bits (or are fp32); {fmt} has {element.bits}")
    return fmt


def aligned(size: int) -> int:
    """Room for `size` bytes such that what follows may be of any dtype."""
    return -(-size // 8) * 8


def payload_bytes(fmt: AnyFormat, count: int) -> int:
    if isinstance(fmt, BlockFormat):
        scales = -(-count // fmt.size)
        return aligned(_codes_bytes(fmt.element, count)) + aligned(_codes_bytes(fmt.scale, scales)) + 8 * fmt.tensor_scale
    return _codes_bytes(fmt, count)


def _codes_bytes(fmt: Format, count: int) -> int:
    if fmt.bits < 8:
        return planar_bytes(count, fmt.bits)
    if 8 < fmt.bits < 16:
        return aligned(count) + planar_bytes(count, fmt.bits - 8)
    return count * (1 if fmt.bits == 8 else 2 if fmt.bits == 16 else 4)


def put(numbers: Tensor, fmt: AnyFormat, rounding: str, noise: Noise | None, out: Tensor, factor: Tensor | None = None) -> None:
    """Write the codes of flat float32 `numbers` to `out` (uint8, `payload_bytes` of it). What is too large saturates.

    `factor` (one float32, for devices other than the CPU) multiplies the numbers on their way.
    """
    if factor is not None and (isinstance(fmt, BlockFormat) or fmt in TORCH_DTYPES or 8 < fmt.bits < 16):
        numbers, factor = numbers * factor, None
    if fmt in TORCH_DTYPES and (rounding == "nearest" or fmt == FP32):
        target = out.view(TORCH_DTYPES[fmt])
        target.copy_(numbers if fmt == FP32 else numbers.clamp(fmt.min, fmt.max))
        return
    if isinstance(fmt, BlockFormat):
        _put_blocks(numbers, fmt, rounding, noise, out)
    elif fmt.bits in (8, 16):
        _encode(numbers, fmt, rounding, noise, out, factor)
    elif fmt.bits < 8:
        codes = room(padded(numbers.numel(), fmt.bits), torch.uint8, numbers.device)
        codes[numbers.numel() :] = 0
        _encode(numbers, fmt, rounding, noise, codes[: numbers.numel()], factor)
        pack_planes(codes, fmt.bits, out)
    else:
        _put_codes(encode(numbers, fmt, rounding, saturate=True, seed=noise, nan="zero"), fmt, out)


def _encode(numbers: Tensor, fmt: Format, rounding: str, noise: Noise | None, out: Tensor, factor: Tensor | None) -> None:
    """`lowp.encode` without its checks: small messages are many, and everything here is flat, contiguous and float32."""
    operation = encode_operation(fmt, torch.float32, rounding, True, "zero", factor is not None)
    kernels.run(operation, numbers.view(torch.int32), noise, out.view(code_storage(fmt)), factor=factor)


def get(payload: Tensor, fmt: AnyFormat, out: Tensor, factor: Tensor | None = None) -> None:
    """Read `out.numel()` numbers (float32), each times `factor`."""
    if isinstance(fmt, BlockFormat):
        _get_blocks(payload, fmt, out)
    elif fmt in TORCH_DTYPES:
        out.copy_(payload.view(TORCH_DTYPES[fmt]))
    else:
        _decode(payload, fmt, out, factor)
        return
    if factor is not None:
        out.mul_(factor)


def _decode(payload: Tensor, fmt: Format, out: Tensor, factor: Tensor | None) -> None:
    operation = decode_operation(fmt, torch.float32, factor is not None)
    codes = _get_codes(payload, fmt, out.numel()).view(code_storage(fmt))
    kernels.run(operation, codes, None, out.view(torch.int32), factor=factor)


def _put_codes(codes: Tensor, fmt: Format, out: Tensor) -> None:
    """Codes as `encode` gives them: uint8 or int16."""
    count = codes.numel()
    if fmt.bits in (8, 16):
        out.copy_(codes.view(torch.uint8))
        return
    low, rest = (codes, out) if fmt.bits < 8 else ((codes >> 8).to(torch.uint8) & 0xFF, out[aligned(count) :])
    if fmt.bits > 8:
        out[:count].copy_((codes & 0xFF).to(torch.uint8))
    bits = fmt.bits if fmt.bits < 8 else fmt.bits - 8
    filled = low.new_zeros(padded(count, bits))
    filled[:count] = low & ((1 << bits) - 1)
    pack_planes(filled, bits, rest)


def _get_codes(payload: Tensor, fmt: Format, count: int) -> Tensor:
    if fmt.bits == 8:
        return payload
    if fmt.bits == 16:
        return payload.view(torch.int16)
    if fmt.bits < 8:
        return unpack_planes(payload, fmt.bits, count)[:count]
    high = unpack_planes(payload[aligned(count) :], fmt.bits - 8, count)[:count]
    return payload[:count].to(torch.int16) | (high.to(torch.int16) << 8)


def _put_blocks(numbers: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, out: Tensor) -> None:
    codes = encode(numbers, fmt, rounding, saturate=True, seed=noise, nan="zero")
    split = _codes_bytes(fmt.element, numbers.numel())
    _put_codes(codes.elements, fmt.element, out[:split])
    rest = out[aligned(split) :]
    _put_codes(codes.scales, fmt.scale, rest[: _codes_bytes(fmt.scale, codes.scales.numel())])
    if fmt.tensor_scale:
        out[-8:-4].copy_(codes.tensor_scale.reshape(1).view(torch.uint8))


def _get_blocks(payload: Tensor, fmt: BlockFormat, out: Tensor) -> None:
    count, scales = out.numel(), -(-out.numel() // fmt.size)
    split = _codes_bytes(fmt.element, count)
    rest = payload[aligned(split) :]
    tensor_scale = payload[-8:-4].clone().view(torch.float32).reshape(()) if fmt.tensor_scale else None
    codes = BlockCodes(
        _get_codes(payload[:split], fmt.element, count),
        _get_codes(rest[: _codes_bytes(fmt.scale, scales)], fmt.scale, scales),
        tensor_scale,
    )
    decode(codes, fmt, out=out)
