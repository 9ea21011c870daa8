"""A traced function as C++, for lists of tensors in a CPU's memory.

The program is printed in vector types (vectors.py), compiled by itself in a second or two, without torch's headers, and called
through ctypes. OpenMP's threads share the work. (inductor's kernels are 20 times slower here: they spill every
reinterpretation of bits.)

A call works on all chunks of a list of tensors; a chunk is a stretch of one tensor. Reductions are integers, so that the order
in which threads add theirs does not matter. Where something is asked of blocks, a block is worked on twice: what its largest
number depends on, then the rest, with what both need kept between them.
"""

import ctypes
import hashlib
import os
import platform
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lowp.tensor.lists import drawing
from lowp.tensor.lists.cache import UnsafeCache, load_library
from lowp.tensor.lists.compiling import compiled
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.lists.tracing import Element, Program, Statement, Value
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer

LONGEST_BLOCK = 4096  # elements
# Processors fetch ahead by themselves, but only to the end of a page of 4 KB. So much further (bytes) we ask for it: then a
# step of SGD takes 8 ns for 16 numbers instead of 10 (docs/LOG.md).
_AHEAD = 2048
_LINE = 64  # bytes that are fetched together
_SIGNATURE = """
extern "C" void run(const int64_t* pointers, const int64_t* lengths, const int64_t* widths, const int32_t* numbers,
                    long tensors, long columns, const float* scalars, const int64_t* tables, int64_t* reduced,
                    const int32_t* chunk_tensor, const int64_t* chunk_start, const int64_t* chunk_sizes, long chunks,
                    long threads) {"""
_INTO = """
static inline void sum_into(int64_t* total, int64_t part) { __atomic_fetch_add(total, part, __ATOMIC_RELAXED); }
static inline void largest_into(int64_t* most, int64_t part) {
    int64_t now = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (part > now && !__atomic_compare_exchange_n(most, &now, part, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}"""
_CHUNK = """
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if(threads > 1)
    for (long chunk = 0; chunk < chunks; chunk++) {
        const Subnormals subnormals;
        const long tensor = chunk_tensor[chunk], begin = chunk_start[chunk], length = lengths[tensor];
        const long size = chunk_sizes[tensor], end = begin + size < length ? begin + size : length;"""


