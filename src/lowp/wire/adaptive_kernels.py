"""The kernels of adaptive messages (adaptive.py) for a GPU, in Triton. adaptive_triton.py builds and launches them.

Numbers of `ITEM` groups are a block [64, ITEM], a column for each group. Memory is read and written along columns: the 32
threads of a warp have 32 numbers side by side. Everything else is done with a column in each thread, so that what concerns a
group (its transform, its squares, its planes) needs no other thread. `halves` and `joined` bring that about: Triton gives both
halves of a split to the same thread, and neighbouring columns to neighbouring threads. So a block goes through shared memory
once: before its first split, or after its last join.

Tables are looked up, and planes are read and written, with blocks of one dimension (`flat`). For one of two dimensions Triton
would choose which threads have what by its own rules, and move everything there and back. Multiplications and additions are
not fused, and have the order of the plain operations.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore

from lowp.wire import adaptive_tables as tables

GROUP = tl.constexpr(tables.GROUP)
ITEM = tl.constexpr(tables.ITEM)
LEVELS = tl.constexpr(tables.LEVELS)
LOWEST = tl.constexpr(tables.LOWEST)
HIGHEST = tl.constexpr(tables.HIGHEST)
BIAS = tl.constexpr(tables.BIAS)
ZERO = tl.constexpr(tables.ZERO)
NONFINITE = tl.constexpr(tables.NONFINITE)
F32_MAX = tl.constexpr(tables.F32_MAX)
SIGNS = tl.constexpr(tables.SIGNS - (1 << 64))
NEAREST = tl.constexpr(tables.fractions(tables.NEAREST))
QUARTERS = tl.constexpr(tables.fractions(tables.quarters(1)))
NOT_FINITE = tl.constexpr(1 << 20)  # instead of a scale
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # of the bits of a float32
FRACTION = tl.constexpr(0x7FFFFF)
INFINITY = tl.constexpr(0x7F800000)
# Of a row of `AdaptiveTable.rows`.
START, LEFT, LAYER, PART, FIRST_GROUP, PART_BYTE, GROUP_BYTE, PLANES, REGION, IN_PART = (tl.constexpr(i) for i in range(10))
ITEM_ROW = tl.constexpr(10)


def kernel(function: Callable[..., None]) -> Any:
    """To be launched: one build serves all addresses and integers."""
    constants = function.__annotations__
    return triton.jit(do_not_specialize=[name for name in signature(function).parameters if name not in constants])(function)


# Blocks with a column for each group.


@triton.jit
def halves(x):
    """The upper rows and the lower rows."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), [1, 2, 0]))


@triton.jit
def joined(a, b):
    """The rows of two blocks in turn. After as many `halves` and `joined` as an index has bits, rows are where they were."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [2 * a.shape[0], a.shape[1]])


@triton.jit
def flat(x):
    return tl.reshape(x, [x.shape[0] * x.shape[1]])


@triton.jit
def transformed(a, b):
    """The Hadamard transform of 64 rows, of which these are the halves: pairs at a distance of 32, 16, ... 1."""
    x = joined(a + b, a - b)
    for _ in tl.static_range(5):
        a, b = halves(x)
        x = joined(a + b, a - b)
    return x


@triton.jit
def largest_of(a, b):
    """The largest magnitude of each group, as bits, from the halves of its numbers."""
    most = tl.maximum(a.to(tl.int32, bitcast=True) & MAGNITUDE, b.to(tl.int32, bitcast=True) & MAGNITUDE)
    for _ in tl.static_range(5):
        a, b = halves(most)
        most = tl.maximum(a, b)
    return flat(most)


@triton.jit
def energy_of(a, b):
    """The sum of the squares of each group: those at a distance of 32, 16, ... 1."""
    sums = a * a + b * b
    for _ in tl.static_range(5):
        a, b = halves(sums)
        sums = a + b
    return flat(sums)


@triton.jit
def exchanged(words):
    """16 words: planes of codes, or codes of planes.

    Let the index of a number within its group be i5 i4 i3 i2 i1 i0 in bits, and that of a bit within its code b2 b1 b0. A word
    has four codes, those of the same i5 i2 i1 i0, or half a plane, 32 numbers of the same i5. Three bits of the indices of
    words change places with three of the indices of bits within words, one after the other:

        codes     word i2 i1 i0 i5 or i5 i2 i1 i0    bit i4 i3 b2 b1 b0
        planes    word i5 b2 b1 b0 or b2 b1 b0 i5    bit i4 i3 i2 i1 i0
    """
    words = _exchanged_bit(words, 4, 0x0F0F0F0F)
    words = _exchanged_bit(words, 2, 0x33333333)
    return _exchanged_bit(words, 1, 0x55555555)


@triton.jit
def _exchanged_bit(words, shift: tl.constexpr, mask: tl.constexpr):
    """The highest bit of the index of words, which becomes the lowest, and the bit of the index of bits that is `shift`."""
    a, b = halves(words)
    return joined((a & mask) | ((b & mask) << shift), ((a >> shift) & mask) | (b & ~mask))


@triton.jit
def is_minus():
    """Which numbers of a group are multiplied by -1: a column."""
    return ((tl.full([GROUP], SIGNS, tl.int64) >> tl.arange(0, GROUP).to(tl.int64)) & 1)[:, None] == 1


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(numbers, left, factor):
    """The numbers of an item times `factor`; `left` are there, the others are zero."""
    at = tl.arange(0, GROUP)[:, None] + GROUP * tl.arange(0, ITEM)[None, :]
    x = tl.load(numbers + at) if left >= GROUP * ITEM else tl.load(numbers + at, mask=at < left, other=0.0)
    return x.to(tl.float32) * factor


@triton.jit
def planes_of(message, row, place):
    """Addresses of the planes of groups, the last one first, and which of them the groups have: one dimension each."""
    plane = 7 - tl.arange(0, 8)[:, None]
    first = (message + tl.load(row + PLANES)).to(tl.pointer_type(tl.int64))
    return flat(first + (place >> 4)[None, :] + plane), flat(plane < (place & 15)[None, :])


@triton.jit
def scales_said(message, row, g, there):
    """The part's byte, and s of groups, 0 for those that are zero."""
    of_part = tl.load(message + tl.load(row + PART_BYTE)).to(tl.int32)
    byte = tl.load(message + tl.load(row + GROUP_BYTE) + g, mask=there, other=0).to(tl.int32)
    return of_part, tl.where(byte > ZERO, byte - 255 + 4 * (of_part - BIAS), 0)


