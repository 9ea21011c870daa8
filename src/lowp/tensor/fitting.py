"""The power of two that brings numbers into a format's range: what the wire and the simulation of models scale by.

With the largest magnitude 2^e * 1.f and the format's own (`scaled_max`) 2^E * 1.F, the *fitting* exponent is E - e, and one
less where f exceeds F: the largest number lands as high as it can without leaving the range. It is found among the bits, as
integers: no logarithm, no rounding. (Subnormal maxima count as if they were of the binade below the normal ones; who scales
limits the exponent anyway.)
"""

import math

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.tensor.carrier import F32, F64, exponent_below


def fitting_exponents(maxima: Tensor, fmt: AnyFormat) -> Tensor:
    """Of each maximum, float32 or float64, positive and finite (others give nonsense); integers as wide."""
    carrier = F64 if maxima.dtype == torch.float64 else F32
    top = exponent_below(fmt.scaled_max)
    fraction = math.floor((math.ldexp(fmt.scaled_max, -top) - 1) * (1 << carrier.fraction_bits))
    bits = maxima.view(carrier.storage)
    beyond = (bits & ((1 << carrier.fraction_bits) - 1)) > fraction
    return top + carrier.bias - (bits >> carrier.fraction_bits) - beyond.to(carrier.storage)


def fitting_exponent(maximum: float, fmt: AnyFormat) -> int:
    """The same of one number, for the CPU, where ten small tensor operations cost more than the work that they save."""
    exponent, top = max(exponent_below(maximum), -F32.bias), exponent_below(fmt.scaled_max)
    return top - exponent - (math.ldexp(maximum, -exponent) > math.ldexp(fmt.scaled_max, -top))
