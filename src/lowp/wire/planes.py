"""Codes of less than a byte, packed in planes: the vectorised cousin of `lowp.pack`.

n codes of b bits are cut into g equal planes, g the fewest codes that fill whole bytes (2 for 4 bits, 8 for 3 bits). Byte t of
the result's planes holds bits of element t of every plane of codes. `lowp.pack` puts neighbours into one byte, which takes
strided memory access; here every operation runs over contiguous bytes, 20 times as fast. The order is nobody's business but
the two ends' of a wire.
"""

import torch
from torch import Tensor

from lowp.tensor.packing import group
from lowp.wire.scratch import room


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
            target = packed[i] if first else room(packed[i].numel(), torch.uint8, out.device, 1)
            if shift >= 0:
                torch.bitwise_left_shift(planes[j], shift, out=target)  # uint8 drops what leaves the byte
            else:
                torch.bitwise_right_shift(planes[j], -shift, out=target)
            if not first:
                packed[i].bitwise_or_(target)
            first = False


def unpack_planes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes, `padded(count, bits)` of them (in memory that the next call uses again)."""
    per_group, width = group(bits)
    codes = room(padded(count, bits), torch.uint8, packed.device)
    planes, stored = codes.view(per_group, -1), packed.view(width, -1)
    for j in range(per_group):
        i, shift = divmod(bits * j, 8)
        torch.bitwise_right_shift(stored[i], shift, out=planes[j])
        if shift + bits > 8:
            upper = room(planes[j].numel(), torch.uint8, packed.device, 1)
            planes[j].bitwise_or_(torch.bitwise_left_shift(stored[i + 1], 8 - shift, out=upper))
        if shift + bits != 8:
            planes[j].bitwise_and_((1 << bits) - 1)
    return codes
