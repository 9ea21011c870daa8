"""Adaptive messages (adaptive.py) in C++, all parts of all messages in one call.

Encoding goes over the numbers twice: scales of all groups; then, message by message, bytes and widths; then codes. Decoding
finds the widths of every message first, then adds up what all messages say, group by group. Threads share stretches of groups.

A group is `VECTORS` vectors of as many numbers as a register holds. What is rounded is rounded as in the plain operations. What
differs: codes of a group are 64 bytes, in one register (AVX-512) or two (AVX2), and a plane is a bit of each of them, taken by
one instruction from each register.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowp.tensor.lists import cpp
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.noise import KEY_SIZE
from lowp.wire import adaptive_tables as tables

if TYPE_CHECKING:
    from lowp.wire.adaptive_group import AdaptiveTable
    from lowp.wire.workspace import NewMemory

_DTYPES = {torch.float32: ("float", "x", "x"), torch.bfloat16: ("int16_t", "bfloat_to_float(x)", "float_to_bfloat(x)"),
           torch.float16: ("int16_t", "half_to_float(x)", "float_to_half(x)")}  # fmt: skip
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_ENCODE = (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG)
_DECODE = (
    _POINTER,
    _POINTER,
    _POINTER,
    _POINTER,
    _LONG,
    _POINTER,
    _LONG,
    _POINTER,
    _POINTER,
    _LONG,
    _LONG,
    _LONG,
    _LONG,
    _LONG,
)


def _array(kind: str, name: str, values: Sequence[float]) -> str:
    text = ", ".join(float(v).hex() if kind == "float" else str(v) for v in values)
    return f"alignas(64) static const {kind} {name}[] = {{{text}}};"


def _constants(stochastic: bool) -> str:
    """The tables, for all functions below."""
    base, rise = tables.curve()
    values = tables.values(stochastic)[:, :128].to(torch.int32)  # without a sign
    return "\n".join(
        [
            f"#define STOCHASTIC {int(stochastic)}",
            f"#define FOR_ALL ({tables.FOR_ALL})",
            f"#define MOST_FOR_ALL {tables.MOST_FOR_ALL}",
            f"#define SIGNS {tables.SIGNS}ull",
            f"#define LEVELS {tables.LEVELS}",
            f"#define LOWEST (4 * {tables.LOWEST})",
            f"#define HIGHEST (4 * {tables.HIGHEST})",
            f"#define BIAS {tables.BIAS}",
            _array("uint16_t", "BASE", base),
            _array("uint16_t", "RISE", rise),
            _array("uint8_t", "BASE_BYTES", [*(v & 0xFF for v in base), *(v >> 8 for v in base)]),
            _array("uint8_t", "RISE_BYTES", [*(v & 0xFF for v in rise), *(v >> 8 for v in rise)]),
            _array("int32_t", "STEPS", tables.steps_of(stochastic)),
            _array("float", "UP", torch.tensor(tables.quarters(1), dtype=torch.float32).tolist()),
            _array("float", "NEAREST", torch.tensor(tables.NEAREST, dtype=torch.float32).tolist()),
            _array("float", "FACTORS", tables.encode_factors(stochastic).tolist()),
            _array("float", "UNITS", tables.decode_units(stochastic).view(-1).tolist()),
            _array("uint8_t", "LOW", (values & 0xFF).view(-1).tolist()),
            _array("uint8_t", "HIGH", (values >> 8 & 0xFF).view(-1).tolist()),
            _array("int16_t", "VALUES", tables.values(stochastic).view(-1).tolist()),
        ]
    )


_COMMON = r"""
struct Part { int64_t count, layer, start, region, group, size; };
struct Region { int64_t begin, parts, groups, planes, payload, first_part, first_group; };
INLINE float power_of_two(int exponent) { int32_t bits = (exponent + 127) << 23; float f; memcpy(&f, &bits, 4); return f; }
INLINE int32_t bits_of(float x) { int32_t bits; memcpy(&bits, &x, 4); return bits; }
constexpr int VECTORS = 64 / LANES;
template <int D> struct Pair {  // lanes at a distance of D
    static constexpr i32 order = LANE_NUMBERS ^ D, flip = (LANE_NUMBERS & D) != 0 ? i32{} + (int32_t)0x80000000 : i32{};
};
template <int D> INLINE f32 pairs(f32 x) { return __builtin_shuffle(x, Pair<D>::order) + (f32)((i32)x ^ Pair<D>::flip); }
template <int D = LANES / 2> INLINE f32 transformed(f32 x) {  // sums and differences of pairs at a distance of D ... 1
    if constexpr (D == 1) return pairs<1>(x); else return transformed<D / 2>(pairs<D>(x));
}
INLINE void transform(f32* x) {
    for (int d = VECTORS / 2; d > 0; d /= 2)
        for (int v = 0; v < VECTORS; v++)
            if (!(v & d)) { const f32 a = x[v], b = x[v + d]; x[v] = a + b; x[v + d] = a - b; }
    for (int v = 0; v < VECTORS; v++) x[v] = transformed(x[v]);
}
template <int D = LANES / 2, class V, class F> INLINE V folded(V x, F f) {  // the first lane: those at a distance of D ... 1
    x = f(x, __builtin_shuffle(x, Pair<D>::order));
    if constexpr (D > 1) return folded<D / 2>(x, f); else return x;
}
static i32 SIGN[VECTORS];  // the sign bits of a group's fixed signs
static struct Signs {
    Signs() { for (int i = 0; i < 64; i++) SIGN[i / LANES][i % LANES] = SIGNS >> i & 1 ? (int32_t)0x80000000 : 0; }
} made;

