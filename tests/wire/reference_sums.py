"""What `VirtualWorld.all_reduce` must return, written down plainly from the papers and the design, without its code.

A gradient is a list of layers (float32 arrays). The bucket is the layers one after the other; `lowp.wire.plan` says how it is
cut, and nothing else of `lowp.wire` is used. Numbers are rounded by the tests' oracle. All additions are numpy's, in float32.

How many shards a chunk has matters for where rings begin and, with scale="local", for what shares a scale: as many as there are
ranks; for rings of leaders as many as there are nodes; one for `tree`. `sum_format` is the format of sums: the first addend is
rounded to it too, and with `hierarchical` it is the format inside nodes (addends and sums), never between them. Kahan sums
begin with the first addend, so that a sum of negative zeros is one.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

import lowp
from lowp.formats import Rounding
from lowp.wire.codec import codec_of
from lowp.wire.plan import Layer, chunks_of
from oracle import round_all

LIMIT = 126  # of exponents of scales
FP32 = lowp.format("fp32")


@dataclass(frozen=True)
class Rounder:
    """Rounds a part of a message to a format and back: as it is, or scaled by its own maximum."""

    format: lowp.Format
    local: bool

    def __call__(self, part: np.ndarray) -> np.ndarray:
        if self.format == FP32:
            return part.astype(np.float32)
        shift = fitting_shift(part, self.format) if self.local else 0
        rounded = round_all(times_power_of_two(part, shift), self.format, Rounding.NEAREST, saturate=True)
        return times_power_of_two(rounded, -shift).astype(np.float32)


def times_power_of_two(numbers: np.ndarray, exponent: int) -> np.ndarray:
    """In float64: nothing is rounded, whatever the numbers."""
    return np.ldexp(numbers.astype(np.float64), exponent)


def fitting_shift(part: np.ndarray, fmt: lowp.Format) -> int:
    """The largest exponent that keeps the part's maximum within the format."""
    maximum = float(np.abs(part).max(initial=0))
    if maximum == 0:
        return 0
    shift = LIMIT
    while shift > -LIMIT and math.ldexp(maximum, shift) > fmt.scaled_max:
        shift -= 1
    return shift


def aps_shift(ranks: list[np.ndarray], fmt: lowp.Format, lowest_bound: int | None = None) -> int:
    """E = ceil(log2(max |g| * W)); the shift is floor(log2(the format's maximum)) - E."""
    maximum = max(float(np.abs(layer).max(initial=0)) for layer in ranks) * len(ranks)
    if maximum == 0:
        return 0
    bound = next(e for e in range(-200, 200) if math.ldexp(1.0, e) >= maximum)
    if lowest_bound is not None:
        bound = max(bound, lowest_bound)
    largest = next(e for e in range(200, -200, -1) if math.ldexp(1.0, e) <= fmt.scaled_max)
    return min(max(largest - bound, -LIMIT), LIMIT)


def all_reduce(
    gradients: list[list[np.ndarray]],
    format: str,
    *,
    scale: str = "local",
    reduction: str = "two_shot",
    sum_format: str | None = None,
    kahan: bool = False,
    op: str = "sum",
    chunk: int = 1 << 21,
    shards: int | None = None,
    lowest_bound: int | None = -115,
) -> list[np.ndarray]:
    """The sum or mean of the ranks' gradients, layer by layer.

    `lowest_bound`: E is sent as a byte, and "a layer below 2^-115 counts as that" (scaling.py); None for E without that limit.
    """
    fmt, world = lowp.format(format), len(gradients)
    name, node, leaders = parse(reduction)
    sums = lowp.format(sum_format) if sum_format else FP32 if name in ("two_shot", "hierarchical") else fmt
    outer, inner = Rounder(fmt, scale == "local"), Rounder(sums, scale == "local")

    shifts = [0] * len(gradients[0])
    if scale == "aps":
        shifts = [aps_shift([g[layer] for g in gradients], fmt, lowest_bound) for layer in range(len(shifts))]
    scaled = [np.concatenate([scale_layer(g, s) for g, s in zip(layers, shifts, strict=True)]) for layers in gradients]

    if shards is None:
        nodes = -(-world // node)
        shards = 1 if name == "tree" else nodes if leaders else world
    codec = codec_of(fmt, scale=scale)
    layers = tuple(Layer(str(i), layer.size, codec, i) for i, layer in enumerate(gradients[0]))
    total = np.zeros_like(scaled[0])
    for piece in chunks_of(layers, shards, (chunk, chunk)):
        for number, shard in enumerate(piece.shards):
            for part in shard.parts:
                first = piece.start + shard.start + part.offset
                cut = slice(first, first + part.size)
                addends = [g[cut] for g in scaled]
                total[cut] = reduce_part(addends, number, name, node, leaders, outer, inner, kahan)

    results, position = [], 0
    for layer, shift in zip(gradients[0], shifts, strict=True):
        flat = times_power_of_two(total[position : position + layer.size], -shift).astype(np.float32)
        position += layer.size
        results.append((flat / np.float32(world) if op == "mean" else flat).reshape(layer.shape))
    return results


def scale_layer(layer: np.ndarray, shift: int) -> np.ndarray:
    """In float64: for formats as wide as float32, float32 would round at its lower end."""
    return times_power_of_two(layer.reshape(-1), shift)


def parse(reduction: str) -> tuple[str, int, bool]:
    """The name, the size of a node, and whether leaders form a ring."""
    match = re.fullmatch(r"hierarchical\((\d+)(, leaders)?\)", reduction)
    return ("hierarchical", int(match[1]), bool(match[2])) if match else (reduction, 1, False)


def reduce_part(addends, shard, name, node, leaders, outer, inner, kahan):
    """The sum of one part, as everybody has it in the end."""
    if name == "hierarchical":
        members = [[inner(addend) for addend in addends[first : first + node]] for first in range(0, len(addends), node)]
        addends = [in_order(each, inner, kahan) for each in members]
        name, inner = ("ring", outer) if leaders else ("two_shot", Rounder(FP32, outer.local))
    addends = [outer(addend) for addend in addends]  # they travel in the format
    world = len(addends)
    match name:
        case "two_shot" | "sequential":
            total = in_order(addends, inner, kahan)
        case "ring":
            total = in_order([addends[(shard + i) % world] for i in range(world)], inner, kahan)
        case "tree":
            total = by_pairs(addends, inner)
    return outer(total)  # and so does the sum


def in_order(addends, rounder, kahan):
    """Every partial sum rounded; with Kahan, everything is."""
    if not kahan:
        total = rounder(addends[0])
        for addend in addends[1:]:
            total = rounder(total + addend)
        return total
    total, compensation = rounder(addends[0]), np.zeros(addends[0].size, np.float32)
    for addend in addends[1:]:
        corrected = rounder(addend - compensation)
        larger = rounder(total + corrected)
        compensation = rounder(rounder(larger - total) - corrected)
        total = larger
    return total


def by_pairs(addends, rounder):
    """(0+1), (2+3), ..., then pairs of pairs; one without a partner moves up as it is."""
    addends = [rounder(addend) for addend in addends]
    while len(addends) > 1:
        pairs = [rounder(a + b) for a, b in zip(addends[::2], addends[1::2], strict=False)]
        addends = pairs + addends[len(pairs) * 2 :]
    return addends[0]
