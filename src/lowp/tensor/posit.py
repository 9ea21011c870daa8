"""Posits from the bits of a carrier: the bit string is assembled in integers and cut like any other.

A positive posit is a string: a run of equal bits and its end (the regime `r`: r + 1 ones and a zero, or -r zeros and a one),
es exponent bits, the fraction. The number is 2^(r * 2^es + exponent) * 1.fraction. Strings of a fixed length are in the order
of their numbers, so the rank of a magnitude is its string cut to n - 1 bits, rounded as an integer would be.
"""

import torch
from torch import Tensor

from lowp.formats.base import Rounding
from lowp.formats.posit import PositFormat
from lowp.tensor.carrier import Carrier
from lowp.tensor.rounding import away_from_zero, cut


def rank(magnitude: Tensor, negative: Tensor, fmt: PositFormat, carrier: Carrier, mode: Rounding) -> Tensor:
    """The ranks of magnitudes (finite), for every mode but stochastic.

    Above the largest posit the result is that one. Between zero and the smallest, rounding to nearest never gives zero.
    """
    fraction_bits, es = carrier.fraction_bits, fmt.exponent_size
    largest = carrier.power_of_two(fmt._max_exponent)
    smallest = carrier.power_of_two(-fmt._max_exponent)
    inside = magnitude.clamp(smallest, largest - 1)
    exponent = (inside >> fraction_bits) - carrier.bias
    regime = exponent >> es
    # What follows the regime, as one integer: the low exponent bits and the fraction.
    tail = ((exponent & ((1 << es) - 1)) << fraction_bits) + (inside & ((1 << fraction_bits) - 1))
    run = torch.where(regime >= 0, regime + 2, 1 - regime)
    room = fmt.width - 1 - run  # bits left for the tail
    opening = torch.ones_like(room) << room  # a one, after zeros
    start = torch.where(regime >= 0, (1 << (fmt.width - 1)) - 2 * opening, opening)
    drop = es + fraction_bits - room
    result = start + cut(tail, drop, lambda: (start + (tail >> drop)) & 1, mode, negative, None, carrier.noise_bits)
    result = torch.where(magnitude >= largest, torch.full_like(result, fmt.max_code), result)
    grows = away_from_zero(mode, negative)
    tiny = magnitude > 0
    if not isinstance(grows, bool):
        tiny = tiny & grows
    under = tiny.to(result.dtype) if grows is not False else torch.zeros_like(result)
    return torch.where(magnitude < smallest, under, result)


def code_of_rank(rank: Tensor, negative: Tensor, fmt: PositFormat) -> Tensor:
    """Negative posits are the two's complement of positive ones."""
    return ((rank ^ negative) - negative) & ((1 << fmt.width) - 1)
