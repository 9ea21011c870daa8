"""Eager calls of block formats: which of them a kernel serves, and the call.

Numbers are seen as rows along the blocks' axis, which must be the last one of a contiguous tensor: others are copied. A kernel
is built when kernels.py says so; until then, and for what has no kernel, the caller computes in integers (block.py).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowp.formats import BlockFormat
from lowp.tensor import block_draws, kernels
from lowp.tensor.block_programs import block_program
from lowp.tensor.block_stages import BlockOperation, block_operation
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.core import code_dtype
from lowp.tensor.memory import in_large_pages
from lowp.tensor.noise import Noise, in_one_block, key_tensor
from lowp.tensor.packing import packed_size


def quantize(x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, saturate: bool, axis: int) -> Tensor | None:
    """Numbers of the format, in x's dtype; None where no kernel is built."""
    if (drawn := _drawn(x, rounding, noise, axis)) is None:
        return None
    kernel = _kernel("quantize", fmt, x.dtype, saturate, "raise", False, x, noise is not None)
    if kernel is None:
        return None
    rows = _rows(x, axis)
    out = in_large_pages(torch.empty_like(rows))
    return _back(out, axis) if kernel(rows, out, None, None, *drawn) else None


def encode(
    x: Tensor, fmt: BlockFormat, rounding: str, noise: Noise | None, saturate: bool, nan: str, packed: bool, axis: int
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes of elements and of scales, and the tensor's scale; None where no kernel is built."""
    packed = packed and fmt.element.bits < 8
    if (drawn := _drawn(x, rounding, noise, axis)) is None or (packed and not _packs(fmt)):
        return None
    kernel = _kernel("encode", fmt, x.dtype, saturate, nan, packed, x, noise is not None)
    if kernel is None:
        return None
    rows = _rows(x, axis)
    *outer, length = rows.shape
    taken = packed_size(length, fmt.element.bits) if packed else length
    elements = torch.empty((*outer, taken), dtype=code_dtype(fmt.element), device=x.device)
    scales = torch.empty((*outer, -(-length // fmt.size)), dtype=code_dtype(fmt.scale), device=x.device)
    whole = torch.empty((), dtype=torch.int32, device=x.device).view(torch.float32) if fmt.tensor_scale else None
    if not kernel(rows, elements, scales, whole, *drawn):
        return None
    return _back(elements, axis), _back(scales, axis), whole


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


def _drawn(x: Tensor, rounding: str, noise: Noise | None, axis: int) -> tuple[Tensor | None, int] | None:
    """The key of the noise, and how far neighbours along the axis are apart in the order in which noise counts elements.

    None where no kernel rounds so, or not with one key.
    """
    if rounding == "nearest":
        return None, 1
    if rounding != "stochastic" or noise is None or not in_one_block(noise, x.numel()):
        return None
    return key_tensor(noise, 0, noise.home(x.device)), math.prod(x.shape[axis % max(x.dim(), 1) + 1 :])


def _packs(fmt: BlockFormat) -> bool:
    """Does every block begin with a byte of its own?"""
    return fmt.size * fmt.element.bits % 8 == 0


def _rows(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, -1).contiguous()


def _back(rows: Tensor, axis: int) -> Tensor:
    return rows.movedim(-1, axis).contiguous()


def _kernel(
    kind: str, fmt: BlockFormat, dtype: torch.dtype, saturate: bool, nan: str, packed: bool, like: Tensor, stochastic: bool = False
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
    def __init__(self, operation: BlockOperation) -> None:
        from lowp.tensor.lists import blocks  # what compiles is loaded when something is compiled

        self._run = blocks.build(operation)

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
