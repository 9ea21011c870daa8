"""Calls whose arguments but the data are those of an earlier call go to its kernel at once.

Of 15 microseconds of a small call on a CPU, checking arguments and making views took 12.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.tensor.core import Encode, Operation
from lowp.tensor.kernels import MAX_ELEMENTS, built_kernel, is_plain, kernel_policy, ready
from lowp.tensor.memory import in_large_pages
from lowp.tensor.noise import Domain, Noise, begun, in_one_block
from lowp.tensor.number_kernels import CppKernel, TritonKernel

MOST_READY = 4096  # calls
_USER = Domain.USER  # for which nothing has begun
# Found once: each dot is a look-up of 20 nanoseconds.
_is_wrapped = compat.is_functorch_wrapped_tensor
_modes = compat.dispatch_mode_count
_is_compiling = torch.compiler.is_compiling
_is_traced = compat.is_tracing
_threads = torch.get_num_threads


def run_ready(call: tuple[Any, ...], x: Any, out: Any, seed: int | Noise | None = None) -> Tensor | None:
    """The result of a call that was made before on other data; None: it must be made in full.

    `call` holds the arguments but x, out and the seed. They were checked in the call that `remember` recorded, so what is left
    to look at are the tensors, and whether something must see every operation. The result of such a call needs no gradient:
    that x requires one makes no difference.
    """
    if not is_plain(x):
        return _run_ready_on_cuda(call, x, out) if seed is None else None
    if _modes() or _is_compiling() or _is_traced():
        return None
    try:
        kernel = ready.get((call, x.dtype, None if out is None else out.dtype, seed is None))
    except (TypeError, AttributeError):  # a format that is no name, an `out` that is no tensor: checked in full
        return None
    if kernel is None:
        return None
    count, numbers = x.numel(), None
    if seed is not None and (numbers := _numbers_of(seed, count)) is None:
        return None
    try:
        if kernel.of_blocks:
            return kernel.run_ready(x, numbers) if out is None else None
        return _run_flat(kernel, x, out, count, numbers)
    except ctypes.ArgumentError:  # a seed or a step that is a tensor
        return None


def _run_ready_on_cuda(call: tuple[Any, ...], x: Any, out: Any) -> Tensor | None:
    if not is_plain(x, "cuda") or _modes() or _is_compiling() or _is_traced():
        return None
    device, count = x.device, x.numel()
    try:
        kernel = ready.get((call, x.dtype, None if out is None else out.dtype, device))
    except (TypeError, AttributeError):  # as in run_ready
        return None
    if kernel is None or not 0 < count <= MAX_ELEMENTS or torch.cuda.current_device() != device.index:
        return None
    result = _room(kernel.dtype, x, out, count)
    if result is None:
        return None
    kernel.run(x.data_ptr(), result.data_ptr(), count)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def _run_flat(kernel: "CppKernel", x: Tensor, out: Any, count: int, numbers: tuple[Any, ...] | None) -> Tensor | None:
    result = _room(kernel.dtype, x, out, count)
    if result is None:
        return None
    target = result.data_ptr()
    if numbers is None:
        refused = kernel.run(x.data_ptr(), target, None, *kernel.tables, count, _threads())
    else:
        refused = kernel.run_drawn(x.data_ptr(), target, *numbers, *kernel.tables, count, _threads())
    if refused:
        return None  # with an error
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def _room(dtype: torch.dtype, x: Tensor, out: Any, count: int) -> Tensor | None:
    """Where a kernel may write what it makes of a plain tensor: to `out` if there is one; None where it does not suit."""
    if out is None:
        return in_large_pages(torch.empty_like(x) if dtype is x.dtype else torch.empty_like(x, dtype=dtype))
    if type(out) is not Tensor or out.shape != x.shape or out.device != x.device or not out.is_contiguous() or out.is_neg():
        return None
    if out.requires_grad or _is_wrapped(out):
        return None
    source, target = x.data_ptr(), out.data_ptr()
    apart = source + count * x.itemsize <= target or target + count * out.itemsize <= source
    return out if apart or (source == target and out.dtype is x.dtype) else None


def run_ready_codes(call: tuple[Any, ...], codes: tuple[Any, ...]) -> Tensor | None:
    """`run_ready` for the codes of a block format: elements, scales and the tensor's scale, which may be None."""
    elements, scales, whole = codes
    if not is_plain(elements) or not is_plain(scales) or _modes() or _is_compiling() or _is_traced():
        return None
    try:
        kernel = ready.get((call, elements.dtype, scales.dtype, whole is None))
    except TypeError:
        return None
    return None if kernel is None else kernel.run_ready_codes(elements, scales, whole)


def _numbers_of(seed: Any, count: int) -> tuple[Any, ...] | None:
    """What the key of the noise is made of, as `run_drawn` takes it; None where it must be looked at in full."""
    if type(seed) is int:
        return (0, seed, 0, 0, 0) if -(1 << 63) <= seed < 1 << 64 and count <= MAX_ELEMENTS else None
    offset = seed.offset  # of a Noise, whose numbers have up to 64 bits
    if offset >= 1 << 62 or not in_one_block(seed, count):
        return None
    domain = seed.domain
    return 0 if domain is _USER else begun(int(domain)), seed.seed, seed.step, seed.stream, offset


def remember(call: tuple[Any, ...], operation: Operation, x: Tensor, out: Tensor | None, noise: Noise | None) -> None:
    """Let `run_ready` make this call from now on, if there is a kernel for it. (On CUDA not where a call draws noise, or has
    to look for NaN first.)"""
    kernel = built_kernel(operation, x.device)
    known_by = call, x.dtype, None if out is None else out.dtype
    if isinstance(kernel, CppKernel):
        remember_kernel((*known_by, noise is None), kernel)
    elif isinstance(kernel, TritonKernel) and noise is None and not (isinstance(operation, Encode) and operation.refuses_nan):
        remember_kernel((*known_by, x.device), kernel)


def remember_kernel(known_by: tuple[Any, ...], kernel: Any) -> None:
    if kernel_policy() != "never":
        if len(ready) >= MOST_READY:
            ready.clear()
        ready[known_by] = kernel
