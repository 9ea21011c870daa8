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
from lowp.wire.adaptive_tables import ITEM, LEVELS
from lowp.wire.codec_group import CodecGroup, Noises, Segment
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

    parts: int64 [parts, 6]: numbers, layer, the first number, region, first group, half of the log2 of the layer's size.
    regions: int64 [regions, 7]: first byte, parts, groups, planes, where planes begin, first part, first group.
    items: int32 [items, 2]: stretches of `ITEM` groups: part, first group within it.
    owners: int32 [groups]: the part of each group.
    """

    parts: Tensor
    regions: Tensor
    items: Tensor
    owners: Tensor

    @property
    def groups(self) -> int:
        return len(self.owners)

    def room(self, messages: int) -> int:
        """For a number of each group, and (of Triton's kernels) a histogram of each region."""
        on_gpu = self.owners.device.type == "cuda"
        return messages * (self.groups + (2 * LEVELS * len(self.regions) if on_gpu else 0))


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
            parts, regions, items, owners = [], [], [], []
            for number, region in enumerate(self.regions):
                layout = region.layout
                places = (layout.planes, layout.payload, len(parts), len(owners))
                regions.append((region.begin, len(region.segments), layout.groups, *places))
                for segment, count, size in zip(region.segments, layout.counts, layout.sizes, strict=True):
                    items += [(len(parts), first) for first in range(0, count, ITEM)]
                    parts.append((segment.part.size, segment.part.layer, segment.start, number, len(owners), size))
                    owners += [len(parts) - 1] * count
            self._adaptive_tables[device] = AdaptiveTable(
                torch.tensor(parts, dtype=torch.int64).to(device),
                torch.tensor(regions, dtype=torch.int64).to(device),
                torch.tensor(items, dtype=torch.int32).reshape(-1, 2).to(device),
                torch.tensor(owners, dtype=torch.int32).to(device),
            )
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
        table, keys = self.adaptive_table(device), None
        scratch = workspace.zeros((table.room(1) + len(table.parts),), device)
        if self.codec.stochastic:
            assert noises is not None
            keys = workspace.empty((KEY_SIZE, len(self.segments)), torch.int32, device)
            self.write_keys(noises, keys)
        kernel(numbers, out, table, scratch, factors, keys)

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
            table = self.adaptive_table(device)
            scratch = workspace.empty((table.room(messages),), torch.int32, device)
            kernel(source, out, table, scratch, factors, divisor, messages, stride)
            return
        for region in self.regions:
            sums = self._read(source, region, device)
            for message in range(1, messages):
                for total, more in zip(sums, self._read(source[message * stride :], region, device), strict=True):
                    total.add_(more)
            for total, segment in zip(sums, region.segments, strict=True):
                total.mul_(factors.view(-1)[segment.part.layer])
                out[segment.start : segment.start + segment.part.size] = total if divisor == 1 else total.div_(divisor)

    def _read(self, source: Tensor, region: AdaptiveRegion, device: torch.device) -> list[Tensor]:
        found = [torch.empty(segment.part.size, device=device) for segment in region.segments]
        adaptive.decode(source[region.begin : region.end], region.layout, found)
        return found
