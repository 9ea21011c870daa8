"""Codes of less than a byte, packed: a little-endian bit stream along the last dimension.

Eager calls have a kernel (lists/bit_stream.py), built when kernels.py says so; otherwise plain operations serve.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.formats import Format, FormatLike
from lowp.formats import format as parse_format
from lowp.tensor import kernels
from lowp.tensor.dynamo import format_text, in_graph, teach_dynamo


def packed_size(count: int, bits: int) -> int:
    """How many bytes `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


@lru_cache(maxsize=64)
def group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes those are."""
    codes = 8 // math.gcd(bits, 8)
    return codes, codes * bits // 8


def _sub_byte_bits(format: FormatLike) -> int:
    fmt = parse_format(format)
    if not isinstance(fmt, Format) or fmt.bits > 8:
        raise ValueError(f"packing is for codes of up to 8 bits; {fmt} has {fmt.bits}")
    return fmt.bits


def pack(codes: Tensor, format: FormatLike) -> Tensor:
    """Pack the codes of each row (the last dimension) without gaps: code i starts at bit i * bits of the row.

    The first code lies in the lowest bits; a row of n codes becomes ceil(n * bits / 8) bytes, the rest of the last one zero.
    """
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        return _pack_in_graph(codes, format_text(format))
    bits = _sub_byte_bits(format)
    if codes.dtype != torch.uint8:
        raise TypeError(f"packing takes uint8 codes, not {codes.dtype}")
    if codes.dim() == 0:
        raise ValueError("packing needs at least one dimension")
    if bits == 8:
        return codes.clone()
    if (packed := _by_kernel("pack", bits, codes, codes.shape[-1])) is not None:
        return packed
    per_group, group_bytes = group(bits)
    count = codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, -count % per_group)).to(torch.int64)
    groups = padded.unflatten(-1, (-1, per_group)) & ((1 << bits) - 1)
    word = sum(groups[..., i] << (bits * i) for i in range(per_group))
    stream = torch.stack([(word >> (8 * i)) & 0xFF for i in range(group_bytes)], -1)  # type: ignore[operator]
    return stream.to(torch.uint8).flatten(-2)[..., : packed_size(count, bits)].contiguous()


def check_packed(packed: Tensor, format: FormatLike, size: int) -> int:
    """A clear error unless rows of `size` codes may be packed there; how many bits a code has."""
    bits = _sub_byte_bits(format)
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise TypeError(f"packed codes are uint8 tensors of at least one dimension, not {packed.dtype}")
    if size < 0:
        raise ValueError(f"size is the number of codes in a row, not {size}")
    if packed.shape[-1] != packed_size(size, bits):
        raise ValueError(
            f"{size} codes of {bits} bits are {packed_size(size, bits)} bytes a row, but the rows here have {packed.shape[-1]}"
        )
    return bits


def unpack(packed: Tensor, format: FormatLike, size: int) -> Tensor:
    """The first `size` codes of each packed row."""
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        return _unpack_in_graph(packed, format_text(format), size)
    bits = check_packed(packed, format, size)
    if bits == 8:
        return packed.clone()
    if (codes := _by_kernel("unpack", bits, packed, size)) is not None:
        return codes
    per_group, group_bytes = group(bits)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % group_bytes)).to(torch.int64)
    groups = padded.unflatten(-1, (-1, group_bytes))
    word = sum(groups[..., i] << (8 * i) for i in range(group_bytes))
    codes = torch.stack([(word >> (bits * i)) & ((1 << bits) - 1) for i in range(per_group)], -1)  # type: ignore[operator]
    return codes.to(torch.uint8).flatten(-2)[..., :size].contiguous()


@in_graph
def _pack_in_graph(codes: Tensor, format: str) -> Tensor:
    return pack(codes, format)


@in_graph
def _unpack_in_graph(packed: Tensor, format: str, size: int) -> Tensor:
    return unpack(packed, format, size)


@dataclass(frozen=True)
class BitStream:
    """A kernel's name: for codes of so many bits."""

    bits: int


def _by_kernel(name: str, bits: int, source: Tensor, length: int) -> Tensor | None:
    """`source` packed or taken apart, in rows of `length` codes; None where plain operations must serve."""
    if kernels.must_be_visible(source) or source.layout is not torch.strided or source.is_nested or not source.numel():
        return None
    source = source.contiguous()
    *outer, found = source.shape
    rows = source.numel() // found
    kernel = kernels.get_or_build(BitStream(bits), source.device, rows * length, _build)
    if kernel is None:
        return None
    shape = (*outer, packed_size(length, bits) if name == "pack" else length)
    target = torch.empty(shape, dtype=torch.uint8, device=source.device)
    if length % group(bits)[0] == 0:  # rows of whole groups are one long row
        rows, length = 1, rows * length
    kernel(name, source, target, rows, length)
    return target


def _build(stream: BitStream, device: torch.device) -> Any:
    from lowp.tensor.lists import bit_stream  # what compiles is loaded when something is compiled

    return bit_stream.build(stream, device)
