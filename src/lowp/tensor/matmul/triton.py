"""Sums of products as a Triton kernel, for matrices in a GPU's memory.

A program computes a tile of the result, with the state of its sums in registers, one k after the other: a column of a and a
row of b are read, and the steps (steps.py), traced and printed, are carried out on the tile. Multiplications and additions
are fused only where the steps say so.

Which lanes are right depends on the data, and nobody waits for the data: the kernels of all lanes are launched, each looks
at the number of the chosen one, and all but that one are done.

Arithmetic bound: a step to nearest with plain sums is 8 instructions (rounding.py): three multiply-adds, and five (two of
logic, a maximum, a comparison, a selection) for the other units, of which an H200 has 64 in each of its 132 processors. At
1.755 GHz that is 132 * 64 * 1.755e9 / 5 = 3e12 steps a second, 5.9 TFLOP/s. Reading and counting adds a fifth to the
instructions (SASS of a tile of 16 by 256), which run beside those five.
"""

import math

import torch
from torch import Tensor

from lowp.tensor.lists.tracing import Program
from lowp.tensor.lists.triton import TYPES, build, expression
from lowp.tensor.matmul.job import MatmulJob, offsets
from lowp.tensor.matmul.programs import Programs
from lowp.tensor.matmul.steps import Steps

_HEAD = """import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

"""

_RUN = """
@triton.jit
def run(a, a_offsets, a_row, a_k, b, b_offsets, b_column, b_k, bias, bias_offsets, bias_row, bias_column, out, rows, columns,
        depth, keys, uniforms, chosen, own, {tables}HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if tl.load(chosen) != own:
        return
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    product = (tile // (down * across)).to(tl.int64)
    row = (tile // across % down * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    of_a = a + tl.load(a_offsets + product) + row.to(tl.int64) * a_row
    of_b = b + tl.load(b_offsets + product) + column.to(tl.int64) * b_column
    place = product * rows * columns + row.to(tl.int64) * columns + column
    index = place.to(tl.int32)
    key = keys
{uniforms}{zeros}{products}    if HAS_BIAS:
        of_bias = bias + tl.load(bias_offsets + product) + row.to(tl.int64) * bias_row + column.to(tl.int64) * bias_column
        x = tl.load(of_bias, mask=(row < rows) & (column < columns), other=0.0).to({lane})
        {add_exactly}
        key += {sum_keys}
    result = {finish}
    tl.store(out + place, result.to({result}), mask=(row < rows) & (column < columns))
"""
_CHUNKED = """    for start in range(0, depth, {chunk}):
{zeros}        for k in range(start, tl.minimum(start + {chunk}, depth)):
            {product}
            key += {product_keys}
        {add}
        key += {sum_keys}
"""
_PLAIN = """    for k in range(0, depth):
        {product}
        key += {product_keys}
"""