// The widths of a message's groups: 16 * the planes before each + its width. Returns the planes used.
static long allocate(const uint8_t* message, const Part* parts, const Region& region, int32_t* places) {
    int32_t at_least[2 * LEVELS + 1] = {};
    const uint8_t* bytes = message + region.parts;
    long begin = 0;
    for (long p = 0; p < region.parts; p++) {
        const Part& part = parts[region.first_part + p];
        const long offset = 3 * (message[p] - BIAS) - part.size - 255 + LEVELS, end = begin + (part.count + 63) / 64;
        for (long g = begin; g < end; g++) if (bytes[g]) at_least[bytes[g] + offset]++;
        begin = end;
    }
    for (long i = 2 * LEVELS - 1; i >= 0; i--) at_least[i] += at_least[i + 1];
    const long average = begin && !STOCHASTIC ? region.planes / begin - 1 : 0;
    const long least = average < 0 ? 0 : average < MOST_FOR_ALL ? average : MOST_FOR_ALL;
    int32_t steps[8];
    for (int k = 0; k < 8; k++) steps[k] = k < least ? FOR_ALL : STEPS[k];
    const auto planes = [&](long level) {
        long sum = 0;
        for (int k = 0; k < 8; k++) {
            const long at = level + steps[k] + LEVELS;
            sum += at_least[at < 0 ? 0 : at > 2 * LEVELS ? 2 * LEVELS : at];
        }
        return sum;
    };
    long low = -LEVELS, high = LEVELS;
    while (low < high) {
        const long middle = (low + high + 4 * LEVELS) / 2 - 2 * LEVELS;  // rounded down
        if (planes(middle) <= region.planes) high = middle; else low = middle + 1;
    }
    uint8_t width[64] = {};  // of priorities from level - 1 on
    for (int d = 0; d < 64; d++) for (int k = 0; k < 8; k++) width[d] += d - 1 >= steps[k];
    long left = region.planes - planes(low), used = 0;
    begin = 0;
    for (long p = 0; p < region.parts; p++) {
        const Part& part = parts[region.first_part + p];
        const long offset = 3 * (message[p] - BIAS) - part.size - 255 - low + 1, end = begin + (part.count + 63) / 64;
        for (long g = begin; g < end; g++) {
            long own = 0;
            if (bytes[g]) {
                const long d = bytes[g] + offset, at = d < 0 ? 0 : d > 62 ? 62 : d;
                own = width[at];
                if (width[at + 1] > own && d >= 0 && d <= 62 && left > 0) { own++; left--; }
            }
            places[g] = (int32_t)(used << 4 | own);
            used += own;
        }
        begin = end;
    }
    return used;
}
template <class F> INLINE void over_groups(const Part* parts, const int32_t* items, long item_count, long threads, F body) {
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if(threads > 1 && item_count > 1)
    for (long item = 0; item < item_count; item++) {
        const Subnormals subnormals;
        const Part& part = parts[items[2 * item]];
        const long first = items[2 * item + 1], groups = (part.count + 63) / 64;
        const long end = first + ITEM < groups ? first + ITEM : groups, full = part.count / 64 < end ? part.count / 64 : end;
        long g = first;
        for (; g < full; g++) body(part, g, std::true_type{});
        for (; g < end; g++) body(part, g, std::false_type{});
    }
}
INLINE long of_vector(long left, int v) { left -= LANES * v; return left < 0 ? 0 : left < LANES ? left : LANES; }
"""

_ENCODER = r"""
typedef STORED stored;
template <class Full> INLINE void get(const stored* numbers, const Part& part, long g, f32 factor, f32* to, Full) {
    const stored* from = numbers + part.start + 64 * g;
    for (int v = 0; v < VECTORS; v++) {
        const auto x = load<std::conditional_t<sizeof(stored) == 4, f32, i16>>(from + LANES * v,
            Full::value ? LANES : of_vector(part.count - 64 * g, v));
        to[v] = FROM_STORED * factor;
    }
}
// s of a group; INT32_MIN: all zero; INT32_MAX: something is not finite.
INLINE int32_t scale_of(f32* x) {
    i32 most = {};
    for (int v = 0; v < VECTORS; v++) most = larger(most, (i32)x[v] & 0x7FFFFFFF);
    const int32_t largest = folded(most, [](i32 a, i32 b) { return larger(a, b); })[0];
    if (largest >= 0x7F800000) return INT32_MAX;
    if (largest == 0) return INT32_MIN;
    int32_t shift = (largest >> 23) - 127;
    shift = shift < LOWEST / 4 ? LOWEST / 4 : shift > HIGHEST / 4 ? HIGHEST / 4 : shift;
    const f32 unit = splat<f32>(power_of_two(-shift));
    for (int v = 0; v < VECTORS; v++) x[v] = x[v] * unit;
#if STOCHASTIC
    for (int v = 0; v < VECTORS; v++) x[v] = (f32)((i32)x[v] ^ SIGN[v]);
    transform(x);
    most = i32{};
    for (int v = 0; v < VECTORS; v++) most = larger(most, (i32)x[v] & 0x7FFFFFFF);
    const int32_t bits = folded(most, [](i32 a, i32 b) { return larger(a, b); })[0];
    int32_t quarter = 4 * ((bits >> 23) - 127) - 12;
    const int32_t mantissa = (bits & 0x7FFFFF) | 0x3F800000;
    for (int j = 0; j < 4; j++) quarter += mantissa > bits_of(UP[j]);
#else
    f32 sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) sum[v] = x[v] * x[v];
    for (int d = VECTORS / 2; d > 0; d /= 2) for (int v = 0; v < d; v++) sum[v] += sum[v + d];
    const int32_t bits = bits_of(folded(sum[0], [](f32 p, f32 q) { return f32(p + q); })[0]);
    int32_t quarter = 2 * ((bits >> 23) - 127) - 12;
    const int32_t mantissa = (bits & 0x7FFFFF) | 0x3F800000;
    for (int j = 0; j < 2; j++) quarter += mantissa > bits_of(NEAREST[j]);
