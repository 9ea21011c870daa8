"""The messages of some shards in one buffer: where every part lies, and encoding and decoding all of them at once.

What is worked out here (offsets, tables on the device) depends on sizes and codecs alone. It is made once for each kind of
message of a bucket and kept (`Rules.messages`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.lists.parts import PartsFunction, PartsKernel, PartTable
from lowp.tensor.noise import Domain, Noise, key_columns, words_of
from lowp.wire.codec import Codec, PartLayout
from lowp.wire.part_kernels import decode_function, encode_function, fold_function, measure, peaks_function, round_function
from lowp.wire.plan import Part, Shard

Noises = Callable[[Part], Noise]
_FUNCTIONS: dict[str, Callable[..., PartsFunction | None]] = {
    "encode": encode_function,
    "decode": decode_function,
    "round": round_function,
    "peaks": peaks_function,
    "fold": fold_function,
}


class Segment(NamedTuple):
    """A part: where its numbers lie, and where its bytes in the buffer."""

    index: int  # of the part among those of all shards here
    part: Part
    start: int  # of its numbers
    begin: int  # bytes
    end: int


@dataclass(eq=False)
class CodecGroup:
    """The segments of one codec."""

    codec: Codec
    segments: list[Segment] = field(default_factory=list)

    def table(self, device: torch.device) -> PartTable:
        if device not in self._tables:
            self._tables[device] = PartTable([self._row(segment) for segment in self.segments], device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, PartTable]:
        return {}

    def _row(self, segment: Segment) -> tuple[int, ...]:
        layout, size = PartLayout.of(self.codec, segment.part.size), segment.part.size
        places = (layout.payload, layout.high, layout.scales, layout.tensor_scale, layout.header)
        return (size, segment.part.layer, segment.start, *(segment.begin + place for place in places))

    @cached_property
    def _kept(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _constant(self, name: str, values: Iterable[int], device: torch.device) -> Tensor:
        if (name, device) not in self._kept:
            self._kept[name, device] = torch.tensor(list(values), dtype=torch.int64).to(device)
        return self._kept[name, device]

    def indices(self, device: torch.device) -> Tensor:
        """Of the segments' parts among all."""
        return self._constant("indices", (segment.index for segment in self.segments), device)

    def header_bytes(self, source: Tensor, messages: int, stride: int, length: int) -> Tensor:
        """The largest header byte of each part in any of the messages, uint8."""
        device, blocks = source.device, self.codec.scale.kind == "block"
        if blocks and (kernel := self.kernel(self.function("peaks"), device)) is not None:
            maxima = torch.zeros(messages, len(self.segments), dtype=torch.int32, device=device)
            for message in range(messages):
                kernel(source[message * stride :], None, self.table(device), maxima=maxima[message])
            return maxima.amax(0).to(torch.uint8)
        every = source[None, :] if messages == 1 else source.as_strided((messages, length), (stride, 1))
        if not blocks:
            found = every[:, self.header_places(device)]
            return found[0] if messages == 1 else found.amax(0)
        spans = self._header_spans
        return torch.stack([every[:, first : first + count].amax() for first, count in spans])

    def header_places(self, device: torch.device) -> Tensor:
        """Where the first header byte of each part lies."""
        return self._constant("headers", (first for first, _ in self._header_spans), device)

    @cached_property
    def _header_spans(self) -> list[tuple[int, int]]:
        codec = self.codec
        return [(s.begin + PartLayout.of(codec, s.part.size).header, codec.header_bytes(s.part.size)) for s in self.segments]

    def function(self, kind: str, *arguments: Any) -> PartsFunction | None:
        """Found again without a look at all of a codec."""
        if (kind, arguments) not in self._functions:
            self._functions[kind, arguments] = _FUNCTIONS[kind](self.codec, *arguments)
        return self._functions[kind, arguments]

    @cached_property
    def _functions(self) -> dict[Any, PartsFunction | None]:
        return {}

    def kernel(self, function: PartsFunction | None, device: torch.device) -> PartsKernel | None:
        return None if function is None or device.type == "meta" else function.kernel(self.table(device))

    def measure(self, numbers: Tensor, kinds: tuple[bool, bool]) -> Tensor | None:
        """The largest magnitudes of the parts, and (or) the largest finite ones; None if nothing is asked for."""
        return measure(numbers, self.table(numbers.device), kinds) if any(kinds) else None

    def keys(self, noises: Noises, device: torch.device) -> Tensor:
        """The keys of the parts' noise, int32 [KEY_SIZE, parts]."""
        found = [noises(segment.part) for segment in self.segments]
        streams, offsets = (torch.tensor([_signed(value) for value in values], dtype=torch.int64)
                            for values in ([n.stream for n in found], [n.offset for n in found]))  # fmt: skip
        first = found[0]
        domain: Domain = first.domain
        columns = key_columns(domain, words_of(first.seed), words_of(first.step), streams, offsets)
        return torch.stack(columns).to(device, non_blocking=True)


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


