"""Numbers of any dtype as the bits of float64 in int64 tensors, and exact products and quotients of such bits.

Scales of blocks are applied here. Of 16-bit numbers no float tensor is made: a training in 16 bits stays free of wider floats.
No chip, compiler or flush-to-zero mode changes a result.
"""

import torch
from torch import Tensor

from lowp.tensor.carrier import CARRIERS, F64
from lowp.tensor.grid import normalized

FRACTION = (1 << F64.fraction_bits) - 1
LEADING = 1 << F64.fraction_bits  # the leading bit of a significand; also the bits of the smallest normal number
ONE = F64.bias << F64.fraction_bits  # the bits of 1.0
SIGNIFICAND = F64.fraction_bits + 1  # bits of a significand


def widen(x: Tensor) -> Tensor:
    """The bits of x's numbers in float64.

    A subnormal is shifted left until its leading bit stands where normal numbers have theirs; its exponent falls by as much.
    """
    own = CARRIERS[x.dtype]
    stored = x.view(own.storage)
    if own is F64:
        return stored
    magnitude = stored & own.magnitude
    field = (magnitude >> own.fraction_bits).clamp(min=1)
    significand = magnitude - (field - 1 << own.fraction_bits)
    if own.storage == torch.int16:
        significand, moved = normalized(significand, own.fraction_bits + 1)  # in 16 bits, which cost little
        bits = significand.to(torch.int64) << (F64.fraction_bits - own.fraction_bits)
        bits = bits + (((field - moved).to(torch.int64) + (F64.bias - own.bias - 1)) << F64.fraction_bits)
    else:  # float32: as an integer that becomes a float64, which normalizes it
        bits = significand.to(torch.float64).view(torch.int64)
        bits = bits + ((field.to(torch.int64) - (own.bias + own.fraction_bits)) << F64.fraction_bits)
    infinity = (2 * F64.bias + 1 << F64.fraction_bits) - (own.infinity << (F64.fraction_bits - own.fraction_bits))
    special = (magnitude.to(torch.int64) << (F64.fraction_bits - own.fraction_bits)) + infinity
    bits = torch.where(magnitude >= own.infinity, special, bits)
    return torch.where(magnitude == 0, torch.zeros_like(bits), bits) | (stored.to(torch.int64) & F64.sign)


def multiply(a: Tensor, b: Tensor, a_width: int, b_width: int) -> Tensor:
    """a * b for positive, finite, normal b; significands have at most `a_width` and `b_width` bits, together at most 53: exact.

    Finite products must be normal numbers of float64 (BlockFormat sees to it). Infinities and NaN stay what they are.
    """
    magnitude = a & F64.magnitude
    kept = (magnitude == 0) | (magnitude >= F64.infinity)
    if b_width == 1:  # a power of two: exponents add up
        return torch.where(kept, a, magnitude.clamp(max=F64.infinity - 1) + (b - ONE) | (a & F64.sign))
    product = _significand(magnitude, a_width) * _significand(b, b_width) << (SIGNIFICAND - a_width - b_width)
    carry = product >> F64.fraction_bits  # 1: the product of two significands in [1, 2) has reached 2
    fields = (magnitude >> F64.fraction_bits) + (b >> F64.fraction_bits) + carry
    bits = (fields - F64.bias - 1 << F64.fraction_bits) + (product << 1 - carry)
    return torch.where(kept, a, bits | (a & F64.sign))


def multiply_any(a: Tensor, b: Tensor, a_width: int, b_width: int) -> Tensor:
    """The same for any b: what other programs wrote may be negative, zero, infinite or NaN. As in IEEE 754."""
    size, magnitude = b & F64.magnitude, a & F64.magnitude
    usual = (size > 0) & (size < F64.infinity)
    product = multiply(a, torch.where(usual, size, torch.full_like(b, ONE)), a_width, b_width) ^ (b & F64.sign)
    # Zero times what is finite is zero, infinity times what is not zero is infinity: for other magnitudes it is NaN.
    least = (size > 0).to(torch.int64)
    most = torch.where(size > F64.infinity, torch.zeros_like(size), F64.infinity - 1 + least)
    defined = (magnitude >= least) & (magnitude <= most)
    strange = torch.where(defined, size | (product & F64.sign), torch.full_like(product, F64.nan))
    return torch.where(usual, product, strange)


def divide(a: Tensor, b: Tensor, b_width: int) -> Tensor:
    """a / b for positive or zero a and positive, finite, normal b of at most `b_width` significant bits (2 to 53).

    The quotient of the significands is cut off, not rounded, after about 64 - b_width bits (51 at most); a last bit of 1 is
    appended where something was cut off (sticky). Such a quotient lies on the same side as the exact one of every number that
    has fewer bits, so whatever is rounded to fewer bits afterwards is rounded right: in all modes, ties included. Quotients
    below float64's normal numbers come out tiny, but never as zero; those above its range in its largest binade.
    """
    shift = min(10, b_width - 2)  # as far as 63 bits hold it, and a significand of 53 bits is enough
    whole, divisor = _significand(a, SIGNIFICAND) << shift, _significand(b, b_width)
    quotient = torch.div(whole, divisor, rounding_mode="trunc")
    sticky = (whole - quotient * divisor).clamp(max=1)
    significand = ((quotient << 1) + sticky) << (b_width - 2 - shift)
    at_least_one = significand >> F64.fraction_bits  # 0: a's significand is smaller than b's
    field = (a >> F64.fraction_bits) + at_least_one + (F64.bias - 2 - (b >> F64.fraction_bits))
    bits = (field.clamp(0, 2 * F64.bias - 1) << F64.fraction_bits) + (significand << 1 - at_least_one)
    return torch.where(a == 0, a, bits)


def _significand(magnitude: Tensor, width: int) -> Tensor:
    """The leading one and what follows it, `width` bits in all."""
    return (magnitude & FRACTION | LEADING) >> (SIGNIFICAND - width)
