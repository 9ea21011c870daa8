"""Sums of products in C++, for matrices in a CPU's memory.

A tile of the result, some rows by one or two vectors of columns, stays in registers while k runs; the steps (steps.py),
traced and printed in vector types (lists/vectors.py), are written out for every vector of the tile, so that the latencies
of one sum's roundings are hidden behind the others'. Before, the columns of b that some tiles need, a panel, are packed: one
vector after the other, for all k, the last filled up with zeros.

Arithmetic bound with AVX-512: a step to nearest with plain sums is 9 instructions for 16 elements (a fused multiply-add, eight
for rounding: rounding.py). Two vector instructions a cycle at 2.8 GHz make 2 * 16 * 2.8e9 / 9 = 10e9 steps, 20 GFLOP/s for
each core.
"""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from lowp.tensor.carrier import F32
from lowp.tensor.lists import cpp
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.lists.tracing import Program
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer
from lowp.tensor.matmul.job import MatmulJob, offsets
from lowp.tensor.matmul.programs import Programs
from lowp.tensor.matmul.steps import Steps

_TILE_ROWS = 4
_BLOCK_ROWS = 32  # of a unit of work
_FIELDS = {  # of a job, as C++ sees it: all of 64 bits
    "a": "const float*", "a_offsets": "const int64_t*", "a_row": "int64_t", "a_k": "int64_t",
    "b": "const float*", "b_offsets": "const int64_t*", "b_column": "int64_t", "b_k": "int64_t",
    "bias": "const float*", "bias_offsets": "const int64_t*", "bias_row": "int64_t", "bias_column": "int64_t",
    "out": "Result*", "out_row": "int64_t", "out_column": "int64_t",
    "rows": "int64_t", "columns": "int64_t", "depth": "int64_t",
    "keys": "const int32_t*", "tables": "const int64_t*", "uniforms": "const double*",
}  # fmt: skip

