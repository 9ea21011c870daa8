"""How much of a tensor a format keeps: sums that grow piece by piece, so that a tensor of any size can be measured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lowp.cli.rounder import FormatRounder, plain_operations
from lowp.formats import BlockFormat

PIECE = 1 << 16  # elements: they stay in the cache


@dataclass
class Fidelity:
    """Sums over elements. Errors are those of finite numbers; one that became inf or NaN has an infinite error."""

    elements: int = 0
    finite: int = 0
    nonzero: int = 0  # and finite
    underflowed: int = 0  # became zero, and were not
    overflowed: int = 0  # whatever they became (tensor/overflow.py)
    nan: int = 0
    inf: int = 0
    signal: float = 0.0  # sum of squares
    noise: float = 0.0  # sum of squared errors
    relative: float = 0.0  # sum of |error| / |number| over non-zero numbers
    max_error: float = 0.0

    def __add__(self, other: "Fidelity") -> "Fidelity":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Fidelity(**sums | {"max_error": max(self.max_error, other.max_error)})

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, in decibels: inf when exact, None when there is no signal."""
        if self.signal == 0:
            return None
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if math.isfinite(self.noise) else -math.inf

    @property
    def mean_relative_error(self) -> float | None:
        return self.relative / self.nonzero if self.nonzero else None

    @property
    def underflow(self) -> float:
        """The share of non-zero numbers that became zero."""
        return self.underflowed / self.nonzero if self.nonzero else 0.0

    @property
    def overflow(self) -> float:
        """The share of finite numbers that overflow."""
        return self.overflowed / self.finite if self.finite else 0.0


def compare(x: Tensor, rounded: Tensor, overflowed: Tensor) -> Fidelity:
    """The figures of one piece, in float64."""
    finite = x.isfinite()
    kept, became = (x, rounded) if finite.all() else (x[finite], rounded[finite])
    error = torch.where(became.isfinite(), (became - kept).abs(), math.inf)
    magnitude = kept.abs()
    nonzero = magnitude > 0
    return Fidelity(
        elements=x.numel(),
        finite=kept.numel(),
        nonzero=int(nonzero.sum()),
        underflowed=int((nonzero & (became == 0)).sum()),
        overflowed=int(overflowed.sum()),
        nan=int(x.isnan().sum()),
        inf=int(x.isinf().sum()),
        signal=float(kept.square().sum()),
        noise=float(error.square().sum()),
        relative=float(torch.where(nonzero, error / magnitude, 0.0).sum()),
        max_error=float(error.max()) if error.numel() else 0.0,
    )


def measure(tensor: Tensor, rounder: FormatRounder) -> Fidelity:
    """What rounding does to a floating-point tensor. Only pieces of it are ever held in float64."""
    total = Fidelity()
    with plain_operations():
        for offset, piece in pieces(tensor, rounder):
            x = piece.to(torch.float64)  # exact: the error measured is the format's, not that of the tensor's own dtype
            rounded = rounder.quantize(x, offset)
            total += compare(x, rounded, rounder.overflowed(x, rounded))
    return total


def pieces(tensor: Tensor, rounder: FormatRounder) -> Iterator[tuple[int, Tensor]]:
    """The tensor in contiguous pieces, each with the index of its first element, that round as the whole would.

    Rows are cut between blocks only. A scale of the whole tensor needs the whole tensor.
    """
    fmt = rounder.fmt
    if tensor.numel() == 0:
        return
    row_length = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.reshape(-1, row_length)
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
        yield 0, rows
        return
    size = fmt.size if isinstance(fmt, BlockFormat) else 1
    width = max(size, PIECE // size * size)
    height = max(1, PIECE // row_length)
    for row in range(0, len(rows), height):
        for column in range(0, row_length, width):
            yield row * row_length + column, rows[row : row + height, column : column + width]