# From numbers to messages and back.


@kernel
def find_scales(numbers, rows, factors, found, tops, stochastic: tl.constexpr):
    """s + LEVELS of each group, 0 for zeros. `tops` get the largest of each part, NOT_FINITE where something is not."""
    row = rows + ITEM_ROW * tl.program_id(0)
    left = tl.load(row + LEFT).to(tl.int32)
    factor = tl.load(factors + tl.load(row + LAYER))
    if stochastic:
        factor = tl.where(is_minus(), factor * -1.0, factor)
    a, b = halves(numbers_of(numbers + tl.load(row + START), left, factor))
    largest = largest_of(a, b)
    shift = tl.minimum(tl.maximum((largest >> 23) - 127, LOWEST), HIGHEST)
    unit = power_of_two(0 - shift)[None, :]
    if stochastic:
        a, b = halves(transformed(a * unit, b * unit))
        bits = largest_of(a, b)
        scale = 4 * shift + 4 * ((bits >> 23) - 127) - 12
        for k in tl.static_range(4):
            scale += ((bits & FRACTION) > QUARTERS[k]).to(tl.int32)
    else:
        bits = energy_of(a * unit, b * unit).to(tl.int32, bitcast=True)
        scale = 4 * shift + 2 * ((bits >> 23) - 127) - 12
        for k in tl.static_range(2):
            scale += ((bits & FRACTION) > NEAREST[k]).to(tl.int32)
    scale = tl.minimum(scale, 4 * HIGHEST)
    scale = tl.where((largest > 0) & (scale >= 4 * LOWEST), scale + LEVELS, 0)
    scale = tl.where(largest >= INFINITY, NOT_FINITE, scale)
    g = tl.arange(0, ITEM)
    tl.store(found + tl.load(row + FIRST_GROUP) + g, scale, mask=GROUP * g < left)
    tl.atomic_max(tops + tl.load(row + PART), tl.max(scale, axis=0), sem="relaxed")


@kernel
def write_codes(numbers, rows, factors, places, out, encode_factors, curve, keys, all_parts, stochastic: tl.constexpr):
    """The planes of groups. `curve`: two numbers of 32 bits for each segment, a and b of a + b * fine, 2^10 times its value."""
    row = rows + ITEM_ROW * tl.program_id(0)
    left = tl.load(row + LEFT).to(tl.int32)
    g = tl.arange(0, ITEM)
    there = GROUP * g < left
    _, scale = scales_said(out, row, g, there)
    place = tl.load(places + tl.load(row + FIRST_GROUP) + g, mask=there, other=0)
    factor = tl.load(factors + tl.load(row + LAYER))
    a, b = halves(numbers_of(numbers + tl.load(row + START), left, tl.where(is_minus(), factor * -1.0, factor)))
    unit = power_of_two(0 - (scale >> 2))[None, :]
    x = transformed(a * unit, b * unit) * tl.load(encode_factors + (scale & 3))[None, :]
    if stochastic:
        part = tl.load(row + PART)
        first = tl.load(keys + 5 * all_parts + part) + tl.load(row + IN_PART).to(tl.int32)
        code = drawn(x, place & 15, first, keys + part, all_parts)
    else:
        fine = tl.minimum(tl.abs(x), 32767.0).to(tl.int32)
        line = tl.reshape(tl.load(curve + flat(fine >> 10)), fine.shape)
        code = ((line.to(tl.int32) + (line >> 32).to(tl.int32) * fine) >> 19) | tl.where(x < 0, 128, 0)
    a, b = halves(code)
    a, b = halves(joined(a, b))  # by i4; i5 is the lowest bit of the index now
    a, b = halves(a | (b << 16))  # by i3
    low, high = halves(exchanged(a | (b << 8)))
    address, has = planes_of(out, row, place)
    tl.store(address, flat(low.to(tl.uint32).to(tl.int64) | (high.to(tl.int64) << 32)), mask=has)


