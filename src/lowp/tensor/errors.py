"""Errors that more than one layer raises, and the quick look before one of them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class NonFiniteGradient(ArithmeticError):
    """A gradient was infinite or NaN. Ranks that work together raise it in the same step. `parameter`: whose, if known."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


def surely_finite(tensors: Iterable[Tensor]) -> bool:
    """Are all numbers of these finite? False also where that is not known: not on a CPU, or where a sum overflows.

    A sum of numbers of which one is not finite is not finite. Sums take less time than largest magnitudes.
    """
    return all(t.is_cpu and math.isfinite(t.sum(dtype=torch.float32).item()) for t in tensors)