class _Source:
    """The text, piece by piece."""

    def __init__(
        self, program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], reductions: tuple[str, ...]
    ) -> None:
        apart = drawing.taken_apart(program)
        # Of blocks, the numbers before and after their maxima are known would each need the words.
        self.drawn, program = apart if len(_stages(program)) == 1 else (None, program)
        self.fixed, program = _of_tensors_alone(program)
        self.program = program
        self.elements = elements
        self.reductions = reductions
        self.written = list(zip(writes, program.results, strict=False))
        self.reduced = list(zip(reductions, program.results[len(writes) :], strict=True))
        self.stages = _stages(program)
        self.kept = _kept(self.stages, program)
        self.of_blocks = len(self.stages) > 1 or any(e.of_block for e in elements)
        self.printer = Printer()

    def text(self, tables: list[torch.dtype]) -> str:
        lines = [*([_INTO] if self.reductions else []), _SIGNATURE]
        lines += [f"    const {SCALARS[d]}* table{i} = (const {SCALARS[d]}*)tables[{i}];" for i, d in enumerate(tables)]
        inner = [*self._of_tensor(), *self._of_block(), *self._reduce(), "    }", "}"]
        # Inside the loop over chunks, so that they are the thread's own, in registers, and not asked for in memory again.
        lines.append(_CHUNK)
        lines += [
            f"        {kind} constant{i} = splat<{kind}>(::constant{i}); KEEP(constant{i});"
            for (kind, _), i in self.printer.constants.items()
        ]
        lines += [f"        const f32 {v.name} = splat<f32>(scalars[{place}]);" for place, v in self.program.scalars.items()]
        lines += inner
        begin = [preamble(self._wide()), *([drawing.PREAMBLE] if self.drawn else [])]
        return "\n".join([*begin, *self.printer.declarations(), *lines])

    def _wide(self) -> bool:
        """Are there 64-bit numbers? Then a register holds as many of them as a vector has: of longer vectors GCC makes code
        that passes through memory, and takes six times as long to make it."""
        return any(v.dtype.itemsize == 8 for v in (*self.program.elements, *(s.result for s in self.program.statements)))

    def _of_tensor(self) -> list[str]:
        """What a chunk's tensor brings."""
        lines = []
        for i, e in enumerate(self.elements):
            kind = SCALARS[e.dtype]
            lines.append(f"        {kind}* p{i} = ({kind}*)pointers[tensor * columns + {i}];")
        for place, v, kind in drawing.typed_numbers(self.program, self.drawn):
            lines.append(f"        const {kind} {v.name} = splat<{kind}>(numbers[{place} * tensors + tensor]);")
        lines += [f"        const {TYPES[s.result.dtype]} {s.result.name} = {self.printer.expression(s)};" for s in self.fixed]
        return lines + [f"        {'i32' if kind == 'max' else 'i64'} r{i} = {{}};" for i, kind in enumerate(self.reductions)]

    def _of_block(self) -> list[str]:
        """The loop over blocks (a chunk is one, where nobody asks for blocks), and over the elements of each."""
        width = "widths[tensor]" if self.of_blocks else "end - begin"
        lines = [f"        const long width = {width};", "        for (long b = begin; b < end; b += width) {"]
        lines.append("            const long stop = b + width < end ? b + width : end;")
        for i, e in enumerate(self.elements):
            if e.of_block:
                lines.append(f"            const {TYPES[e.dtype]} x{i} = splat<{TYPES[e.dtype]}>(p{i}[b / width]);")
        lines += [f"            {TYPES[v.dtype]} kept_{v.name}[{LONGEST_BLOCK} / LANES];" for v in self.kept]
        for number, (statements, maxima) in enumerate(self.stages):
            lines += [f"            f32 most_{m.result.name} = {{}};" for m in maxima]
            more = self.drawn.parameters if self.drawn else ""
            lines += [f"            const auto stage{number} = [&](long e, long count{more}) __attribute__((always_inline)) {{"]
            lines += ["                " + line for line in self._body(number, statements, maxima)]
            lines += ["            };", *("            " + line for line in self._loop(number, statements, maxima))]
            lines += [f"            const f32 {m.result.name} = splat<f32>(largest_of(most_{m.result.name}));" for m in maxima]
        return [*lines, "        }"]

    def _loop(self, number: int, statements: list[Statement], maxima: list[Statement]) -> list[str]:
        """Two vectors at a time: of 16-bit numbers they are a line of the cache where a register has as many bytes."""
        ahead = self._ahead(self._needed(number, statements, maxima))
        if self.drawn is not None:
            return self.drawn.loop(f"stage{number}", "b", "stop", f"numbers[{self.drawn.first} * tensors + tensor]", ahead)
        return [
            "{",
            "    long e = b;",
            "    for (; e + 2 * LANES <= stop; e += 2 * LANES) {",
            *("        " + line for line in ahead),
            f"        stage{number}(e, LANES); stage{number}(e + LANES, LANES);",
            "    }",
            f"    for (; e < stop; e += LANES) stage{number}(e, stop - e < LANES ? stop - e : LANES);",
            "}",
        ]

    def _ahead(self, needed: set[str]) -> list[str]:
        """Ask for the elements that will be read some pairs of vectors later."""
        return [
            f"for (long at = 0; at < 2 * LANES * {e.dtype.itemsize}; at += {_LINE}) "
            f"__builtin_prefetch((const char*)(p{i} + e) + {_AHEAD} + at);"
            for i, e in enumerate(self.elements)
            if not e.of_block and f"x{i}" in needed
        ]

    def _needed(self, number: int, statements: list[Statement], maxima: list[Statement]) -> set[str]:
        """The names that a stage reads, or gives."""
        last = number == len(self.stages) - 1
        return _read(statements, maxima) | ({v.name for v in self.program.results} if last else set())

    def _body(self, number: int, statements: list[Statement], maxima: list[Statement]) -> list[str]:
        """As many elements as a vector holds."""
        last, needed = number == len(self.stages) - 1, self._needed(number, statements, maxima)
        lines = ["const i32 index = splat<i32>((int32_t)e) + LANE_NUMBERS;"]
        lines += ["const i32 inside = (index - splat<i32>((int32_t)e)) < splat<i32>((int32_t)count);"]
        for i, e in enumerate(self.elements):
            if not e.of_block and f"x{i}" in needed:
                lines.append(f"const {TYPES[e.dtype]} x{i} = load<{TYPES[e.dtype]}>(p{i} + e, count);")
        if number > 0:
            lines += [f"const {TYPES[v.dtype]} {v.name} = kept_{v.name}[(e - b) / LANES];" for v in self.kept]
        lines += lines_of(self.printer, statements, needed - _read(statements, []) | {v.name for v in self.kept})
        if number == 0:
            lines += [f"kept_{v.name}[(e - b) / LANES] = {v.name};" for v in self.kept]
        for m in maxima:
            most = f"most_{m.result.name}"
            lines.append(f"{most} = larger({most}, inside ? {m.arguments[0].name} : f32{{}});")
        return lines + self._results() if last else lines

    def _results(self) -> list[str]:
        lines = []
        for i, v in self.written:
            if self.elements[i].of_block:
                lines.append(f"if (e == b) p{i}[b / width] = {v.name}[0];")
            else:
                lines.append(f"store(p{i} + e, {v.name}, count);")
        for i, (kind, v) in enumerate(self.reduced):
            if kind == "max":
                lines.append(f"r{i} = larger(r{i}, inside ? {self.printer.argument(v, torch.int32)} : i32{{}});")
            else:
                value = self.printer.argument(v, torch.int64)
                lines.append(f"r{i} += CHOOSE(CONVERT(inside, i64), {value}, i64{{}});")
        return lines

    def _reduce(self) -> list[str]:
        lines = []
        for i, kind in enumerate(self.reductions):
            more = f"r{i}[l] > whole{i} ? r{i}[l] : whole{i}" if kind == "max" else f"whole{i} + r{i}[l]"
            lines += [f"        int64_t whole{i} = 0;", f"        for (int l = 0; l < LANES; l++) whole{i} = {more};"]
            lines.append(
                f"        {'largest_into' if kind == 'max' else 'sum_into'}(reduced + {i} * tensors + tensor, whole{i});"
            )
        return lines


