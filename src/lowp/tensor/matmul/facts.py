"""What is known of a matrix's numbers after one look at them: how large, how small, how many digits.

Products of numbers with few digits are exact in float32, and sums of them may be; which lanes are enough (lanes.py) depends on
these three figures. One pass, whose cost is that of an addition of the matrix, beside a thousand for the product.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.carrier import F32
from lowp.tensor.lists.function import ListFunction, Lists
from lowp.tensor.lists.tracing import Element
from lowp.tensor.memory import is_dense

_NONE = 1 << 12  # an exponent that no number comes near


@dataclass(frozen=True)
class Facts:
    """Of the finite numbers other than zero: all are multiples of 2^low, below 2^top, and have `digits` bits at most.

    Integers, or on CUDA tensors of one, so that nobody waits for them.
    """

    top: Any
    low: Any
    digits: Any


NOTHING = Facts(-_NONE, _NONE, 0)


def _figures(stored: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Of each number, as positive integers whose maximum counts: top + 149, 128 - low, digits; 0 for zero and for specials."""
    magnitude = stored & F32.magnitude
    field = (magnitude >> F32.fraction_bits).clamp(min=1)
    significand = magnitude - (field - 1 << F32.fraction_bits)  # with the leading one
    counts = (significand != 0) & (magnitude < F32.infinity)
    last = _exponent(significand & -significand)
    first = _exponent(significand)
    figures = field + first, 278 - field - last, first - last + 1
    return tuple(torch.where(counts, figure, torch.zeros_like(figure)) for figure in figures)


def _exponent(integer: Tensor) -> Tensor:
    """Of integers below 2^24, exactly."""
    return (integer.to(torch.float32).view(torch.int32) >> F32.fraction_bits) - F32.bias


_look = ListFunction(_figures, (Element(torch.int32),), (), 0, 0, (), ("max", "max", "max"))


def facts_of(x: Tensor | None) -> Facts:
    """Of float32 numbers."""
    if x is None or x.numel() == 0:
        return NOTHING
    x = x.detach()
    x = x if is_dense(x) else x.contiguous()
    lists = Lists([[x]])
    found = _look(lists, _no_numbers(x.device), ())[:, 0]
    if x.device.type != "cuda":
        top, low, digits = found.tolist()
        return Facts(top - 149, 128 - low, digits) if digits else NOTHING
    some = found[2] > 0
    return Facts(torch.where(some, found[0] - 149, -_NONE), torch.where(some, 128 - found[1], _NONE), found[2].clone())


@lru_cache(maxsize=8)
def _no_numbers(device: torch.device) -> Tensor:
    return torch.zeros((0, 1), dtype=torch.int32, device=device)
