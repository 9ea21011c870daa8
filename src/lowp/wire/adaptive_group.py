"""The adaptive parts of some messages (adaptive.py): all of them that are in one shard share one region of bytes."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.lists.parts import PartsFunction
from lowp.tensor.noise import KEY_SIZE
from lowp.wire import adaptive
from lowp.wire.adaptive import AdaptiveLayout
from lowp.wire.adaptive_tables import BLOCK, GROUP, ITEM
from lowp.wire.codec_group import CodecGroup, Noises, Segment
from lowp.wire.scaling import divide_
from lowp.wire.workspace import NewMemory


class AdaptiveRegion(NamedTuple):
    """One shard's message: where it begins, its layout, its parts."""

    begin: int
    layout: AdaptiveLayout
    segments: list[Segment]

    @property
    def end(self) -> int:
        return self.begin + self.layout.length


class AdaptiveTable(NamedTuple):
    """Where everything lies, for kernels.

    groups: how many there are.
    parts: int64 [parts, 6]: numbers, layer, the first number, region, first group, half of the log2 of the layer's size.
    regions: int64 [regions, 7]: first byte, parts, groups, planes, where planes begin, first part, first group.
    items: int32 [items, 2]: stretches of `ITEM` groups: part, first group within it.

    Kernels on a GPU have all that a program must know in one row. Places of bytes are counted from the beginning of `out`.

    rows: int64 [items, 10], of items: the first number, how many there are, layer, part, first group; where the part's byte,
        the first group's byte and the region's planes are; 256 region + half of the log2 of the layer's size; the first number
        within the part.
    stretches: the same of stretches of `BLOCK` groups of a part.
    blocks: int64 [blocks, 8], of stretches of `BLOCK` groups of a region: first group, groups from there on, region; the
        region's first block, its blocks; where the bytes of its groups end, where its planes begin, planes.
    """

    groups: int
    parts: Tensor
    regions: Tensor
    items: Tensor
    rows: Tensor
    stretches: Tensor
    blocks: Tensor

    def to(self, device: torch.device) -> "AdaptiveTable":
        groups, *tensors = self
        return AdaptiveTable(groups, *(tensor.to(device) for tensor in tensors))


def _rows(parts: Tensor, regions: Tensor, items: Tensor, length: int) -> Tensor:
    """`AdaptiveTable.rows` of items of `length` groups."""
    part, first = items.to(torch.int64).unbind(1)
    count, layer, start, region, group, size = parts[part].unbind(1)
    begin, before, _, _, payload, first_part, first_group = regions[region].unbind(1)
    left = (count - GROUP * first).clamp(max=GROUP * length)
    places = begin + part - first_part, begin + before + group + first - first_group, begin + payload
    columns = (start + GROUP * first, left, layer, part, group + first, *places, region << 8 | size, GROUP * first)
    return torch.stack(columns, 1)


