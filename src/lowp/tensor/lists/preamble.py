"""What every C++ text begins with: vector types, and functions of vectors.

**How long a vector is** is decided here, by the compiler: `LANES` is how many numbers fill one of the registers that the text
is compiled for (64 bytes with AVX-512, 32 with AVX2, else 16). Of vectors that are longer than a register GCC 12 makes scalar
code that passes through memory: on AVX2, with 64 bytes, 10 to 50 times slower. The text is the same for every processor, and
its results must not depend on LANES. LOWP_MARCH (cpp.py) chooses another processor, for tests.

A vector of 64-bit numbers is two registers (`Two`). With AVX-512, it is one register, and 32-bit numbers fill half of one, in
`wide` texts, whose loops have 64-bit numbers; in others it passes through memory.

Each function has a general form, which any processor can run, and forms in the instructions of AVX-512 and AVX2 where the
compiler would not find these by itself. All give the same bits.
"""


def preamble(wide: bool = False, least: int = 1) -> str:
    """`wide`: are there 64-bit numbers in the loop over elements? `least`: so many numbers must a vector have."""
    return f"{HEADERS}#define WIDE {int(wide)}\n#define LEAST {least}{_TYPES}{_TWO}{_GENERAL}{_AVX512}{_AVX2}{_CONVERSIONS}"


HEADERS = """\
#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
"""

_TYPES = r"""
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define REGISTER 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define REGISTER 32
#else
#define REGISTER 16
#endif
#if REGISTER == 64 && !WIDE
#define LANES 16
#define AVX512_32  // vectors of 32-bit numbers fill a register
#elif REGISTER == 64
#define LANES 8
#define AVX512_64
#elif REGISTER == 32
#define LANES 8
#define AVX2_32
#elif LEAST <= 4
#define LANES 4
#else
#define LANES 8
#endif
typedef int8_t i8 __attribute__((vector_size(LANES)));
typedef int16_t i16 __attribute__((vector_size(2 * LANES)));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES)));
typedef int32_t i32 __attribute__((vector_size(4 * LANES)));
typedef float f32 __attribute__((vector_size(4 * LANES)));
#if LANES == 16
#define LANE_NUMBERS i32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define LANE_NUMBERS i32{0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANE_NUMBERS i32{0, 1, 2, 3}
#endif
#define INLINE static inline __attribute__((always_inline))
// The compiler no longer knows that a vector is a constant. It would make it anew, with two instructions, wherever it is used.
#if REGISTER >= 32
#define KEEP(vector) asm("" : "+v"(vector))
#else
#define KEEP(vector)
#endif
// Subnormal numbers count, whatever the calling thread was told (torch.set_flush_denormal).
struct Subnormals {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    Subnormals() { _mm_setcsr(before & ~0x8040u); }
    ~Subnormals() { _mm_setcsr(before); }
#endif
};
"""

