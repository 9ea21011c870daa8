"""How many bits each group of adaptive messages has, and where its planes begin, on a GPU (see adaptive_kernels.py).

All groups of a message compete for its planes. Four kernels spread the work over the chip, for all messages at once:

1. `find_priorities`, a program for `BLOCK` groups of a part: priorities, and how many groups have each.
2. `find_levels`, a program for a message: the least level for which the planes suffice.
3. `sum_blocks`, a program for `BLOCK` groups of a message: how many planes they have at that level, and how many of the groups
   have one more at the next level.
4. `find_places`, the same programs: each adds up the sums of the blocks before its own, and goes over its own groups.
"""

import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore

from lowp.wire import adaptive_tables as tables
from lowp.wire.adaptive_kernels import (
    BIAS,
    FIRST_GROUP,
    GROUP,
    GROUP_BYTE,
    ITEM_ROW,
    LEFT,
    LEVELS,
    NONFINITE,
    NOT_FINITE,
    PART,
    PART_BYTE,
    REGION,
    ZERO,
    kernel,
)

BLOCK = tl.constexpr(tables.BLOCK)
BINS = tl.constexpr(tables.BINS)
STEPS = tl.constexpr(tables.STEPS)
UNIFORM_STEPS = tl.constexpr(tables.UNIFORM_STEPS)
MOST_FOR_ALL = tl.constexpr(tables.MOST_FOR_ALL)
REGION_ROW = tl.constexpr(7)  # `AdaptiveTable.regions`
# Of a row of `AdaptiveTable.blocks`.
GROUPS_BEGIN, GROUPS, OWN_REGION, FIRST_BLOCK, ALL_BLOCKS, BYTES_END, PLANES_BEGIN, ALL_PLANES = (
    tl.constexpr(i) for i in range(8)
)
BLOCK_ROW = tl.constexpr(8)
# Of a row of `levels`: the level + LEVELS, the planes that are left, the bits that every group has.
LEVEL, SPARE, LEAST = (tl.constexpr(i) for i in range(3))
LEVEL_ROW = tl.constexpr(tables.LEVEL_ROW)


