"""Powers of two that bring gradients into a format's range. Multiplying by them never rounds.

- `none`: no scaling.
- `aps`: Auto Precision Scaling (arXiv 1911.08907). Per layer, `E = ceil(log2(max |g| * world))` bounds the sum; the ranks agree
  on the largest E by one MAX of a byte a layer; everybody multiplies by 2^(exponent of the format's maximum - E).
- `aps_delayed`: the same with last step's E and one binade of headroom. E travels with the gradients: no extra message.
- `local`: every message is scaled by its own maximum, layer by layer, and carries the exponent: no agreement, no headroom.
- `block:<n>`: the same for every n elements.

Where no scale is named, a format has its own, `default_scale`. What a scale costs is in scale_warnings.py.

Exponents travel as bytes. 0 says that everything is zero, 255 that something is not finite. Where the published code takes the
logarithm of zero, or scales by infinity, the exponents here end at +-126: that is as far as float32 reaches.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat
from lowp.tensor.carrier import F32, exponent_below
from lowp.tensor.carrier import power_of_two as power_of_two
from lowp.tensor.elementwise import Elementwise
from lowp.tensor.fitting import fitting_exponents
from lowp.tensor.fitting import largest as largest
from lowp.tensor.scale import Scale as Scale
from lowp.tensor.scale import parse_scale

ZERO, NONFINITE = 0, 255
_BOUND_BIAS = 116  # of E, which spans -115 (a layer below 2^-115 counts as that) to 138 (float32's maximum on 1024 ranks)
_SHIFT_BIAS = 127  # of shifts
MAX_SHIFT = 126
KINDS = ("none", "aps", "aps_delayed", "local", "block:<n>")


def scale_of(text: "str | Scale") -> Scale:
    """Parse one of `KINDS`."""
    return parse_scale(text, KINDS)


def default_scale(fmt: AnyFormat, keep: float = 1.0) -> Scale:
    """The scale of a format where none is named: `block:32` for formats of fewer than 8 bits, `local` for all others.

    A narrow format has few numbers: with one scale for a whole layer, most of a gradient rounds to zero. Block formats have
    scales of their own, and the numbers that top-k keeps (`keep` < 1) are all large: both have `local`.

    Why 32, and not 16 or 64: for formats of 4 bits, 16 has 5 to 20 % less error for .25 bits more an element, 64 has 8 to 25 %
    more for .125 bits less. A bit is worth a factor of 4 in error; counted so, 32 is 14 to 33 % better than 16, and between 9 %
    worse and 5 % better than 64 (docs/LOG.md).
    """
    narrow = not isinstance(fmt, BlockFormat) and fmt.bits < 8 and keep == 1
    return Scale("block", 32) if narrow else Scale("local")


SCALES = (Scale("none"), Scale("aps"), Scale("aps_delayed"), Scale("local"), Scale("block", 64))


def bound_bytes(maxima: Tensor, world: int) -> Tensor:
    """The byte of `E = ceil(log2(maximum * world))` for each layer's largest magnitude (NaN or infinite where it is)."""
    bits = maxima.to(torch.float32).abs().contiguous().view(torch.int32)  # NaN may have a sign
    found = torch.empty(bits.shape, dtype=torch.uint8, device=bits.device)
    write_bounds(bits, world, found)
    return found


def write_bounds(maxima: Tensor, world: int, out: Tensor) -> None:
    """The same for largest magnitudes given as the bits of float32; `out` is uint8, or int32."""
    _bounding(world, out.dtype)([maxima], [out])


@lru_cache(maxsize=64)
def _bounding(world: int, dtype: torch.dtype) -> Elementwise:
    def bounds(maxima: Tensor) -> list[Tensor]:
        bits = (maxima.view(torch.float32).to(torch.float64) * world).view(torch.int64)
        bound = (bits >> 52) - 1023 + ((bits & ((1 << 52) - 1)) != 0).to(torch.int64)  # a power of two is its own bound
        return [_marked((bound + _BOUND_BIAS).clamp(1, 254).to(torch.int32), maxima.view(torch.float32)).to(dtype)]

    return Elementwise(bounds, (torch.int32,), (dtype,))