@triton.jit
def drawn(x, width, first, keys, all_parts):
    """Numbers from -1 to 1 as codes of `width` bits, at the upper end of 8: up or down at random (lowp/tensor/noise.py)."""
    most = ((1 << width) - 1).to(tl.float32)[None, :]
    place = tl.minimum(tl.maximum((x + 1.0) * (most * 0.5), 0.0), most)
    below = tl.floor(place)
    index = first + tl.arange(0, GROUP)[:, None] + GROUP * tl.arange(0, ITEM)[None, :]
    low = index & 0xFFFF
    high = (index >> 16) & 0xFFFF
    for k in tl.static_range(5):
        product = low * (0x7A35 if k % 2 == 0 else 0x6E2B)
        low = (product >> 16) ^ high ^ tl.load(keys + k * all_parts)
        high = product & 0xFFFF
    noise = (((high << 14) + (low >> 2)) >> 6).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return (below.to(tl.int32) + (noise < place - below).to(tl.int32)) << (8 - width)[None, :]


@triton.jit
def said(message, row, places, values, units, there):
    """The numbers of a message. `values`: of a code of w bits, at 2^w + code; `units`: at 4 w + the quarter of an octave."""
    g = tl.arange(0, ITEM)
    of_part, scale = scales_said(message, row, g, there)
    place = tl.load(places + tl.load(row + FIRST_GROUP) + g, mask=there, other=0)
    width = place & 15
    address, has = planes_of(message, row, place)
    plane = tl.reshape(tl.load(address, mask=has, other=0), [8, ITEM])
    word = exchanged(joined(plane.to(tl.int32), (plane >> 32).to(tl.int32)))
    code = joined(word, word >> 16)
    code = joined(code, code >> 8) & 255  # rows are i5 i2 i1 i0 i4 i3
    at = (code | 256) >> (8 - width)[None, :]
    a, b = halves(tl.reshape(tl.load(values + flat(at)), at.shape).to(tl.int32))
    value = transformed(a, b)  # of integers: exact in any order
    value = tl.reshape(tl.permute(tl.reshape(value, [2, 8, 4, ITEM]), [0, 2, 1, 3]), [GROUP, ITEM])
    value = tl.where(is_minus(), 0 - value, value)
    power = tl.where(of_part == NONFINITE, float("nan"), power_of_two(scale >> 2))
    x = value.to(tl.float32) * tl.load(units + 4 * width + (scale & 3))[None, :] * power[None, :]
    x = tl.maximum(x, -F32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, F32_MAX, propagate_nan=tl.PropagateNan.ALL)


@kernel
def add_numbers(source, stride, messages, rows, factors, places, all_groups, out, values, units, divisor, one: tl.constexpr):
    """The sums of what messages say, times factors, divided. `one` message needs no sums: half of the registers."""
    row = rows + ITEM_ROW * tl.program_id(0)
    left = tl.load(row + LEFT).to(tl.int32)
    there = GROUP * tl.arange(0, ITEM) < left
    if one:
        sums = said(source, row, places, values, units, there)
    else:
        sums = tl.full([GROUP, ITEM], -0.0, tl.float32)  # the first addend, -0.0 too, stays what it is
        for number in range(messages):
            sums += said(
                source + number * tl.cast(stride, tl.int64),
                row,
                places + number * tl.cast(all_groups, tl.int64),
                values,
                units,
                there,
            )
    sums *= tl.load(factors + tl.load(row + LAYER))
    by = tl.cast(divisor, tl.float32)
    if divisor & (divisor - 1) == 0:  # a power of two: to multiply by its inverse is as exact
        sums *= (0x7F000000 - by.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        sums = tl.div_rn(sums, tl.full([GROUP, ITEM], 0.0, tl.float32) + by)
    at = tl.arange(0, GROUP)[:, None] + GROUP * tl.arange(0, ITEM)[None, :]
    tl.store(out + tl.load(row + START) + at, sums.to(out.dtype.element_ty), mask=at < left)
