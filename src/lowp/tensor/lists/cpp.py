"""A traced function as C++, for lists of tensors in a CPU's memory.

The program is printed in GCC's vector types (16 numbers at a time, on any machine: the compiler splits them where registers are
shorter), compiled by itself in a second or two, without torch's headers, and called through ctypes, which lets go of Python's
lock: threads of our own share the work. inductor's kernels, 20 times slower here, spill every reinterpretation of bits.

One call works on chunks `first` to `last` of a list of tensors; a chunk is a stretch of one tensor.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowp.tensor.lists.cache import cache_folder
from lowp.tensor.lists.trace import Element, Program, Statement, Value

LONGEST_BLOCK = 4096  # elements
_TYPES = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float32: "f32", torch.float64: "f64",
    torch.float16: "i16", torch.bfloat16: "i16", torch.bool: "i32",
}  # fmt: skip
_SCALARS = {
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float",
    torch.float64: "double", torch.bool: "uint8_t",
}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

_PREAMBLE = r"""
#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
constexpr int LANES = 16;
typedef int8_t i8 __attribute__((vector_size(16)));
typedef int16_t i16 __attribute__((vector_size(32)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef int64_t i64 __attribute__((vector_size(128)));
typedef float f32 __attribute__((vector_size(64)));
typedef double f64 __attribute__((vector_size(128)));
#define INLINE static inline __attribute__((always_inline))
template <class V, class S> INLINE V splat(S s) { return (std::remove_reference_t<decltype(V{}[0])>)s - V{}; }  // x - 0 is x, -0.0 too
template <class V, class T> INLINE V load(const T* p, long count) {
    V v = {}; memcpy(&v, p, count * sizeof(T)); return v; }
template <class V, class T> INLINE void store(T* p, V v, long count) { memcpy(p, &v, count * sizeof(T)); }
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }
#if defined(__AVX512F__)
INLINE i32 larger(i32 a, i32 b) { return (i32)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE i32 smaller(i32 a, i32 b) { return (i32)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#endif
INLINE f32 square_root(f32 x) {
#if defined(__AVX512F__)
    return (f32)_mm512_sqrt_ps((__m512)x);
#else
    f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_sqrtf(x[l]); return r;
#endif
}
INLINE f64 square_root(f64 x) { f64 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_sqrt(x[l]); return r; }
INLINE f32 nearest_integer(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_rintf(x[l]); return r; }
INLINE f32 integer_below(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_floorf(x[l]); return r; }
INLINE f32 half_to_float(i16 h) {
#if defined(__AVX512F__)
    return (f32)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    f32 r; for (int l = 0; l < LANES; l++) r[l] = _cvtsh_ss((uint16_t)h[l]); return r;
#else
    i32 b = __builtin_convertvector(h, i32), m = b & 0x7FFF;
    f32 r = (f32)(m << 13) * splat<f32>(0x1p112f);
    i32 special = m > 0x7BFF;
    return (f32)((special ? (m << 13 | 0x7F800000) : (i32)r) | (b << 16 & (int32_t)0x80000000));
#endif
}
INLINE i16 float_to_half(f32 x) {
#if defined(__AVX512F__)
    return (i16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    i32 b = (i32)x, m = b & 0x7FFFFFFF, s = b >> 16 & 0x8000;
    i32 normal = (m - ((127 - 15) << 23) + 0xFFF + (m >> 13 & 1)) >> 13;
    i32 small = (i32)((f32)m + splat<f32>(0.5f)) - 0x3F000000;
    i32 r = m < 0x38800000 ? small : normal;
    r = m > 0x477FEFFF ? splat<i32>(0x7C00) : r;
    r = m > 0x7F800000 ? (m >> 13 | 0x7E00) : r;
    return __builtin_convertvector(r | s, i16);
#endif
}
INLINE f32 bfloat_to_float(i16 h) { return (f32)(__builtin_convertvector(h, i32) << 16); }
INLINE i16 float_to_bfloat(f32 x) {
    i32 b = (i32)x, r = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    r = (b & 0x7FFFFFFF) > 0x7F800000 ? (b >> 16 | 0x40) : r;
    return __builtin_convertvector(r, i16);
}
#define LOOK_UP(V) template <class T> INLINE V look_up_##V(const T* table, i32 index) { \
    V r; for (int l = 0; l < LANES; l++) r[l] = table[index[l]]; return r; }
LOOK_UP(i8) LOOK_UP(i16) LOOK_UP(i32) LOOK_UP(i64) LOOK_UP(f32) LOOK_UP(f64)
#if defined(__AVX512F__)
INLINE i32 look_up_i32(const int32_t* table, i32 index) { return (i32)_mm512_i32gather_epi32((__m512i)index, table, 4); }
INLINE f64 look_up_f64(const double* table, i32 index) {
    union { f64 v; __m512d h[2]; } r; union { i32 v; __m256i h[2]; } at; at.v = index;
    r.h[0] = _mm512_i32gather_pd(at.h[0], table, 8); r.h[1] = _mm512_i32gather_pd(at.h[1], table, 8); return r.v; }
#endif
"""


class _Printer:
    """Expressions of statements, in vector types. A truth value is a 32-bit integer, all ones or zero."""

    def __init__(self) -> None:
        self._comparisons: dict[str, tuple[str, int]] = {}  # their text, and the width of what they compare
        self.constants: dict[tuple[str, str], int] = {}  # type and text -> place

    def kept(self, kind: str, text: str) -> str:
        """A constant in memory, from where instructions take it as they go. Written out, each would cost one of its own."""
        place = self.constants.setdefault((kind, text), len(self.constants))
        return f"splat<{kind}>(constant{place})"

    def literal(self, constant: Any, dtype: torch.dtype, shift: bool = False) -> str:
        kind = _TYPES[dtype]
        if dtype == torch.bool:
            return f"splat<i32>({-int(bool(constant))})"
        if dtype in (torch.float32, torch.float64):
            number = float(np.float32(constant)) if dtype == torch.float32 else float(constant)
            text = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}.get(str(number), number.hex())
            return (
                self.kept(kind, f"({_SCALARS[dtype]}){text}")
                if dtype == torch.float32
                else f"splat<{kind}>(({_SCALARS[dtype]}){text})"
            )
        bits = dtype.itemsize * 8
        wrapped = (int(constant) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        if dtype == torch.int32 and not shift and wrapped not in (0, -1):
            return self.kept(kind, str(wrapped))
        return f"splat<{kind}>(({_SCALARS[dtype]}){wrapped}LL)"

    def argument(self, argument: Any, dtype: torch.dtype) -> str:
        if not isinstance(argument, Value):
            return self.literal(argument, dtype)
        return argument.name if argument.dtype == dtype else self.converted(argument, dtype)

    def converted(self, value: Value, dtype: torch.dtype) -> str:
        source, name = value.dtype, value.name
        if source == torch.bool:
            return f"__builtin_convertvector({name} & 1, {_TYPES[dtype]})"
        if dtype == torch.bool:
            return f"__builtin_convertvector({name} != 0, i32)"
        if source in _HALVES:
            single = f"{_HALVES[source]}_to_float({name})"
            return single if dtype == torch.float32 else f"__builtin_convertvector({single}, {_TYPES[dtype]})"
        if dtype in _HALVES:
            single = name if source == torch.float32 else f"__builtin_convertvector({name}, f32)"
            return f"float_to_{_HALVES[dtype]}({single})"
        return f"__builtin_convertvector({name}, {_TYPES[dtype]})"

    def expression(self, s: Statement) -> str:
        a = [None if x is None else self.argument(x, s.operand) for x in s.arguments] if s.operation not in _OWN else []
        match s.operation:
            case "constant":
                return self.literal(s.arguments[0], s.result.dtype)
            case "index":
                return "index"
            case "bitcast":
                return f"({_TYPES[s.result.dtype]}){s.arguments[0].name}"
            case "convert":
                return self.argument(s.arguments[0], s.result.dtype)
            case "look_up":
                table, index = s.arguments
                at = self.argument(index, torch.int32)
                found = f"look_up_{_TYPES[s.result.dtype]}(table{table}, {at})"
                return f"-({found})" if s.result.dtype == torch.bool else found
            case "where":
                mask, yes, no = s.arguments[0].name, *(self.argument(x, s.operand) for x in s.arguments[1:])
                width = 4 if s.operand == torch.bool else s.operand.itemsize
                if mask in self._comparisons and self._comparisons[mask][1] == width:
                    return f"({self._comparisons[mask][0]}) ? {yes} : {no}"  # a mask register, never a vector
                if width != 4:
                    mask = f"__builtin_convertvector({mask}, {'i' + str(8 * width)})"
                return f"{mask} ? {yes} : {no}"
            case "shl" | "shr" if not isinstance(s.arguments[1], Value):  # by a constant that is part of the instruction
                return f"{a[0]} {_INFIX[s.operation]} {self.literal(s.arguments[1], s.operand, shift=True)}"
            case operation if operation in _INFIX:
                return f"{a[0]} {_INFIX[operation]} {a[1]}"
            case operation if operation in _COMPARE:
                text = f"{a[0]} {_COMPARE[operation]} {a[1]}"
                self._comparisons[s.result.name] = (text, s.operand.itemsize)
                return f"__builtin_convertvector({text}, i32)"
            case "rsub":
                return f"{a[1]} - {a[0]}"
            case "neg":
                return f"-{a[0]}"
            case "not":
                return f"~{a[0]}"
            case "sqrt":
                return f"square_root({a[0]})"
            case "round":
                return f"nearest_integer({a[0]})"
            case "floor":
                return f"integer_below({a[0]})"
            case "abs" if s.operand == torch.float32:
                return f"(f32)((i32){a[0]} & 0x7FFFFFFF)"
            case "abs":
                return f"{a[0]} < 0 ? -{a[0]} : {a[0]}"
            case "max":
                return f"({a[0]} > {a[1]}) | ({a[0]} != {a[0]}) ? {a[0]} : {a[1]}"
            case "min":
                return f"({a[0]} < {a[1]}) | ({a[0]} != {a[0]}) ? {a[0]} : {a[1]}"
            case "clamp":
                text = a[0]
                if a[1] is not None:
                    text = f"larger({a[1]}, {text})"  # where it is NaN, the second
                if a[2] is not None:
                    text = f"smaller({a[2]}, {text})"
                return text
        raise NotImplementedError(f"{s.operation} in C++")


_HALVES = {torch.float16: "half", torch.bfloat16: "bfloat"}
_OWN = ("constant", "index", "bitcast", "convert", "look_up", "where", "amax")


def source(
    program: Program,
    elements: tuple[Element, ...],
    writes: tuple[int, ...],
    reductions: tuple[str, ...],
    tables: list[torch.dtype],
) -> str:
    """The C++ text of a program."""
    printer = _Printer()
    stages = _stages(program)
    written = program.results[: len(writes)]
    reduced = program.results[len(writes) :]
    last = len(stages) - 1
    lines = [_PREAMBLE, _SIGNATURE]
    lines += [f"    const {_SCALARS[d]}* table{i} = (const {_SCALARS[d]}*)tables[{i}];" for i, d in enumerate(tables)]
    lines += [f"    const f32 {v.name} = splat<f32>(scalars[{place}]);" for place, v in program.scalars.items()]
    lines += ["    for (long chunk = first; chunk < last; chunk++) {", "        const long tensor = chunk_tensor[chunk];"]
    lines += ["        const long begin = chunk_start[chunk], length = lengths[tensor];"]
    lines += ["        const long size = chunk_sizes[tensor], end = begin + size < length ? begin + size : length;"]
    lines += ["        const long width = widths[tensor];"]
    for i, e in enumerate(elements):
        lines.append(f"        {_SCALARS[e.dtype]}* p{i} = ({_SCALARS[e.dtype]}*)pointers[tensor * {len(elements)} + {i}];")
    for place, v in program.numbers.items():
        lines.append(f"        const i32 {v.name} = splat<i32>(numbers[{place} * tensors + tensor]);")
    for i, kind in enumerate(reductions):
        lines.append(f"        {'i32' if kind == 'max' else 'i64'} r{i} = {{}};")
    blocks = len(stages) > 1 or any(e.of_block for e in elements)
    lines.append(f"        for (long b = begin; b < end; b += {'width' if blocks else 'end - begin'}) {{")
    lines.append(f"            const long stop = {'b + width < end ? b + width : end' if blocks else 'end'};")
    for i, e in enumerate(elements):
        if e.of_block:
            lines.append(f"            const {_TYPES[e.dtype]} x{i} = splat<{_TYPES[e.dtype]}>(p{i}[b / width]);")
    kept = _kept(stages, program)
    for v in kept:
        lines.append(f"            {_TYPES[v.dtype]} kept_{v.name}[{LONGEST_BLOCK} / LANES];")
    for number, (statements, maxima) in enumerate(stages):
        lines += [f"            f32 most_{m.result.name} = {{}};" for m in maxima]
        lines.append("            for (long e = b; e < stop; e += LANES) {")
        lines.append("                const long count = stop - e < LANES ? stop - e : LANES;")
        lines.append("                auto body = [&](long count) __attribute__((always_inline)) {")
        body = [f"const i32 index = splat<i32>((int32_t)e) + i32{{{', '.join(map(str, range(16)))}}};"]
        body.append("const i32 inside = (index - splat<i32>((int32_t)e)) < splat<i32>((int32_t)count);")
        needed = _needed(statements, maxima, written if number == last else (), reduced if number == last else ())
        body += [
            f"const {_TYPES[e.dtype]} x{i} = load<{_TYPES[e.dtype]}>(p{i} + e, count);"
            for i, e in enumerate(elements)
            if not e.of_block and f"x{i}" in needed
        ]
        if number > 0:
            body += [f"const {_TYPES[v.dtype]} {v.name} = kept_{v.name}[(e - b) / LANES];" for v in kept]
        body += [f"const {_TYPES[s.result.dtype]} {s.result.name} = {printer.expression(s)};" for s in statements]
        if number == 0:
            body += [f"kept_{v.name}[(e - b) / LANES] = {v.name};" for v in kept]
        for m in maxima:
            amount = f"(inside ? {m.arguments[0].name} : f32{{}})"
            body.append(f"most_{m.result.name} = {amount} > most_{m.result.name} ? {amount} : most_{m.result.name};")
        if number == last:
            body += [
                f"store(p{i} + e, {v.name}, count);" for i, v in zip(writes, written, strict=True) if not elements[i].of_block
            ]
            for i, (kind, v) in enumerate(zip(reductions, reduced, strict=True)):
                value = printer.argument(v, torch.int32 if kind == "max" else torch.int64)
                value = (
                    f"(inside ? {value} : i32{{}})"
                    if kind == "max"
                    else (f"(__builtin_convertvector(inside, i64) ? {value} : i64{{}})")
                )
                body.append(f"r{i} = {f'{value} > r{i} ? {value} : r{i}' if kind == 'max' else f'r{i} + {value}'};")
            for i, v in zip(writes, written, strict=True):
                if elements[i].of_block:
                    body.append(f"if (e == b) p{i}[b / width] = {v.name}[0];")
        lines += ["                    " + line for line in body]
        lines.append("                };")
        lines.append("                if (count == LANES) body(LANES); else body(count);")
        lines.append("            }")
        for m in maxima:
            lines.append(f"            float top_{m.result.name} = 0;")
            lines.append(
                f"            for (int l = 0; l < LANES; l++) top_{m.result.name} = "
                f"most_{m.result.name}[l] > top_{m.result.name} ? most_{m.result.name}[l] : top_{m.result.name};"
            )
            lines.append(f"            const f32 {m.result.name} = splat<f32>(top_{m.result.name});")
    lines.append("        }")
    for i, kind in enumerate(reductions):
        lines.append(
            f"        for (int l = 0; l < LANES; l++) reduced[{i} * tensors + tensor] = "
            + (
                f"r{i}[l] > reduced[{i} * tensors + tensor] ? r{i}[l] : reduced[{i} * tensors + tensor];"
                if kind == "max"
                else f"reduced[{i} * tensors + tensor] + r{i}[l];"
            )
        )
    lines += ["    }", "}"]
    declared = [
        f'__attribute__((visibility("hidden"))) {"int32_t" if kind == "i32" else "float"} constant{place} = {text};'
        for (kind, text), place in printer.constants.items()
    ]
    return "\n".join([*lines[:1], *declared, *lines[1:]])


_SIGNATURE = """
extern "C" void run(const int64_t* pointers, const int64_t* lengths, const int64_t* widths, const int32_t* numbers,
                    long tensors, const float* scalars, const int64_t* tables, int64_t* reduced,
                    const int32_t* chunk_tensor, const int64_t* chunk_start, const int64_t* chunk_sizes, long first, long last) {"""


def _stages(program: Program) -> list[tuple[list[Statement], list[Statement]]]:
    """The statements before and after the maxima of a block are known (only one stage where nothing is asked of blocks)."""
    maxima = [s for s in program.statements if s.operation == "amax"]
    if not maxima:
        return [(list(program.statements), [])]
    made_by = {s.result.name: s for s in program.statements}
    before: set[str] = set()
    waiting = [m.arguments[0].name for m in maxima]
    while waiting:
        name = waiting.pop()
        if name in made_by and name not in before:
            assert made_by[name].operation != "amax", "maxima of maxima are not supported"
            before.add(name)
            waiting += [a.name for a in made_by[name].arguments if isinstance(a, Value)]
    first = [s for s in program.statements if s.result.name in before]
    second = [s for s in program.statements if s.result.name not in before and s.operation != "amax"]
    return [(first, maxima), (second, [])]


def _needed(statements: list[Statement], maxima: list[Statement], *results: tuple[Value, ...]) -> set[str]:
    found = {a.name for s in (*statements, *maxima) for a in s.arguments if isinstance(a, Value)}
    return found | {v.name for values in results for v in values}


def _kept(stages: list[tuple[list[Statement], list[Statement]]], program: Program) -> list[Value]:
    """What the second stage needs of the first."""
    if len(stages) == 1:
        return []
    needed = _needed(stages[1][0], [], program.results)
    return [s.result for s in stages[0][0] if s.result.name in needed]


def compiler() -> str:
    """The C++ compiler: what CXX names, g++, clang++ or c++."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise FileNotFoundError("no C++ compiler (g++ or clang++) was found; set CXX")


_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-w",
    "-shared",
    "-fPIC",
)


@lru_cache(maxsize=1)
def _machine() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next((line for line in text.split("\n") if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def build(text: str) -> Any:
    """Compile and load; what was compiled before on this kind of machine is found again."""
    command = [compiler(), *_FLAGS]
    name = hashlib.sha256("\0".join([text, _machine(), *command]).encode()).hexdigest()[:32]
    library = cache_folder() / f"{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            written, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            written.write_text(text)
            done = subprocess.run([*command, str(written), "-o", str(made)], capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise RuntimeError(f"{command[0]} could not compile a kernel: {done.stderr[:2000]}")
            os.replace(made, library)
    run = ctypes.CDLL(str(library)).run
    run.restype = None
    run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] + [ctypes.c_void_p] * 6 + [ctypes.c_long] * 2
    return run


@lru_cache(maxsize=4)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads beside the calling one. (Not those of a process that this one was forked from.)"""
    return ThreadPoolExecutor(count, thread_name_prefix="lowp")


def parts_of(chunks: int, elements: int) -> int:
    """Into how many parts work is divided: as many threads as torch uses, where it is worth it."""
    return min(torch.get_num_threads(), chunks) if elements > 1 << 16 else 1


def in_parallel(call: Any, chunks: int, parts: int) -> None:
    """`call(first, last, part)` over all chunks, each part on a thread."""
    if parts <= 1:
        call(0, chunks, 0)
        return
    cuts = [chunks * part // parts for part in range(parts + 1)]
    pool = _threads(torch.get_num_threads() - 1, os.getpid())
    others = [pool.submit(call, cuts[part], cuts[part + 1], part) for part in range(1, parts)]
    call(cuts[0], cuts[1], 0)
    for other in others:
        other.result()