#endif
    const int32_t scale = 4 * shift + quarter;
    return scale > HIGHEST ? HIGHEST : scale < LOWEST ? INT32_MIN : scale;
}
static void write_headers(const int32_t* scales, const Part* parts, const Region& region, uint8_t* message) {
    uint8_t* bytes = message + region.parts;
    long begin = 0;
    for (long p = 0; p < region.parts; p++) {
        const long end = begin + (parts[region.first_part + p].count + 63) / 64;
        int32_t top = INT32_MIN;
        for (long g = begin; g < end; g++) top = scales[g] > top ? scales[g] : top;
        const bool usual = top != INT32_MIN && top != INT32_MAX;
        const int32_t exponent = usual ? (top + 3) >> 2 : 0;
        message[p] = top == INT32_MIN ? 0 : top == INT32_MAX ? 255 : exponent + BIAS;
        for (long g = begin; g < end; g++) {
            const int32_t byte = scales[g] == INT32_MIN ? 0 : 255 + scales[g] - 4 * exponent;
            bytes[g] = usual && byte > 0 ? byte : 0;
        }
        begin = end;
    }
    memset(bytes + region.groups, 0, region.payload - region.parts - region.groups);
}
INLINE void write_planes(uint8_t* to, int width, const uint8_t* codes) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_loadu_si512(codes);
    for (int p = 0; p < width; p++) {
        const uint64_t plane = _mm512_test_epi8_mask(all, _mm512_set1_epi8(128 >> p));
        memcpy(to + 8 * p, &plane, 8);
    }
