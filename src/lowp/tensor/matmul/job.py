"""One job: many products of matrices of the same shapes, and what is needed to do it, whoever does."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowp.tensor.matmul.arithmetic import Arithmetic
from lowp.tensor.matmul.facts import facts_of
from lowp.tensor.matmul.keys import keys_of, no_keys
from lowp.tensor.matmul.lanes import Operands
from lowp.tensor.matmul.steps import Steps
from lowp.tensor.noise import Noise


@dataclass(frozen=True, eq=False)
class MatmulJob:
    """a [*batch, M, K] times b [*batch, K, N], plus bias [*batch, M, N] or None: all float32, of any strides, zero too.

    `part` says whose noise is drawn (keys.py), `first` is the index of the result's first element there.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    arithmetic: Arithmetic
    noise: Noise
    part: int
    first: int = 0

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def batch(self) -> torch.Size:
        return self.a.shape[:-2]

    @property
    def rows(self) -> int:
        return self.a.shape[-2]

    @property
    def depth(self) -> int:
        return self.a.shape[-1]

    @property
    def columns(self) -> int:
        return self.b.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, self.rows, self.columns)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.elements * self.depth

    def operands(self) -> Operands:
        return Operands(
            *(facts_of(None if x is None else _once(x)) for x in (self.a, self.b, self.bias)),
            addends=self.depth + (self.bias is not None),
        )

    def keys(self, steps: Steps) -> Tensor:
        """Of all roundings of an element, in order; none where nothing is drawn."""
        if not self.arithmetic.stochastic:
            return no_keys(self.device)
        chunks = -(-self.depth // self.arithmetic.chunk) if self.arithmetic.chunk > 1 else 0
        sums = chunks + (self.bias is not None)
        count = self.depth * steps.roundings_of_product + sums * steps.roundings_of_sum + steps.roundings_at_end
        keys = keys_of(self.noise, self.part, count, self.first + self.elements, self.device)
        keys[:, -1] += self.first
        return keys


def _once(x: Tensor) -> Tensor:
    """Without what is there more than once because a dimension was expanded."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def offsets(x: Tensor | None) -> np.ndarray:
    """Where each matrix of a batch begins, in elements."""
    if x is None:
        return np.zeros(0, dtype=np.int64)
    found = np.zeros((), dtype=np.int64)
    for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return np.ascontiguousarray(found.reshape(-1))
