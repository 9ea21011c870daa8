"""What a tensor's numbers would suffer in a format, measured on the device without waiting for it.

`measure` turns a tensor into one short float64 vector of counts and sums; vectors of several tensors are merged by `merge`,
and only `summary`, later and on the host, divides them and takes logarithms. Counts stay below 2^53 and are exact. Nothing here
asks the device for a value, so a training step that is measured does not wait for itself.

Exponents, zeros and non-finite numbers are read from bits. The rounding itself is `lowp.quantize`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.tensor.carrier import CARRIERS, FORMAT_OF_DTYPE
from lowp.tensor.ops import quantize
from lowp.tensor.overflow import overflows

# Bins of the exponent histogram: float32 from its smallest subnormal to its largest number, and one bin at either end for what
# only float64 reaches.
LOWEST, HIGHEST = -150, 128
BINS = HIGHEST - LOWEST + 1

SUMS = ("sampled", "zeros", "nonfinite", "underflow", "overflow", "signal", "noise")
EXTREMES = ("largest", "smallest")
CHANGES = 4  # sums of `measure_change`


def own_format(dtype: torch.dtype) -> AnyFormat | None:
    """The format whose numbers a dtype holds; None for float64, which is wider than every format."""
    if dtype == torch.float64:
        return None
    return FORMAT_OF_DTYPE.get(dtype) or parse_format(str(dtype).removeprefix("torch.float8_").removeprefix("torch."))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts, lists and tuples, with the keys that lead to it: `exp_avg`, `blocks.3.scale`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from named_tensors(entry, f"{name}.{key}" if name else str(key))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as real numbers in memory: a DTensor's shard, a sparse tensor's values."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def sample(tensor: Tensor, most: int, fmt: AnyFormat | None = None) -> Tensor:
    """At most `most` elements of a tensor, always the same ones: a view where that is possible.

    Every n-th element in row-major order, with n prime to the number of elements: a stride that shares a factor with the rows'
    length would see some columns only. Block formats scale neighbours together, so for them whole rows are taken.
    """
    tensor = local_part(tensor)
    if isinstance(fmt, BlockFormat) and tensor.dim() > 1 and tensor.numel() > 0:
        rows = tensor.flatten(0, -2)
        return rows[:: _stride(rows.shape[0], max(1, most // rows.shape[1])), :most]
    stride = _stride(tensor.numel(), most)
    if isinstance(fmt, BlockFormat):
        return tensor.reshape(-1)[:most]
    if tensor.is_contiguous():
        return tensor.view(-1)[::stride]
    # take() finds elements through the strides; reshape would copy the whole tensor first.
    return tensor.take(torch.arange(0, tensor.numel(), stride, device=tensor.device))


def _stride(count: int, most: int) -> int:
    stride = -(-count // most)
    if stride <= 1:
        return 1
    while math.gcd(stride, count) > 1:
        stride += 1
    return stride


def measure(numbers: Tensor, fmt: AnyFormat | None, rounded: Tensor | None = None, limit: float | None = None) -> Tensor:
    """Counts and sums for a sample of numbers, in the order of SUMS, EXTREMES and the exponents' bins.

    Underflow is a non-zero number that rounds to zero; overflow is what tensor/overflow.py says. Without a format nothing is
    rounded. Where somebody has rounded the numbers already, `rounded` is what they became. Then overflow is a finite number
    that became none, or one beyond `limit`.
    """
    numbers = numbers.reshape(-1) if not isinstance(fmt, BlockFormat) else numbers
    if numbers.dtype != torch.float64:
        numbers = numbers.to(torch.float32)  # exact, and wide enough for every format's numbers
    numbers = numbers.contiguous()  # a sample is read several times
    carrier = CARRIERS[numbers.dtype]
    magnitude = _magnitude(numbers)
    zero, finite = magnitude == 0, magnitude < carrier.infinity
    exact = torch.where(finite, numbers, 0).to(torch.float64)  # squares of float32 numbers fit
    if rounded is not None:
        damage = _damage_done(exact, zero, finite, rounded.reshape(numbers.shape), limit)
    elif fmt is None:
        nothing = exact.new_zeros(())
        damage = [nothing, nothing, exact.square().sum(), nothing]
    else:
        damage = _damage(numbers, exact, zero, finite, fmt)
    sums = [exact.new_full((), numbers.numel()), zero.sum(), (~finite).sum(), *damage, *_extremes(exact)]
    histogram = _exponents(magnitude, carrier, ~zero & finite)
    return torch.cat([torch.stack([entry.to(torch.float64) for entry in sums]), histogram.to(torch.float64)])


def _damage(numbers: Tensor, exact: Tensor, zero: Tensor, finite: Tensor, fmt: AnyFormat) -> list[Tensor]:
    """What rounding does: counts of underflow and overflow, squares of the numbers that survive and of their errors."""
    rounded = quantize(numbers, fmt)
    magnitude = _magnitude(rounded)
    survives = finite & (magnitude < CARRIERS[numbers.dtype].infinity)
    underflow = finite & ~zero & (magnitude == 0)
    signal = torch.where(survives, exact, 0)
    noise = torch.where(survives, rounded.to(torch.float64) - exact, 0)
    return [underflow.sum(), overflows(numbers, fmt).sum(), signal.square().sum(), noise.square().sum()]


def _damage_done(exact: Tensor, zero: Tensor, finite: Tensor, rounded: Tensor, limit: float | None) -> list[Tensor]:
    """The same of numbers that were rounded elsewhere, with whatever scale."""
    survives = finite & rounded.isfinite()
    beyond = finite & ~survives if limit is None else finite & (~survives | (exact.abs() > limit))
    signal = torch.where(survives, exact, 0)
    noise = torch.where(survives, rounded.to(torch.float64) - exact, 0)
    return [(finite & ~zero & (rounded == 0)).sum(), beyond.sum(), signal.square().sum(), noise.square().sum()]


def _magnitude(numbers: Tensor) -> Tensor:
    """Bits without the sign: as integers they are ordered as the magnitudes are."""
    carrier = CARRIERS[numbers.dtype]
    return carrier.bits(numbers.view(carrier.storage)) & carrier.magnitude


def _extremes(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude (0 if there is none) and the smallest above zero (infinity if there is none)."""
    end = torch.zeros(1, dtype=torch.float64, device=exact.device)  # so that empty tensors have extremes too
    magnitudes = torch.cat([exact.abs().reshape(-1), end])
    return magnitudes.amax(), torch.where(magnitudes > 0, magnitudes, math.inf).amin()


