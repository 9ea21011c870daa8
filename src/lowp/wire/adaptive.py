"""`adaptive:<bits>`: a budget of bits for each number on average, spent where the gradient has its energy.

One message has the numbers of all adaptive parts of one shard. Its length follows from the sizes of layers and the budget
alone (`layer_budgets`). Within it, the sender decides, and the message describes itself: ranks agree on nothing, and nothing is
remembered from step to step. A message has

    part bytes    one a part: 0 = all zero, 255 = something is not finite, else 127 + P: scales of its groups are up to 2^P
    group bytes   one a group of 64 numbers of a part (the last group of a part is filled up with zeros): 0 = all zero, else
                  255 + s - 4 P, where 2^(s/4) is the group's scale
    padding       to a multiple of 8 bytes
    planes        8 bytes each: one bit of each of the 64 numbers of a group, the most significant bits first

A group is encoded in five steps.

1. Its numbers get fixed signs and go through a Hadamard transform of 64 points. Almost any numbers become normal ones by that.
2. Its scale is their root mean square, to a quarter of an octave.
3. Each number in units of the scale becomes a code of 8 bits: a sign, and a magnitude by a curve of 32 straight lines. The
   curve is near the error function that spaces levels best for normal numbers.
4. The group gets a width w of 0 to 8 bits (`widths`), and the upper w bits of its codes are sent: w planes.
5. The receiver takes the mean of a normal number within each interval, transforms back and multiplies by the scale.

**Widths** follow from the bytes before the planes, in integers, on both sides. The priority of a group is s - P - log2(size of
its layer) / 2, in quarters of an octave: three quarters of what its energy says (which alone would leave layers of small
gradients without bits), one quarter of what would treat all layers alike. A group has the k-th bit if its priority is `level +
STEPS[k]` or more, where the spacing of STEPS is what one more bit brings; every group that is not zero has the first bits in
any case (`least_width`). `level` is the least for which the planes suffice. Planes that are left go to the first groups that
the next level would give one more.

**rounding="stochastic"** is the unbiased mode: levels are uniform from minus to plus the largest magnitude of the transformed
group, its scale (rounded up), and each number goes to one of its two neighbours at random. A group that is not zero has at
least one bit.

Scales from 2^-126 to 2^126 are told apart; a group below that is zero. Sums are exact or in a defined order: the same bits in
plain operations (this file) and in kernels (adaptive_cpp.py), on every chip.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import CodebookFormat
from lowp.tensor.carrier import F32, power_of_two
from lowp.tensor.noise import Noise, blocks, draw, key_tensor
from lowp.wire.adaptive_tables import (
    BIAS,
    F32_MAX,
    FINE,
    FOR_ALL,
    GROUP,
    HIGHEST,
    LEAST_BITS,
    LEAST_UNBIASED,
    LEVELS,
    LOWEST,
    MOST_BITS,
    NEAREST,
    NONFINITE,
    PLANE,
    SIGNS,
    WIDEST,
    ZERO,
    decode_units,
    encode_factors,
    least_width,
    magnitudes_of,
    quarters,
    steps_of,
    values,
)

_SIZES_COUNT = 0.75


@dataclass(frozen=True)
class Adaptive(CodebookFormat):
    """The format: codes of 8 bits in units of a group's scale, of which `budget` bits for each number are sent on average."""

    budget: float


@lru_cache(maxsize=256)
def parse_adaptive(text: str) -> Adaptive:
    """`adaptive:4`, `adaptive:2.5`."""
    if not re.fullmatch(r"adaptive:(\d+(\.\d*)?|\.\d+)", text):
        raise ValueError(f"adaptive is written adaptive:<bits for each number>, say adaptive:4 or adaptive:2.5, not {text!r}")
    bits = float(text.removeprefix("adaptive:"))
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"adaptive has {LEAST_BITS:g} to {MOST_BITS:g} bits for each number, not {bits:g}")
    return Adaptive(f"adaptive:{bits:g}", tuple((values(False)[WIDEST] / FINE).tolist()), bits)