class Messages:
    """`codec_of` gives a part's codec. Numbers of shard i begin at `starts[i]`, its message at `begins[i]` of the buffer.

    Without `begins`, messages follow each other; without `starts`, shards do.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        codec_of: Callable[[Part], Codec],
        starts: Sequence[int] | None = None,
        begins: Sequence[int] | None = None,
    ) -> None:
        self.shards = tuple(shards)
        self.parts = sum(len(shard.parts) for shard in self.shards)
        self.layers = 1 + max((part.layer for shard in self.shards for part in shard.parts), default=0)
        self.spans: list[tuple[int, int]] = []
        self._groups: dict[Codec, CodecGroup] = {}
        self._ones: dict[torch.device, Tensor] = {}
        self._zeros: dict[torch.device, Tensor] = {}
        index = start = begin = 0
        for number, shard in enumerate(self.shards):
            start = start if starts is None else starts[number]
            begin = begin if begins is None else begins[number]
            end = self._place(shard, codec_of, index, start, begin)
            self.spans.append((begin, end))
            index, start, begin = index + len(shard.parts), start + shard.size, end
        self.groups = list(self._groups.values())
        self.sends_peaks = any(codec.sends_peaks for codec in self._groups)
        self.length = max((end for _, end in self.spans), default=0)
        self.elements = sum(shard.size for shard in self.shards)

    def _place(self, shard: Shard, codec_of: Callable[[Part], Codec], index: int, start: int, begin: int) -> int:
        """One shard's parts, one after the other. Where does its message end?"""
        for number, part in enumerate(shard.parts):
            codec = codec_of(part)
            end = begin + codec.wire_bytes(part.size)
            segment = Segment(index + number, part, start + part.offset, begin, end)
            self._groups.setdefault(codec, CodecGroup(codec)).segments.append(segment)
            begin = end
        return begin

    def view(self, buffer: Tensor, number: int) -> Tensor:
        """One shard's message."""
        begin, end = self.spans[number]
        return buffer[begin:end]

    def _of_layers(self, factors: Tensor | None, device: torch.device) -> Tensor:
        if factors is not None:
            return factors.view(-1, factors.shape[-1])
        if device not in self._ones:
            self._ones[device] = torch.ones(1, self.layers, device=device)
        return self._ones[device]

    def measure(self, numbers: Tensor, wanted: "Callable[[Codec], tuple[bool, bool]]") -> "list[Tensor | None]":
        """For each group, the largest magnitudes of its parts that are wanted: bits of float32, int32 [wanted, parts]."""
        return [group.measure(numbers, wanted(group.codec)) for group in self.groups]

    def encode(
        self,
        numbers: Tensor,
        out: Tensor,
        factors: Tensor | None = None,
        peaks: Tensor | None = None,
        noises: Noises | None = None,
        maxima: "Sequence[Tensor | None] | None" = None,
    ) -> None:
        """Write the messages of `numbers`, each times the factor of its layer, to `out`.

        `peaks` are the header bytes (uint8, of all parts) of codecs that do not compute their own. `maxima` is what `measure`
        would find for `codec.measures`.
        """
        device = numbers.device
        for place, group in enumerate(self.groups):
            codec = group.codec
            kernel = group.kernel(group.function("encode", numbers.dtype), device)
            if kernel is None:
                self._encode_plainly(group, numbers, out, factors, peaks, noises)
                continue
            measured = None
            if any(codec.measures):
                found = None if maxima is None else maxima[place]
                measured = group.measure(numbers, codec.measures) if found is None else found
            own = self._known(group, measured, peaks, noises, device)
            kernel(numbers, out, group.table(device), own, self._of_layers(factors, device))

    def _encode_plainly(
        self,
        group: CodecGroup,
        numbers: Tensor,
        out: Tensor,
        factors: Tensor | None,
        peaks: Tensor | None,
        noises: Noises | None,
    ) -> None:
        for index, part, start, begin, end in group.segments:
            own = numbers[start : start + part.size].to(torch.float32)
            if factors is not None:
                own = own * factors.view(-1)[part.layer]
            noise = noises(part) if group.codec.stochastic and noises is not None else None
            peak = peaks[index : index + 1] if peaks is not None and group.codec.sends_peaks else None
            group.codec.encode(own, out[begin:end], noise, peak)

    def decode(
        self,
        source: Tensor,
        out: Tensor,
        factors: Tensor | None = None,
        divisor: int = 1,
        messages: int = 1,
        stride: int = 0,
        wanted: "Callable[[Codec], tuple[bool, bool]] | None" = None,
    ) -> "list[Tensor | None]":
        """Write to `out` the sums of what `messages` buffers say, each `stride` bytes after the last, in their order.

        Sums are float32, then times the factor of their layer, then divided. Returns what `measure` would find in `out`.
        """
        device, found = out.device, []
        for group in self.groups:
            kinds = (False, False) if wanted is None else wanted(group.codec)
            function = group.function("decode", out.dtype, kinds, divisor != 1)
            kernel = group.kernel(function, device)
            if kernel is None:
                self._decode_plainly(group, source, out, factors, divisor, messages, stride)
                found.append(group.measure(out, kinds))
                continue
            maxima = torch.zeros(sum(kinds), len(group.segments), dtype=torch.int32, device=device) if any(kinds) else None
            found.append(maxima)
            of_layers = self._of_layers(factors, device)
            if divisor != 1:
                of_layers = torch.cat([of_layers, torch.full_like(of_layers, divisor)])
            kernel(source, out, group.table(device), None, of_layers, maxima, messages, stride)
        return found

    def _decode_plainly(
        self, group: CodecGroup, source: Tensor, out: Tensor, factors: Tensor | None, divisor: int, messages: int, stride: int
    ) -> None:
        for _, part, start, begin, end in group.segments:
            total = torch.empty(part.size, dtype=torch.float32, device=out.device)
            group.codec.decode(source[begin:end], total)
            for message in range(1, messages):
                more = torch.empty_like(total)
                group.codec.decode(source[message * stride + begin : message * stride + end], more)
                total.add_(more)
            if factors is not None:
                total.mul_(factors.view(-1)[part.layer])
            out[start : start + part.size] = total if divisor == 1 else total.div_(divisor)

    def fold(self, source: Tensor, out: Tensor, messages: int, stride: int, noises: Noises) -> bool:
        """Write to `out` the message of the sum of `messages` messages, without numbers in memory; False: nothing was done."""
        device = source.device
        found = [group.kernel(group.function("fold"), device) for group in self.groups]
        if not all(found):
            return False
        peaks = self.peaks(source, messages, stride) if self.sends_peaks else None
        for group, kernel in zip(self.groups, found, strict=True):
            known = self._known(group, None, peaks, noises, device)
            assert kernel is not None
            kernel(source, out, group.table(device), known, None, None, messages, stride)
        return True

    def _known(
        self, group: CodecGroup, measured: Tensor | None, peaks: Tensor | None, noises: Noises | None, device: torch.device
    ) -> Tensor | None:
        """The numbers of a group's parts that its encoder asks for."""
        known = [] if measured is None else [measured]
        if group.codec.sends_peaks:
            given = self.no_peaks(device) if peaks is None else peaks
            given = given if len(self.groups) == 1 else given[group.indices(device)]
            known.append(given.to(torch.int32).view(1, -1))
        if group.codec.stochastic:
            assert noises is not None
            known.append(group.keys(noises, device))
        return known[0] if len(known) == 1 else torch.cat(known) if known else None

    def units(
        self, source: Tensor, owners: Tensor, usual: Tensor, factors: Tensor | None, messages: int, stride: int
    ) -> Tensor | None:
        """`usual / factors` of each layer, NaN where a part of it was not finite, in one launch; None where there is none."""
        group = self.groups[0]
        one_byte = len(self.groups) == 1 and group.codec.scale.kind in ("local", "none", "aps_delayed")
        if source.device.type != "cuda" or not one_byte or kernels.kernel_info()["policy"] == "never":
            return None
        from lowp.tensor.lists.parts_triton import MOST_UNITS, units_of_layers

        if max(self.parts, usual.numel()) > MOST_UNITS:
            return None
        headers = group.header_places(source.device)
        return units_of_layers(source, headers, owners, usual, factors, messages, stride)

    def no_peaks(self, device: torch.device) -> Tensor:
        """Zeros for all parts, always the same memory: not to be written to."""
        if device not in self._zeros:
            self._zeros[device] = torch.zeros(self.parts, dtype=torch.uint8, device=device)
        return self._zeros[device]

    def peaks(self, source: Tensor, messages: int = 1, stride: int = 0) -> Tensor:
        """The largest header byte of each part (255: something is not finite) in any of the messages; uint8, of all parts."""
        if len(self.groups) == 1 and not self.groups[0].codec.scale.agreed:
            return self.groups[0].header_bytes(source, messages, stride, self.length)
        if all(group.codec.scale.agreed for group in self.groups):
            return self.no_peaks(source.device)
        found = torch.zeros(self.parts, dtype=torch.uint8, device=source.device)
        for group in self.groups:
            if group.codec.scale.agreed:
                continue
            bytes_here = group.header_bytes(source, messages, stride, self.length)
            found[group.indices(source.device)] = bytes_here
        return found

    def round_(self, numbers: Tensor, noises: Noises | None = None) -> Tensor:
        """What sending and receiving would make of float32 numbers, in place, for elementwise codecs."""
        device = numbers.device
        for group in self.groups:
            kernel = group.kernel(group.function("round"), device)
            if kernel is None:
                for _, part, start, _, _ in group.segments:
                    own = numbers[start : start + part.size]
                    group.codec.round_(own, noises(part) if group.codec.stochastic and noises is not None else None)
                continue
            keys = group.keys(noises, device) if group.codec.stochastic and noises is not None else None
            kernel(numbers, numbers, group.table(device), keys)
        return numbers
