"""Eager operations on numbers as kernels: one for an operation and a device, for any number of elements.

1. On a CPU the traced program is printed as C++ (lists/flat.py): built in a second, half a microsecond a call. (inductor's
   C++ for the same program takes 2 to 5 times as long on numbers in the cache, since its vectors pass through memory wherever
   bits are seen as floats, and 5 to 10 seconds to build.)
2. On CUDA it is printed as Triton (lists/flat_triton.py): one launch, in a second or two as well.
3. Before a kernel is built (kernels.py), the plain operations serve, piece by piece through the cache.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import format as parse_format
from lowp.tensor.core import (
    Decode,
    Encode,
    Operation,
    Quantize,
    code_dtype,
    code_storage,
    encode_operation,
    quantize_operation,
    tables_on,
)
from lowp.tensor.kernels import MAX_ELEMENTS, SMALL, get_or_build
from lowp.tensor.memory import flat_memory
from lowp.tensor.noise import KEY_SIZE, Noise, blocks, key_tensor

_CPU = torch.device("cpu")


def run(
    operation: Operation,
    stored: Tensor,
    noise: Noise | None,
    out: Tensor,
    check: Callable[[int, int], None] | None = None,
) -> None:
    """Apply an operation to flat, contiguous integer tensors of the same length (`out` may be the input itself).

    `check(start, stop)` raises where the operation refuses what is in a piece. Kernels on a CPU find that out as they go (they
    return 1); otherwise it is called on each piece before it is worked on.
    """
    count = stored.numel()
    if count == 0:
        return
    kernel = get_or_build(operation, stored.device, count, _build)
    tables = tables_on(operation, stored.device)
    looks = isinstance(kernel, CppKernel)
    for start, stop in _pieces(count, noise, SMALL if kernel is None else MAX_ELEMENTS):
        if check is not None and not looks:
            check(start, stop)
        whole = stop - start == count
        source, target = (stored, out) if whole else (stored[start:stop], out[start:stop])
        home = stored.device if kernel is None or noise is None else noise.home(stored.device)
        key = None if noise is None else key_tensor(noise, start, home)
        if kernel is not None:
            if kernel(source, tables, key, target) and check is not None:
                check(start, stop)
        else:
            target.copy_(operation(source, tables, key))


def _pieces(count: int, noise: Noise | None, most: int) -> list[tuple[int, int]]:
    """Where one call of a kernel starts and stops: at most `most` elements, all with one key of the noise."""
    whole = [(0, count)] if noise is None else blocks(noise, count)
    return [(start, min(start + most, end)) for first, end in whole for start in range(first, end, most)]


def _build(operation: Operation, device: torch.device) -> "CppKernel | TritonKernel":
    return CppKernel(operation) if device.type == "cpu" else TritonKernel(operation, device)


def round_into(x: Tensor, format: str, rounding: str, out: Tensor, saturate: bool = False) -> None:
    """`quantize(x, ..., out=out)` without its checks, for what a graph compiled for a CPU calls (inductor.py).

    Dense tensors on a CPU of the same dtype, laid out alike, and apart; formats without blocks, roundings without noise.
    """
    operation = _quantizer(format, rounding, saturate, x.dtype)
    kernel = get_or_build(operation, _CPU, SMALL, _build)  # whatever the size: a graph calls it in every step
    if kernel is not None:
        kernel(x, tables_on(operation, _CPU), None, out)
    else:
        storage = operation.own.storage
        run(operation, flat_memory(x, storage), None, flat_memory(out, storage))


@lru_cache(maxsize=4096)
def _quantizer(format: str, rounding: str, saturate: bool, dtype: torch.dtype) -> Quantize:
    return quantize_operation(parse_format(format), dtype, rounding, saturate, dtype)


class CppKernel:
    """One operation on a CPU, for any number of elements. `run` takes addresses; it returns 1 if it met what is refused."""

    of_blocks = False

    def __init__(self, operation: Operation) -> None:
        refuses = isinstance(operation, Encode) and operation.refuses_nan

        def function(stored: Tensor, numbers: Tensor, tables: tuple[Tensor, ...]) -> list[Tensor]:
            result = operation(stored, tables, numbers if operation.stochastic else None)
            return [result, operation.is_nan(stored)] if refuses else [result]  # type: ignore[union-attr]  # it encodes

        from lowp.tensor.lists import flat  # what compiles is loaded when something is compiled

        source, target = _dtypes(operation)
        keys = KEY_SIZE if operation.stochastic else 0
        # A quantizer in floats multiplies by powers of two only.
        exact = isinstance(operation, Quantize)
        self._tables = tables_on(operation, _CPU)  # kept: the kernel knows their addresses
        words = range(KEY_SIZE - 1) if keys else ()  # of a key; its last number is an index
        self._call = flat.build(function, [source], target, keys, self._tables, exact, words)
        self.run, self.run_drawn = self._call.run, self._call.run_drawn
        self.tables = [table.data_ptr() for table in self._tables]
        self.dtype = _result_dtype(operation)

    def __call__(self, stored: Tensor, tables: tuple[Tensor, ...], key: Tensor | None, out: Tensor) -> int:
        return self._call([stored], out, key, tables)


class TritonKernel:
    """One operation on CUDA, for any number of elements."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        shortest = _in_float32(operation)

        def function(stored: Tensor, numbers: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
            return shortest(stored, tables, numbers if operation.stochastic else None)

        from lowp.tensor.lists import flat_triton  # what compiles is loaded when something is compiled

        source, target = _dtypes(operation)
        keys = KEY_SIZE if operation.stochastic else 0
        exact = isinstance(operation, Quantize)  # as in CppKernel
        self._tables = tables_on(operation, device)  # kept: their addresses are
        with torch.cuda.device(device):
            self._call = flat_triton.build(function, [source], target, keys, self._tables, exact)
        self._addresses = [table.data_ptr() for table in self._tables]
        self.dtype = _result_dtype(operation)

    def __call__(self, stored: Tensor, tables: tuple[Tensor, ...], key: Tensor | None, out: Tensor) -> None:
        self._call([stored], out, key, tables)

    def run(self, source: int, target: int, count: int) -> None:
        """For `run_ready`: addresses on the current device, nothing drawn."""
        self._call.launch(count, (source, target), self._addresses)


def _result_dtype(operation: Operation) -> torch.dtype:
    """Of the result, as users see it."""
    if isinstance(operation, Decode):
        return operation.dtype
    return operation.out_dtype if isinstance(operation, Quantize) else code_dtype(operation.fmt)


def _in_float32(operation: Operation) -> Callable[..., Tensor]:
    """The operation; if it works on the bits of bfloat16, the same on those of float32, whose upper half they are.

    GPUs round float32 in floats, and 16 bits in integers, which takes twice as many instructions. The result is a bfloat16
    again without rounding: a format is rounded to on bfloat16's own bits only where bfloat16 holds its numbers.
    """
    if isinstance(operation, Decode) or operation.dtype != torch.bfloat16 or operation.carrier is not operation.own:
        return operation
    how = operation.mode.value, operation.saturate
    if isinstance(operation, Encode):
        codes = encode_operation(operation.fmt, torch.float32, *how, operation.nan_to)
        return lambda stored, tables, key: codes(stored.to(torch.int32) << 16, tables, key)
    if operation.float_grid is not None or operation.out_dtype != torch.bfloat16:
        return operation
    rounded = quantize_operation(operation.fmt, torch.float32, *how, torch.float32)
    return lambda stored, tables, key: (rounded(stored.to(torch.int32) << 16, tables, key) >> 16).to(torch.int16)


def _dtypes(operation: Operation) -> tuple[torch.dtype, torch.dtype]:
    """The stored dtypes of input and output."""
    if isinstance(operation, Decode):
        return code_storage(operation.fmt), operation.target.storage
    return operation.own.storage, operation.storage if isinstance(operation, Encode) else operation.target.storage
