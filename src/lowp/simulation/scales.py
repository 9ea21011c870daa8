"""Scales: the power of two that a tensor is multiplied by before it is rounded, and divided by afterwards.

Neither rounds, so a scale only moves the format's grid to where the numbers are. The *fitting* power brings the largest finite
magnitude as high as it can without leaving the format's range (tensor/fitting.py).

| scale | one power for | from |
|---|---|---|
| `none` | | |
| `tensor` | every tensor | its own maximum, fitting |
| `channel` | every channel | its own maximum, fitting |
| `aps` | every tensor | Auto Precision Scaling (arXiv 1911.08907) of one rank: E - ceil(log2(maximum)) |
| `block:<n>` | n neighbours of a row | their maximum, as the block format `block(<format>, n, e8m0fnu)` does |
| `delayed:<n>` | every tensor | the largest maximum of the last n steps (16 if n is not given), fitting |
| `calibrated` | every tensor | the largest maximum of a calibration (calibration.py), fitting |

`tensor`, `channel` and `aps` keep everything in range; blocks saturate. `delayed` and `calibrated` go by other numbers than
those they scale, so that some are too large as a matter of course: they saturate as well, as hardware does behind such scales,
at the format's largest value. With `none`, numbers beyond the range become what the format says: infinity if it has one, else
NaN if it has that, else the largest value. Where there is no maximum to go by (no history yet, or nothing but zeros in it),
`delayed` and `calibrated` take the tensor's own.

`aps` does what the wire does with gradients: a tensor of zeros, or with a number that is not finite, stays as it is, and what
lies below 2^-115 counts as that.

Exponents end at +-126 (float64: 1022), so that the power and its inverse are normal numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.tensor.carrier import F32, Carrier, exponent_below
from lowp.tensor.fitting import carrier_of, fitting_exponent, fitting_exponents
from lowp.tensor.scale import Scale, parse_scale

KINDS = ("none", "tensor", "channel", "aps", "block:<n>", "delayed", "delayed:<n>", "calibrated")
_APS_LOWEST = -115  # of the wire's exponents, which travel as bytes


NONE = Scale("none")


def simulated_scale(text: "str | Scale") -> Scale:
    """Parse one of `KINDS`."""
    return parse_scale(text, KINDS)


def checked_scales(given: "str | Scale | Mapping[str, str | Scale]", roles: tuple[str, ...], where: str) -> dict[str, Scale]:
    """Scales by role, from one for all of them or a mapping."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(roles, simulated_scale(given))
    for role in given:
        if role not in roles:
            raise ValueError(f"unknown role {role!r} in {where}; roles are {', '.join(roles)}")
    return {role: simulated_scale(scale) for role, scale in given.items()}


def fitting_shift(maximum: Tensor, fmt: AnyFormat) -> Tensor:
    """The exponent of the power of two that puts each maximum just below the format's `scaled_max`."""
    limit = carrier_of(maximum).bias - 1
    return fitting_exponents(maximum, fmt).clamp(-limit, limit)


def known_shift(maximum: float, fmt: AnyFormat) -> int:
    """`fitting_shift` of one number that is known."""
    return min(max(fitting_exponent(maximum, fmt), 1 - F32.bias), F32.bias - 1)


def aps_shift(maximum: Tensor, fmt: AnyFormat) -> Tensor:
    """The exponent that puts 2^ceil(log2(maximum)) onto the format's largest power of two."""
    carrier = carrier_of(maximum)
    bits = maximum.view(carrier.storage)
    whole = (bits & ((1 << carrier.fraction_bits) - 1)) == 0  # a power of two is its own bound
    bound = (bits >> carrier.fraction_bits) - carrier.bias + 1 - whole.to(carrier.storage)
    shift = (exponent_below(fmt.scaled_max) - bound.clamp(min=_APS_LOWEST)).clamp(1 - carrier.bias, carrier.bias - 1)
    return torch.where((bits == 0) | (bits >= carrier.infinity), torch.zeros_like(shift), shift)


def power_of_two(exponent: Tensor, carrier: Carrier) -> Tensor:
    return ((exponent + carrier.bias) << carrier.fraction_bits).view(carrier.dtype)
