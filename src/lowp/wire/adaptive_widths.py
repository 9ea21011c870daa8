"""How many bits each group of adaptive messages has, and where its planes begin, on a GPU (see adaptive_kernels.py).

All groups of a message compete for its planes. Four kernels spread the work over the chip, for all messages at once:

1. `find_priorities`, a program for each item: the priorities of groups, and how many groups have each (a histogram).
2. `find_levels`, a program for each message: the least level for which the planes suffice.
3. `sum_blocks`, a program for each `BLOCK` groups: how many planes they have at that level, and how many groups of them would
   have one more at the next level.
4. `find_places`, the same programs: they add up the sums of the blocks before, and go over their own groups.
"""

import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore

from lowp.wire import adaptive_tables as tables
from lowp.wire.adaptive_kernels import BIAS, GROUP, ITEM, ITEM_ROW, LEVELS, NONFINITE, NOT_FINITE, ZERO, kernel

BLOCK = tl.constexpr(tables.BLOCK)
BINS = tl.constexpr(tables.BINS)
STEPS = tl.constexpr(tables.STEPS)
UNIFORM_STEPS = tl.constexpr(tables.UNIFORM_STEPS)
MOST_FOR_ALL = tl.constexpr(tables.MOST_FOR_ALL)
REGION_ROW = tl.constexpr(tables.REGION_ROW)
BLOCK_ROW = tl.constexpr(tables.BLOCK_ROW)
LEVEL_ROW = tl.constexpr(tables.LEVEL_ROW)