@dataclass(frozen=True)
class AdaptiveLayout:
    """Where everything lies in the message of some parts. `counts`: groups of each; `sizes`: log2 of its layer's size / 2."""

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: float  # of the whole message, over 64
    stochastic: bool

    @staticmethod
    def of(parts: Sequence[int], layers: Sequence[int], budgets: Sequence[float], stochastic: bool) -> "AdaptiveLayout":
        """`parts`: numbers of each part; `layers`: numbers of the layer of each; `budgets`: bits for each of its numbers."""
        counts = tuple(-(-size // GROUP) for size in parts)
        bits = sum(count * budget for count, budget in zip(counts, budgets, strict=True))
        return AdaptiveLayout(counts, tuple(size.bit_length() // 2 for size in layers), bits, stochastic)

    @property
    def groups(self) -> int:
        return sum(self.counts)

    @property
    def payload(self) -> int:
        """Where the planes begin."""
        return -(-(len(self.counts) + self.groups) // PLANE) * PLANE

    @property
    def planes(self) -> int:
        """How many there are: what the budget leaves. A single group has at least one."""
        left = math.floor(self.bits) - self.payload // PLANE
        return max(left, self.groups if self.stochastic else min(1, self.groups))

    @property
    def length(self) -> int:
        return self.payload + PLANE * self.planes

    def owners(self, device: torch.device) -> Tensor:
        """The part of each group."""
        counts = torch.tensor(self.counts, device=device)
        return torch.repeat_interleave(torch.arange(len(self.counts), device=device), counts)


def layer_budgets(sizes: Sequence[int], bits: float) -> list[float]:
    """Bits for each number of layers of these sizes, `bits` on average: what their messages will have between them.

    Before a gradient is seen, its layers are expected to have the same energy, as they nearly have in a ResNet: a layer 4
    times as large has numbers half as large, which need one bit less. `_SIZES_COUNT` of that difference is applied. It
    matters where layers are in different messages; within one, bits go where the energy is.
    """
    most, least = MOST_BITS, max(bits / 2, min(bits, LEAST_UNBIASED))
    less = [_SIZES_COUNT / 2 * math.log2(max(size, GROUP)) for size in sizes]

    def budgets(level: float) -> list[float]:
        return [math.floor(256 * min(most, max(least, level - own))) / 256 for own in less]

    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        spent = sum(size * budget for size, budget in zip(sizes, budgets(middle), strict=True))
        low, high = (middle, high) if spent <= bits * sum(sizes) else (low, middle)
    return budgets(low)


# A group's transform and scale.


def transformed(x: Tensor) -> Tensor:
    """The Hadamard transform of [groups, 64], not divided by anything: pairs at a distance of 32, 16, ... 1."""
    distance = GROUP // 2
    while distance:
        pairs = x.view(-1, GROUP // 2 // distance, 2, distance)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, GROUP)
        distance //= 2
    return x


def signs(device: torch.device) -> Tensor:
    return torch.tensor([-1.0 if SIGNS >> i & 1 else 1.0 for i in range(GROUP)], dtype=torch.float32, device=device)


def _energy(x: Tensor) -> Tensor:
    """The sum of 64 squares: those at a distance of 32, 16, ... 1."""
    squares = x * x
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]


def _mantissa_above(bits: Tensor, bounds: Sequence[float]) -> Tensor:
    """How many of these numbers from 1 to 2 the mantissa is above."""
    mantissa = (bits & ((1 << F32.fraction_bits) - 1)) | F32.power_of_two(0)
    return torch.stack([mantissa.view(torch.float32) > bound for bound in bounds]).sum(0, dtype=torch.int32)


def scales(x: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Of groups [groups, 64] of float32 numbers: s (see above), which means nothing for zeros; and the largest magnitudes as
    bits. Both int32.

    First the largest magnitude is brought to between 1 and 4, so that no square overflows.
    """
    largest = (x.view(torch.int32) & F32.magnitude).amax(1)
    shift = ((largest >> F32.fraction_bits) - F32.bias).clamp(LOWEST, HIGHEST)
    x = x * power_of_two(-shift)[:, None]
    if stochastic:  # rounded up
        bits = transformed(x * signs(x.device)).abs().amax(1).view(torch.int32)
        quarter = 4 * ((bits >> F32.fraction_bits) - F32.bias) + _mantissa_above(bits, quarters(1)) - 12
    else:
        bits = _energy(x).view(torch.int32)
        quarter = 2 * ((bits >> F32.fraction_bits) - F32.bias) + _mantissa_above(bits, NEAREST) - 12
    return (4 * shift + quarter).clamp(max=4 * HIGHEST), largest


def headers(scale: Tensor, largest: Tensor, owners: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Part bytes and group bytes, int32."""
    there = (largest != 0) & (scale >= 4 * LOWEST)
    least = torch.full((parts,), 4 * LOWEST, dtype=torch.int32, device=scale.device)
    top = least.scatter_reduce(0, owners, torch.where(there, scale, 4 * LOWEST), "amax") + 3 >> 2
    kinds = torch.where(largest >= F32.infinity, 2, there.to(torch.int32)).to(torch.int32)
    kind = torch.zeros_like(least).scatter_reduce(0, owners, kinds, "amax")
    part_bytes = torch.where(kind == 0, ZERO, torch.where(kind == 2, NONFINITE, top + BIAS))
    found = (255 + scale - 4 * top[owners]).clamp(min=0)
    return part_bytes, torch.where(there & (kind[owners] == 1), found, ZERO)


def _scales_said(part_bytes: Tensor, group_bytes: Tensor, owners: Tensor) -> Tensor:
    """s of each group as its bytes say it; 0 for those that are zero."""
    return torch.where(group_bytes > ZERO, group_bytes - 255 + 4 * (part_bytes[owners] - BIAS), 0)


def widths(part_bytes: Tensor, group_bytes: Tensor, owners: Tensor, layout: AdaptiveLayout) -> Tensor:
    """How many bits each group has: int64. (A part that is zero or not finite has groups of byte 0.)"""
    device = group_bytes.device
    sizes = torch.tensor(layout.sizes, device=device)
    priority = group_bytes.to(torch.int64) - 255 + (3 * (part_bytes.to(torch.int64) - BIAS) - sizes)[owners]
    there = group_bytes != ZERO
    least = least_width(layout.planes, layout.groups, layout.stochastic)
    steps = (*(FOR_ALL for _ in range(least)), *steps_of(layout.stochastic)[least:])
    counts = torch.bincount(priority[there] + LEVELS, minlength=2 * LEVELS)
    at_least = torch.nn.functional.pad(counts.flip(0).cumsum(0).flip(0), (0, 1))  # how many groups have this priority or more

    def planes(level: int) -> int:
        return sum(int(at_least[min(max(level + step + LEVELS, 0), 2 * LEVELS)]) for step in steps)

    low, high = -LEVELS, LEVELS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if planes(middle) <= layout.planes else (middle + 1, high)

    def at(level: int) -> Tensor:
        found = torch.stack([priority >= level + step for step in steps]).sum(0)
        return torch.where(there, found, 0)

    width, left = at(low), layout.planes - planes(low)
    more = at(low - 1) > width
    return width + (more & (more.cumsum(0) <= left))


# Messages.


def encode(parts: Sequence[Tensor], layout: AdaptiveLayout, out: Tensor, noises: "Sequence[Noise] | None" = None) -> None:
    """Write flat float32 `parts` to the bytes of their message."""
    if not layout.groups:
        return
    device = out.device
    owners = layout.owners(device)
    x = torch.cat([torch.nn.functional.pad(part, (0, -part.numel() % GROUP)) for part in parts]).view(-1, GROUP)
    part_bytes, group_bytes = headers(*scales(x, layout.stochastic), owners, len(parts))
    width = widths(part_bytes, group_bytes, owners, layout)
    scale = _scales_said(part_bytes, group_bytes, owners)
    x = torch.where(group_bytes[:, None] > ZERO, x * power_of_two(-(scale >> 2))[:, None], 0.0)
    factor = encode_factors(layout.stochastic).to(device)[(scale & 3).to(torch.int64)]
    scaled = transformed(x * signs(device)) * factor[:, None]
    if layout.stochastic:
        assert noises is not None
        codes = _stochastic(scaled, width, _drawn(noises, layout, device))
    else:
        codes = magnitudes_of(scaled.abs().clamp(max=8.0 * FINE - 1).to(torch.int32)) | torch.where(scaled < 0, 128, 0)
    out[: len(parts)] = part_bytes.to(torch.uint8)
    out[len(parts) : len(parts) + layout.groups] = group_bytes.to(torch.uint8)
    out[len(parts) + layout.groups :] = 0
    planes = out[layout.payload :].view(-1, PLANE)
    first = width.cumsum(0) - width
    places = torch.arange(8, device=device, dtype=torch.int32)
    for plane in range(WIDEST):
        has = width > plane
        bits = (codes[has] >> (7 - plane) & 1).view(-1, PLANE, 8)
        planes[first[has] + plane] = (bits << places).sum(2).to(torch.uint8)


def _stochastic(scaled: Tensor, width: Tensor, noise: Tensor) -> Tensor:
    """Numbers from -1 to 1 as codes of `width` bits, at the upper end of 8. `noise`: 24 bits."""
    most = ((1 << width) - 1).to(torch.float32)[:, None]
    place = (scaled + 1.0) * (most * 0.5)
    place = torch.minimum(place.nan_to_num(0.0).clamp(min=0.0), most)
    below = place.floor()
    code = below + (noise.to(torch.float32) * 2.0**-24 < place - below)
    return code.to(torch.int32) << (WIDEST - width).to(torch.int32)[:, None]


def _drawn(noises: Sequence[Noise], layout: AdaptiveLayout, device: torch.device) -> Tensor:
    """24 bits for each number of each group, int32 [groups, 64]."""
    found = []
    for noise, groups in zip(noises, layout.counts, strict=True):
        for first, end in blocks(noise, groups * GROUP):
            like = torch.empty(end - first, dtype=torch.float32, device=device)
            found.append(draw(key_tensor(noise, first, device), like, 30) >> 6)
    return torch.cat(found).view(-1, GROUP)


def decode(message: Tensor, layout: AdaptiveLayout, outs: Sequence[Tensor]) -> None:
    """Read a message into flat float32 `outs`, one for each part."""
    if not layout.groups:
        return
    device, parts = message.device, len(outs)
    owners = layout.owners(device)
    part_bytes = message[:parts].to(torch.int32)
    group_bytes = message[parts : parts + layout.groups].to(torch.int32)
    width = widths(part_bytes, group_bytes, owners, layout)
    planes = message[layout.payload :].view(-1, PLANE).to(torch.int32)
    first = width.cumsum(0) - width
    places = torch.arange(8, device=device, dtype=torch.int32)
    codes = torch.zeros(layout.groups, GROUP, dtype=torch.int32, device=device)
    for plane in range(WIDEST):
        has = width > plane
        bits = (planes[first[has] + plane][:, :, None] >> places & 1).view(-1, GROUP)
        codes[has] = codes[has] << 1 | bits
    value = values(layout.stochastic).to(device)[width[:, None], codes.to(torch.int64)].to(torch.int32)
    back = transformed(value) * signs(device).to(torch.int32)  # exact in any order
    scale = _scales_said(part_bytes, group_bytes, owners)
    unit = decode_units(layout.stochastic).to(device)[width, (scale & 3).to(torch.int64)]
    x = back.to(torch.float32) * unit[:, None] * power_of_two(scale >> 2)[:, None]
    x = torch.where((part_bytes == NONFINITE)[owners][:, None], math.nan, x.clamp(-F32_MAX, F32_MAX))
    for own, out in zip(x.split(layout.counts), outs, strict=True):
        out.copy_(own.reshape(-1)[: out.numel()])