def _of_tensors_alone(program: Program) -> tuple[list[Statement], Program]:
    """What depends on a tensor's numbers and the call's scalars alone, such as LARS's rate of a layer; and the rest."""
    known = {v.name for v in (*program.numbers.values(), *program.scalars.values())}
    fixed, rest = [], []
    for s in program.statements:
        values = [a.name for a in s.arguments if isinstance(a, Value)]
        if values and known.issuperset(values) and s.operation not in ("shortcut", "amax"):
            known.add(s.result.name)
            fixed.append(s)
        else:
            rest.append(s)
    return fixed, replace(program, statements=tuple(rest))


Stage = tuple[list[Statement], list[Statement]]  # statements, then maxima over the block


def _stages(program: Program) -> list[Stage]:
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


def _read(statements: list[Statement], maxima: list[Statement]) -> set[str]:
    return {a.name for s in (*statements, *maxima) for a in s.arguments if isinstance(a, Value)}


def lines_of(printer: Printer, statements: list[Statement], outside: set[str]) -> list[str]:
    """Statements one after the other; what is only needed for the long way of a shortcut stands in a branch. `outside` are the
    names that others need."""
    branches = {s.result.name: _only_for(s, statements, outside) for s in statements if s.operation == "shortcut"}
    in_branches = {name for names in branches.values() for name in names}

    def printed(chosen: list[Statement]) -> list[str]:
        lines = []
        for s in chosen:
            name, kind = s.result.name, TYPES[s.result.dtype]
            if s.operation != "shortcut":
                lines.append(f"const {kind} {name} = {printer.expression(s)};")
                continue
            condition, usual, general = (a.name for a in s.arguments)
            lines += [f"{kind} {name} = {usual};", f"if (__builtin_expect({printer.any_of(condition)}, 0)) {{"]
            lines += ["    " + line for line in printed([t for t in statements if t.result.name in branches[name]])]
            lines += [f"    {name} = {general};", "}"]
        return lines

    return printed([s for s in statements if s.result.name not in in_branches])