_TWO = r"""
template <class V> using element = std::remove_reference_t<decltype(V{}[0])>;
#if REGISTER == 64
typedef int64_t i64 __attribute__((vector_size(8 * LANES)));
typedef double f64 __attribute__((vector_size(8 * LANES)));
template <class V, class S> INLINE V splat(S s) {  // of a number: x - 0 is x, also for -0.0; or of what is a vector already
    if constexpr (std::is_same_v<V, S>) return s; else return (element<V>)s - V{}; }
template <class V, class W> INLINE V converted(W x) { return __builtin_convertvector(x, V); }
#define CHOOSE(mask, yes, no) ((mask) ? (yes) : (no))
#define CONVERT(x, V) __builtin_convertvector(x, V)
#else
template <class H> struct Two {  // registers: one vector
    typedef element<H> number;
    typedef H half;
    H low, high;
    template <class G> explicit operator Two<G>() const { return {(G)low, (G)high}; }
    const number& operator[](long l) const { return ((const number*)this)[l]; }
    number& operator[](long l) { return ((number*)this)[l]; }
};
typedef Two<int64_t __attribute__((vector_size(4 * LANES)))> i64;
typedef Two<double __attribute__((vector_size(4 * LANES)))> f64;
template <class V> constexpr bool is_two = std::is_same_v<V, i64> || std::is_same_v<V, f64>;
#define INFIX(op, R) \
    template <class H> INLINE R operator op(Two<H> a, Two<H> b) { return (R){a.low op b.low, a.high op b.high}; } \
    template <class H> INLINE R operator op(Two<H> a, typename Two<H>::number b) { return (R){a.low op b, a.high op b}; }
INFIX(+, Two<H>) INFIX(-, Two<H>) INFIX(*, Two<H>) INFIX(/, Two<H>) INFIX(&, Two<H>) INFIX(|, Two<H>) INFIX(^, Two<H>)
INFIX(<<, Two<H>) INFIX(>>, Two<H>) INFIX(<, i64) INFIX(<=, i64) INFIX(>, i64) INFIX(>=, i64) INFIX(==, i64) INFIX(!=, i64)
template <class H> INLINE Two<H> operator-(Two<H> a) { return {-a.low, -a.high}; }
template <class H> INLINE Two<H> operator~(Two<H> a) { return {~a.low, ~a.high}; }
template <class H> INLINE Two<H>& operator+=(Two<H>& a, Two<H> b) { return a = a + b; }
template <class V> struct Half;  // GCC does not heed a vector_size that depends on a type in an alias
template <> struct Half<i32> { typedef int32_t type __attribute__((vector_size(2 * LANES))); };
template <> struct Half<f32> { typedef float type __attribute__((vector_size(2 * LANES))); };
template <class V> using half = typename Half<V>::type;
template <class V> INLINE half<V> half_of(V x, int which) { union { V v; half<V> h[2]; } both = {x}; return both.h[which]; }
template <class V> INLINE V joined(half<V> low, half<V> high) {
    union { half<V> h[2]; V v; } both = {{low, high}}; return both.v; }
template <class V, class S> INLINE V splat(S s) {
    if constexpr (std::is_same_v<V, S>) return s;
    else if constexpr (is_two<V>) return V{splat<typename V::half>(s), splat<typename V::half>(s)};
    else return (element<V>)s - V{}; }
template <class M, class V> INLINE V chosen(M mask, V yes, V no) {
    if constexpr (is_two<V>) return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
    else return mask ? yes : no; }
template <class V, class W> INLINE V converted(W x) {
    if constexpr (!is_two<V> && !is_two<W>) return __builtin_convertvector(x, V);
    else if constexpr (is_two<V> && is_two<W>) {
        typedef typename V::half H;
        return V{__builtin_convertvector(x.low, H), __builtin_convertvector(x.high, H)};
    } else if constexpr (sizeof(element<V>) < 4 || sizeof(element<W>) < 4) return converted<V>(converted<i32>(x));
    else if constexpr (is_two<V>) {
        typedef typename V::half H;
        return V{__builtin_convertvector(half_of(x, 0), H), __builtin_convertvector(half_of(x, 1), H)};
    } else return joined<V>(__builtin_convertvector(x.low, half<V>), __builtin_convertvector(x.high, half<V>)); }
#define CHOOSE(mask, yes, no) chosen(mask, yes, no)
#define CONVERT(x, V) converted<V>(x)
#endif
template <class V, class T> INLINE V load(const T* p, long count) {
    V v = {}; memcpy(&v, p, count * sizeof(T)); return v; }
template <class V, class T> INLINE void store(T* p, V v, long count) { memcpy(p, &v, count * sizeof(T)); }
"""