#elif defined(__AVX2__)
    __m256i low = _mm256_loadu_si256((const __m256i*)codes), high = _mm256_loadu_si256((const __m256i*)codes + 1);
    for (int p = 0; p < width; p++) {
        const uint32_t plane[2] = {(uint32_t)_mm256_movemask_epi8(low), (uint32_t)_mm256_movemask_epi8(high)};
        memcpy(to + 8 * p, plane, 8);
        low = _mm256_add_epi8(low, low);
        high = _mm256_add_epi8(high, high);
    }
#else
    for (int p = 0; p < width; p++)
        for (int i = 0; i < 8; i++) {  // the lowest bits of eight bytes, moved to the highest byte
            uint64_t eight; memcpy(&eight, codes + 8 * i, 8);
            to[8 * p + i] = (eight >> (7 - p) & 0x0101010101010101ull) * 0x0102040810204080ull >> 56;
        }
#endif
}
#if STOCHASTIC
INLINE void write_codes(const f32* x, f32 factor, int width, uint8_t* to, const int32_t* keys, long parts, long part,
                        long first) {
    alignas(64) uint8_t codes[64];
    const float most = (float)((1 << width) - 1);
    for (int v = 0; v < VECTORS; v++) {
        f32 place = (x[v] * factor + splat<f32>(1.0f)) * splat<f32>(most * 0.5f);
        place = smaller(larger(place, f32{}), splat<f32>(most));
        const f32 below = integer_below(place);
        i32 index = splat<i32>((int32_t)first + LANES * v + keys[5 * parts + part]) + LANE_NUMBERS;
        i32 low = index & 0xFFFF, high = index >> 16 & 0xFFFF;
        for (int round = 0; round < 5; round++) {
            const i32 product = low * (round % 2 ? 0x6E2B : 0x7A35);
            low = (product >> 16) ^ high ^ keys[round * parts + part];
            high = product & 0xFFFF;
        }
        const f32 noise = __builtin_convertvector(((high << 14) + (low >> 2)) >> 6, f32) * splat<f32>(0x1p-24f);
        const i32 code = (__builtin_convertvector(below, i32) - (noise < place - below)) << (8 - width);
        const i8 bytes = converted<i8>(code);
        memcpy(codes + LANES * v, &bytes, LANES);
    }
    write_planes(to, width, codes);
}
#else
INLINE void write_codes(const f32* x, f32 factor, int width, uint8_t* to) {
#if defined(AVX512_32) && defined(__AVX512BW__)
    const __m512i base = _mm512_load_si512(BASE), rise = _mm512_load_si512(RISE);
    __m256i half[2];
    uint64_t plane = 0;
    for (int h = 0; h < 2; h++) {
        __m256i fine[2];
        for (int v = 0; v < 2; v++) {
            const __m512 scaled = (__m512)(x[2 * h + v] * factor);
            plane |= (uint64_t)_mm512_cmp_ps_mask(scaled, _mm512_setzero_ps(), _CMP_LT_OQ) << (32 * h + 16 * v);
            const __m512 size = _mm512_min_ps(_mm512_abs_ps(scaled), _mm512_set1_ps(32767.0f));
            fine[v] = _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(size));
        }
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(fine[0]), fine[1], 1);
        const __m512i segment = _mm512_srli_epi16(both, 10), rest = _mm512_slli_epi16(both, 6);
        const __m512i more = _mm512_mulhi_epu16(_mm512_permutexvar_epi16(segment, rise), rest);
        half[h] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(_mm512_add_epi16(_mm512_permutexvar_epi16(segment, base), more), 9));
    }
    memcpy(to, &plane, 8);
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    for (int p = 1; p < width; p++) {
        plane = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(128 >> p));
        memcpy(to + 8 * p, &plane, 8);
    }
