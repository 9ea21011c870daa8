"""Codes of less than a byte, packed in planes: the vectorised cousin of `lowp.pack`.

n codes of b bits are cut into g equal planes, g the fewest codes that fill whole bytes (2 for 4 bits, 8 for 3 bits). Byte t of
the result's planes holds bits of element t of every plane of codes. `lowp.pack` puts neighbours into one byte, which takes
strided memory access; here every operation runs over contiguous bytes, 20 times as fast. The order is nobody's business but
the two ends' of a wire.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes those are."""
    codes = 8 // math.gcd(bits, 8)
    return codes, codes * bits // 8


def planar_bytes(count: int, bits: int) -> int:
    codes, width = group(bits)
    return -(-count // codes) * width


def padded(count: int, bits: int) -> int:
    """How many codes a whole number of groups has."""
    codes, _ = group(bits)
    return -(-count // codes) * codes


def pack_planes(codes: Tensor, bits: int, out: Tensor) -> None:
    """`codes`: uint8, `padded(n, bits)` of them, each below 2^bits. `out`: uint8, `planar_bytes(n, bits)`."""
    per_group, width = group(bits)
    planes, packed = codes.view(per_group, -1), out.view(width, -1)
    for i in range(width):
        first = True
        for j in range(per_group):
            shift = bits * j - 8 * i  # where plane j starts in byte i
            if not -bits < shift < 8:
                continue
            bits_here = planes[j] << shift if shift >= 0 else planes[j] >> -shift  # uint8 drops what leaves the byte
            if first:
                packed[i].copy_(bits_here)
            else:
                packed[i].bitwise_or_(bits_here)
            first = False


def unpack_planes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes, `padded(count, bits)` of them."""
    per_group, width = group(bits)
    codes = torch.empty(padded(count, bits), dtype=torch.uint8, device=packed.device)
    planes, stored = codes.view(per_group, -1), packed.view(width, -1)
    for j in range(per_group):
        i, shift = divmod(bits * j, 8)
        torch.bitwise_right_shift(stored[i], shift, out=planes[j])
        if shift + bits > 8:
            planes[j].bitwise_or_(stored[i + 1] << (8 - shift))
        planes[j].bitwise_and_((1 << bits) - 1)
    return codes
