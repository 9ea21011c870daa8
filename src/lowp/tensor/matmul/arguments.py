"""Arguments of the public functions: checked, and as plain values that a graph can hold."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.compat import constant_for_dynamo
from lowp.tensor.matmul.arithmetic import Arithmetic, name_of
from lowp.tensor.noise import KeySource, Noise, signed

Seed = int | Tensor | Noise
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@constant_for_dynamo
def arithmetic_name(
    multiply: Any, accumulate: Any, kahan: bool, chunk: int, quire: bool, rounding: str, approximate: str | None
) -> str:
    """The name of an arithmetic, of which a compiled function sees nothing else."""
    return _name(multiply, accumulate, kahan, chunk, quire, rounding, approximate)


@lru_cache(maxsize=1024)
def _name(*options: Any) -> str:
    return name_of(Arithmetic(*options))


def check_operands(function: str, *operands: Tensor | None) -> None:
    """Dense tensors, of one dtype, on one device."""
    given = [x for x in operands if x is not None]
    for x in given:
        if not isinstance(x, Tensor):
            raise TypeError(f"{function} takes tensors, not {type(x).__name__}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{function} takes float32, bfloat16 or float16 tensors, not {x.dtype}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{function} takes dense tensors, not {'nested ones' if x.is_nested else x.layout}")
    if any(x.dtype != given[0].dtype for x in given):
        raise TypeError(f"{function} takes tensors of one dtype, not {' and '.join(str(x.dtype) for x in given)}")
    if any(x.device != given[0].device for x in given):
        raise ValueError(f"{function} takes tensors on one device, not {' and '.join(str(x.device) for x in given)}")


def noise_parts(seed: Seed) -> tuple[list[int], Tensor | None, Tensor | None]:
    """Seed, step, stream, offset and domain as numbers, and the first two as tensors where they are."""
    noise = seed if isinstance(seed, Noise) else Noise(seed)
    tensors = [part if isinstance(part, Tensor) else None for part in (noise.seed, noise.step)]
    assert not isinstance(noise.step, KeySource)  # passes with such products are not recorded
    parts = noise.seed, noise.step, noise.stream, noise.offset, int(noise.domain)
    numbers = [0 if isinstance(part, Tensor) else signed(part) for part in parts]
    return numbers, *tensors  # type: ignore[return-value]
