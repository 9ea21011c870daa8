"""A format with the way to round to it: what `lowp quantize` applies, to numbers and to pieces of tensors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import lowp
from lowp.formats import AnyFormat, BlockFormat, Rounding


@dataclass(frozen=True)
class Rounder:
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

    def beyond_range(self, x: Tensor, rounded: Tensor, offset: int = 0) -> Tensor:
        """Which finite numbers are larger than the format's largest value.

        A block's range depends on its scale: there, those are the numbers that were cut down to the largest element though
        the one after it, if there was one, would have been nearer.
        """
        fmt = self.fmt
        if not isinstance(fmt, BlockFormat):
            return x.isfinite() & ((x > fmt.max) | ((x < fmt.min) & fmt.signed))
        codes = lowp.encode(x, fmt, self.rounding, saturate=self.saturate, seed=self._noise(offset), nan="zero")
        before, largest = fmt.element.values[-2:]
        at_the_end = lowp.decode(codes.elements, fmt.element, dtype=torch.float64).abs() >= largest
        half_a_step = (largest - before) / 2 / largest
        return x.isfinite() & at_the_end & (x.abs() > rounded.abs() * (1 + half_a_step))


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
