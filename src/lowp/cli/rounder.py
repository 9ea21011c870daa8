"""A format with the way to round to it: what `lowp quantize` applies, to numbers and to pieces of tensors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import lowp
from lowp.formats import AnyFormat, BlockFormat, Rounding
from lowp.tensor.overflow import overflows


@dataclass(frozen=True)
class FormatRounder:
    fmt: AnyFormat
    rounding: Rounding = Rounding.NEAREST
    saturate: bool = False
    seed: int = 0

    @property
    def saturates(self) -> bool:
        """Does a number that is too large become the largest value?"""
        return self.saturate or isinstance(self.fmt, BlockFormat) or math.isfinite(self.fmt.overflow)

    def _noise(self, offset: int) -> lowp.Noise | None:
        return lowp.Noise(self.seed, offset=offset) if self.rounding is Rounding.STOCHASTIC else None

    def quantize(self, x: Tensor, offset: int = 0) -> Tensor:
        """`offset` is the index, in the whole tensor, of x's first element: pieces then get the noise of the whole."""
        return lowp.quantize(x, self.fmt, self.rounding, saturate=self.saturate, seed=self._noise(offset))

    def codes(self, x: Tensor) -> list[int | None]:
        """The code of each number; None for NaN in a format that has none, and in block formats, where a code says nothing."""
        fmt = self.fmt
        if isinstance(fmt, BlockFormat):
            return [None] * x.numel()
        found = lowp.encode(x, fmt, self.rounding, saturate=self.saturate, seed=self._noise(0), nan="zero").tolist()
        lost = (x.isnan() & (not fmt.has_nan)).tolist()
        return [None if gone else code % (1 << fmt.bits) for code, gone in zip(found, lost, strict=True)]

    def overflowed(self, x: Tensor, rounded: Tensor) -> Tensor:
        """Which numbers overflowed when x became `rounded`."""
        return overflows(x, self.fmt, None if self.saturate else rounded)


@contextmanager
def plain_operations() -> Iterator[None]:
    """No compiling, and one thread: on small pieces, once, both cost more than they bring. Results are the same."""
    policy, threads = lowp.kernel_info()["policy"], torch.get_num_threads()
    lowp.set_kernel_policy("never")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        lowp.set_kernel_policy(policy)
        torch.set_num_threads(threads)
