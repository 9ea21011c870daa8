"""A traced function of flat tensors as one C++ loop: `out = function(*sized, numbers, tables)`.

A function that gives a list of two returns truth values besides: the loop returns 1 if any of them is true.

The form of a kernel for one tensor, where cpp.py has the one for a list of tensors: addresses and a length come as arguments,
so that a small call costs two microseconds. Work is divided among the threads that torch's own kernels run on (OpenMP's), which
need not be started; without OpenMP one thread does it.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists import cpp, drawing
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.lists.tracing import Element, Program, Statement, fused, in_words, trace
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer
from lowp.tensor.noise import KEY_SIZE

_CPU = torch.device("cpu")
_CHUNK = 1 << 12  # elements
_WORTH_THREADS = 1 << 15  # elements: 8 microseconds on one core

Function = Callable[..., Tensor | Sequence[Tensor]]


def build(
    function: Function,
    sized: Sequence[torch.dtype],
    out: torch.dtype,
    numbers: int,
    tables: Sequence[Tensor],
    exact_products: bool = False,
    words: Collection[int] = (),
) -> Any:
    """Compile a function for a CPU: a `_CppFlatKernel`.

    Where `exact_products`, a product and a sum may be one operation, which has the same bits then. `words` are the places of
    numbers that have 16 bits (`in_words`): those of a key of noise.
    """

    program = traced(function, sized, numbers, tables, _CPU)
    assert program.results[0].dtype == out, (program.results[0].dtype, out)
    program = fused(program) if exact_products else program
    text = _source(in_words(program, words) if words else program, sized, out, tables, bool(words))
    address, number = ctypes.c_void_p, ctypes.c_long
    run = cpp.build_parallel(text, [address] * (len(sized) + 2 + len(tables)) + [number] * 2)
    if not words:
        return _CppFlatKernel(run, None)
    with_numbers = [address] * (len(sized) + 1) + [number] * 5 + [address] * len(tables) + [number] * 2
    return _CppFlatKernel(run, cpp.build_parallel(text, with_numbers, "run_drawn"))


def traced(
    function: Function, sized: Sequence[torch.dtype], numbers: int, tables: Sequence[Tensor], device: torch.device
) -> Program:
    """The function's operations, on a device."""

    def results(*arguments: Any) -> Sequence[Tensor]:
        *tensors, own, _, looked_up = arguments
        found = function(*tensors, own, looked_up)
        return [found] if isinstance(found, Tensor) else found

    return trace(results, [Element(dtype) for dtype in sized], numbers, 0, list(tables), device)


class _CppFlatKernel:
    """`run` takes addresses, and `run_drawn`, of functions with noise, the numbers that its key is made of instead of a key."""

    def __init__(self, run: Any, run_drawn: Any) -> None:
        self.run, self.run_drawn = run, run_drawn
        for function in (run, run_drawn):
            if function is not None:
                function.restype = ctypes.c_int

    def __call__(self, sized: Sequence[Tensor], out: Tensor, numbers: Tensor | None, tables: Sequence[Tensor]) -> int:
        """All flat, on the CPU, `sized` and `out` of one length."""
        return self.run(
            *[x.data_ptr() for x in sized],
            out.data_ptr(),
            None if numbers is None else numbers.data_ptr(),
            *[table.data_ptr() for table in tables],
            out.numel(),
            torch.get_num_threads(),
        )


_MOST_HELD = 256  # numbers of a table that is kept in registers
_HELD = r"""
constexpr int registers(int numbers) { int n = 1; while (n * LANES < numbers) n *= 2; return n; }
#if defined(AVX512_32)
template <int N> struct Held {  // a table of up to 16 * N numbers in registers: a gather takes 22 cycles, N = 4 takes 3
    i32 part[N];
    template <class T> __attribute__((always_inline)) Held(const T* table, int count) {
        for (int i = 0; i < N; i++) for (int l = 0; l < 16; l++) part[i][l] = 16 * i + l < count ? table[16 * i + l] : 0; }
    template <int FIRST = 0, int COUNT = N> __attribute__((always_inline)) i32 operator()(i32 index) const {
        if constexpr (COUNT == 1) return (i32)_mm512_permutexvar_epi32((__m512i)index, (__m512i)part[FIRST]);
        else if constexpr (COUNT == 2)
            return (i32)_mm512_permutex2var_epi32((__m512i)part[FIRST], (__m512i)index, (__m512i)part[FIRST + 1]);
        else {  // which half: one instruction tests a bit
            const i32 low = (*this).template operator()<FIRST, COUNT / 2>(index);
            const i32 high = (*this).template operator()<FIRST + COUNT / 2, COUNT / 2>(index);
            const __mmask16 upper = _mm512_test_epi32_mask((__m512i)index, _mm512_set1_epi32(8 * COUNT));
            return (i32)_mm512_mask_mov_epi32((__m512i)low, upper, (__m512i)high); } }
};
#define HOLD(number, count) const Held<registers(count)> held##number(table##number, count);
#elif defined(AVX2_32)
template <int N> struct Held {  // a table of up to 8 * N numbers
    i32 part[N];
    template <class T> __attribute__((always_inline)) Held(const T* table, int count) {
        for (int i = 0; i < N; i++) for (int l = 0; l < 8; l++) part[i][l] = 8 * i + l < count ? table[8 * i + l] : 0; }
    template <int FIRST = 0, int COUNT = N> __attribute__((always_inline)) i32 operator()(i32 index) const {
        if constexpr (COUNT == 1) return (i32)_mm256_permutevar8x32_epi32((__m256i)part[FIRST], (__m256i)index);
        else {  // which half: a bit of the index, moved to the sign
            const i32 low = (*this).template operator()<FIRST, COUNT / 2>(index);
            const i32 high = (*this).template operator()<FIRST + COUNT / 2, COUNT / 2>(index);
            const i32 upper = index << (29 - __builtin_ctz(COUNT));
            return (i32)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)upper); } }
};
#define HOLD(number, count) const Held<registers(count)> held##number(table##number, count);
#else
#define HOLD(number, count) const auto held##number = [=](i32 index) { return look_up_i32(table##number, index); };
#endif
"""


