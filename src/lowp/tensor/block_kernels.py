"""Eager calls of block formats: which of them a kernel serves, and the call.

Numbers are seen as rows along the blocks' axis, which must be the last one of a contiguous tensor: others are copied. A kernel
is built when kernels.py says so; until then, and for what has no kernel, the caller computes in integers (block.py).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import BlockFormat
from lowp.tensor import block_draws, kernels, repeated_calls
from lowp.tensor.block_programs import block_program
from lowp.tensor.block_stages import BlockOperation, block_operation
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.core import code_dtype
from lowp.tensor.memory import in_large_pages, laid_out_alike
from lowp.tensor.noise import Noise, in_one_block, key_tensor
from lowp.tensor.packing import packed_size

ROUNDINGS = ("nearest", "stochastic")  # for which there are kernels


def quantize(
    x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, saturate: bool, axis: int, into: Tensor | None = None
) -> Tensor | None:
    """Numbers of the format, in x's dtype; None where no kernel is built. They are written to `into` if that suits: memory
    apart from x, laid out as they are."""
    if not _rounds(x, rounding, noise):
        return None
    kernel = _kernel("quantize", fmt, x.dtype, saturate, "raise", False, x, noise is not None)
    if kernel is None:
        return None
    rows = _rows(x, axis)
    if into is not None and axis % x.dim() == x.dim() - 1 and _may_be_written(into, rows):
        return into if kernel(rows, into, None, None, *_drawn(x, noise, axis)) else None
    out = in_large_pages(torch.empty_like(rows))
    return _back(out, axis) if kernel(rows, out, None, None, *_drawn(x, noise, axis)) else None


def _may_be_written(out: Tensor, rows: Tensor) -> bool:
    """By a kernel that reads the rows meanwhile."""
    return out.dtype == rows.dtype and laid_out_alike(rows, out) and not compat.overlaps(rows, out)


def encode(
    x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, saturate: bool, nan: str, packed: bool, axis: int
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes of elements and of scales, and the tensor's scale; None where no kernel is built."""
    packed = packed and fmt.element.bits < 8
    if not _rounds(x, rounding, noise) or (packed and not _packs(fmt)):
        return None
    kernel = _kernel("encode", fmt, x.dtype, saturate, nan, packed, x, noise is not None)
    if kernel is None:
        return None
    rows = _rows(x, axis)
    elements, scales, whole = _room_for_codes(rows, fmt, packed)
    if not kernel(rows, elements, scales, whole, *_drawn(x, noise, axis)):
        return None
    return _back(elements, axis), _back(scales, axis), whole