def write_factors(bounds: Tensor, emax: Tensor, usual: Tensor, factors: Tensor, units: Tensor) -> None:
    """By what each layer is multiplied, `factors`: 2^`aps_shifts`. What its sum counts in, `units`: `usual / factors`; NaN for
    layers that are not finite on some rank. Bounds are uint8, `emax` int32, the others float32."""
    _FACTORS([bounds, emax, usual], [factors, units])


def _factors(bounds: Tensor, emax: Tensor, usual: Tensor) -> list[Tensor]:
    byte = bounds.to(torch.int32)
    factors = power_of_two(aps_shifts(byte, emax))
    return [factors, torch.where(byte == NONFINITE, torch.full_like(usual, math.nan), usual / factors)]


_FACTORS = Elementwise(_factors, (torch.uint8, torch.int32, torch.float32), (torch.float32, torch.float32))


def aps_shifts(bounds: Tensor, emax: Tensor) -> Tensor:
    """The power of two for each layer, from the agreed bytes and the exponent of each layer's format's maximum."""
    shifts = (emax - (bounds.to(torch.int32) - _BOUND_BIAS)).clamp(-MAX_SHIFT, MAX_SHIFT)
    return torch.where((bounds == ZERO) | (bounds == NONFINITE), torch.zeros_like(shifts), shifts)


def write_remembered(found: Tensor, delayed: Tensor, bounds: Tensor) -> None:
    """Bounds for the next step of `aps_delayed`: those that were found (int32), where a layer is `delayed` (uint8) and was
    neither zero nor not finite; else they stay what they are."""
    _REMEMBERED([found, delayed, bounds], [bounds])


def _remembered(found: Tensor, delayed: Tensor, bounds: Tensor) -> list[Tensor]:
    learnt = (delayed.to(torch.int32) != 0) & (found != ZERO) & (found != NONFINITE)
    return [torch.where(learnt, found, bounds.to(torch.int32)).to(torch.uint8)]


_REMEMBERED = Elementwise(_remembered, (torch.int32, torch.uint8, torch.uint8), (torch.uint8,))


def emax_of(fmt: AnyFormat) -> int:
    """The exponent of the largest power of two that numbers are scaled up to: 15 for e5m2, as in the paper's 2^(e-1) - 1."""
    return exponent_below(fmt.scaled_max)


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


def poisoned(units: Tensor, peaks: Tensor, owners: Tensor, out: Tensor | None = None) -> Tensor:
    """Units of layers: NaN where the header byte of a part (`owners` has the layer of each) says that it is not finite.

    Marks are integers: CUDA adds up floats by an instruction that takes subnormal numbers for zero, and a unit may be 2^-127.
    """
    marks = torch.zeros(units.shape, dtype=torch.int32, device=units.device)
    marks.scatter_reduce_(0, owners, (peaks == NONFINITE).to(torch.int32), "amax")
    return torch.add(units, torch.where(marks != 0, torch.full_like(units, math.nan), torch.zeros_like(units)), out=out)


def divide_(numbers: Tensor, divisor: int) -> Tensor:
    """In place, correctly rounded on every device: for a divisor that is a Python number, CUDA multiplies by its inverse."""
    return numbers if divisor == 1 else numbers.div_(torch.full((), divisor, dtype=numbers.dtype, device=numbers.device))


def _marked(found: Tensor, maxima: Tensor) -> Tensor:
    bits = maxima.view(torch.int32)  # of magnitudes: NaN is above infinity
    found = torch.where(bits == 0, torch.full_like(found, ZERO), found)
    return torch.where(bits >= F32.infinity, torch.full_like(found, NONFINITE), found)