@kernel
def find_priorities(message, stride, stretches, places, all_groups, counts, all_regions, tops, writes: tl.constexpr):
    """The priority + LEVELS of each group, -1 for zeros, to `places`; and how many groups of a message have each, to `counts`.

    `writes`: `places` and `tops` have what `find_scales` has found, and the message gets its bytes first.
    """
    row = stretches + ITEM_ROW * tl.program_id(0)
    number = tl.program_id(1)
    message += number * tl.cast(stride, tl.int64)
    part_byte = message + tl.load(row + PART_BYTE)
    g = tl.arange(0, BLOCK)
    there = GROUP * g < tl.load(row + LEFT).to(tl.int32)
    group_bytes = message + tl.load(row + GROUP_BYTE) + g
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row + FIRST_GROUP) + g
    if writes:
        top = tl.load(tops + tl.load(row + PART))
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
    region_and_size = tl.load(row + REGION).to(tl.int32)
    first = LEVELS - 255 + 3 * (of_part - BIAS) - (region_and_size & 255)
    tl.store(places, tl.where(byte > ZERO, byte + first, -1), mask=there)
    count = tl.histogram(byte, 256, mask=byte > ZERO)
    counts += (number * all_regions + (region_and_size >> 8)) * BINS + first
    tl.atomic_add(counts + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@kernel
def find_levels(regions, counts, levels, stochastic: tl.constexpr):
    """A row of `levels` for each message."""
    row = regions + REGION_ROW * tl.program_id(0)
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    planes = tl.load(row + 3).to(tl.int32)
    least = tl.full([], 0, tl.int32)
    if not stochastic:
        groups = tl.load(row + 2).to(tl.int32)
        least = tl.minimum(tl.maximum(planes // tl.maximum(groups, 1) - 1, 0), MOST_FOR_ALL)
    level = tl.arange(0, BINS)
    counts += number * BINS
    count = tl.load(counts + level)
    tl.store(counts + level, tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count)  # those of this priority or more
    tl.debug_barrier()
    needed = tl.zeros([BINS], tl.int32)
    for k in tl.static_range(8):
        at = tl.maximum(level + tl.where(k < least, -BINS, UNIFORM_STEPS[k] if stochastic else STEPS[k]), 0)
        needed += tl.load(counts + at, mask=at < BINS, other=0)
    lowest = tl.min(tl.where(needed <= planes, level, BINS), axis=0)
    levels += number * LEVEL_ROW
    tl.store(levels + LEVEL, lowest)
    tl.store(levels + SPARE, planes - tl.sum(tl.where(level == lowest, needed, 0), axis=0))
    tl.store(levels + LEAST, least)


@triton.jit
def width_at(above, least, stochastic: tl.constexpr):
    """The bits of groups whose priorities are so much above the level."""
    width = tl.zeros_like(above)
    for k in tl.static_range(8):
        width += ((above >= (UNIFORM_STEPS[k] if stochastic else STEPS[k])) | (k < least)).to(tl.int32)
    return width


@triton.jit
def widths_of(places, row, level, stochastic: tl.constexpr):
    """The widths of a block's groups at the level; 65536 more for those that have one more at the next level."""
    g = tl.arange(0, BLOCK)
    priority = tl.load(places + g, mask=g < tl.load(row + GROUPS), other=-1)
    above = priority - tl.load(level + LEVEL)
    least = tl.load(level + LEAST)
    width = width_at(above, least, stochastic)
    more = width_at(above + 1, least, stochastic) - width
    return tl.where(priority >= 0, width + (more << 16), 0)


@kernel
def sum_blocks(blocks, places, all_groups, levels, all_regions, sums, stochastic: tl.constexpr):
    """The sum of `widths_of` of each block."""
    row = blocks + BLOCK_ROW * tl.program_id(0)
    number = tl.program_id(1)
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row + GROUPS_BEGIN)
    level = levels + LEVEL_ROW * (number * all_regions + tl.load(row + OWN_REGION))
    width = widths_of(places, row, level, stochastic)
    tl.store(sums + number * tl.num_programs(0) + tl.program_id(0), tl.sum(width, axis=0))


@kernel
def find_places(blocks, places, all_groups, levels, all_regions, sums, out, clears, stochastic: tl.constexpr):
    """Of each group: 16 * the planes before it + its width. `clears`: bytes of `out` that nobody else writes become zero."""
    row = blocks + BLOCK_ROW * tl.program_id(0)
    number = tl.program_id(1)
    places += number * tl.cast(all_groups, tl.int64) + tl.load(row + GROUPS_BEGIN)
    level = levels + LEVEL_ROW * (number * all_regions + tl.load(row + OWN_REGION))
    spare = tl.load(level + SPARE)
    first_block = tl.load(row + FIRST_BLOCK).to(tl.int32)
    count = tl.load(row + ALL_BLOCKS).to(tl.int32)
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
    width = widths_of(places, row, level, stochastic)
    before = tl.cumsum(width, axis=0) - width
    more = tl.sum(more_before, axis=0) + (before >> 16)
    place = tl.sum(planes_before, axis=0) + (before & 0xFFFF) + tl.minimum(more, spare)
    width = (width & 0xFFFF) + tl.where(more < spare, width >> 16, 0)
    tl.store(places + g, (place << 4) | width, mask=g < tl.load(row + GROUPS))
    if clears != 0:
        payload = tl.load(row + PLANES_BEGIN)
        if own == 0:
            end = tl.load(row + BYTES_END) + tl.arange(0, 8)
            tl.store(out + end, tl.zeros([8], tl.uint8), mask=end < payload)
        unused = tl.maximum(spare - tl.sum(more_in_all, axis=0), 0)
        rest = (out + payload).to(tl.pointer_type(tl.int64)) + tl.load(row + ALL_PLANES) - unused
        for first in range(own * BLOCK, unused, count * BLOCK):
            tl.store(rest + first + g, tl.zeros([BLOCK], tl.int64), mask=first + g < unused)