def _room_for_codes(rows: Tensor, fmt: BlockFormat, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    *outer, length = rows.shape
    taken = packed_size(length, fmt.element.bits) if packed else length
    elements = torch.empty((*outer, taken), dtype=code_dtype(fmt.element), device=rows.device)
    scales = torch.empty((*outer, -(-length // fmt.size)), dtype=code_dtype(fmt.scale), device=rows.device)
    whole = torch.empty((), dtype=torch.int32, device=rows.device).view(torch.float32) if fmt.tensor_scale else None
    return elements, scales, whole


def decode(
    elements: Tensor, scales: Tensor, whole: Tensor | None, fmt: BlockFormat, dtype: torch.dtype, size: int | None, axis: int
) -> Tensor | None:
    """Numbers in `dtype`; `size` is the length of what was packed. None where no kernel is built."""
    packed = size is not None and fmt.element.bits < 8
    kernel = _kernel("decode", fmt, dtype, True, "zero", packed, elements) if not packed or _packs(fmt) else None
    if kernel is None:
        return None
    rows, of_blocks = _rows(elements, axis), _rows(scales, axis)
    shape = (*rows.shape[:-1], size) if packed else rows.shape
    out = in_large_pages(torch.empty(shape, dtype=dtype, device=elements.device))
    done = kernel(out, rows, of_blocks, None if whole is None else whole.to(out.device), None, 1)
    return _back(out, axis) if done else None


def remember(call: tuple, kind: str, fmt: BlockFormat, x: Any, rounding: str, saturate: bool, nan: str, packed: bool) -> None:
    """Let `repeated_calls.run_ready` make this call from now on, with the last axis, if there is a kernel for it: of numbers x,
    or of codes (for decoding, `x` are these and the dtype)."""
    numbers, dtype = (x[0], x[1]) if kind == "decode" else (x, x.dtype)
    has_kernel = dtype in FORMAT_OF_DTYPE and rounding in ROUNDINGS
    program = block_program(fmt, "nearest", saturate, nan) if has_kernel else None
    if program is None:
        return
    operation = block_operation(kind, program, dtype, packed and fmt.element.bits < 8, rounding == "stochastic")
    if not isinstance(kernel := kernels.built_kernel(operation), _CppBlockKernel):
        return
    if kind == "decode":
        elements, scales, whole = numbers
        repeated_calls.remember_kernel((call, elements.dtype, scales.dtype, whole is None), kernel)
    else:
        repeated_calls.remember_kernel((call, dtype, None, rounding != "stochastic"), kernel)


def _rounds(x: Tensor, rounding: str, noise: Noise | None) -> bool:
    """Is there a kernel that rounds so, with one key for all elements?"""
    return rounding in ROUNDINGS and (noise is None or in_one_block(noise, x.numel()))


def _drawn(x: Tensor, noise: Noise | None, axis: int) -> tuple[Tensor | None, int]:
    """The key of the noise, and how far neighbours along the axis are apart in the order in which noise counts elements."""
    if noise is None:
        return None, 1
    return key_tensor(noise, 0, noise.home(x.device)), math.prod(x.shape[axis % x.dim() + 1 :])


def _packs(fmt: BlockFormat) -> bool:
    """Does every block begin with a byte of its own?"""
    return fmt.size * fmt.element.bits % 8 == 0


def _rows(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, -1).contiguous()


def _back(rows: Tensor, axis: int) -> Tensor:
    return rows.movedim(-1, axis).contiguous()


def _kernel(
    kind: str,
    fmt: BlockFormat,
    dtype: torch.dtype,
    saturate: bool,
    nan: str,
    packed: bool,
    like: Tensor,
    stochastic: bool = False,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int], bool] | None:
    """The kernel for tensors like that one; it takes numbers, elements, scales, the tensor's scale and what `_drawn` gives. It
    returns False where the numbers are so small that it could not be exact (nvfp4 on a CPU, nothing above 2^-104): integers
    serve then."""
    program = block_program(fmt, "nearest", saturate, nan) if dtype in FORMAT_OF_DTYPE else None
    if program is None or like.numel() == 0 or like.dim() == 0 or (stochastic and not block_draws.suits(fmt)):
        return None
    # At once where plain operations would be a hundred launches.
    count = like.numel() if like.device.type == "cpu" else max(like.numel(), kernels.SMALL)
    return kernels.get_or_build(block_operation(kind, program, dtype, packed, stochastic), like.device, count, _build)


def _build(operation: BlockOperation, device: torch.device) -> Callable[..., bool]:
    return _CppBlockKernel(operation) if device.type == "cpu" else _TritonBlockKernel(operation, device)


class _CppBlockKernel:
    of_blocks = True

    def __init__(self, operation: BlockOperation) -> None:
        from lowp.tensor.lists import blocks  # what compiles is loaded when something is compiled

        self._run, self._run_drawn = blocks.build(operation)
        self._operation, self._fmt = operation, operation.program.fmt

    def run_ready(self, x: Tensor, numbers: tuple[Any, ...] | None) -> Any:
        """For `repeated_calls.run_ready`: rows of a plain tensor, and what noise is made of; None: it must be made in full."""
        count = x.numel()
        if count == 0 or x.dim() == 0:
            return None
        if self._operation.kind == "quantize":
            result: Any = in_large_pages(torch.empty_like(x, requires_grad=False))
            rooms = [result.data_ptr(), None, None]
        else:
            result = _room_for_codes(x, self._fmt, self._operation.packed)
            rooms = [None if room is None else room.data_ptr() for room in result]
        length = x.shape[-1]
        sizes = count // length, length, 1, torch.get_num_threads()
        if numbers is None:
            done = self._run(x.data_ptr(), *rooms, None, *sizes)
        else:
            done = self._run_drawn(x.data_ptr(), *rooms, *numbers, *sizes)  # type: ignore[misc]  # it draws
        return result if done else None

    def run_ready_codes(self, elements: Tensor, scales: Tensor, whole: Tensor | None) -> Tensor | None:
        """For `repeated_calls.run_ready_codes`: of codes that are not packed."""
        shape = elements.shape
        if elements.numel() == 0 or not shape or scales.shape != (*shape[:-1], -(-shape[-1] // self._fmt.size)):
            return None
        if whole is not None and not (kernels.is_plain(whole) and whole.numel() == 1 and whole.dtype is torch.float32):
            return None
        out = in_large_pages(torch.empty(shape, dtype=self._operation.dtype, device=elements.device))
        return out if self(out, elements, scales, whole, None, 1) else None

    def __call__(
        self, numbers: Tensor, elements: Tensor, scales: Tensor | None, whole: Tensor | None, key: Tensor | None, apart: int
    ) -> bool:
        length = numbers.shape[-1]
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (numbers, elements, scales, whole, key))
        return self._run(*addresses, numbers.numel() // length, length, apart, torch.get_num_threads()) == 1


class _TritonBlockKernel:
    def __init__(self, operation: BlockOperation, device: torch.device) -> None:
        from lowp.tensor.lists import triton_blocks

        self._run = triton_blocks.build(operation, device)

    def __call__(
        self, numbers: Tensor, elements: Tensor, scales: Tensor | None, whole: Tensor | None, key: Tensor | None, apart: int
    ) -> bool:
        with torch.cuda.device(numbers.device):
            self._run(numbers, elements, scales, whole, key, apart)
        return True