#else
    alignas(64) uint8_t codes[64];
#if defined(AVX2_32)
    for (int h = 0; h < 2; h++) {  // 32 numbers; packing exchanges quarters of registers, which is undone at the end
        __m256i fine[4], signs[4];
        for (int v = 0; v < 4; v++) {
            const f32 scaled = x[4 * h + v] * factor;
            signs[v] = (__m256i)(scaled < 0.0f);
            fine[v] = _mm256_cvttps_epi32((__m256)smaller((f32)((i32)scaled & 0x7FFFFFFF), splat<f32>(32767.0f)));
        }
        const __m256i low = _mm256_packs_epi32(fine[0], fine[1]), high = _mm256_packs_epi32(fine[2], fine[3]);
        const __m256i segment = _mm256_packus_epi16(_mm256_srli_epi16(low, 10), _mm256_srli_epi16(high, 10));
        const auto found = [&](const uint8_t* table) __attribute__((always_inline)) {  // of 32 bytes
            const __m256i first = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
            const __m256i second = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table + 1));
            return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, segment), _mm256_shuffle_epi8(second, segment),
                                      _mm256_slli_epi16(segment, 3)); };
        const __m256i base[2] = {found(BASE_BYTES), found(BASE_BYTES + 32)};
        const __m256i rise[2] = {found(RISE_BYTES), found(RISE_BYTES + 32)};
        const auto code = [](__m256i base, __m256i rise, __m256i fine) {
            return _mm256_srli_epi16(_mm256_add_epi16(base, _mm256_mulhi_epu16(rise, _mm256_slli_epi16(fine, 6))), 9); };
        const __m256i bytes = _mm256_packus_epi16(
            code(_mm256_unpacklo_epi8(base[0], base[1]), _mm256_unpacklo_epi8(rise[0], rise[1]), low),
            code(_mm256_unpackhi_epi8(base[0], base[1]), _mm256_unpackhi_epi8(rise[0], rise[1]), high));
        const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(signs[0], signs[1]), _mm256_packs_epi32(signs[2], signs[3]));
        const __m256i whole = _mm256_or_si256(bytes, _mm256_and_si256(sign, _mm256_set1_epi8((char)128)));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_store_si256((__m256i*)codes + h, _mm256_permutevar8x32_epi32(whole, order));
    }
#else
    for (int i = 0; i < 64; i++) {
        const float scaled = x[i / LANES][i % LANES] * factor[0], size = scaled < 0 ? -scaled : scaled;
        const int fine = size < 32767.0f ? (int)size : 32767, segment = fine >> 10;
        codes[i] = (BASE[segment] + (RISE[segment] * (fine & 1023) >> 10)) >> 9 | (scaled < 0 ? 128 : 0);
    }
#endif
    write_planes(to, width, codes);