def _exponents(magnitude: Tensor, carrier: Any, counted: Tensor) -> Tensor:
    """How many numbers there are in each binade, by floor(log2 |x|).

    For normal numbers that is the exponent field. A subnormal is an integer number of smallest steps: as a float of its own,
    that integer is normal and has an exponent field. (float64's subnormals are all in the lowest bin, whatever they are.)
    """
    field = magnitude >> carrier.fraction_bits
    steps = magnitude.to(torch.float32).view(torch.int32) >> 23
    exponent = torch.where(field > 0, field - carrier.bias, steps - 127 + carrier.min_exponent - carrier.fraction_bits)
    bins = (exponent.clamp(LOWEST, HIGHEST) - LOWEST).to(torch.int64).reshape(-1)
    histogram = torch.zeros(BINS, dtype=torch.int64, device=magnitude.device)
    return histogram.scatter_add_(0, bins, counted.to(torch.int64).reshape(-1))  # bincount would wait for the device


def merge(one: Tensor, other: Tensor) -> Tensor:
    """The vector of two samples together."""
    both = one + other
    largest = len(SUMS)
    both[largest] = torch.maximum(one[largest], other[largest])
    both[largest + 1] = torch.minimum(one[largest + 1], other[largest + 1])
    return both


def summary(vector: list[float]) -> dict[str, Any]:
    """A vector as figures for people and JSON: fractions, decibels, a sparse histogram; None where there is no number."""
    of = dict(zip((*SUMS, *EXTREMES), vector, strict=False))
    histogram = vector[len(of) :]
    numbers = of["sampled"] - of["zeros"] - of["nonfinite"]
    return {
        "sampled": int(of["sampled"]),
        "underflow": of["underflow"] / max(numbers, 1),
        "overflow": of["overflow"] / max(numbers, 1),
        "zeros": of["zeros"] / max(of["sampled"], 1),
        "nonfinite": int(of["nonfinite"]),
        "sqnr_db": decibels(of["signal"], of["noise"]),
        "largest": of["largest"] if numbers else None,
        "smallest": of["smallest"] if numbers else None,
        "exponents": {str(LOWEST + place): int(count) for place, count in enumerate(histogram) if count},
    }


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); None if nothing was rounded away, or there was nothing, or squares overflowed float64."""
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 10 * (math.log10(signal) - math.log10(noise))


def measure_change(intended: Tensor, change: Tensor, same_bits: Tensor) -> Tensor:
    """Sums that tell how much of an intended update arrived: a.d, d.d, how many d are not zero, how many of those did nothing.

    Elements whose weight is not finite, before or after, are left out of the products.
    """
    intended, change = intended.to(torch.float64), change.to(torch.float64)
    known = intended.isfinite() & change.isfinite()
    intended, change = torch.where(known, intended, 0), torch.where(known, change, 0)
    wanted = intended != 0
    sums = [(change * intended).sum(), intended.square().sum(), wanted.sum(), (wanted & same_bits).sum()]
    return torch.stack([entry.to(torch.float64) for entry in sums])


def change_summary(sums: list[float]) -> dict[str, Any]:
    """`lost_updates` and `unchanged`, with the reason where there is no number."""
    arrived, intended, wanted, unchanged = sums
    if not 0 < intended < math.inf:
        reason = "the optimizer intended no change" if intended == 0 else "the intended update is too large for float64"
        return {"lost_updates": None, "unchanged": None, "reason": reason}
    return {"lost_updates": 1 - arrived / intended, "unchanged": unchanged / wanted}
