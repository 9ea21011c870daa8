"""A traced function of flat tensors as one Triton kernel: `out = function(*sized, numbers, scalars, tables)`, in one launch.

The CUDA counterpart of flat.py. A program works on TILE elements. The text has the function twice: without masks for a full
tile, so that memory is read and written 16 bytes at a time, and with masks for the last tile. Two kernels are made of it: one
that may assume that all tensors begin at multiples of 16 bytes, and, when it is first needed, one that may not.

Triton's `kernel[grid](...)` looks at every argument in every call, which takes longer than the work on a small tensor. Nothing
is to be found out here: one kernel is compiled for the dtypes (`warmup`), and launched with addresses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists import triton
from lowp.tensor.lists.trace import Element, Program, fused, trace

TILE = 1024  # elements of a program
WARPS = 4
MOST = 1 << 30  # elements of a launch: 32-bit indices


def build(
    function: Callable[..., Tensor],
    sized: Sequence[torch.dtype],
    out: torch.dtype,
    numbers: int,
    scalars: int,
    tables: Sequence[Tensor],
    exact_products: bool = False,
) -> Callable[..., None]:
    """Compile a function for the device of the current stream. Arguments and result are those of `flat.build`."""
    device = torch.device("cuda", torch.cuda.current_device())
    program = trace(lambda *a: [function(*a)], [Element(dtype) for dtype in sized], numbers, scalars, list(tables), device)
    assert program.results[0].dtype == out, (program.results[0].dtype, out)
    return _Kernel(fused(program) if exact_products else program, [*sized, out], [table.dtype for table in tables], device)


class _Kernel:
    def __init__(self, program: Program, sized: list[torch.dtype], tables: list[torch.dtype], device: torch.device) -> None:
        self._program, self._sized, self._tables, self._device = program, sized, tables, device
        self._compiled: dict[bool, Any] = {}
        self._compiled[True] = self._compile(True)

    def _compile(self, aligned: bool) -> Any:
        dtypes = [*self._sized, *_small(self._program), *self._tables]
        with torch.cuda.device(self._device):
            run = triton.build(source(self._program, self._sized, len(self._tables), aligned))
            return run.warmup(*dtypes, 1, grid=(1,), num_warps=WARPS, enable_fp_fusion=False)

    def __call__(
        self, sized: Sequence[Tensor], out: Tensor, numbers: Tensor | None, scalars: Tensor | None, tables: Sequence[Tensor]
    ) -> None:
        """All flat, on the device, `sized` and `out` of one length."""
        count = out.numel()
        if count > MOST:  # (Functions that count elements are called with fewer: kernels.py cuts where noise changes its key.)
            for start in range(0, count, MOST):
                part = slice(start, start + MOST)
                self([x[part] for x in sized], out[part], numbers, scalars, tables)
            return
        addresses = [*(x.data_ptr() for x in sized), out.data_ptr()]
        aligned = not any(address % 16 for address in addresses)
        compiled = self._compiled.get(aligned)
        if compiled is None:
            compiled = self._compiled[aligned] = self._compile(aligned)
        if self._program.numbers:
            addresses.append(numbers.data_ptr())  # type: ignore[union-attr]  # it is there where the function reads it
        if self._program.scalars:
            addresses.append(scalars.data_ptr())  # type: ignore[union-attr]
        addresses += [table.data_ptr() for table in tables]
        launch = compiled[-(-count // TILE), 1, 1]
        if torch.cuda.current_device() == self._device.index:
            launch(*addresses, count)
        else:
            with torch.cuda.device(self._device):
                launch(*addresses, count)


def _small(program: Program) -> dict[torch.dtype, str]:
    """The arrays of single numbers that the program reads: dtype and name of each."""
    found = {torch.int32: "numbers"} if program.numbers else {}
    return found | ({torch.float32: "scalars"} if program.scalars else {})


def source(program: Program, sized: Sequence[torch.dtype], tables: int, aligned: bool) -> str:
    """The Python text of a module with the kernel `run`. `sized` are the dtypes of the long arguments, the result's last.

    Triton assumes that a pointer is a multiple of 16 if it specialises on it and the example is one, as `warmup`'s are.
    """
    elements = tuple(Element(dtype) for dtype in sized)
    long = [f"p{i}" for i in range(len(sized))]
    names = [*long, *_small(program).values(), *(f"table{i}" for i in range(tables)), "count"]
    lines = [
        *triton.IMPORTS,
        f"@triton.jit(do_not_specialize={names[len(long) :] if aligned else names})",
        f"def run({', '.join(names)}):",
        f"    begin = tl.program_id(0) * {TILE}",
        f"    lane = tl.arange(0, {TILE})",
        "    index = begin + lane",
        "    inside = index < count",
        *(f"    {value.name} = tl.load(numbers + {place})" for place, value in program.numbers.items()),
        *(f"    {value.name} = tl.load(scalars + {place})" for place, value in program.scalars.items()),
    ]
    for head, masked in ((f"    if begin + {TILE} <= count:", False), ("    else:", True)):
        lines += [head, *("        " + line for line in triton.body(program, elements, (len(sized) - 1,), (), masked))]
    return "\n".join(lines) + "\n"