_BODY = r"""
template <class V> INLINE V read(const float* p) {
    return converted<V>(load<f32>(p, LANES));
}
template <class V> INLINE V read(const float* p, long stride, long count) {
    f32 x = {}; for (long l = 0; l < count; l++) x[l] = p[l * stride]; return converted<V>(x);
}
INLINE i32 lane_numbers() { i32 n; for (int l = 0; l < LANES; l++) n[l] = l; return n; }

// ROWS by VECTORS * LANES elements of a result, of which `columns` are wanted; `element` is the index of the first.
template <int ROWS, int VECTORS>
static __attribute__((noinline)) void tile(const Job& job, const float* a, const float* panel, const float* bias, Result* out,
                                           long columns, int32_t element) {
    Lane sums[ROWS][VECTORS][STATES] = {}, uniforms[UNIFORMS + 1];
    for (int u = 0; u < UNIFORMS; u++) uniforms[u] = splat<Lane>(job.uniforms[u]);
    i32 index[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            index[r][v] = (lane_numbers() + v * LANES) * (int32_t)job.out_column + (int32_t)(element + r * job.out_row);
    const int32_t* key = job.keys;
    auto all = [&](auto step) __attribute__((always_inline)) {
        UNROLLED for (int v = 0; v < VECTORS; v++) { UNROLLED for (int r = 0; r < ROWS; r++) step(r, v); } };
    for (long start = 0; start < job.depth; start += CHUNK) {
        const long end = CHUNK > 1 ? (start + CHUNK < job.depth ? start + CHUNK : job.depth) : job.depth;
        auto products = [&](Lane (&into)[ROWS][VECTORS][STATES]) __attribute__((always_inline)) {
            for (long k = start; k < end; k++, key += PRODUCT_KEYS) {
                const float* columns_of_k = panel + k * PANEL;
                all([&](int r, int v) __attribute__((always_inline)) {
                    multiply_add(splat<Operand>(a[r * job.a_row + k * job.a_k]), read<Operand>(columns_of_k + v * LANES),
                                 into[r][v], uniforms, key, index[r][v], job.tables);
                });
            }
        };
        if constexpr (CHUNK == 1) {
            products(sums);
            break;
        } else {
            Lane inner[ROWS][VECTORS][STATES] = {};
            products(inner);
            all([&](int r, int v) __attribute__((always_inline)) {
                add(inner[r][v][0], sums[r][v], uniforms, key, index[r][v], job.tables); });
            key += SUM_KEYS;
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        const long count = columns - v * LANES < LANES ? columns - v * LANES : LANES;
        for (int r = 0; r < ROWS; r++) {
            const int32_t* last = key;
            if (bias) {
                const float* own = bias + r * job.bias_row + v * LANES * job.bias_column;
                add_exactly(read<Lane>(own, job.bias_column, count), sums[r][v], uniforms, last, index[r][v], job.tables);
                last += SUM_KEYS;
            }
            const Lane result = finish(sums[r][v], uniforms, last, index[r][v], job.tables);
            Result* own = out + r * job.out_row + v * LANES * job.out_column;
            for (long l = 0; l < count; l++) own[l * job.out_column] = (Result)result[l];
        }
    }
}

template <int VECTORS> static void block(const Job& job, const float* a, const float* panel, const float* bias, Result* out,
                                         long rows, long columns, int32_t element) {
    long r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        tile<TILE_ROWS, VECTORS>(job, a + r * job.a_row, panel, bias ? bias + r * job.bias_row : bias, out + r * job.out_row,
                                 columns, (int32_t)(element + r * job.out_row));
    for (; r < rows; r++)
        tile<1, VECTORS>(job, a + r * job.a_row, panel, bias ? bias + r * job.bias_row : bias, out + r * job.out_row, columns,
                         (int32_t)(element + r * job.out_row));
}

static void pack(const Job& job, const float* b, long columns, float* panel) {
    memset(panel, 0, job.depth * PANEL * sizeof(float));
    if (job.b_column == 1) {
        for (long k = 0; k < job.depth; k++) memcpy(panel + k * PANEL, b + k * job.b_k, columns * sizeof(float));
    } else {
        for (long c = 0; c < columns; c++)
            for (long k = 0; k < job.depth; k++) panel[k * PANEL + c] = b[c * job.b_column + k * job.b_k];
    }
}

// Units of work: blocks of rows of one panel of columns of one product, in this order.
extern "C" void run(const Job* given, long first, long last) {
    const Subnormals subnormals;
    const Job job = *given;
    const long blocks = (job.rows + BLOCK_ROWS - 1) / BLOCK_ROWS, panels = (job.columns + PANEL - 1) / PANEL;
    float* panel = (float*)aligned_alloc(64, (job.depth * PANEL + LANES) * sizeof(float));
    long packed = -1;
    for (long unit = first; unit < last; unit++) {
        const long row = unit % blocks * BLOCK_ROWS, product = unit / blocks / panels;
        const long column = unit / blocks % panels * PANEL;
        const long rows = job.rows - row < BLOCK_ROWS ? job.rows - row : BLOCK_ROWS;
        const long columns = job.columns - column < PANEL ? job.columns - column : PANEL;
        if (packed != unit / blocks) {
            pack(job, job.b + job.b_offsets[product] + column * job.b_column, columns, panel);
            packed = unit / blocks;
        }
        const float* a = job.a + job.a_offsets[product] + row * job.a_row;
        const float* bias = job.bias;
        if (bias) bias += job.bias_offsets[product] + row * job.bias_row + column * job.bias_column;
        const long element = product * job.rows * job.columns + row * job.out_row + column * job.out_column;
        const auto tiles = [&](long c, long own) __attribute__((always_inline)) {  // `own` columns from `c` on
            const float* own_bias = bias ? bias + c * job.bias_column : bias;
            const long place = element + c * job.out_column;
            if (own > LANES) block<TILE_VECTORS>(job, a, panel + c, own_bias, job.out + place, rows, own, (int32_t)place);
            else block<1>(job, a, panel + c, own_bias, job.out + place, rows, own, (int32_t)place);
        };
        constexpr long most = TILE_VECTORS * LANES;
        if constexpr (PANEL == most) tiles(0, columns);
        else for (long c = 0; c < columns; c += most) tiles(c, columns - c < most ? columns - c : most);
    }
    free(panel);
}
"""


_LONGEST_REGISTER = 64  # bytes
_SHORT = 32  # statements: a step that leaves registers for a tile of two vectors


