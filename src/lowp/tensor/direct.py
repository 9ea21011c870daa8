"""A quantizer as a C++ function of two addresses and a length: what a graph compiled for a CPU calls (inductor.py).

A graph has hundreds of small quantizers. Between the products of a step Python's code has left the cache, and a call through
`quantize` and inductor's wrappers, 25 microseconds in a loop, takes 100 to 160. This one takes 2 in a loop. The text is printed
from torch operations as every other form of the rounding is (lists/trace.py, lists/vectors.py), in vectors that need not pass
through memory: 0.15 ns a number on one core to nearest (a copy: 0.11), where inductor's code takes 0.5.

For formats that are computed, not looked up, and roundings without noise; `quantize` takes the rest.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.core import Quantize
from lowp.tensor.lists import cpp
from lowp.tensor.lists.trace import fused
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer, preamble
from lowp.tensor.ops import quantize
from lowp.tensor.pointwise import pointwise, traced

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long)
_CPU = torch.device("cpu")
_CHUNK = 1 << 12  # elements
_WORTH_THREADS = 1 << 15  # elements: 8 microseconds on one core


@dataclass(frozen=True, eq=False)
class _Direct:
    """An operation for which there is such a function (one object each)."""

    operation: Quantize


def round_into(x: Tensor, format: str, rounding: str, out: Tensor) -> None:
    """`quantize(x, format, rounding, out=out)` for tensors on a CPU of the same dtype, dense, laid out alike, and apart."""
    what = _direct(format, rounding, x.dtype)
    run = None if what is None else kernels.built(what, _CPU, kernels.SMALL, _build)
    if run is None:
        quantize(x, format, rounding, out=out)
    else:
        run(x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())


@lru_cache(maxsize=4096)
def _direct(format: str, rounding: str, dtype: torch.dtype) -> _Direct | None:
    """The quantizer, if it can be printed: without tables."""
    operation = pointwise(format, rounding, dtype)
    return None if operation is None or operation.tables else _Direct(operation)


def _build(what: _Direct, device: torch.device) -> Callable[..., Any]:
    """With the threads that inductor's own kernels run on, which are awake; a compiler without OpenMP does without."""
    text = _text(what.operation)
    try:
        return cpp.build(text, _ARGUMENTS, ["-fopenmp"])
    except (RuntimeError, OSError):
        return cpp.build(text, _ARGUMENTS)


def _text(operation: Quantize) -> str:
    """The operation on as many numbers at a time as a vector holds, chunk by chunk."""
    storage = operation.own.storage
    program = fused(traced(partial(_rounded, operation=operation), storage))
    printer, scalar, vector = Printer(), SCALARS[storage], TYPES[storage]
    statements = [f"const {TYPES[s.result.dtype]} {s.result.name} = {printer.expression(s)};" for s in program.statements]
    lines = [
        f'extern "C" void run(const {scalar}* source, {scalar}* target, long count, long threads) {{',
        f"    const long chunks = (count + {_CHUNK - 1}) / {_CHUNK};",
        f"    #pragma omp parallel for num_threads(threads) if(threads > 1 && count >= {_WORTH_THREADS})",
        "    for (long chunk = 0; chunk < chunks; chunk++) {",
        "        const Subnormals subnormals;",
        *(
            f"        const auto constant{place} = ::constant{place};" for place in printer.constants.values()
        ),  # a register each
        f"        const long first = chunk * {_CHUNK}, last = first + {_CHUNK} < count ? first + {_CHUNK} : count;",
        "        const auto body = [&](long e, long count) __attribute__((always_inline)) {",
        f"            const {vector} x0 = load<{vector}>(source + e, count);",
        *(f"            {statement}" for statement in statements),
        f"            store(target + e, {program.results[0].name}, count);",
        "        };",
        "        long e = first;",
        "        for (; e + LANES <= last; e += LANES) body(e, LANES);",
        "        if (e < last) body(e, last - e);",
        "    }",
        "}",
    ]
    wide = operation.carrier.compute.itemsize == 8  # vectors of 16 such numbers would pass through memory
    return "\n".join([preamble(8 if wide else 16), *printer.declarations(), *lines])


def _rounded(stored: Tensor, operation: Quantize) -> Tensor:
    """The operation, as is shortest in vectors."""
    if operation.dtype != torch.float32 or operation.float_grid is None:
        return operation(stored, ())
    magnitude = stored & operation.own.magnitude
    return torch.where(magnitude > operation.own.infinity, stored, operation.in_floats(stored))  # NaN with its payload
