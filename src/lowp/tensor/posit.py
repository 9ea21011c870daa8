"""Posits from the bits of a carrier: the bit string is assembled in integers and cut like any other.

A positive posit is a string: a run of equal bits and its end (the regime `r`: r + 1 ones and a zero, or -r zeros and a one),
es exponent bits, the fraction. The number is 2^(r * 2^es + exponent) * 1.fraction. Strings of a fixed length are in the order
of their numbers, so the rank of a magnitude is its string cut to n - 1 bits, rounded as an integer would be.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.formats.base import Rounding
from lowp.formats.posit import PositFormat
from lowp.tensor.carrier import Carrier
from lowp.tensor.rounding import away_from_zero, cut


@dataclass(frozen=True)
class Shape:
    """A posit format's constants on one carrier."""

    carrier: Carrier
    width: int
    exponent_size: int
    max_code: int
    nan_code: int
    largest_bits: int
    smallest_bits: int

    @property
    def is_normal(self) -> bool:
        """Are all posits normal numbers of the carrier, with bits to spare?"""
        return self.smallest_bits >= 1 << self.carrier.fraction_bits and self.width - 3 < self.carrier.fraction_bits

    @staticmethod
    def of(fmt: PositFormat, carrier: Carrier) -> "Shape":
        largest, smallest = (carrier.power_of_two(sign * fmt.max_exponent) for sign in (1, -1))
        return Shape(carrier, fmt.width, fmt.exponent_size, fmt.max_code, fmt.nan_code, largest, smallest)


def rank(magnitude: Tensor, negative: Tensor, shape: Shape, mode: Rounding) -> Tensor:
    """The ranks of magnitudes (finite), for every mode but stochastic.

    Above the largest posit the result is that one. Between zero and the smallest, rounding to nearest never gives zero.
    """
    carrier, fraction_bits, es = shape.carrier, shape.carrier.fraction_bits, shape.exponent_size
    inside = magnitude.clamp(shape.smallest_bits, shape.largest_bits - 1)
    # Exponent and fraction as one integer; the low exponent bits and the fraction are what follows the regime. (Not as
    # (exponent - bias) >> es: of that ptxas 12, in a thread that needs one of two results, makes nonsense.)
    scaled = inside - (carrier.bias << fraction_bits)
    regime, tail = scaled >> (fraction_bits + es), scaled & ((1 << (fraction_bits + es)) - 1)
    run = torch.where(regime >= 0, regime + 2, 1 - regime)
    room = shape.width - 1 - run  # bits left for the tail
    opening = torch.ones_like(room) << room  # a one, after zeros
    start = torch.where(regime >= 0, (1 << (shape.width - 1)) - 2 * opening, opening)
    drop = es + fraction_bits - room
    result = start + cut(tail, drop, lambda: (start + (tail >> drop)) & 1, mode, negative, None, carrier.noise_bits)
    result = torch.where(magnitude >= shape.largest_bits, torch.full_like(result, shape.max_code), result)
    grows = away_from_zero(mode, negative)
    if grows is False:
        under = torch.zeros_like(result)
    else:
        under = ((magnitude > 0) if grows is True else (magnitude > 0) & grows).to(result.dtype)
    return torch.where(magnitude < shape.smallest_bits, under, result)


def rounded(magnitude: Tensor, negative: Tensor, shape: Shape, mode: Rounding) -> Tensor:
    """The carrier's bits of the posits that `rank` finds, where `Shape.is_normal`: nothing has to be looked up.

    Where the string is cut, so is the carrier's: exponent and fraction, read as one integer, lose as many bits as the string.
    """
    carrier, fraction_bits, es = shape.carrier, shape.carrier.fraction_bits, shape.exponent_size
    scaled = magnitude.clamp(shape.smallest_bits, shape.largest_bits - 1) - (carrier.bias << fraction_bits)
    regime = scaled >> (fraction_bits + es)
    below = regime >> (regime.dtype.itemsize * 8 - 1)  # -1 where the regime is negative: a run of zeros
    drop = (regime ^ below) + (es + fraction_bits - shape.width + 3)
    # The last bit of the string is the last that is kept of the tail, or the end of the regime: a one after zeros.
    bare = drop == es + fraction_bits
    result = cut(scaled, drop, lambda: torch.where(bare, below, scaled >> drop) & 1, mode, negative, None, carrier.noise_bits)
    result = (result << drop) + (carrier.bias << fraction_bits)
    result = torch.where(magnitude >= shape.largest_bits, torch.full_like(result, shape.largest_bits), result)
    grows = away_from_zero(mode, negative)
    smallest, nothing = torch.full_like(result, shape.smallest_bits), torch.zeros_like(result)
    under = nothing if grows is False else torch.where((magnitude > 0) & grows, smallest, nothing)
    return torch.where(magnitude < shape.smallest_bits, under, result)


def code_of_rank(rank: Tensor, negative: Tensor, shape: Shape) -> Tensor:
    """Negative posits are the two's complement of positive ones."""
    return ((rank ^ negative) - negative) & ((1 << shape.width) - 1)
