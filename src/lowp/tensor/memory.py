"""A tensor's memory as kernels see it: a flat stretch of integers, in whatever order its dimensions lie."""

import torch
from torch import Tensor

from lowp.tensor.carrier import CARRIERS


def storage_of(dtype: torch.dtype) -> torch.dtype:
    """The integers in which kernels see a dtype's memory: inductor narrows to int8 with one instruction, to uint8 with many."""
    return CARRIERS[dtype].storage if dtype in CARRIERS else (torch.int8 if dtype == torch.uint8 else dtype)


def is_dense(x: Tensor) -> bool:
    """Does the tensor fill its stretch of memory, in whatever order of dimensions?"""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def flat_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense tensor's memory as a flat tensor of `dtype`, mostly `storage_of` its own."""
    flat = x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))
    return flat.view(dtype)
