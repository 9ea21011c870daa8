"""The power of two that brings numbers into a format's range: what the wire and the simulation of models scale by.

With the largest magnitude 2^e * 1.f and the format's own (`scaled_max`) 2^E * 1.F, the *fitting* exponent is E - e, and one
less where f exceeds F: the largest number lands as high as it can without leaving the range. It is found among the bits, as
integers: no logarithm, no rounding. (Subnormal maxima count as if they were of the binade below the normal ones; who scales
limits the exponent anyway.)
"""

import math

import torch
from torch import Tensor

from lowp.compat import becomes_graph
from lowp.formats import AnyFormat
from lowp.tensor.carrier import F32, F64, Carrier, exponent_below
from lowp.tensor.dynamo import in_graph


def carrier_of(x: Tensor) -> Carrier:
    """Float32 or float64, which have the exponents that scaling needs."""
    return F64 if x.dtype == torch.float64 else F32


@in_graph
def largest(x: Tensor, axis: int | None = None, finite: bool = False) -> Tensor:
    """The largest magnitude in the tensor, or in each channel of dimension `axis`; of the `finite` numbers, or of all.

    It is NaN if one of them is. It has the carrier's dtype and broadcasts against x. It does not wait for the device.
    """
    carrier = carrier_of(x)
    if axis is None and not finite and x.numel() and not becomes_graph():
        # No tensor of magnitudes in memory; vector_norm takes ten times as long on a CPU.
        low, high = torch.aminmax(x.detach() if x.requires_grad else x)
        found = torch.maximum(-low, high).abs_()  # of zero too, which may be negative here
        return found if found.dtype == carrier.dtype else found.to(carrier.dtype)
    wide = x.detach().to(carrier.dtype)
    if x.numel() == 0:
        return wide.new_zeros(())
    magnitude = wide.view(carrier.storage) & carrier.magnitude
    if finite:
        magnitude = torch.where(magnitude < carrier.infinity, magnitude, torch.zeros_like(magnitude))
    if axis is None or x.dim() == 0:
        found = magnitude.amax()
    else:  # in a tensor of one dimension each number is a channel of its own (and amax of no dimensions means all of them)
        around = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
        found = magnitude.amax(around, keepdim=True) if around else magnitude
    return found.view(carrier.dtype)


def fitting_exponents(maxima: Tensor, fmt: AnyFormat) -> Tensor:
    """Of each maximum, float32 or float64, positive and finite (others give nonsense); integers as wide."""
    carrier = carrier_of(maxima)
    top = exponent_below(fmt.scaled_max)
    fraction = math.floor((math.ldexp(fmt.scaled_max, -top) - 1) * (1 << carrier.fraction_bits))
    bits = maxima.view(carrier.storage)
    beyond = (bits & ((1 << carrier.fraction_bits) - 1)) > fraction
    return top + carrier.bias - (bits >> carrier.fraction_bits) - beyond.to(carrier.storage)


def fitting_exponent(maximum: float, fmt: AnyFormat) -> int:
    """The same of one number, for the CPU, where ten small tensor operations cost more than the work that they save."""
    exponent, top = max(exponent_below(maximum), -F32.bias), exponent_below(fmt.scaled_max)
    return top - exponent - (math.ldexp(maximum, -exponent) > math.ldexp(fmt.scaled_max, -top))