#endif
}
#endif
extern "C" void run(const stored* numbers, uint8_t* out, const Part* parts, const Region* regions, long region_count,
                    const int32_t* items, long item_count, int32_t* scratch, const float* factors, long part_count,
                    const int32_t* keys, long threads) {
    over_groups(parts, items, item_count, threads, [&](const Part& part, long g, auto full) __attribute__((always_inline)) {
        f32 x[VECTORS];
        get(numbers, part, g, splat<f32>(factors[part.layer]), x, full);
        scratch[part.group + g] = scale_of(x);
    });
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if(threads > 1 && region_count > 1)
    for (long r = 0; r < region_count; r++) {
        const Region& region = regions[r];
        uint8_t* message = out + region.begin;
        write_headers(scratch + region.first_group, parts, region, message);
        const long used = allocate(message, parts, region, scratch + region.first_group);
        memset(message + region.payload + 8 * used, 0, 8 * (region.planes - used));
    }
    over_groups(parts, items, item_count, threads, [&](const Part& part, long g, auto full) __attribute__((always_inline)) {
        const int32_t place = scratch[part.group + g], width = place & 15;
        if (!width) return;
        const Region& region = regions[part.region];
        uint8_t* message = out + region.begin;
        const int32_t scale = message[region.parts + part.group - region.first_group + g] - 255
                              + 4 * (message[&part - parts - region.first_part] - BIAS);
        f32 x[VECTORS];
        get(numbers, part, g, splat<f32>(factors[part.layer]), x, full);
        const f32 unit = splat<f32>(power_of_two(-(scale >> 2))), factor = splat<f32>(FACTORS[scale & 3]);
        for (int v = 0; v < VECTORS; v++) x[v] = (f32)((i32)(x[v] * unit) ^ SIGN[v]);
        transform(x);
        uint8_t* to = message + region.payload + 8 * (long)(place >> 4);
#if STOCHASTIC
        write_codes(x, factor, width, to, keys, part_count, &part - parts, 64 * g);
#else
        write_codes(x, factor, width, to);
#endif
    });
}
"""

_DECODER = r"""
typedef STORED stored;
// What the codes of a group stand for.
INLINE void read_codes(const uint8_t* from, int width, f32* x) {
#if defined(AVX512_32) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
    uint64_t sign;
    memcpy(&sign, from, 8);
    __m512i codes = _mm512_setzero_si512();
    const __m512i one = _mm512_set1_epi8(1);
#if STOCHASTIC
    codes = _mm512_maskz_mov_epi8(sign, one);
#endif
    for (int p = 1; p < width; p++) {
        uint64_t plane;
        memcpy(&plane, from + 8 * p, 8);
        codes = _mm512_add_epi8(codes, codes);
        codes = _mm512_mask_add_epi8(codes, plane, codes, one);
    }
    __m512i words[2];
#if STOCHASTIC
    const __m512i first = _mm512_set1_epi16(1 - (1 << width));
    for (int h = 0; h < 2; h++) {
        const __m512i wide = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes));
        words[h] = _mm512_add_epi16(_mm512_add_epi16(wide, wide), first);
    }
#else
    const uint8_t *low = LOW + 128 * width, *high = HIGH + 128 * width;
    const __m512i lows = _mm512_permutex2var_epi8(_mm512_load_si512(low), codes, _mm512_load_si512(low + 64));
    const __m512i highs = _mm512_permutex2var_epi8(_mm512_load_si512(high), codes, _mm512_load_si512(high + 64));
    for (int h = 0; h < 2; h++) {
        const __m512i l = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(lows, 1) : _mm512_castsi512_si256(lows));
        const __m512i u = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(highs, 1) : _mm512_castsi512_si256(highs));
        const __m512i both = _mm512_or_si512(l, _mm512_slli_epi16(u, 8));
        words[h] = _mm512_mask_sub_epi16(both, (__mmask32)(sign >> (32 * h)), _mm512_setzero_si512(), both);
    }
