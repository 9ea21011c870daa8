"""Top-k's choice, and sums of what was chosen, as C++ (top_k.py says what they do). Threads share the parts."""

import ctypes

import torch
from torch import Tensor

from lowp.tensor.lists import cpp
from lowp.tensor.lists.preamble import preamble
from lowp.wire.top_k import DIGITS, PIECE, KeptTable

_SMALL = 1 << 15  # numbers: one thread
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long

_PART = """
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if(threads > 1 && parts > 1)
    for (long part = 0; part < parts; part++) {
        const Subnormals subnormals;
        const auto column = [&](int number) { return table[number * parts + part]; };
        const long size = column(0), kept = column(1), layer = column(2), start = column(3), begin = column(4);
        const long ends_begin = column(5), before = column(6), slots = column(7), last = (size - 1) / PIECE;
"""

_CHOOSE = (
    r"""
#include <algorithm>
#include <functional>

// Of 16 numbers, magnitudes as integers. NaN is infinity.
INLINE i32 keys_of(f32 x, f32 factor) {
    return smaller((i32)(x * factor) & splat<i32>(0x7fffffff), splat<i32>(0x7f800000));
}

INLINE int32_t largest_key(i32 keys) {
    int32_t most = 0; for (int l = 0; l < LANES; l++) most = keys[l] > most ? keys[l] : most; return most;
}

// Appends those of 16 keys and positions that are at least `low`; behind them, up to 16 others are written.
INLINE long append(i32 keys, i32 places, int32_t low, long there, int32_t* to_keys, int32_t* to_places, long found) {
#if defined(AVX512_32)
    const __mmask16 good = _mm512_cmpge_epi32_mask((__m512i)keys, _mm512_set1_epi32(low)) & ((1u << there) - 1);
    _mm512_storeu_si512(to_keys + found, _mm512_maskz_compress_epi32(good, (__m512i)keys));
    _mm512_storeu_si512(to_places + found, _mm512_maskz_compress_epi32(good, (__m512i)places));
    return found + __builtin_popcount(good);
#else
    if (any_above(keys, splat<i32>(low - 1)))
        for (long l = 0; l < there; l++)
            if (keys[l] >= low) { to_keys[found] = keys[l]; to_places[found++] = places[l]; }
    return found;
#endif
}

// Numbers by the upper bits of their keys. Two rows, so that a count need not wait for the one before, which is often the same.
struct Counts {
    uint32_t rows[2][BINS];
    int32_t most = 0;  // the largest key
    void clear() { memset(rows, 0, sizeof rows); }
    // From the top, the bin that has the one wanted, which is then counted from that bin's top.
    long bin_of(long first, long& wanted) const {
        long bin = first;
        for (; bin > 0 && rows[0][bin] + rows[1][bin] < wanted; bin--) wanted -= rows[0][bin] + rows[1][bin];
        return bin;
    }
};

// Counts of one vector in `step`, by the upper bits. How many numbers were seen?
static long count(const float* x, long size, f32 factor, long step, Counts& counts) {
    counts.clear();
    long seen = 0;
    i32 most = {};
    for (long i = 0; i < size; i += step * LANES) {
        const long there = size - i < LANES ? size - i : LANES;
        const i32 keys = keys_of(load<f32>(x + i, there), factor);
        most = larger(most, keys);
        for (long l = 0; l < there; l++) counts.rows[l & 1][keys[l] >> SHIFT]++;
        seen += there;
    }
    counts.most = largest_key(most);
    return seen;
}

// A threshold that is probably below the k-th largest, but not by much.
static int32_t estimated(const float* x, long size, long kept, f32 factor, Counts& counts) {
    if (size < 64 * LANES) return 0;
    const double share = (double)count(x, size, factor, size < 8192 ? 16 : size < PIECE ? 32 : 64, counts) / size * kept;
    long wanted = (long)(1.2 * share + 4 * sqrt(share) + 4);
    return (int32_t)(counts.bin_of(counts.most >> SHIFT, wanted) << SHIFT);
}

// Keys from `low` on and their positions, in their order.
static long candidates(const float* x, long size, f32 factor, int32_t low, int32_t* keys, int32_t* places, Counts& counts) {
    long found = 0, i = 0;
    i32 place, most = {}; for (int l = 0; l < LANES; l++) place[l] = l;
    const auto take = [&](long there) __attribute__((always_inline)) {
        const i32 own = keys_of(load<f32>(x + i, there), factor);
        most = larger(most, own);
        found = append(own, place, low, there, keys, places, found);
        place += LANES;
    };
    for (; i + LANES <= size; i += LANES) take(LANES);
    if (i < size) take(size - i);
    counts.most = largest_key(most);
    return found;
}

// The k-th largest key, where k is `wanted`. `equal` keys are equal to it, of which `wanted` are kept.
static int32_t threshold_of(const int32_t* keys, long found, int32_t* room, long& wanted, long& equal, Counts& counts) {
    counts.clear();
    for (long c = 0; c < found; c++) counts.rows[c & 1][keys[c] >> SHIFT]++;
    const long bin = counts.bin_of(counts.most >> SHIFT, wanted);
    long left = 0;  // keys in this bin
    for (long c = 0; c < found; c++) { room[left] = keys[c]; left += keys[c] >> SHIFT == bin; }
    std::nth_element(room, room + (wanted - 1), room + left, std::greater<int32_t>());
    const int32_t threshold = room[wanted - 1];
    equal = std::count(room, room + left, threshold);
    wanted -= std::count_if(room, room + wanted, [=](int32_t key) { return key > threshold; });
    return threshold;
}

// Positions whose keys are above the threshold, and the first `wanted` of those that are equal to it.
static void keep(int32_t* keys, int32_t* places, long found, int32_t threshold, long wanted, bool all) {
    long slot = 0;
    if (all) {
        long c = 0;
        for (; c + LANES <= found; c += LANES)
            slot = append(load<i32>(keys + c, LANES), load<i32>(places + c, LANES), threshold, LANES, keys, places, slot);
        for (; c < found; c++) if (keys[c] >= threshold) places[slot++] = places[c];
        return;
    }
    for (long c = 0; c < found; c++)
        if (keys[c] > threshold || (keys[c] == threshold && wanted-- > 0)) places[slot++] = places[c];
}

// Positions of all numbers but zeros, and of the first zeros. Up to the last zero that is kept, everything is.
static void add_zeros(int32_t* places, long found, long kept) {
    long upto = 0, passed = 0;
    for (long zeros = kept - found; zeros > 0; upto++)
        if (passed < found && places[passed] == upto) passed++; else zeros--;
    memmove(places + upto, places + passed, (found - passed) * sizeof(int32_t));
    for (long i = 0; i < upto; i++) places[i] = (int32_t)i;
}

extern "C" void run(const float* numbers, const float* factors, char* out, float* values, int32_t* room, const int64_t* table,
                    long parts, long threads) {"""
    + _PART
    + r"""
        const float* x = numbers + start;
        const f32 factor = splat<f32>(factors ? factors[layer] : 1.0f);
        int32_t* keys = room + 3 * (before + LANES * part);
        int32_t *places = keys + size + LANES, *rest = places + size + LANES;
        Counts counts;
        int32_t low = std::max(estimated(x, size, kept, factor, counts), 1);  // zeros are many, or not needed
        long found = candidates(x, size, factor, low, keys, places, counts);
        if (found < kept && low > 1) {  // the sample was not like the others
            count(x, size, factor, 1, counts);
            long wanted = kept;
            low = std::max((int32_t)(counts.bin_of(counts.most >> SHIFT, wanted) << SHIFT), 1);
            found = candidates(x, size, factor, low, keys, places, counts);
        }
        if (found < kept) {
            add_zeros(places, found, kept);
        } else {
            long wanted = kept, equal = 0;
            const int32_t threshold = threshold_of(keys, found, rest, wanted, equal, counts);
            keep(keys, places, found, threshold, wanted, wanted == equal);
        }
        uint16_t* words = (uint16_t*)(out + begin);
        for (long slot = 0; slot < kept; slot++) words[slot] = (uint16_t)places[slot];
        for (long slot = 0; slot < kept; slot++) values[slots + slot] = x[places[slot]];
        int32_t* ends = (int32_t*)(out + ends_begin);
        for (long piece = 0, slot = 0; piece < last; ends[piece++] = (int32_t)slot)
            while (slot < kept && places[slot] < (piece + 1) * PIECE) slot++;
    }
}
"""
)

