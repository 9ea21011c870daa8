"""The adaptive parts of some messages (adaptive.py): all of them that are in one shard share one region of bytes."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.tensor.lists.parts import PartsFunction
from lowp.wire import adaptive
from lowp.wire.adaptive import AdaptiveLayout
from lowp.wire.codec_group import CodecGroup, Noises, Segment
from lowp.wire.workspace import NewMemory


class Region(NamedTuple):
    """One shard's message: where it begins, its layout, its parts."""

    begin: int
    layout: AdaptiveLayout
    segments: list[Segment]

    @property
    def end(self) -> int:
        return self.begin + self.layout.length


@dataclass(eq=False)
class AdaptiveGroup(CodecGroup):
    """The parts of one adaptive codec: a region for each shard."""

    regions: list[Region] = field(default_factory=list)

    def place(self, segments: list[Segment], begin: int) -> int:
        """Lay out one shard's parts from a byte on. Where does the region end?"""
        sizes = [segment.part.size for segment in segments]
        layout = self.codec.adaptive_layout(sizes, [segment.part.layer_size for segment in segments])
        end = begin + layout.length
        placed = [segment._replace(begin=begin, end=end) for segment in segments]
        self.regions.append(Region(begin, layout, placed))
        self.segments += placed
        return end

    def function(self, kind: str, *arguments: Any) -> PartsFunction | None:
        return None

    @cached_property
    def header_spans(self) -> list[tuple[int, int]]:
        """The byte of each part."""
        return [(region.begin + number, 1) for region in self.regions for number in range(len(region.segments))]

    def encode(self, numbers: Tensor, out: Tensor, factors: Tensor | None, noises: Noises | None, workspace: NewMemory) -> None:
        """Write the messages of `numbers`, each times the factor of its layer, to `out`."""
        for region in self.regions:
            parts = [numbers[s.start : s.start + s.part.size].to(torch.float32) for s in region.segments]
            if factors is not None:
                layers = (segment.part.layer for segment in region.segments)
                parts = [part * factors.view(-1)[layer] for part, layer in zip(parts, layers, strict=True)]
            own = None
            if self.codec.stochastic and noises is not None:
                own = [noises(segment.part) for segment in region.segments]
            adaptive.encode(parts, region.layout, out[region.begin : region.end], own)

    def decode(
        self,
        source: Tensor,
        out: Tensor,
        factors: Tensor | None,
        divisor: int,
        messages: int,
        stride: int,
        workspace: NewMemory,
    ) -> None:
        """Write to `out` the sums of what `messages` buffers say, times the factor of their layer, divided."""
        for region in self.regions:
            sums = self._read(source, region, out.device)
            for message in range(1, messages):
                for total, more in zip(sums, self._read(source[message * stride :], region, out.device), strict=True):
                    total.add_(more)
            for total, segment in zip(sums, region.segments, strict=True):
                if factors is not None:
                    total.mul_(factors.view(-1)[segment.part.layer])
                out[segment.start : segment.start + segment.part.size] = total if divisor == 1 else total.div_(divisor)

    def _read(self, source: Tensor, region: Region, device: torch.device) -> list[Tensor]:
        found = [torch.empty(segment.part.size, device=device) for segment in region.segments]
        adaptive.decode(source[region.begin : region.end], region.layout, found)
        return found
