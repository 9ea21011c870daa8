"""Numbers that define adaptive messages (adaptive.py): for its plain operations and for its kernels alike."""

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

GROUP = 64  # numbers
PLANE = GROUP // 8  # bytes
WIDEST = 8  # bits of a code
SIGNS = 0x9E3779B97F4A7C15  # bit i: is number i of a group multiplied by -1?
STEPS = (0, 3, 6, 9, 13, 17, 21, 25)  # of a normal number's squared error at 0 to 8 bits: 2 log2 of the ratios of its decreases
FOR_ALL = -(1 << 20)  # instead of a step: every group has the bit
MOST_FOR_ALL = 2  # such bits, see `least_width`
UNIFORM_STEPS = (FOR_ALL, 0, 7, 12, 16, 20, 24, 28)  # the same of 1 / (2^w - 1)^2; every group has the first bit
LEAST_BITS, MOST_BITS = 1.0, 8.0
LEAST_UNBIASED = 1.25  # a bit for each number, its group's byte, and a little more
ZERO, NONFINITE = 0, 255
LOWEST, HIGHEST = -126, 126  # exponents of scales
BIAS = 127  # of a part's byte
NEAREST = (2.0**0.25, 2.0**0.75)  # where a sum of squares goes to the next quarter octave of its root
FINE = 4096  # units of a scaled number before it becomes a code; 8 * FINE is the largest that 64 numbers can have
SEGMENTS, SEGMENT = 32, 1024  # of the curve, and units in each
# Of the curve: sqrt(3) is best for many levels, 1.46 for four. With this, each width is up to 2.3 % worse than its best levels.
_SPREAD = 1.62
F32_MAX = torch.finfo(torch.float32).max
LEVELS = 1024  # priorities are between +- this
ITEM = 128  # groups that a thread on a CPU, or a program on a GPU, takes at once
BINS = 2 * LEVELS
BLOCK = 1024  # groups of a message whose places a program on a GPU finds
LEVEL_ROW = 3  # numbers that are found out about each message there
_CPU = torch.device("cpu")  # whatever the default device is


@lru_cache(maxsize=1)
def curve() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each segment: the 16-bit value at its beginning, and by how much it rises."""
    knots = [round(65536 * math.erf(8 * k / SEGMENTS / (_SPREAD * math.sqrt(2)))) for k in range(SEGMENTS + 1)]
    knots = [min(knot, 65535) for knot in knots]
    return tuple(knots[:-1]), tuple(after - before for before, after in pairwise(knots))


def magnitudes_of(fine: Tensor) -> Tensor:
    """The 7 bits of magnitudes in units of 1 / 4096 scale (int32, below 32768)."""
    base, rise = (torch.tensor(each, dtype=torch.int32, device=fine.device) for each in curve())
    segment = (fine >> 10).to(torch.int64)
    return (base[segment] + (rise[segment] * (fine & (SEGMENT - 1)) >> 10)) >> 9


@lru_cache(maxsize=2)
def values(stochastic: bool) -> Tensor:
    """What codes stand for, int16 [9, 256]: the upper w bits of a code, for each width w.

    To nearest: the mean of normal numbers within the code's interval, in 1 / 4096. Stochastic: 2 code + 1 - 2^w.
    """
    found = torch.zeros(WIDEST + 1, 256, dtype=torch.int16, device=_CPU)
    if stochastic:
        for width in range(1, WIDEST + 1):
            found[width, : 1 << width] = torch.arange(1 << width, device=_CPU) * 2 + 1 - (1 << width)
        return found
    fine = torch.arange(8 * FINE, dtype=torch.int32, device=_CPU)
    magnitude = magnitudes_of(fine).to(torch.int64)
    middle = fine.to(torch.float64) + 0.5
    weight = torch.exp(-((middle / FINE) ** 2) / 2)
    sums = [torch.zeros(128, dtype=torch.float64, device=_CPU).index_add(0, magnitude, x) for x in (weight, weight * middle)]
    for width in range(1, WIDEST + 1):
        half = 1 << (width - 1)
        mean = (sums[1].view(half, -1).sum(1) / sums[0].view(half, -1).sum(1)).round().to(torch.int16)
        found[width, :half], found[width, half : 2 * half] = mean, -mean
    return found


def quarters(sign: int) -> list[float]:
    """2^(sign j/4) for j = 0 to 3."""
    return [2.0 ** (sign * j / 4) for j in range(4)]


def fractions(numbers: Iterable[float]) -> tuple[int, ...]:
    """The fraction bits of float32 numbers."""
    return tuple(torch.tensor(list(numbers), dtype=torch.float32, device=_CPU).view(torch.int32).bitwise_and(0x7FFFFF).tolist())


@lru_cache(maxsize=2)
def encode_factors(stochastic: bool) -> Tensor:
    """By what transforms (which are 8 times too large) are multiplied: float32 [4], by s mod 4."""
    return torch.tensor(
        [(1 if stochastic else FINE) / 8 * quarter for quarter in quarters(-1)], dtype=torch.float32, device=_CPU
    )


@lru_cache(maxsize=2)
def decode_units(stochastic: bool) -> Tensor:
    """What the transformed values of a group count in, less a power of two: float32 [9, 4], by width and s mod 4."""
    per_width = [1.0] + [1.0 / ((1 << w) - 1) / 8 if stochastic else 1.0 / (8 * FINE) for w in range(1, WIDEST + 1)]
    return torch.tensor([[unit * quarter for quarter in quarters(1)] for unit in per_width], dtype=torch.float32, device=_CPU)


def steps_of(stochastic: bool) -> tuple[int, ...]:
    return UNIFORM_STEPS if stochastic else STEPS


def least_width(planes: int, groups: int, stochastic: bool) -> int:
    """Bits that every group has that is not zero: one where there are two planes for each on average, two where there are more.

    Least squared error would give groups of small energy none. But an optimizer such as AdamW does not look at the size of
    gradients: with none a small GPT trained worse, with two at 4.4 bits as in float32 (docs/LOG.md). (`UNIFORM_STEPS` has it.)
    """
    return 0 if stochastic or not groups else min(MOST_FOR_ALL, max(0, planes // groups - 1))
