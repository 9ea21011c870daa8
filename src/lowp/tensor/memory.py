"""A tensor's memory as kernels see it: a flat stretch of integers, in whatever order its dimensions lie."""

import ctypes
import sys

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


def laid_out_alike(x: Tensor, out: Tensor) -> bool:
    """May a kernel write to `out` what it makes of x (dense), number by number, in the order in which they lie in memory?"""
    return out.stride() == x.stride() and type(out) is Tensor and not out.is_neg()


_MAPPED = 1 << 25  # bytes: C's allocator maps what is larger anew in each call, and the system fills page after page with zeros
_PAGE, _MADV_HUGEPAGE = 1 << 12, 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def in_large_pages(new: Tensor) -> Tensor:
    """A tensor that was just made, on a CPU, whose pages the system should make 2 MiB large, if it is large itself.

    To write 64 MiB for the first time takes three times as long as `copy_`; in large pages 1.7 times. The system may refuse:
    it is a piece of advice.
    """
    if _madvise is not None and new.is_cpu and new.nbytes >= _MAPPED:
        begin = -(-new.data_ptr() // _PAGE) * _PAGE
        length = (new.data_ptr() + new.nbytes - begin) // _PAGE * _PAGE
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return new