class _FlatPrinter(Printer):
    """Small tables of integers are kept in registers."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self.held = {i: t.numel() for i, t in enumerate(tables) if t.numel() <= _MOST_HELD and t.dtype in _HELD_DTYPES}

    def expression(self, s: Statement) -> str:
        if s.operation != "look_up" or s.arguments[0] not in self.held:
            return super().expression(s)
        return f"converted<{TYPES[s.result.dtype]}>(held{s.arguments[0]}({self.argument(s.arguments[1], torch.int32)}))"


_HELD_DTYPES = (torch.int8, torch.int16, torch.int32)


def _loop(drawn: drawing.Drawing | None) -> list[str]:
    if drawn is not None:
        return drawn.loop("body", "first", "last", f"numbers[{drawn.first}]")
    return ["long e = first;", "for (; e + LANES <= last; e += LANES) body(e, LANES);", "if (e < last) body(e, last - e);"]


def _source(
    program: Program, sized: Sequence[torch.dtype], out: torch.dtype, tables: Sequence[Tensor], takes_key: bool = False
) -> str:
    """The program on as many numbers at a time as a vector holds, chunk by chunk."""
    drawn, program = drawing.taken_apart(program)
    printer = _FlatPrinter(tables)
    statements = [f"const {TYPES[s.result.dtype]} {s.result.name} = {printer.expression(s)};" for s in program.statements]
    result = printer.argument(program.results[0], out)
    noticed = [f"            noticed |= {program.results[1].name};"] if len(program.results) > 1 else []
    inputs = "".join(f"const {SCALARS[dtype]}* p{i}, " for i, dtype in enumerate(sized))
    looked_up = "".join(f"const {SCALARS[table.dtype]}* table{i}, " for i, table in enumerate(tables))
    words = drawn.parameters if drawn else ""
    indexed = any(s.operation == "index" for s in program.statements)
    lines = [
        f'extern "C" int run({inputs}{SCALARS[out]}* target, const int32_t* numbers, {looked_up}long count, long threads) {{',
        "    const auto stretch = [=](const long first, const long last) {",
        "        const Subnormals subnormals;",
        *(
            f"        const {kind} constant{place} = splat<{kind}>(::constant{place});"
            for (kind, _), place in printer.constants.items()
        ),  # a register each
        *(
            f"        const {kind} {v.name} = splat<{kind}>(numbers[{place}]);"
            for place, v, kind in drawing.typed_numbers(program, drawn)
        ),
        *(f"        HOLD({number}, {count})" for number, count in printer.held.items()),
        "        i32 noticed = {};",
        f"        const auto body = [&](long e, long count{words}) __attribute__((always_inline)) {{",
        *(["            const i32 index = splat<i32>((int32_t)e) + LANE_NUMBERS;"] if indexed else []),
        *(f"            const {TYPES[dtype]} x{i} = load<{TYPES[dtype]}>(p{i} + e, count);" for i, dtype in enumerate(sized)),
        *(f"            {statement}" for statement in statements),
        f"            store(target + e, {result}, count);",
        *noticed,
        "        };",
        *("        " + line for line in _loop(drawn)),
        "        int any = 0;",
        "        for (int l = 0; l < LANES; l++) any |= noticed[l];",
        "        return any != 0 ? 1 : 0;",
        "    };",
        # OpenMP takes half a microsecond to find that there is nothing to divide
        f"    if (threads < 2 || count < {_WORTH_THREADS}) return stretch(0, count);",
        f"    const long chunks = (count + {_CHUNK - 1}) / {_CHUNK};",
        "    int any = 0;",
        "    #pragma omp parallel for num_threads(threads) reduction(|: any)",
        "    for (long chunk = 0; chunk < chunks; chunk++)",
        f"        any |= stretch(chunk * {_CHUNK}, chunk * {_CHUNK} + {_CHUNK} < count ? chunk * {_CHUNK} + {_CHUNK} : count);",
        "    return any;",
        "}",
    ]
    if takes_key:
        given = "".join(f"p{i}, " for i in range(len(sized)))
        lines += [
            drawing.key_text(),
            f'extern "C" int run_drawn({inputs}{SCALARS[out]}* target, long begun, long seed, long step, long stream, '
            f"long offset, {looked_up}long count, long threads) {{",
            f"    int32_t key[{KEY_SIZE}];",
            "    single::make_key(begun, seed, step, stream, offset, key);",
            f"    return run({given}target, key, {''.join(f'table{i}, ' for i in range(len(tables)))}count, threads);",
            "}",
        ]
    wide = any(s.result.dtype.itemsize == 8 for s in program.statements)
    begin = [preamble(wide), *([drawing.PREAMBLE] if drawn else []), *([_HELD] if printer.held else [])]
    return "\n".join([*begin, *printer.declarations(), *lines])