_GENERAL = r"""
template <class V> INLINE V larger(V a, V b) { return CHOOSE(a > b, a, b); }  // the second where one is NaN
template <class V> INLINE V smaller(V a, V b) { return CHOOSE(a < b, a, b); }
template <class V> INLINE bool any_above(V a, V b) {
    int any = 0; for (int l = 0; l < LANES; l++) any |= a[l] > b[l]; return any != 0; }
template <class V> INLINE i16 upper_words(V x) { return converted<i16>(V(x >> 16)); }
template <class V> INLINE i32 as_upper_words(V x) { return converted<i32>(x) << 16; }
template <class V> INLINE V fused(V a, V b, V c) {  // a * b + c, rounded once
    V r; for (int l = 0; l < LANES; l++) r[l] = std::fma(a[l], b[l], c[l]); return r; }
template <class V> INLINE V upper_half(V a, V b) {  // of the product of words without a sign
    return converted<V>(i32(converted<i32>(a) * converted<i32>(b) >> 16)); }
template <class V> INLINE element<V> largest_of(V x) {  // of numbers that are not negative
    element<V> top = 0; for (int l = 0; l < LANES; l++) top = x[l] > top ? x[l] : top; return top; }
template <class V> INLINE V square_root(V x) { V r; for (int l = 0; l < LANES; l++) r[l] = std::sqrt(x[l]); return r; }
template <class V> INLINE V nearest_integer(V x) {  // 2^23 + x has no fraction
    const i32 sign = (i32)x & (int32_t)0x80000000;
    const f32 size = (f32)((i32)x ^ sign), whole = size + 0x1p23f - 0x1p23f;
    return size < 0x1p23f ? (f32)((i32)whole | sign) : x; }
template <class V> INLINE V integer_below(V x) { const V near = nearest_integer(x); return near > x ? near - 1.0f : near; }
template <class V> INLINE f32 half_to_float(V h) {
    const i32 b = converted<i32>(h), m = b & 0x7FFF;
    const f32 finite = (f32)(m << 13) * splat<f32>(0x1p112f);
    const i32 nan = m > 0x7C00 ? splat<i32>(0x400000) : i32{};
    return (f32)((m > 0x7BFF ? (m << 13 | 0x7F800000 | nan) : (i32)finite) | (b << 16 & (int32_t)0x80000000)); }
template <class V> INLINE i16 float_to_half(V x) {
    const i32 b = (i32)x, m = b & 0x7FFFFFFF, s = b >> 16 & 0x8000;
    const i32 normal = (m - ((127 - 15) << 23) + 0xFFF + (m >> 13 & 1)) >> 13;
    const i32 small = (i32)((f32)m + splat<f32>(0.5f)) - 0x3F000000;
    i32 r = m < 0x38800000 ? small : normal;
    r = m > 0x477FEFFF ? splat<i32>(0x7C00) : r;
    r = m > 0x7F800000 ? ((m >> 13 & 0x3FF) | 0x7E00) : r;
    return converted<i16>(i32(r | s)); }
#define LOOK_UP(V) template <class T> INLINE V look_up_##V(const T* table, i32 index) { \
    V r; for (int l = 0; l < LANES; l++) r[l] = table[index[l]]; return r; }
LOOK_UP(i8) LOOK_UP(i16) LOOK_UP(i32) LOOK_UP(i64) LOOK_UP(f32) LOOK_UP(f64)
// GCC 12 converts short integers that come from memory number by number, through general registers. There are instructions.
#define CONVERTED(V, W, instruction, T) \
    template <> inline __attribute__((always_inline)) V converted<V, W>(W x) { return (V)instruction((T)x); }
"""