#endif
    for (int v = 0; v < VECTORS; v++) {
        const __m256i own = v % 2 ? _mm512_extracti64x4_epi64(words[v / 2], 1) : _mm512_castsi512_si256(words[v / 2]);
        x[v] = (f32)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(own));
    }
#elif defined(AVX2_32)
    const __m256i eighths = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    const auto mask = [&](int p, int h) __attribute__((always_inline)) {  // a byte of ones for each bit of half a plane
        int32_t plane;
        memcpy(&plane, from + 8 * p + 4 * h, 4);
        const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(plane), eighths), bit);
        return _mm256_cmpeq_epi8(own, bit); };
    for (int h = 0; h < 2; h++) {
        const __m256i sign = mask(0, h);
        __m256i codes = STOCHASTIC ? _mm256_sub_epi8(_mm256_setzero_si256(), sign) : _mm256_setzero_si256();
        for (int p = 1; p < width; p++) codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), mask(p, h));
        __m256i words[2];
#if STOCHASTIC
        const __m256i first = _mm256_set1_epi16(1 - (1 << width));
        for (int q = 0; q < 2; q++) {
            const __m128i own = q ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
            const __m256i wide = _mm256_cvtepu8_epi16(own);
            words[q] = _mm256_add_epi16(_mm256_add_epi16(wide, wide), first);
        }
#else
        __m256i lows = _mm256_setzero_si256(), highs = _mm256_setzero_si256();
        for (int first = 0; first < 1 << (width - 1); first += 16) {  // 16 values at a time; others have their highest bit set
            const __m256i own = _mm256_adds_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(first)), _mm256_set1_epi8(0x70));
            const auto found = [&](const uint8_t* table) __attribute__((always_inline)) {
                const __m128i values = _mm_load_si128((const __m128i*)(table + 128 * width + first));
                return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), own); };
            lows = _mm256_or_si256(lows, found(LOW));
            highs = _mm256_or_si256(highs, found(HIGH));
        }
        for (int q = 0; q < 2; q++) {
            const auto wide = [&](__m256i x) { return q ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x); };
            const __m256i minus = _mm256_cvtepi8_epi16(wide(sign)), l = _mm256_cvtepu8_epi16(wide(lows));
            const __m256i both = _mm256_or_si256(l, _mm256_slli_epi16(_mm256_cvtepu8_epi16(wide(highs)), 8));
            words[q] = _mm256_sub_epi16(_mm256_xor_si256(both, minus), minus);
        }
#endif
        for (int v = 0; v < 4; v++) {
            const __m128i own = v % 2 ? _mm256_extracti128_si256(words[v / 2], 1) : _mm256_castsi256_si128(words[v / 2]);
            x[4 * h + v] = (f32)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(own));
        }
    }
#else
    uint64_t planes[8];
    memcpy(planes, from, 8 * width);
    for (int i = 0; i < 64; i++) {
        int code = 0;
        for (int p = 0; p < width; p++) code = code << 1 | (int)(planes[p] >> i & 1);
        x[i / LANES][i % LANES] = (float)VALUES[256 * width + code];
    }
