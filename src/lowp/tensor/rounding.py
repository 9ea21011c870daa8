"""The rounding modes, written once: what is added before the low bits are cut off."""

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.formats.base import Rounding

Bits = Tensor | int  # a number of bits: one for all elements, or one for each


def cut(
    value: Tensor,
    bit: Bits,
    odd: Callable[[], Tensor],
    mode: Rounding,
    negative: Tensor,
    noise: Tensor | None,
    noise_bits: int,
) -> Tensor:
    """`value / 2^bit` rounded to an integer, for magnitudes: toward zero is down, away from zero is up.

    Adding `a` before shifting right rounds up exactly those remainders that are at least 2^bit - a:

    - nearest: half minus one, and one more where the integer below is odd, so that a tie ends on an even one;
    - away from zero: all ones; toward zero: nothing;
    - to odd: all ones if the integer below is even;
    - stochastic: as many random bits as are cut off.

    `odd()` is 1 where the integer below is odd; `negative` is -1 where the number is negative, else 0.
    """
    if isinstance(bit, int) and bit == 0:
        return value
    if mode is Rounding.TOWARD_ZERO:
        return value >> bit
    if mode is Rounding.STOCHASTIC:
        assert noise is not None
        return (value + (noise >> (noise_bits - bit))) >> bit
    ones = (1 << bit) - 1 if isinstance(bit, int) else (torch.ones_like(bit) << bit) - 1
    match mode:
        case Rounding.NEAREST:
            added = (ones >> 1) + odd()
        case Rounding.NEAREST_AWAY:
            added = (ones >> 1) + 1
        case Rounding.UP:
            added = ~negative & ones
        case Rounding.DOWN:
            added = negative & ones
        case Rounding.TO_ODD:
            added = (odd() - 1) & ones
    return (value + added) >> bit


def first_above_zero(half: int, mode: Rounding) -> int | None:
    """Between zero and the smallest value of a format: the bits from which a magnitude is rounded up to it, not to zero.

    `half` are the bits of half the smallest value: the tie, which goes to zero, whose rank is even. None: never. For `up` and
    `down` this is the answer on the side where they lead away from zero.
    """
    match mode:
        case Rounding.NEAREST:
            return half + 1
        case Rounding.NEAREST_AWAY:
            return half
        case Rounding.TOWARD_ZERO:
            return None
        case _:
            return 1


def away_from_zero(mode: Rounding, negative: Tensor) -> Tensor | bool:
    """Does the mode let a magnitude grow at all, for numbers of this sign?"""
    match mode:
        case Rounding.UP:
            return negative == 0
        case Rounding.DOWN:
            return negative != 0
        case Rounding.TOWARD_ZERO:
            return False
        case _:
            return True