class _TritonSource:
    """The text of a kernel: a function for each step, and the loops around them."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self._steps = programs, programs.steps
        self._lane = TYPES[self._steps.carrier.dtype]

    def text(self) -> str:
        steps, programs = self._steps, self._programs
        functions = [self._function(name, program) for name, (program, _) in programs.functions.items()]
        run = _RUN.format(
            tables="".join(f"table{i}, " for i in range(len(programs.tables))),
            uniforms="".join(f"    u{i} = tl.load(uniforms + {i})\n" for i in range(steps.uniforms)),
            zeros=self._zeros("s", "    "),
            products=self._products(),
            add_exactly=self._call("add_exactly", "x", "s"),
            finish=self._call("finish", "", "s").split(" = ")[1],
            sum_keys=programs.sum_keys,
            lane=self._lane,
            result=TYPES[steps.result_dtype],
        )
        return _HEAD + "\n\n".join(functions) + "\n" + run

    def _products(self) -> str:
        chunk = self._steps.arithmetic.chunk
        operand = TYPES[self._steps.operand_dtype]
        x = f"tl.load(of_a + k * a_k, mask=row < rows, other=0.0).to({operand})"
        y = f"tl.load(of_b + k * b_k, mask=column < columns, other=0.0).to({operand})"
        return (_PLAIN if chunk == 1 else _CHUNKED).format(
            product=self._call("multiply_add", f"{x}, {y}", "s" if chunk == 1 else "t"),
            product_keys=self._programs.product_keys,
            sum_keys=self._programs.sum_keys,
            chunk=chunk,
            zeros=self._zeros("t", " " * 8),
            add=self._call("add", "t0", "s"),
        )

    def _states(self, letter: str) -> list[str]:
        return [f"{letter}{i}" for i in range(self._steps.states)]

    def _zeros(self, letter: str, indent: str) -> str:
        return "".join(f"{indent}{name} = tl.zeros([ROWS, COLUMNS], {self._lane})\n" for name in self._states(letter))

    def _call(self, name: str, joining: str, letter: str) -> str:
        states = self._states(letter)
        uniforms = [f"u{i}" for i in range(self._steps.uniforms)]
        tables = [f"table{i}" for i in range(len(self._programs.tables))]
        given = [joining] if joining else []
        return f"{', '.join(states)} = {name}({', '.join([*given, *states, *uniforms, 'key', 'index', *tables])})"

    def _function(self, name: str, program: Program) -> str:
        tables = [f"table{i}" for i in range(len(self._programs.tables))]
        arguments = [*(v.name for v in program.elements), "key", "index", *tables]
        lines = ["@triton.jit", f"def {name}({', '.join(arguments)}):"]
        lines += [f"    {v.name} = tl.load(key + {place})" for place, v in program.numbers.items()]
        lines += [f"    {s.result.name} = {expression(s)}" for s in program.statements]
        return "\n".join([*lines, f"    return {', '.join(v.name for v in program.results)}"])


_WARPS = 4
_SHORT = 32  # statements: of such a step a thread has registers for 32 elements, of others for 8


class TritonMatmul:
    """The steps of one arithmetic in certain lanes."""

    def __init__(self, steps: Steps, tables: tuple[Tensor, ...], device: torch.device) -> None:
        self._steps, self._tables = steps, tables
        programs = Programs(steps, tables, device)
        self._run = build(_TritonSource(programs).text())
        words = steps.states * steps.carrier.dtype.itemsize // 4  # of a state
        most = 32 if len(programs.multiply_add.statements) < _SHORT else 8
        self._each = 1 << ((max(1, most // words)).bit_length() - 1)

    def launch(self, job: MatmulJob, out: Tensor, uniforms: Tensor, chosen: Tensor, own: int) -> None:
        """Nothing happens unless the kernel is the chosen one."""
        a, b, bias = job.a, job.b, job.bias
        last = a if bias is None else bias  # an argument that is not looked at where there is no bias
        starts = [torch.from_numpy(offsets(x)).to(job.device, non_blocking=True) for x in (a, b, last)]
        rows, columns = self._tile(job.columns)
        tiles = math.prod(job.batch) * -(-job.rows // rows) * -(-job.columns // columns)
        self._run[(tiles,)](
            *(a, starts[0], a.stride(-2), a.stride(-1), b, starts[1], b.stride(-1), b.stride(-2)),
            *(last, starts[2], last.stride(-2), last.stride(-1), out, job.rows, job.columns, job.depth),
            *(job.keys(self._steps), uniforms, chosen, own, *self._tables),
            HAS_BIAS=bias is not None, ROWS=rows, COLUMNS=columns, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _tile(self, columns: int) -> tuple[int, int]:
        """Rows and columns. A warp has 32 columns of one row, and warps lie side by side as far as the tile is wide: in a tile
        of 256 columns a thread has two of each row, and reads two numbers of b and one of each row of a for each k.
        """
        wide = 32 if columns <= 32 else (64 if columns <= 64 else 256)
        wide = min(wide, self._each * _WARPS * 32)
        return self._each * _WARPS * 32 // wide, wide