def _blocks(regions: Tensor) -> Tensor:
    """`AdaptiveTable.blocks`."""
    begin, before, groups, planes, payload, _, first_group = regions.unbind(1)
    count = -(-groups // BLOCK)
    region, first_block = torch.repeat_interleave(torch.arange(len(regions)), count), count.cumsum(0) - count
    of_regions = torch.stack([first_block, count, begin + before + groups, begin + payload, planes], 1)
    first = BLOCK * (torch.arange(len(region)) - first_block[region])
    return torch.cat([torch.stack([first_group[region] + first, groups[region] - first, region], 1), of_regions[region]], 1)


class AdaptiveFunction(NamedTuple):
    """A kernel to be built: "encode" from numbers of a dtype, or "decode" to them."""

    kind: str
    dtype: torch.dtype
    stochastic: bool

    def build(self, device: torch.device) -> Any:
        if device.type == "cpu":
            from lowp.wire.adaptive_cpp import CppDecoder, CppEncoder

            return (CppEncoder if self.kind == "encode" else CppDecoder)(self.dtype, self.stochastic)
        from lowp.wire.adaptive_triton import TritonDecoder, TritonEncoder

        return (TritonEncoder if self.kind == "encode" else TritonDecoder)(self.dtype, self.stochastic, device)


@dataclass(eq=False)
class AdaptiveGroup(CodecGroup):
    """The parts of one adaptive codec: a region for each shard."""

    regions: list[AdaptiveRegion] = field(default_factory=list)

    def place(self, segments: list[Segment], begin: int) -> int:
        """Lay out one shard's parts from a byte on. Where does the region end?"""
        parts = [segment.part for segment in segments]
        layout = AdaptiveLayout.of(
            [part.size for part in parts],
            [part.layer_size for part in parts],
            [part.budget or self.codec.bits for part in parts],
            self.codec.stochastic,
        )
        end = begin + layout.length
        placed = [segment._replace(begin=begin, end=end) for segment in segments]
        self.regions.append(AdaptiveRegion(begin, layout, placed))
        self.segments += placed
        return end

    def function(self, kind: str, *arguments: Any) -> PartsFunction | None:
        return None

    @cached_property
    def header_spans(self) -> list[tuple[int, int]]:
        """The byte of each part."""
        return [(region.begin + number, 1) for region in self.regions for number in range(len(region.segments))]

    def adaptive_table(self, device: torch.device) -> AdaptiveTable:
        if device not in self._adaptive_tables:
            parts, regions, items, stretches, groups = [], [], [], [], 0
            for number, region in enumerate(self.regions):
                layout = region.layout
                places = (layout.planes, layout.payload, len(parts), groups)
                regions.append((region.begin, len(region.segments), layout.groups, *places))
                for segment, count, size in zip(region.segments, layout.counts, layout.sizes, strict=True):
                    items += [(len(parts), first) for first in range(0, count, ITEM)]
                    stretches += [(len(parts), first) for first in range(0, count, BLOCK)]
                    parts.append((segment.part.size, segment.part.layer, segment.start, number, groups, size))
                    groups += count
            of_parts = torch.tensor(parts, dtype=torch.int64).reshape(-1, 6)
            of_regions = torch.tensor(regions, dtype=torch.int64).reshape(-1, 7)
            of_items, of_stretches = (torch.tensor(each, dtype=torch.int32).reshape(-1, 2) for each in (items, stretches))
            rows = _rows(of_parts, of_regions, of_items, ITEM)
            longer = _rows(of_parts, of_regions, of_stretches, BLOCK)
            table = AdaptiveTable(groups, of_parts, of_regions, of_items, rows, longer, _blocks(of_regions))
            self._adaptive_tables[device] = table.to(device)
        return self._adaptive_tables[device]

    @cached_property
    def _adaptive_tables(self) -> dict[torch.device, AdaptiveTable]:
        return {}

    def _kernel(self, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
        if device.type == "meta":
            return None
        function = AdaptiveFunction(kind, dtype, self.codec.stochastic)
        return kernels.get_or_build(function, device, self._elements, lambda what, device: what.build(device))

    @cached_property
    def _elements(self) -> int:
        return sum(segment.part.size for segment in self.segments)

    def encode(self, numbers: Tensor, out: Tensor, factors: Tensor, noises: Noises | None, workspace: NewMemory) -> None:
        """Write the messages of `numbers`, each times the factor of its layer, to `out`."""
        device = numbers.device
        kernel = self._kernel("encode", numbers.dtype, device)
        if kernel is None:
            self._encode_plainly(numbers, out, factors, noises)
            return
        keys = None
        if self.codec.stochastic:
            assert noises is not None
            keys = workspace.empty((KEY_SIZE, len(self.segments)), torch.int32, device)
            self.write_keys(noises, keys)
        kernel(numbers, out, self.adaptive_table(device), factors, keys, workspace)

    def _encode_plainly(self, numbers: Tensor, out: Tensor, factors: Tensor, noises: Noises | None) -> None:
        for region in self.regions:
            parts = [
                numbers[s.start : s.start + s.part.size].to(torch.float32) * factors.view(-1)[s.part.layer]
                for s in region.segments
            ]
            own = None
            if self.codec.stochastic and noises is not None:
                own = [noises(segment.part) for segment in region.segments]
            adaptive.encode(parts, region.layout, out[region.begin : region.end], own)

    def decode(
        self,
        source: Tensor,
        out: Tensor,
        factors: Tensor,
        divisor: int,
        messages: int,
        stride: int,
        workspace: NewMemory,
    ) -> None:
        """Write to `out` the sums of what `messages` buffers say, times the factor of their layer, divided."""
        device = out.device
        kernel = self._kernel("decode", out.dtype, device)
        if kernel is not None:
            kernel(source, out, self.adaptive_table(device), factors, divisor, messages, stride, workspace)
            return
        for region in self.regions:
            sums = self._read(source, region, device)
            for message in range(1, messages):
                for total, more in zip(sums, self._read(source[message * stride :], region, device), strict=True):
                    total.add_(more)
            for total, segment in zip(sums, region.segments, strict=True):
                total.mul_(factors.view(-1)[segment.part.layer])
                out[segment.start : segment.start + segment.part.size] = divide_(total, divisor)

    def _read(self, source: Tensor, region: AdaptiveRegion, device: torch.device) -> list[Tensor]:
        found = [torch.empty(segment.part.size, dtype=torch.float32, device=device) for segment in region.segments]
        adaptive.decode(source[region.begin : region.end], region.layout, found)
        return found