_AVX512 = r"""
#if defined(AVX512_32)
CONVERTED(i32, i8, _mm512_cvtepi8_epi32, __m128i)
CONVERTED(i32, i16, _mm512_cvtepi16_epi32, __m256i)
CONVERTED(i32, u16, _mm512_cvtepu16_epi32, __m256i)
CONVERTED(u16, i32, _mm512_cvtepi32_epi16, __m512i)
CONVERTED(i8, i32, _mm512_cvtepi32_epi8, __m512i)
CONVERTED(i16, i32, _mm512_cvtepi32_epi16, __m512i)
INLINE i32 larger(i32 a, i32 b) { return (i32)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE i32 smaller(i32 a, i32 b) { return (i32)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE bool any_above(i32 a, i32 b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b) != 0; }
typedef int16_t i16x2 __attribute__((vector_size(64)));
INLINE i16 upper_words(i32 x) {
    i16x2 odd; for (int l = 0; l < 32; l++) odd[l] = 2 * l + 1;  // only the lower half is looked at
    return (i16)_mm512_castsi512_si256(_mm512_permutexvar_epi16((__m512i)odd, (__m512i)x)); }
INLINE i32 as_upper_words(i16 x) {
    i16x2 twice; for (int l = 0; l < 32; l++) twice[l] = l / 2;
    return (i32)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, (__m512i)twice, _mm512_castsi256_si512((__m256i)x)); }
INLINE f32 fused(f32 a, f32 b, f32 c) { return (f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE u16 upper_half(u16 a, u16 b) { return (u16)_mm256_mulhi_epu16((__m256i)a, (__m256i)b); }
INLINE float largest_of(f32 x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE int32_t largest_of(i32 x) { return _mm512_reduce_max_epi32((__m512i)x); }
INLINE f32 square_root(f32 x) { return (f32)_mm512_sqrt_ps((__m512)x); }
INLINE f32 nearest_integer(f32 x) { return (f32)_mm512_roundscale_ps((__m512)x, 8); }
INLINE f32 integer_below(f32 x) { return (f32)_mm512_roundscale_ps((__m512)x, 9); }
INLINE f32 half_to_float(i16 h) { return (f32)_mm512_cvtph_ps((__m256i)h); }
INLINE i16 float_to_half(f32 x) { return (i16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE i32 look_up_i32(const int32_t* table, i32 index) { return (i32)_mm512_i32gather_epi32((__m512i)index, table, 4); }
INLINE f64 look_up_f64(const double* table, i32 index) {
    union { f64 v; __m512d h[2]; } r; union { i32 v; __m256i h[2]; } at; at.v = index;
    r.h[0] = _mm512_i32gather_pd(at.h[0], table, 8); r.h[1] = _mm512_i32gather_pd(at.h[1], table, 8); return r.v; }
#elif defined(AVX512_64)
CONVERTED(i32, i16, _mm256_cvtepi16_epi32, __m128i)
CONVERTED(i32, u16, _mm256_cvtepu16_epi32, __m128i)
CONVERTED(i64, i32, _mm512_cvtepi32_epi64, __m256i)
CONVERTED(i32, i64, _mm512_cvtepi64_epi32, __m512i)
CONVERTED(i64, f32, _mm512_cvttps_epi64, __m256)
CONVERTED(f32, i64, _mm512_cvtepi64_ps, __m512i)
CONVERTED(f64, f32, _mm512_cvtps_pd, __m256)
CONVERTED(f32, f64, _mm512_cvtpd_ps, __m512d)
INLINE i32 larger(i32 a, i32 b) { return (i32)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE i32 smaller(i32 a, i32 b) { return (i32)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE f32 square_root(f32 x) { return (f32)_mm256_sqrt_ps((__m256)x); }
INLINE i64 larger(i64 a, i64 b) { return (i64)_mm512_max_epi64((__m512i)a, (__m512i)b); }
INLINE i64 smaller(i64 a, i64 b) { return (i64)_mm512_min_epi64((__m512i)a, (__m512i)b); }
INLINE f64 larger(f64 a, f64 b) { return (f64)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE f64 smaller(f64 a, f64 b) { return (f64)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE f64 fused(f64 a, f64 b, f64 c) { return (f64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
INLINE f32 nearest_integer(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_rintf(x[l]); return r; }
INLINE f32 integer_below(f32 x) { f32 r; for (int l = 0; l < LANES; l++) r[l] = __builtin_floorf(x[l]); return r; }
INLINE f32 half_to_float(i16 h) { return (f32)_mm256_cvtph_ps((__m128i)h); }
INLINE i16 float_to_half(f32 x) { return (i16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE i64 look_up_i64(const int64_t* table, i32 index) { return (i64)_mm512_i32gather_epi64((__m256i)index, table, 8); }
INLINE f64 look_up_f64(const double* table, i32 index) { return (f64)_mm512_i32gather_pd((__m256i)index, table, 8); }
#endif
"""

