"""Powers of two that bring gradients into a format's range. Multiplying by them never rounds.

- `none`: no scaling.
- `aps`: Auto Precision Scaling (arXiv 1911.08907). Per layer, `E = ceil(log2(max |g| * world))` bounds the sum; the ranks agree
  on the largest E by one MAX of a byte a layer; everybody multiplies by 2^(exponent of the format's maximum - E).
- `aps_delayed`: the same with last step's E and one binade of headroom. E travels with the gradients: no extra message.
- `local`: every message is scaled by its own maximum, layer by layer, and carries the exponent: no agreement, no headroom.
- `block:<n>`: the same for every n elements.

The bound of `aps` is a bound of the sum: log2(world) of a format's binades are headroom, which a rank's own numbers do not use.
A format has `binades` from its smallest number to the largest power of two: 31 in e5m2, 17 in e4m3fn, 6 in int8, 3 in e2m1fn.
Where n are left for a rank's numbers, the sum of normal ones has a relative error of about 2.3 / 2^n or the format's own,
whichever is larger: .14 for n = 4, .28 for 3, .57 for 2, and all is zero below (measured, docs/LOG.md). With fewer than
`ENOUGH_BINADES`, `warn_of_headroom` says so.

Exponents travel as bytes. 0 says that everything is zero, 255 that something is not finite. Where the published code takes the
logarithm of zero, or scales by infinity, the exponents here end at +-126: that is as far as float32 reaches.
"""

import logging
import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat
from lowp.tensor.carrier import F32, exponent_below
from lowp.tensor.carrier import power_of_two as power_of_two
from lowp.tensor.fitting import fitting_exponents
from lowp.tensor.fitting import largest as largest
from lowp.tensor.kernels import Elementwise
from lowp.tensor.scale import Scale as Scale
from lowp.tensor.scale import parse_scale

logger = logging.getLogger("lowp")

ENOUGH_BINADES = 4
ZERO, NONFINITE = 0, 255
_BOUND_BIAS = 116  # of E, which spans -115 (a layer below 2^-115 counts as that) to 138 (float32's maximum on 1024 ranks)
_SHIFT_BIAS = 127  # of shifts
MAX_SHIFT = 126
KINDS = ("none", "aps", "aps_delayed", "local", "block:<n>")


def scale_of(text: "str | Scale") -> Scale:
    """Parse one of `KINDS`."""
    return parse_scale(text, KINDS)


SCALES = (Scale("none"), Scale("aps"), Scale("aps_delayed"), Scale("local"), Scale("block", 64))


def bound_bytes(maxima: Tensor, world: int) -> Tensor:
    """The byte of `E = ceil(log2(maximum * world))` for each layer's largest magnitude (NaN or infinite where it is)."""
    return _bounding(world)(maxima.to(torch.float32).contiguous()).view(torch.uint8)


@lru_cache(maxsize=64)
def _bounding(world: int) -> Elementwise:
    def bounds(maxima: Tensor) -> Tensor:
        maxima = maxima.abs()  # NaN may have a sign
        bits = (maxima.to(torch.float64) * world).view(torch.int64)
        bound = (bits >> 52) - 1023 + ((bits & ((1 << 52) - 1)) != 0).to(torch.int64)  # a power of two is its own bound
        return _marked((bound + _BOUND_BIAS).clamp(1, 254).to(torch.int32), maxima).to(torch.int8)

    return Elementwise(bounds, (torch.float32,), torch.int8)


def aps_factors(bounds: Tensor, emax: Tensor) -> Tensor:
    """By what each layer is multiplied (float32): 2^`aps_shifts`."""
    return _FACTORS(bounds.view(torch.int8), emax)


def aps_shifts(bounds: Tensor, emax: Tensor, headroom: int = 0) -> Tensor:
    """The power of two for each layer, from the agreed bytes and the exponent of each layer's format's maximum."""
    shifts = (emax - (bounds.to(torch.int32) - _BOUND_BIAS) - headroom).clamp(-MAX_SHIFT, MAX_SHIFT)
    return torch.where((bounds == ZERO) | (bounds == NONFINITE), torch.zeros_like(shifts), shifts)


_FACTORS = Elementwise(
    lambda bounds, emax: power_of_two(aps_shifts(bounds.to(torch.int32) & 0xFF, emax)), (torch.int8, torch.int32), torch.float32
)


def emax_of(fmt: AnyFormat) -> int:
    """The exponent of the largest power of two that numbers are scaled up to: 15 for e5m2, as in the paper's 2^(e-1) - 1."""
    return exponent_below(fmt.scaled_max)


def binades_left(fmt: AnyFormat, scale: "Scale", world: int) -> int | None:
    """How many binades the headroom of `aps` leaves for a rank's own numbers; None where nothing is taken from them."""
    if not scale.kind.startswith("aps") or isinstance(fmt, BlockFormat):  # whose blocks have scales of their own
        return None
    return binades(fmt) - (world - 1).bit_length() - (scale.kind == "aps_delayed")


def binades(fmt: AnyFormat) -> int:
    return emax_of(fmt) - exponent_below(fmt.smallest)


def warn_of_headroom(used: "Iterable[tuple[AnyFormat, Scale]]", world: int) -> None:
    """Say once, for each format, where the headroom of `aps` leaves too little of it."""
    for fmt, scale in used:
        left = binades_left(fmt, scale, world)
        if world == 1 or left is None or left >= ENOUGH_BINADES or (str(fmt), scale, world) in _warned:
            continue
        _warned.add((str(fmt), scale, world))
        logger.warning(
            "scale='%s' leaves %d of the %d binades of %s to gradients on %d ranks: the others are headroom for the sum. %s; "
            "take scale='local' or 'block:<n>'",
            scale,
            max(0, left),
            binades(fmt),
            fmt,
            world,
            "Most numbers round to zero" if left > 1 else "Nearly all numbers round to zero",
        )


_warned: set[tuple[str, Scale, int]] = set()


def fitting_bytes(maxima: Tensor, fmt: AnyFormat) -> Tensor:
    """The byte of the largest shift that keeps each maximum (float32) within the format."""
    return fitting_numbers(maxima.abs(), fmt).to(torch.uint8)  # NaN may have a sign


def fitting_numbers(maxima: Tensor, fmt: AnyFormat) -> Tensor:
    """The same as int32, for kernels."""
    return _marked(fitting_exponents(maxima, fmt).clamp(-MAX_SHIFT, MAX_SHIFT) + _SHIFT_BIAS, maxima)


def shifts_of(fitting: Tensor) -> Tensor:
    """The powers of two that such bytes stand for."""
    shifts = fitting.to(torch.int32) - _SHIFT_BIAS
    return torch.where((fitting == ZERO) | (fitting == NONFINITE), torch.zeros_like(shifts), shifts)


def units_of(fitting: Tensor) -> Tensor:
    """What codes count in: 2^-shift, or NaN where something was not finite."""
    unit = power_of_two(-shifts_of(fitting))
    return torch.where(fitting == NONFINITE, torch.full_like(unit, math.nan), unit)


def _marked(found: Tensor, maxima: Tensor) -> Tensor:
    bits = maxima.view(torch.int32)  # of magnitudes: NaN is above infinity
    found = torch.where(bits == 0, torch.full_like(found, ZERO), found)
    return torch.where(bits >= F32.infinity, torch.full_like(found, NONFINITE), found)