_ADD = (
    r"""
extern "C" void run(const char* source, const float* values, float* out, const float* factors, float divisor,
                    const int64_t* table, long parts, long messages, long stride, long all_slots, long threads) {"""
    + _PART
    + r"""
        float* total = out + start;
        memset(total, 0, size * sizeof(float));
        for (long message = 0; message < messages; message++) {
            const uint16_t* words = (const uint16_t*)(source + message * stride + begin);
            const int32_t* ends = (const int32_t*)(source + message * stride + ends_begin);
            const float* own = values + message * all_slots + slots;
            for (long piece = 0, slot = 0; piece <= last; piece++) {
                const long end = piece < last && ends[piece] < kept ? ends[piece] : kept;
                for (; slot < end; slot++) {
                    const long place = piece * PIECE + words[slot];
                    if (place < size) total[place] += own[slot];  // whatever a message says, memory is not another's
                }
            }
        }
        const float factor = factors ? factors[layer] : 1.0f;
        if (divisor != 1.0f) for (long i = 0; i < size; i++) total[i] = total[i] * factor / divisor;
        else if (factor != 1.0f) for (long i = 0; i < size; i++) total[i] *= factor;
    }
}
"""
)


def _text(body: str) -> str:
    shift, bits = DIGITS[0]
    defined = {"PIECE": f"{PIECE}L", "SHIFT": shift, "BINS": 1 << bits}
    return "\n".join([preamble(), *(f"#define {name} {value}" for name, value in defined.items()), body])


def _threads(table: KeptTable) -> int:
    return torch.get_num_threads() if table.elements >= _SMALL else 1


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Choose:
    def __init__(self) -> None:
        self._run = cpp.build_parallel(_text(_CHOOSE), [*[_POINTER] * 6, *[_LONG] * 2])

    def __call__(
        self, table: KeptTable, numbers: Tensor, factors: Tensor | None, out: Tensor, values: Tensor, room: Tensor
    ) -> None:
        columns = table.columns(numbers.device)
        pointers = (_address(x) for x in (numbers, factors, out, values, room, columns))
        self._run(*pointers, len(table.rows), _threads(table))


class Add:
    def __init__(self) -> None:
        self._run = cpp.build_parallel(_text(_ADD), [*[_POINTER] * 4, ctypes.c_float, _POINTER, *[_LONG] * 5])

    def __call__(
        self,
        table: KeptTable,
        source: Tensor,
        values: Tensor,
        out: Tensor,
        factors: Tensor | None,
        divisor: int,
        messages: int,
        stride: int,
    ) -> None:
        pointers = (_address(x) for x in (source, values, out, factors))
        columns = table.columns(out.device)
        more = len(table.rows), messages, stride, table.slots, _threads(table)
        self._run(*pointers, float(divisor), columns.data_ptr(), *more)
