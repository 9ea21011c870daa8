"""Sums of products in plain torch operations: the steps of one k after the other, for all elements of a result at once.

What the kernels are tested against, and what runs where none can be compiled. Always in float64, whatever the data.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowp.formats.floats import FP32
from lowp.tensor import ops
from lowp.tensor.matmul.job import MatmulJob
from lowp.tensor.matmul.steps import Steps

_ELEMENTS = 1 << 18  # of the results that are worked on at once: their states stay in the cache


def run(job: MatmulJob, steps: Steps, uniforms: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """The result, in a dtype that holds its numbers exactly."""
    batch = math.prod(job.batch)
    flat = [None if x is None else x.reshape(batch, *x.shape[-2:]) for x in (job.a, job.b, job.bias)]
    result = torch.empty((batch, job.rows, job.columns), dtype=torch.float64, device=job.device)
    keys = job.keys(steps)
    each = max(1, _ELEMENTS // (job.rows * job.columns))
    for first in range(0, batch, each):
        pieces = [None if x is None else x[first : first + each] for x in flat]
        own = _Keys(keys, first * job.rows * job.columns)
        result[first : first + each] = _sums(*pieces, steps, own, list(uniforms), tables)  # type: ignore[arg-type]
    result = result.reshape(job.shape)
    if steps.result_dtype == torch.float64:
        return result
    return ops.quantize(result, FP32, out=torch.empty_like(result, dtype=torch.float32))


def _sums(
    a: Tensor, b: Tensor, bias: Tensor | None, steps: Steps, keys: "_Keys", fixed: list[Tensor], tables: tuple[Tensor, ...]
) -> Tensor:
    """[batch, M, N] in the lanes' dtype; `fixed` are the steps' uniforms."""
    depth, chunk = a.shape[-1], steps.arithmetic.chunk
    zero = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=steps.carrier.dtype, device=a.device)
    a, b = steps.operand(a), steps.operand(b)

    def multiply_add(state: list[Tensor], k: int) -> list[Tensor]:
        numbers = keys.next(steps.roundings_of_product)
        return list(steps.multiply_add(a[:, :, k, None], b[:, k, None, :], *state, *fixed, numbers, None, tables))

    def join(function: Any, x: Tensor, state: list[Tensor]) -> list[Tensor]:
        return list(function(x, *state, *fixed, keys.next(steps.roundings_of_sum), None, tables))

    state = [zero] * steps.states
    for start in range(0, depth, chunk):
        inner = state if chunk == 1 else [zero] * steps.states
        for k in range(start, min(start + chunk, depth)):
            inner = multiply_add(inner, k)
        state = inner if chunk == 1 else join(steps.add, inner[0], state)
    if bias is not None:
        state = join(steps.add_exactly, steps.lane(bias), state)
    return steps.finish(*state, *fixed, keys.next(steps.roundings_at_end), None, tables)[0]


class _Keys:
    """The keys of the roundings, handed out in order, for elements from `first` on."""

    def __init__(self, keys: Tensor, first: int) -> None:
        self._keys = keys.clone()
        if keys.numel():
            self._keys[:, -1] += first
        self._used = 0

    def next(self, count: int) -> Tensor:
        start, self._used = self._used, self._used + count
        return self._keys[start : self._used].reshape(-1)
