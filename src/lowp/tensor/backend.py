"""What becomes of the torch operations that run now: they are carried out, or recorded for a compiler.

Rounding has several algorithms, which give the same bits. Which of them is the fastest depends on this: `grid.rounding_for`
chooses.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowp.compat import becomes_graph


@dataclass(frozen=True)
class Backend:
    """`kernel`: a compiler, ours or the user's, records the operations. It keeps in registers what tensors are here.
    `floats`: to see the bits of a number as a float, and back, costs nothing.
    `vectors`: they become C++ of our own.
    `assembly`: they become Triton of our own, in which instructions can be written.
    `halves`: the GPU has instructions that convert to two float16 numbers at once, and for the least of each (from 8.0 on).
    `converts`: the GPU has instructions that convert float32 to e5m2 and e4m3fn, and back.
    """

    kernel: bool = False
    floats: bool = False
    vectors: bool = False
    assembly: bool = False
    halves: bool = False
    converts: bool = False


PLAIN = Backend()  # each operation makes a tensor: floats of 16-bit numbers would take twice the memory
GRAPH = Backend(kernel=True)  # inductor's vectors on a CPU pass through memory wherever bits are seen as floats
GPU_GRAPH = Backend(kernel=True, floats=True)
CPP = Backend(kernel=True, floats=True, vectors=True)
TRITON_BEFORE_8_0 = Backend(kernel=True, floats=True, assembly=True)
TRITON = replace(TRITON_BEFORE_8_0, halves=True)
TRITON_8_BITS = replace(TRITON, converts=True)

PRINTED = {"cpu": CPP}  # what our own printers make, by device; on CUDA the chip decides
_now = threading.local()  # `printing`: does this thread record for one of them?


@contextmanager
def printing() -> Iterator[None]:
    """Within it, what this thread runs is recorded for one of our own printers (lists/tracing.py)."""
    before, _now.printing = getattr(_now, "printing", False), True
    try:
        yield
    finally:
        _now.printing = before


def backend_of(numbers: Tensor) -> Backend:
    """What operations on this tensor become."""
    device = numbers.device
    if getattr(_now, "printing", False):
        if device.type == "cuda":
            chip = torch.cuda.get_device_capability(device)
            return TRITON_8_BITS if chip >= (8, 9) else TRITON if chip >= (8, 0) else TRITON_BEFORE_8_0
        return PRINTED.get(device.type, GRAPH)
    if not becomes_graph():
        return PLAIN
    return GPU_GRAPH if device.type == "cuda" else GRAPH