_AVX2 = r"""
#if defined(__AVX2__) && LANES == 8
INLINE int32_t largest_of(i32 x) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E)); m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return _mm_cvtsi128_si32(m); }
#endif
#if defined(AVX2_32)
INLINE __m256i wide_bytes(i8 x) { return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x)); }
CONVERTED(i32, i8, wide_bytes, i8)
CONVERTED(i32, i16, _mm256_cvtepi16_epi32, __m128i)
CONVERTED(i32, u16, _mm256_cvtepu16_epi32, __m128i)
INLINE __m128i words_of(__m256i x, int first) {  // of each 32-bit number the word that begins at its byte `first`
    const char a = first, b = first + 1;
    const __m256i order = _mm256_setr_epi8(a, b, a + 4, b + 4, a + 8, b + 8, a + 12, b + 12, -1, -1, -1, -1, -1, -1, -1, -1,
                                           a, b, a + 4, b + 4, a + 8, b + 8, a + 12, b + 12, -1, -1, -1, -1, -1, -1, -1, -1);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, order), 8)); }
INLINE __m128i low_words(__m256i x) { return words_of(x, 0); }
INLINE long long low_bytes(__m256i x) {
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i own = _mm256_shuffle_epi8(x, order);
    return _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(own), _mm256_extracti128_si256(own, 1))); }
CONVERTED(u16, i32, low_words, __m256i)
CONVERTED(i16, i32, low_words, __m256i)
CONVERTED(i8, i32, low_bytes, __m256i)
INLINE i32 larger(i32 a, i32 b) { return (i32)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE i32 smaller(i32 a, i32 b) { return (i32)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE bool any_above(i32 a, i32 b) { return _mm256_movemask_ps((__m256)(a > b)) != 0; }
INLINE i16 upper_words(i32 x) { return (i16)words_of((__m256i)x, 2); }
INLINE f32 fused(f32 a, f32 b, f32 c) { return (f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE u16 upper_half(u16 a, u16 b) { return (u16)_mm_mulhi_epu16((__m128i)a, (__m128i)b); }
INLINE float largest_of(f32 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m)); return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m))); }
INLINE f32 square_root(f32 x) { return (f32)_mm256_sqrt_ps((__m256)x); }
INLINE f32 nearest_integer(f32 x) { return (f32)_mm256_round_ps((__m256)x, 8); }
INLINE f32 integer_below(f32 x) { return (f32)_mm256_round_ps((__m256)x, 9); }
INLINE f32 half_to_float(i16 h) { return (f32)_mm256_cvtph_ps((__m128i)h); }
INLINE i16 float_to_half(f32 x) { return (i16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE f64 fused(f64 a, f64 b, f64 c) {
    typedef f64::half H;
    return {(H)_mm256_fmadd_pd((__m256d)a.low, (__m256d)b.low, (__m256d)c.low),
            (H)_mm256_fmadd_pd((__m256d)a.high, (__m256d)b.high, (__m256d)c.high)}; }
INLINE f64 square_root(f64 x) {
    typedef f64::half H; return {(H)_mm256_sqrt_pd((__m256d)x.low), (H)_mm256_sqrt_pd((__m256d)x.high)}; }
#endif
"""

_CONVERSIONS = r"""
INLINE f32 bfloat_to_float(i16 h) { return (f32)as_upper_words(h); }
INLINE i16 float_to_bfloat(f32 x) {
#if defined(AVX512_32) && defined(__AVX512BF16__)  // the instruction makes subnormal numbers zero
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, 0x20) == 0, 1)) return (i16)_mm512_cvtneps_pbh((__m512)x);
#endif
    i32 b = (i32)x, r = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    r = x != x ? (b >> 16 | 0x40) : r;
    return converted<i16>(r);
}
"""

# Around functions of single numbers, in which the names of vector types are those of numbers.
SINGLES = (
    r"""
#pragma push_macro("CHOOSE")
#pragma push_macro("CONVERT")
#undef CHOOSE
#undef CONVERT
#define CHOOSE(mask, yes, no) ((mask) ? (yes) : (no))
#define CONVERT(x, V) converted<V>(x)
#ifndef SINGLE_NUMBERS
#define SINGLE_NUMBERS
namespace single {
typedef int8_t i8; typedef int16_t i16; typedef uint16_t u16; typedef int32_t i32; typedef int64_t i64;
typedef float f32; typedef double f64;
template <class V, class S> INLINE V splat(S s) { return (V)s; }
template <class V, class W> INLINE V seen_as(W x) { V v; memcpy(&v, &x, sizeof v); return v; }
template <class V, class W> INLINE V converted(W x) { return std::is_same_v<W, bool> ? -(V)x : (V)x; }  // truth is all ones
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }
}
#endif
namespace single {
""",
    r"""
}
#pragma pop_macro("CHOOSE")
#pragma pop_macro("CONVERT")
""",
)