class _CppSource:
    """The text of a kernel."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self._steps = programs, programs.steps
        self._printer = Printer()
        short = len(programs.multiply_add.statements) < _SHORT and self._steps.states == 1 and self._steps.carrier is F32
        self.vectors = 2 if short else 1  # of a tile
        self.panel = self.vectors * _LONGEST_REGISTER // self._steps.carrier.dtype.itemsize  # columns

    def text(self) -> str:
        steps, programs = self._steps, self._programs
        functions = [self._function(name, program, joining) for name, (program, joining) in programs.functions.items()]
        sizes = {
            "STATES": steps.states, "UNIFORMS": steps.uniforms, "CHUNK": steps.arithmetic.chunk,
            "PRODUCT_KEYS": programs.product_keys, "SUM_KEYS": programs.sum_keys,
            "BLOCK_ROWS": _BLOCK_ROWS, "TILE_ROWS": _TILE_ROWS, "TILE_VECTORS": self.vectors, "PANEL": self.panel,
        }  # fmt: skip
        lines = [preamble(wide=steps.carrier is not F32), "#include <cstdlib>", '#define UNROLLED _Pragma("GCC unroll 16")']
        types = {"Lane": steps.carrier.dtype, "Operand": steps.operand_dtype}
        lines += [f"typedef {TYPES[dtype]} {name};" for name, dtype in types.items()]
        lines += [f"typedef {SCALARS[steps.result_dtype]} Result;"]
        lines += [f"constexpr long {', '.join(f'{name} = {size}' for name, size in sizes.items())};"]
        lines += ["struct Job {", *(f"    {kind} {name};" for name, kind in _FIELDS.items()), "};"]
        return "\n".join([*lines, *self._printer.declarations(), *functions, _BODY])

    def _function(self, name: str, program: Program, given: int) -> str:
        """A step: it changes the state, or, if it is the last, returns the result."""
        steps = self._steps
        self._printer.begin()
        arguments = [f"const {TYPES[v.dtype]} {v.name}" for v in program.elements[:given]]
        arguments += ["Lane* state", "const Lane* uniforms", "const int32_t* key", "const i32 index", "const int64_t* tables"]
        lines = [f"INLINE {'Lane' if name == 'finish' else 'void'} {name}({', '.join(arguments)}) {{"]
        for i, v in enumerate(program.elements[given:]):
            lines.append(f"    const Lane {v.name} = {f'state[{i}]' if i < steps.states else f'uniforms[{i - steps.states}]'};")
        for i, table in enumerate(self._programs.tables):
            lines.append(f"    const {SCALARS[table.dtype]}* table{i} = (const {SCALARS[table.dtype]}*)tables[{i}];")
        lines += [f"    const i32 {v.name} = splat<i32>(key[{place}]);" for place, v in program.numbers.items()]
        for s in program.statements:
            lines.append(f"    const {TYPES[s.result.dtype]} {s.result.name} = {self._printer.expression(s)};")
        if name == "finish":
            lines.append(f"    return {program.results[0].name};")
        else:
            lines += [f"    state[{i}] = {v.name};" for i, v in enumerate(program.results)]
        return "\n".join([*lines, "}"])


class CppMatmul:
    """The steps of one arithmetic in certain lanes, compiled."""

    def __init__(self, steps: Steps, tables: tuple[Tensor, ...], device: torch.device) -> None:
        self._steps, self._tables = steps, tables
        self._addresses = np.array([table.data_ptr() for table in tables], dtype=np.int64)
        source = _CppSource(Programs(steps, tables, device))
        self._panel_columns, self._narrow = source.panel, source.panel // source.vectors
        self._run = cpp.build(source.text(), (ctypes.c_void_p, ctypes.c_long, ctypes.c_long))

    def __call__(self, job: MatmulJob, uniforms: Tensor) -> Tensor:
        result = torch.empty(job.shape, dtype=self._steps.result_dtype)
        a, b, bias, out = job.a, job.b, job.bias, result
        if job.columns < self._narrow and job.columns < job.rows:
            # (A B)^T = B^T A^T, product by product: vectors along the rows
            a, b, bias, out = b.mT, a.mT, None if bias is None else bias.mT, result.mT
        keys = job.keys(self._steps)
        starts = [offsets(x) for x in (a, b, bias)]  # named, so that they live while the kernel runs
        rows, columns = out.shape[-2:]
        numbers = [
            *(a.data_ptr(), starts[0].ctypes.data, a.stride(-2), a.stride(-1)),
            *(b.data_ptr(), starts[1].ctypes.data, b.stride(-1), b.stride(-2)),
            *((0, 0, 0, 0) if bias is None else (bias.data_ptr(), starts[2].ctypes.data, bias.stride(-2), bias.stride(-1))),
            *(out.data_ptr(), out.stride(-2), out.stride(-1), rows, columns, job.depth),
            *(keys.data_ptr(), self._addresses.ctypes.data, uniforms.data_ptr()),
        ]
        given = np.array(numbers, dtype=np.int64)
        units = math.prod(job.batch) * -(-columns // self._panel_columns) * -(-rows // _BLOCK_ROWS)
        cpp.in_parallel(lambda first, last, _: self._run(given.ctypes.data, first, last), units, cpp.parts_of(units, job.work))
        return result
