"""A traced function of flat tensors as one Triton kernel: `out = function(*sized, numbers, tables)`, in one launch. A
function may have several results, each with its own tensor.

The CUDA counterpart of flat.py. A program works on TILE elements. The text has the function twice: without masks for a full
tile, so that memory is read and written 16 bytes at a time, and with masks for the last tile. Two kernels are made of it: one
that may assume that all tensors begin at multiples of 16 bytes, and, when it is first needed, one that may not.

Triton's `kernel[grid](...)` looks at every argument in every call, which takes longer than the work on a small tensor. Nothing
is to be found out here: one kernel is compiled for the dtypes (`warmup`), and launched with addresses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists import triton
from lowp.tensor.lists.flat import Function, traced
from lowp.tensor.lists.tracing import Program, fused

TILE = 1024  # elements of a program
WARPS = 4
MOST = 1 << 30  # elements of a launch: 32-bit indices


def build(
    function: Function,
    sized: Sequence[torch.dtype],
    out: torch.dtype | Sequence[torch.dtype],
    numbers: int,
    tables: Sequence[Tensor],
    exact_products: bool = False,
) -> "_TritonFlatKernel":
    """Compile a function for the device of the current stream. Arguments and result are those of `flat.build`."""
    device = torch.device("cuda", torch.cuda.current_device())
    outs = [out] if isinstance(out, torch.dtype) else list(out)
    program = traced(function, sized, numbers, tables, device)
    assert [result.dtype for result in program.results] == outs, (program.results, outs)
    return _TritonFlatKernel(
        fused(program) if exact_products else program, [*sized, *outs], [table.dtype for table in tables], device
    )


class _TritonFlatKernel:
    """Compiled variants of one program: for aligned tensors or any, for `numbers` on the device or on the host."""

    def __init__(self, program: Program, sized: list[torch.dtype], tables: list[torch.dtype], device: torch.device) -> None:
        self._program, self._sized, self._tables, self._device = program, sized, tables, device
        self._compiled: dict[tuple[bool, bool], Any] = {}
        self._get(True, True)  # the usual one: what cannot be compiled is found out here

    def _get(self, aligned: bool, on_host: bool) -> Any:
        found = self._compiled.get((aligned, on_host))
        if found is not None:
            return found
        numbers: list[Any] = [1] * len(self._program.numbers) if on_host else [torch.int32]
        small = numbers if self._program.numbers else []
        text = source(self._program, self._sized, len(self._tables), aligned, on_host)
        with torch.cuda.device(self._device):
            examples = [*self._sized, *small, *self._tables, 1]
            found = triton.build(text).warmup(*examples, grid=(1,), num_warps=WARPS, enable_fp_fusion=False)
        self._compiled[aligned, on_host] = found
        return found

    def __call__(
        self,
        sized: Sequence[Tensor],
        out: Tensor | Sequence[Tensor],
        numbers: Tensor | Sequence[int] | None,
        tables: Sequence[Tensor],
    ) -> None:
        """All flat, `sized` and `out` of one length, on the device; `numbers` there or on the host."""
        outs = [out] if isinstance(out, Tensor) else out
        count = outs[0].numel()
        if not count:
            return
        if count > MOST:  # (Functions that count elements have fewer: number_kernels.py cuts where noise changes its key.)
            for start in range(0, count, MOST):
                part = slice(start, start + MOST)
                self([x[part] for x in sized], [x[part] for x in outs], numbers, tables)
            return
        small, on_host = [], True
        if self._program.numbers:
            assert numbers is not None
            if isinstance(numbers, Tensor) and numbers.is_cuda:
                small, on_host = [numbers.data_ptr()], False
            else:
                values = numbers.tolist() if isinstance(numbers, Tensor) else numbers
                small = [values[place] for place in self._program.numbers]
        arguments = [x.data_ptr() for x in (*sized, *outs)], [*small, *(table.data_ptr() for table in tables)], on_host
        if torch.cuda.current_device() == self._device.index:
            self.launch(count, *arguments)
        else:
            with torch.cuda.device(self._device):
                self.launch(count, *arguments)

    def launch(self, count: int, long: Sequence[int], rest: Sequence[int], on_host: bool = True) -> None:
        """On the current device: addresses of `sized` and `out`, of at most MOST elements, and the arguments behind them."""
        aligned = not any(address % 16 for address in long)
        self._get(aligned, on_host)[-(-count // TILE), 1, 1](*long, *rest, count)


def source(program: Program, sized: Sequence[torch.dtype], tables: int, aligned: bool, on_host: bool) -> str:
    """The Python text of a module with the kernel `run`. `sized` are the dtypes of the long arguments, the results' last.

    Triton assumes that a pointer is a multiple of 16 if it specialises on it and the example is one, as `warmup`'s are.
    """
    long, numbers = [f"p{i}" for i in range(len(sized))], [value.name for value in program.numbers.values()]
    small = numbers if on_host or not numbers else ["numbers"]
    names = [*long, *small, *(f"table{i}" for i in range(tables)), "count"]
    inputs = len(sized) - len(program.results)
    lines = [
        *triton.IMPORTS,
        f"@triton.jit(do_not_specialize={names[len(long) :] if aligned else names})",
        f"def run({', '.join(names)}):",
        f"    begin = tl.program_id(0) * {TILE}",
        f"    index = begin + tl.arange(0, {TILE})",
        "    inside = index < count",
        *(f"    {value.name} = tl.load(numbers + {place})" for place, value in program.numbers.items() if not on_host),
    ]
    for head, read, write in (
        (f"    if begin + {TILE} <= count:", "", ""),
        ("    else:", ", mask=inside, other=0", ", mask=inside"),
    ):
        lines += [
            head,
            *(f"        x{i} = tl.load(p{i} + index{read})" for i in range(inputs)),
            *(f"        {s.result.name} = {triton.expression(s)}" for s in program.statements),
            *(f"        tl.store({p} + index, {v.name}{write})" for p, v in zip(long[inputs:], program.results, strict=True)),
        ]
    return "\n".join(lines) + "\n"