def _only_for(shortcut: Statement, statements: list[Statement], outside: set[str]) -> set[str]:
    """The names that nobody needs but the long way of a shortcut."""
    short_way, long_way = {a.name for a in shortcut.arguments[:2]}, shortcut.arguments[2].name
    found: set[str] = set()
    others = outside | short_way
    for s in reversed(statements):
        if s.result.name == shortcut.result.name:
            continue
        if s.result.name not in others and (
            s.result.name == long_way or s.result.name in _read([t for t in statements if t.result.name in found], [])
        ):
            found.add(s.result.name)
        else:
            others |= _read([s], [])
    return found


def _kept(stages: list[Stage], program: Program) -> list[Value]:
    """What the second stage needs of the first."""
    if len(stages) == 1:
        return []
    needed = _read(*stages[1]) | {v.name for v in program.results}
    return [s.result for s in stages[0][0] if s.result.name in needed]


def source(
    program: Program,
    elements: tuple[Element, ...],
    writes: tuple[int, ...],
    reductions: tuple[str, ...],
    tables: list[torch.dtype],
) -> str:
    """The C++ text of a program."""
    return _Source(program, elements, writes, reductions).text(tables)


def compiler() -> str:
    """The C++ compiler: what CXX names, g++, clang++ or c++."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++", "c++"]:
        if shutil.which(name):
            return name
    raise FileNotFoundError(f"no C++ compiler was found: {f'CXX is {asked}' if asked else 'install g++ or set CXX'}")


# The same bits as torch's own operations: integers wrap around (-fwrapv), and a multiplication and an addition are never made
# one (-ffp-contract=off), which would round once instead of twice. No -ffast-math: NaN, infinity and -0.0 are results here.
# -fno-math-errno lets a square root be one instruction.
_FLAGS = (
    "-std=c++17", "-O3", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-w", "-shared", "-fPIC",
)  # fmt: skip


def _processor() -> str:
    """What the compiler is told to compile for: this machine. LOWP_MARCH names another that it can run, for tests."""
    return f"-march={os.environ.get('LOWP_MARCH', 'native')}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next((line for line in text.split("\n") if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


_ARGUMENTS = (*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 6, *[ctypes.c_long] * 2)


def build(text: str, arguments: Sequence[Any] = _ARGUMENTS, flags: Sequence[str] = (), function: str = "run") -> Any:
    """Compile and load a function; what was compiled before on this kind of machine is found again."""
    command = [compiler(), *_FLAGS, _processor(), *flags]
    name = hashlib.sha256("\0".join([text, _machine(), *command]).encode()).hexdigest()[:32]
    run = getattr(load_library(f"{name}.so", lambda: compiled(command, text, _machine())), function)
    run.restype = None
    run.argtypes = list(arguments)
    return run


def build_parallel(text: str, arguments: Sequence[Any] = _ARGUMENTS, function: str = "run") -> Any:
    """The same with OpenMP, whose threads go on between calls; one thread where the compiler or the machine has none."""
    try:
        return build(text, arguments, ["-fopenmp"], function)
    except UnsafeCache:
        raise
    except (RuntimeError, OSError):
        return build(text, arguments, function=function)


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
