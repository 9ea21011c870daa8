"""Statements in GCC's vector types: 16 numbers at a time, or 8 where most are of 64 bits, on any machine.

(The compiler splits them where registers are shorter.) What costs, and is avoided: a constant written into the code takes an
instruction each time, one in memory none; a comparison that becomes numbers takes two more than one that selects.
"""

from typing import Any

import numpy as np
import torch

from lowp.tensor.lists.tracing import COMPARE, INFIX, Statement, Value

TYPES = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float32: "f32", torch.float64: "f64",
    torch.float16: "i16", torch.bfloat16: "i16", torch.bool: "i32", torch.uint16: "u16",
}  # fmt: skip
SCALARS = {
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float",
    torch.float64: "double", torch.bool: "uint8_t", torch.uint16: "uint16_t",
}  # fmt: skip


def preamble(lanes: int = 16) -> str:
    """What every program begins with."""
    return f"#define LANES {lanes}{_PREAMBLE}"


_PREAMBLE = r"""
#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && LANES == 16
#define LONG_32  // vectors of 32-bit numbers fill a register
#elif defined(__AVX512F__) && LANES == 8
#define LONG_64
#endif
typedef int8_t i8 __attribute__((vector_size(LANES)));
typedef int16_t i16 __attribute__((vector_size(2 * LANES)));
typedef int16_t i16x2 __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES)));
typedef int32_t i32 __attribute__((vector_size(4 * LANES)));
typedef int64_t i64 __attribute__((vector_size(8 * LANES)));
typedef float f32 __attribute__((vector_size(4 * LANES)));
typedef double f64 __attribute__((vector_size(8 * LANES)));
#define INLINE static inline __attribute__((always_inline))
template <class V> using element = std::remove_reference_t<decltype(V{}[0])>;
template <class V, class S> INLINE V splat(S s) { return (element<V>)s - V{}; }  // x - 0 is x, also for -0.0
template <class V, class T> INLINE V load(const T* p, long count) {
    V v = {}; memcpy(&v, p, count * sizeof(T)); return v; }
template <class V, class T> INLINE void store(T* p, V v, long count) { memcpy(p, &v, count * sizeof(T)); }
// Subnormal numbers count, whatever the calling thread was told (torch.set_flush_denormal).
struct Subnormals {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    Subnormals() { _mm_setcsr(before & ~0x8040u); }
    ~Subnormals() { _mm_setcsr(before); }
#endif
};
// GCC 12 converts short integers that come from memory number by number, through general registers. There are instructions.
template <class V, class W> INLINE V converted(W x) { return __builtin_convertvector(x, V); }
#if defined(LONG_32)
#define CONVERTED(V, W, instruction, T) \
    template <> inline __attribute__((always_inline)) V converted<V, W>(W x) { return (V)instruction((T)x); }
CONVERTED(i32, i8, _mm512_cvtepi8_epi32, __m128i)
CONVERTED(i32, i16, _mm512_cvtepi16_epi32, __m256i)
CONVERTED(i32, u16, _mm512_cvtepu16_epi32, __m256i)
CONVERTED(u16, i32, _mm512_cvtepi32_epi16, __m512i)
CONVERTED(i8, i32, _mm512_cvtepi32_epi8, __m512i)
CONVERTED(i16, i32, _mm512_cvtepi32_epi16, __m512i)
#endif
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }
#if defined(LONG_32)
INLINE i32 larger(i32 a, i32 b) { return (i32)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE i32 smaller(i32 a, i32 b) { return (i32)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }  // the second where one is NaN, as above
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(LONG_64)
INLINE i64 larger(i64 a, i64 b) { return (i64)_mm512_max_epi64((__m512i)a, (__m512i)b); }
INLINE i64 smaller(i64 a, i64 b) { return (i64)_mm512_min_epi64((__m512i)a, (__m512i)b); }
INLINE f64 larger(f64 a, f64 b) { return (f64)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE f64 smaller(f64 a, f64 b) { return (f64)_mm512_min_pd((__m512d)a, (__m512d)b); }
#endif
#if defined(LONG_32)
INLINE bool any_above(i32 a, i32 b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b) != 0; }
INLINE i16 upper_words(i32 x) {
    i16x2 odd; for (int l = 0; l < 32; l++) odd[l] = 2 * l + 1;  // only the lower half is looked at
    return (i16)_mm512_castsi512_si256(_mm512_permutexvar_epi16((__m512i)odd, (__m512i)x)); }
INLINE i32 as_upper_words(i16 x) {
    i16x2 twice; for (int l = 0; l < 32; l++) twice[l] = l / 2;
    return (i32)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, (__m512i)twice, _mm512_castsi256_si512((__m256i)x)); }
#else
INLINE bool any_above(i32 a, i32 b) { int any = 0; for (int l = 0; l < LANES; l++) any |= a[l] > b[l]; return any != 0; }
INLINE i16 upper_words(i32 x) { return converted<i16>(i32(x >> 16)); }
INLINE i32 as_upper_words(i16 x) { return converted<i32>(x) << 16; }
#endif
INLINE f32 fused(f32 a, f32 b, f32 c) {  // a * b + c, rounded once
#if defined(LONG_32)
    return (f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_fmaf(a[l], b[l], c[l]); return r;
#endif
}
INLINE f64 fused(f64 a, f64 b, f64 c) {
#if defined(LONG_64)
    return (f64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    f64 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_fma(a[l], b[l], c[l]); return r;
#endif
}
INLINE u16 upper_half(u16 a, u16 b) {  // of the product
#if defined(__AVX2__) && LANES == 16
    return (u16)_mm256_mulhi_epu16((__m256i)a, (__m256i)b);
#else
    return converted<u16>(i32(converted<i32>(a) * converted<i32>(b) >> 16));
#endif
}
INLINE float largest_of(f32 x) {  // of numbers that are not negative
#if defined(LONG_32)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = 0; for (int l = 0; l < LANES; l++) top = x[l] > top ? x[l] : top; return top;
#endif
}
INLINE f32 square_root(f32 x) {
#if defined(LONG_32)
    return (f32)_mm512_sqrt_ps((__m512)x);
#else
    f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_sqrtf(x[l]); return r;
#endif
}
INLINE f64 square_root(f64 x) { f64 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_sqrt(x[l]); return r; }
#if defined(LONG_32)
INLINE f32 nearest_integer(f32 x) { return (f32)_mm512_roundscale_ps((__m512)x, 8); }
INLINE f32 integer_below(f32 x) { return (f32)_mm512_roundscale_ps((__m512)x, 9); }
#else
INLINE f32 nearest_integer(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_rintf(x[l]); return r; }
INLINE f32 integer_below(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_floorf(x[l]); return r; }
#endif
INLINE f32 half_to_float(i16 h) {
#if defined(LONG_32)
    return (f32)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    f32 r; for (int l = 0; l < LANES; l++) r[l] = _cvtsh_ss((uint16_t)h[l]); return r;
#else
    i32 b = converted<i32>(h), m = b & 0x7FFF;
    f32 r = (f32)(m << 13) * splat<f32>(0x1p112f);
    i32 special = m > 0x7BFF;
    return (f32)((special ? (m << 13 | 0x7F800000) : (i32)r) | (b << 16 & (int32_t)0x80000000));
#endif
}
INLINE i16 float_to_half(f32 x) {
#if defined(LONG_32)
    return (i16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    i32 b = (i32)x, m = b & 0x7FFFFFFF, s = b >> 16 & 0x8000;
    i32 normal = (m - ((127 - 15) << 23) + 0xFFF + (m >> 13 & 1)) >> 13;
    i32 small = (i32)((f32)m + splat<f32>(0.5f)) - 0x3F000000;
    i32 r = m < 0x38800000 ? small : normal;
    r = m > 0x477FEFFF ? splat<i32>(0x7C00) : r;
    r = m > 0x7F800000 ? ((m >> 13 & 0x3FF) | 0x7E00) : r;
    return converted<i16>(i32(r | s));
#endif
}
INLINE f32 bfloat_to_float(i16 h) { return (f32)as_upper_words(h); }
INLINE i16 float_to_bfloat(f32 x) {
#if defined(LONG_32) && defined(__AVX512BF16__)  // the instruction makes subnormal numbers zero
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, 0x20) == 0, 1)) return (i16)_mm512_cvtneps_pbh((__m512)x);
#endif
    i32 b = (i32)x, r = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    r = x != x ? (b >> 16 | 0x40) : r;
    return converted<i16>(r);
}
#define LOOK_UP(V) template <class T> INLINE V look_up_##V(const T* table, i32 index) { \
    V r; for (int l = 0; l < LANES; l++) r[l] = table[index[l]]; return r; }
LOOK_UP(i8) LOOK_UP(i16) LOOK_UP(i32) LOOK_UP(i64) LOOK_UP(f32) LOOK_UP(f64)
#if defined(LONG_32)
INLINE i32 look_up_i32(const int32_t* table, i32 index) { return (i32)_mm512_i32gather_epi32((__m512i)index, table, 4); }
INLINE f64 look_up_f64(const double* table, i32 index) {
    union { f64 v; __m512d h[2]; } r; union { i32 v; __m256i h[2]; } at; at.v = index;
    r.h[0] = _mm512_i32gather_pd(at.h[0], table, 8); r.h[1] = _mm512_i32gather_pd(at.h[1], table, 8); return r.v; }
#elif defined(LONG_64)
INLINE i64 look_up_i64(const int64_t* table, i32 index) { return (i64)_mm512_i32gather_epi64((__m256i)index, table, 8); }
INLINE f64 look_up_f64(const double* table, i32 index) { return (f64)_mm512_i32gather_pd((__m256i)index, table, 8); }
#endif
"""