@kernel
def find_priorities(message, stride, rows, places, all_groups, counts, all_regions, tops, WRITES: tl.constexpr):
    """The priority + LEVELS of each group, -1 for zeros, to `places`; and how many groups of a message have each, to `counts`.

    `WRITES`: `places` and `tops` have what `find_scales` has found, and the message gets its bytes first.
    """
    row = rows + ITEM_ROW * tl.program_id(0)
    number = tl.program_id(1)
    message += number * tl.cast(stride, tl.int64)
    part_byte = message + tl.load(row + 5)
    g = tl.arange(0, ITEM)
    there = GROUP * g < tl.load(row + 1).to(tl.int32)
    group_bytes = message + tl.load(row + 6) + g
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row + 4) + g
    if WRITES:
        top = tl.load(tops + tl.load(row + 3))
        usual = (top > 0) & (top < NOT_FINITE)
        exponent = (top - LEVELS + 3) >> 2
        of_part = tl.where(usual, exponent + BIAS, tl.where(top > 0, NONFINITE, ZERO))
        scale = tl.load(places, mask=there, other=0)
        byte = tl.where((scale > 0) & usual, tl.maximum(255 + scale - LEVELS - 4 * exponent, 0), ZERO)
        tl.store(part_byte, of_part.to(tl.uint8))
        tl.store(group_bytes, byte.to(tl.uint8), mask=there)
    else:
        of_part = tl.load(part_byte).to(tl.int32)
        byte = tl.load(group_bytes, mask=there, other=0).to(tl.int32)
    region_and_size = tl.load(row + 8).to(tl.int32)
    first = LEVELS - 255 + 3 * (of_part - BIAS) - (region_and_size & 255)
    tl.store(places, tl.where(byte > ZERO, byte + first, -1), mask=there)
    count = tl.histogram(byte, 256, mask=byte > ZERO)
    counts += (number * all_regions + (region_and_size >> 8)) * BINS + first
    tl.atomic_add(counts + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@kernel
def find_levels(regions, counts, found, STOCHASTIC: tl.constexpr):
    """Of each message: its level + LEVELS, the planes that are left, and the bits that every group has."""
    row = regions + REGION_ROW * tl.program_id(0)
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    planes = tl.load(row + 3).to(tl.int32)
    least = tl.full([], 0, tl.int32)
    if not STOCHASTIC:
        groups = tl.load(row + 2).to(tl.int32)
        least = tl.minimum(tl.maximum(planes // tl.maximum(groups, 1) - 1, 0), MOST_FOR_ALL)
    level = tl.arange(0, BINS)
    counts += number * BINS
    count = tl.load(counts + level)
    tl.store(counts + level, tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count)  # those of this priority or more
    tl.debug_barrier()
    needed = tl.zeros([BINS], tl.int32)
    for k in tl.static_range(8):
        at = tl.maximum(level + tl.where(k < least, -BINS, UNIFORM_STEPS[k] if STOCHASTIC else STEPS[k]), 0)
        needed += tl.load(counts + at, mask=at < BINS, other=0)
    lowest = tl.min(tl.where(needed <= planes, level, BINS), axis=0)
    found += number * LEVEL_ROW
    tl.store(found, lowest)
    tl.store(found + 1, planes - tl.sum(tl.where(level == lowest, needed, 0), axis=0))
    tl.store(found + 2, least)


@triton.jit
def width_at(above, least, STOCHASTIC: tl.constexpr):
    """The bits of groups whose priorities are so much above the level."""
    width = tl.zeros_like(above)
    for k in tl.static_range(8):
        width += ((above >= (UNIFORM_STEPS[k] if STOCHASTIC else STEPS[k])) | (k < least)).to(tl.int32)
    return width


@triton.jit
def widths_of(places, row, level, STOCHASTIC: tl.constexpr):
    """The widths of a block's groups at the level; 65536 more for those that have one more at the next level."""
    g = tl.arange(0, BLOCK)
    priority = tl.load(places + g, mask=g < tl.load(row + 1), other=-1)
    above = priority - tl.load(level)
    least = tl.load(level + 2)
    width = width_at(above, least, STOCHASTIC)
    more = width_at(above + 1, least, STOCHASTIC) - width
    return tl.where(priority >= 0, width + (more << 16), 0)


@kernel
def sum_blocks(blocks, places, all_groups, levels, all_regions, sums, STOCHASTIC: tl.constexpr):
    """The sum of `widths_of` of each block."""
    row = blocks + BLOCK_ROW * tl.program_id(0)
    number = tl.program_id(1)
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row)
    level = levels + LEVEL_ROW * (number * all_regions + tl.load(row + 2))
    width = widths_of(places, row, level, STOCHASTIC)
    tl.store(sums + number * tl.num_programs(0) + tl.program_id(0), tl.sum(width, axis=0))


@kernel
def find_places(blocks, places, all_groups, levels, all_regions, sums, out, clears, STOCHASTIC: tl.constexpr):
    """Of each group: 16 * the planes before it + its width. `clears`: bytes of `out` that nobody else writes become zero."""
    row = blocks + BLOCK_ROW * tl.program_id(0)
    number = tl.program_id(1)
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row)
    level = levels + LEVEL_ROW * (number * all_regions + tl.load(row + 2))
    left = tl.load(level + 1)
    first_block = tl.load(row + 3).to(tl.int32)
    count = tl.load(row + 4).to(tl.int32)
    own = tl.program_id(0) - first_block
    sums += number * tl.num_programs(0) + first_block
    g = tl.arange(0, BLOCK)
    planes_before = tl.zeros([BLOCK], tl.int32)
    more_before = tl.zeros([BLOCK], tl.int32)
    more_in_all = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        of_block = tl.load(sums + first + g, mask=first + g < count, other=0)
        planes_before += tl.where(first + g < own, of_block & 0xFFFF, 0)
        more_before += tl.where(first + g < own, of_block >> 16, 0)
        more_in_all += of_block >> 16
    width = widths_of(places, row, level, STOCHASTIC)
    before = tl.cumsum(width, axis=0) - width
    more = tl.sum(more_before, axis=0) + (before >> 16)
    place = tl.sum(planes_before, axis=0) + (before & 0xFFFF) + tl.minimum(more, left)
    width = (width & 0xFFFF) + tl.where(more < left, width >> 16, 0)
    tl.store(places + g, (place << 4) | width, mask=g < tl.load(row + 1))
    if clears != 0:
        payload = tl.load(row + 6)
        if own == 0:
            end = tl.load(row + 5) + tl.arange(0, 8)
            tl.store(out + end, tl.zeros([8], tl.uint8), mask=end < payload)
        unused = tl.maximum(left - tl.sum(more_in_all, axis=0), 0)
        rest = (out + payload).to(tl.pointer_type(tl.int64)) + tl.load(row + 7) - unused
        for first in range(own * BLOCK, unused, count * BLOCK):
            tl.store(rest + first + g, tl.zeros([BLOCK], tl.int64), mask=first + g < unused)