#endif
}
extern "C" void run(const uint8_t* source, stored* out, const Part* parts, const Region* regions, long region_count,
                    const int32_t* items, long item_count, int32_t* scratch, const float* factors, long groups,
                    long divisor, long messages, long stride, long threads) {
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if(threads > 1 && region_count * messages > 1)
    for (long i = 0; i < region_count * messages; i++) {
        const Region& region = regions[i % region_count];
        const long message = i / region_count;
        allocate(source + message * stride + region.begin, parts, region, scratch + message * groups + region.first_group);
    }
    over_groups(parts, items, item_count, threads, [&](const Part& part, long g, auto full) __attribute__((always_inline)) {
        const Region& region = regions[part.region];
        f32 sum[VECTORS];
        for (long m = 0; m < messages; m++) {
            const uint8_t* message = source + m * stride + region.begin;
            const int32_t place = scratch[m * groups + part.group + g], width = place & 15;
            const int32_t part_byte = message[&part - parts - region.first_part];
            f32 x[VECTORS] = {};
            if (part_byte == 255) {
                for (int v = 0; v < VECTORS; v++) x[v] = splat<f32>(NAN);
            } else if (width) {
                const int32_t byte = message[region.parts + part.group - region.first_group + g];
                const int32_t scale = byte - 255 + 4 * (part_byte - BIAS);
                read_codes(message + region.payload + 8 * (long)(place >> 4), width, x);
                transform(x);
                const f32 unit = splat<f32>(UNITS[4 * width + (scale & 3)]), power = splat<f32>(power_of_two(scale >> 2));
                const f32 most = splat<f32>(3.4028234663852886e38f);
                for (int v = 0; v < VECTORS; v++) {
                    x[v] = SIGN[v] < 0 ? f32{} - x[v] : x[v];
                    x[v] = smaller(larger(x[v] * unit * power, -most), most);
                }
            }
            for (int v = 0; v < VECTORS; v++) sum[v] = m ? sum[v] + x[v] : x[v];
        }
        const f32 factor = splat<f32>(factors[part.layer]), parts_of = splat<f32>((float)divisor);
        for (int v = 0; v < VECTORS; v++) {
            f32 x = sum[v] * factor;
            if (divisor != 1) x = x / parts_of;
            const long room = decltype(full)::value ? LANES : of_vector(part.count - 64 * g, v);
            store(out + part.start + 64 * g + LANES * v, TO_STORED, room);
        }
    });
}
"""


def _built(text: str, dtype: torch.dtype, stochastic: bool, arguments: Sequence[Any]) -> Any:
    stored, read, written = _DTYPES[dtype]
    defined = f"#define STORED {stored}\n#define FROM_STORED {read}\n#define TO_STORED {written}\n#define ITEM {tables.ITEM}"
    head = f"{preamble()}\n{defined}\n{_constants(stochastic)}"
    return cpp.build_parallel(f"{head}{_COMMON}{text}", arguments)


class CppEncoder:
    """Numbers of a dtype to messages."""

    def __init__(self, dtype: torch.dtype, stochastic: bool) -> None:
        self._run = _built(_ENCODER, dtype, stochastic, _ENCODE)

    def __call__(
        self,
        numbers: Tensor,
        out: Tensor,
        table: "AdaptiveTable",
        factors: Tensor,
        keys: Tensor | None,
        workspace: "NewMemory",
    ) -> None:
        scratch = workspace.scratch(table.groups, torch.int32, numbers.device)
        assert keys is None or keys.shape == (KEY_SIZE, len(table.parts))
        self._run(
            numbers.data_ptr(), out.data_ptr(), table.parts.data_ptr(), table.regions.data_ptr(), len(table.regions),
            table.items.data_ptr(), len(table.items), scratch.data_ptr(), factors.data_ptr(),
            len(table.parts), None if keys is None else keys.data_ptr(), _threads(table),
        )  # fmt: skip


class CppDecoder:
    """Messages to sums of a dtype."""

    def __init__(self, dtype: torch.dtype, stochastic: bool) -> None:
        self._run = _built(_DECODER, dtype, stochastic, _DECODE)

    def __call__(
        self,
        source: Tensor,
        out: Tensor,
        table: "AdaptiveTable",
        factors: Tensor,
        divisor: int,
        messages: int,
        stride: int,
        workspace: "NewMemory",
    ) -> None:
        scratch = workspace.scratch(messages * table.groups, torch.int32, out.device)
        self._run(
            source.data_ptr(), out.data_ptr(), table.parts.data_ptr(), table.regions.data_ptr(), len(table.regions),
            table.items.data_ptr(), len(table.items), scratch.data_ptr(), factors.data_ptr(),
            table.groups, divisor, messages, stride, _threads(table),
        )  # fmt: skip


def _threads(table: "AdaptiveTable") -> int:
    return torch.get_num_threads() if table.groups >= 512 else 1