class Printer:
    """Expressions of statements, in vector types. A truth value is a 32-bit integer, all ones or zero."""

    def __init__(self) -> None:
        self.begin()
        self.constants: dict[tuple[str, str], int] = {}  # type and text -> place

    def begin(self) -> None:
        """Another program, whose names have nothing to do with those of the last; constants are shared."""
        self._comparisons: dict[str, tuple[str, int]] = {}  # their text, and the width of what they compare
        self._above: dict[str, str] = {}  # of comparisons of int32: is it so for one of the vector?
        self._shifted: dict[str, str] = {}  # int32 numbers that were shifted right by 16 bits: those before

    def kept(self, kind: str, text: str) -> str:
        """A constant in memory, from where instructions take it as they go. Written out, each would cost one of its own."""
        place = self.constants.setdefault((kind, text), len(self.constants))
        return f"splat<{kind}>(constant{place})"

    def declarations(self) -> list[str]:
        """Of the constants in memory, which all expressions printed so far need."""
        return [
            f'__attribute__((visibility("hidden"))) {"int32_t" if kind == "i32" else "float"} constant{place} = {text};'
            for (kind, text), place in self.constants.items()
        ]

    def literal(self, constant: Any, dtype: torch.dtype, shift: bool = False) -> str:
        kind = TYPES[dtype]
        if dtype == torch.bool:
            return f"splat<i32>({-int(bool(constant))})"
        if dtype in (torch.float32, torch.float64):
            number = float(np.float32(constant)) if dtype == torch.float32 else float(constant)
            text = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}.get(str(number), number.hex())
            text = f"({SCALARS[dtype]}){text}"
            return self.kept(kind, text) if dtype == torch.float32 else f"splat<{kind}>({text})"
        bits = dtype.itemsize * 8
        wrapped = (int(constant) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        if dtype == torch.int32 and not shift and wrapped not in (0, -1):
            return self.kept(kind, str(wrapped))
        return f"splat<{kind}>(({SCALARS[dtype]}){wrapped}LL)"

    def argument(self, argument: Any, dtype: torch.dtype) -> str:
        if not isinstance(argument, Value):
            return self.literal(argument, dtype)
        return argument.name if argument.dtype == dtype else self.converted(argument, dtype)

    def converted(self, value: Value, dtype: torch.dtype) -> str:
        source, name = value.dtype, value.name
        if source == torch.bool:
            return f"__builtin_convertvector({name} & 1, {TYPES[dtype]})"
        if dtype == torch.bool:
            return f"__builtin_convertvector({name} != 0, i32)"
        if source in _HALVES:
            single = f"{_HALVES[source]}_to_float({name})"
            return single if dtype == torch.float32 else f"__builtin_convertvector({single}, {TYPES[dtype]})"
        if dtype in _HALVES:
            single = name if source == torch.float32 else f"__builtin_convertvector({name}, f32)"
            return f"float_to_{_HALVES[dtype]}({single})"
        return f"converted<{TYPES[dtype]}>({name})"

    def any_of(self, condition: str) -> str:
        """Is a comparison (lt or gt of int32) true for an element of the vector?"""
        return self._above[condition]

    def expression(self, s: Statement) -> str:
        a = [None if x is None else self.argument(x, s.operand) for x in s.arguments] if s.operation not in _OWN else []
        match s.operation:
            case "constant":
                return self.literal(s.arguments[0], s.result.dtype)
            case "index":
                return "index"
            case "bitcast":
                return f"({TYPES[s.result.dtype]}){s.arguments[0].name}"
            case "convert" if s.result.dtype == torch.int16 and getattr(s.arguments[0], "name", None) in self._shifted:
                return f"upper_words({self._shifted[s.arguments[0].name]})"
            case "convert":
                return self.argument(s.arguments[0], s.result.dtype)
            case "look_up":
                table, index = s.arguments
                at = self.argument(index, torch.int32)
                found = f"look_up_{TYPES[s.result.dtype]}(table{table}, {at})"
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
                if s.operation == "shr" and s.arguments[1] == 16 and s.operand == torch.int32:
                    self._shifted[s.result.name] = str(a[0])
                return f"{a[0]} {INFIX[s.operation]} {self.literal(s.arguments[1], s.operand, shift=True)}"
            case operation if operation in INFIX:
                return f"{a[0]} {INFIX[operation]} {a[1]}"
            case operation if operation in COMPARE:
                text = f"{a[0]} {COMPARE[operation]} {a[1]}"
                self._comparisons[s.result.name] = (text, s.operand.itemsize)
                if s.operand == torch.int32 and operation in ("lt", "gt"):
                    self._above[s.result.name] = f"any_above({', '.join(map(str, a if operation == 'gt' else a[::-1]))})"
                return f"__builtin_convertvector({text}, i32)"
            case "mul_high":
                return f"upper_half({a[0]}, {a[1]})"
            case "rsub":
                return f"{a[1]} - {a[0]}"
            case "fma":
                return f"fused({a[0]}, {a[1]}, {a[2]})"
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
            case "abs" if s.operand == torch.float64:
                return f"(f64)((i64){a[0]} & 0x7FFFFFFFFFFFFFFFLL)"
            case "abs":
                return f"{a[0]} < 0 ? -{a[0]} : {a[0]}"
            case "max":
                return f"({a[0]} > {a[1]}) | ({a[0]} != {a[0]}) ? {a[0]} : {a[1]}"
            case "min":
                return f"({a[0]} < {a[1]}) | ({a[0]} != {a[0]}) ? {a[0]} : {a[1]}"
            case "clamp":
                text = str(a[0])
                if a[1] is not None:
                    text = f"larger({a[1]}, {text})"  # where it is NaN, the second
                if a[2] is not None:
                    text = f"smaller({a[2]}, {text})"
                return text
        raise NotImplementedError(f"{s.operation} in C++")


_HALVES = {torch.float16: "half", torch.bfloat16: "bfloat"}
_OWN = ("constant", "index", "bitcast", "convert", "look_up", "where", "amax")
