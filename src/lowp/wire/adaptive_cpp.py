"""Adaptive messages (adaptive.py) in C++, all parts of all messages in one call.

Encoding goes over the numbers twice: scales of all groups; then, message by message, bytes and widths; then codes. Decoding
finds the widths of every message first, then adds up what all messages say, group by group. Threads share stretches of groups.

A group is `VECTORS` vectors of as many numbers as a register holds. What is rounded is rounded as in the plain operations.
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
from lowp.wire.adaptive_codes_cpp import READ_CODES, WRITE_CODES

if TYPE_CHECKING:
    from lowp.wire.adaptive_group import AdaptiveTable
    from lowp.wire.workspace import NewMemory

_DTYPES = {torch.float32: ("float", "x", "x"), torch.bfloat16: ("int16_t", "bfloat_to_float(x)", "float_to_bfloat(x)"),
           torch.float16: ("int16_t", "half_to_float(x)", "float_to_half(x)")}  # fmt: skip
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_ENCODE = (*[_POINTER] * 4, _LONG, _POINTER, _LONG, *[_POINTER] * 2, _LONG, _POINTER, _LONG)
_DECODE = (*[_POINTER] * 4, _LONG, _POINTER, _LONG, *[_POINTER] * 2, *[_LONG] * 5)


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
        self._run = _built(WRITE_CODES + _ENCODER, dtype, stochastic, _ENCODE)

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
        self._run = _built(READ_CODES + _DECODER, dtype, stochastic, _DECODE)

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
