"""The messages of some shards in one buffer: where every part lies, and encoding and decoding all of them at once.

What is worked out here (offsets, tables on the device) depends on sizes and codecs alone. It is made once for each kind of
message of a bucket and kept (`Rules.messages`). Memory for what is found on the way comes from a workspace.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.noise import KEY_SIZE
from lowp.wire.adaptive_group import AdaptiveGroup
from lowp.wire.codec import Codec
from lowp.wire.codec_group import CodecGroup, Noises, Segment
from lowp.wire.plan import Part, Shard
from lowp.wire.scaling import divide_, poisoned, write_bounds
from lowp.wire.top_k_group import TopKGroup
from lowp.wire.workspace import NEW_MEMORY, NewMemory


class Messages:
    """`codec_of` gives a part's codec. Numbers of shard i begin at `starts[i]` (those of striped shards are at their places in
    the chunk), its message at `begins[i]` of the buffer.

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
        self._top_k_groups: dict[Codec, TopKGroup] = {}
        self._kept: dict[tuple[str, torch.device], Tensor] = {}
        index = start = begin = 0
        for number, shard in enumerate(self.shards):
            start = start if starts is None else starts[number]
            begin = begin if begins is None else begins[number]
            end = self._place(shard, codec_of, index, start, begin, starts is not None)
            self.spans.append((begin, end))
            index, start, begin = index + len(shard.parts), start + shard.size, end
        self.groups = list(self._groups.values())
        self.sends_peaks = any(codec.sends_peaks for codec in self._groups)
        self.length = max((end for _, end in self.spans), default=0)
        self.elements = sum(shard.size for shard in self.shards)

    def _place(
        self, shard: Shard, codec_of: Callable[[Part], Codec], index: int, start: int, begin: int, in_chunk: bool
    ) -> int:
        """One shard's parts, one after the other; at the end, all adaptive ones together. Where does its message end?"""
        together: dict[Codec, list[Segment]] = {}
        for number, part in enumerate(shard.parts):
            codec = codec_of(part)
            first = part.place if in_chunk and part.place is not None else start + part.offset
            if codec.adaptive:
                together.setdefault(codec, []).append(Segment(index + number, part, first, 0, 0))
                continue
            end = begin + codec.wire_bytes(part.size)
            segment = Segment(index + number, part, first, begin, end)
            self._groups.setdefault(codec, CodecGroup(codec)).segments.append(segment)
            begin = end
        for codec, segments in together.items():
            group = self._groups.setdefault(codec, AdaptiveGroup(codec))
            assert isinstance(group, AdaptiveGroup)
            begin = group.place(segments, begin)
        return begin

    def view(self, buffer: Tensor, number: int) -> Tensor:
        """One shard's message."""
        begin, end = self.spans[number]
        return buffer[begin:end]

    def _constant(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Numbers that are always the same, in the same memory: not to be written to."""
        if (name, device) not in self._kept:
            self._kept[name, device] = make().to(device)
        return self._kept[name, device]

    def _of_layers(self, factors: Tensor | None, device: torch.device) -> Tensor:
        if factors is not None:
            return factors
        return self._constant("ones", device, lambda: torch.ones(self.layers, dtype=torch.float32))

    def measure(self, numbers: Tensor, wanted: "Callable[[Codec], tuple[bool, bool]]") -> "list[Tensor | None]":
        """For each group, the largest magnitudes of its parts that are wanted: bits of float32, int32, the first rows."""
        found: list[Tensor | None] = []
        for group in self.groups:
            kinds = wanted(group.codec)
            found.append(self._room(group, kinds, numbers.device, NEW_MEMORY))
            if (out := found[-1]) is not None:
                group.measure(numbers, kinds, out)
        return found

    def _room(self, group: CodecGroup, kinds: tuple[bool, bool], device: torch.device, workspace: NewMemory) -> Tensor | None:
        return workspace.zeros((group.rows(kinds), len(group.segments)), device) if any(kinds) else None

    def encode(
        self,
        numbers: Tensor,
        out: Tensor,
        factors: Tensor | None = None,
        peaks: Tensor | None = None,
        noises: Noises | None = None,
        maxima: "Sequence[Tensor | None] | None" = None,
        workspace: NewMemory = NEW_MEMORY,
        peaks_of: int = 0,
    ) -> None:
        """Write the messages of `numbers`, each times the factor of its layer, to `out`.

        `peaks` are the header bytes (int32, of all parts) of codecs that do not compute their own; with `peaks_of`, a number of
        ranks, they are found here. `maxima` is what `measure` would find for `codec.measures`; the rows after them are written
        here.
        """
        device = numbers.device
        if peaks_of and self.sends_peaks and not self._find_peaks_together:
            peaks = self.own_peaks(numbers, peaks_of, workspace)
        for place, group in enumerate(self.groups):
            if group.codec.keep < 1:
                self._top_k(group).encode(numbers, out, factors, peaks, noises, workspace)
                continue
            if isinstance(group, AdaptiveGroup):
                group.encode(numbers, out, self._of_layers(factors, device), noises, workspace)
                continue
            finds = group.codec.sends_peaks and peaks is None and peaks_of > 0
            function = group.function("encode", numbers.dtype, not finds)
            kernel = group.kernel(function, device)
            if kernel is None:
                known_peaks = self.own_peaks(numbers, peaks_of) if finds else peaks
                self._encode_plainly(group, numbers, out, factors, known_peaks, noises)
                continue
            assert function is not None
            measured = None if maxima is None else maxima[place]
            known = self._known(group, function.numbers, measured, peaks, noises, device, workspace, not finds)
            if known is not None and measured is None:
                group.measure(numbers, group.codec.measures, known)
            found = workspace.zeros((len(group.segments),), device) if finds else None
            kernel(numbers, out, group.table(device), known, self._of_layers(factors, device), found)
            if found is not None:
                self._write_peaks(group, found, peaks_of, out)

    def _top_k(self, group: CodecGroup) -> TopKGroup:
        """The parts of a group with top-k."""
        if group.codec not in self._top_k_groups:
            self._top_k_groups[group.codec] = TopKGroup(group, Messages)
        return self._top_k_groups[group.codec]

    def _known(
        self,
        group: CodecGroup,
        rows: int,
        measured: Tensor | None,
        peaks: Tensor | None,
        noises: Noises | None,
        device: torch.device,
        workspace: NewMemory,
        with_peaks: bool = True,
    ) -> Tensor | None:
        """The numbers of a group's parts that its encoder asks for: int32 [rows, parts]; maxima are zero if none are given."""
        if not rows:
            return None
        row, sends_peaks = sum(group.codec.measures), group.codec.sends_peaks and with_peaks
        if sends_peaks:
            peaks = self.no_peaks(device) if peaks is None else peaks.to(torch.int32)
            peaks = peaks if len(self.groups) == 1 else peaks[group.indices(device)]
            if rows == 1:
                return peaks
        known = workspace.zeros((rows, len(group.segments)), device) if measured is None else measured
        if sends_peaks and peaks is not None:
            known[row] = peaks
        if group.codec.stochastic:
            assert noises is not None
            group.write_keys(noises, workspace.once(group, ("keys", rows), lambda: known[rows - KEY_SIZE :]))
        return known

    def own_peaks(self, numbers: Tensor, ranks: int, workspace: NewMemory = NEW_MEMORY) -> Tensor:
        """The header byte of each part, where the codec does not make its own: how large the numbers are. Int32."""
        device, peaks = numbers.device, self.no_peaks(numbers.device)
        for group in self.groups:
            if group.codec.sends_peaks:
                maxima = workspace.zeros((len(group.segments),), device)
                group.measure(numbers, (True, False), maxima)
                write_bounds(maxima, ranks, maxima)
                peaks = maxima if len(self.groups) == 1 else peaks.index_copy(0, group.indices(device), maxima)
        return peaks

    @cached_property
    def _find_peaks_together(self) -> bool:
        """Can all groups that send peaks find them while they encode?"""
        senders = [group for group in self.groups if group.codec.sends_peaks]
        return all(group.codec.keep == 1 and group.function("encode", torch.float32) is not None for group in senders)

    def _write_peaks(self, group: CodecGroup, maxima: Tensor, ranks: int, out: Tensor) -> None:
        """The header bytes that follow from largest magnitudes (which are overwritten)."""
        device = out.device
        write_bounds(maxima, ranks, maxima)
        places = group.constant("headers", lambda: [first for first, _ in group.header_spans], device)
        out.index_copy_(0, places, maxima.to(torch.uint8))

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
        workspace: NewMemory = NEW_MEMORY,
    ) -> "list[Tensor | None]":
        """Write to `out` the sums of what `messages` buffers say, each `stride` bytes after the last, in their order.

        Sums are float32, then times the factor of their layer, then divided. Returns what `measure` would find in `out`.
        """
        device, found = out.device, []
        of_layers = own_factors = self._of_layers(factors, device)
        if divisor != 1:
            of_layers = torch.stack([of_layers, torch.full_like(of_layers, divisor)])
        for group in self.groups:
            if isinstance(group, AdaptiveGroup):
                group.decode(source, out, own_factors, divisor, messages, stride, workspace)
                found.append(None)
                continue
            kinds = (False, False) if wanted is None else wanted(group.codec)
            maxima = self._room(group, kinds, device, workspace)
            found.append(maxima)
            kernel = group.kernel(group.function("decode", out.dtype, kinds, divisor != 1), device)
            if kernel is not None:
                kernel(source, out, group.table(device), None, of_layers, maxima, messages, stride)
                continue
            if group.codec.keep < 1:
                self._top_k(group).decode(source, out, factors, divisor, messages, stride, workspace)
            else:
                self._decode_plainly(group, source, out, factors, divisor, messages, stride)
            if maxima is not None:
                group.measure(out, kinds, maxima)
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
            out[start : start + part.size] = divide_(total, divisor)

    def fold(
        self, source: Tensor, out: Tensor, messages: int, stride: int, noises: Noises, workspace: NewMemory = NEW_MEMORY
    ) -> bool:
        """Write to `out` the message of the sum of `messages` messages, without numbers in memory; False: nothing was done.

        Where a codec must know a sum's largest magnitude first, messages are decoded twice. On a CPU it is cheaper to keep the
        numbers, which stay in the cache.
        """
        device = source.device
        if device.type == "cpu" and any(any(group.codec.measures) for group in self.groups):
            return False
        functions = [group.function("fold") for group in self.groups]
        found = [group.kernel(function, device) for group, function in zip(self.groups, functions, strict=True)]
        if not all(found):
            return False
        peaks = self.peaks(source, messages, stride, workspace) if self.sends_peaks else None
        for group, function, kernel in zip(self.groups, functions, found, strict=True):
            assert kernel is not None
            assert function is not None
            measured = self._room(group, group.codec.measures, device, workspace)
            if measured is not None:
                measure = group.kernel(group.function("measure_sum"), device)
                assert measure is not None
                measure(source, None, group.table(device), None, None, measured, messages, stride)
            known = self._known(group, function.numbers, measured, peaks, noises, device, workspace)
            kernel(source, out, group.table(device), known, None, None, messages, stride)
        return True

    def places(self, device: torch.device) -> Tensor:
        """Where the header byte of each part lies that has one; -1 for the others."""

        def make() -> Tensor:
            places = torch.full((self.parts,), -1, dtype=torch.int64)
            for group in self.groups:
                if not group.codec.scale.agreed and group.codec.scale.kind != "block":
                    for segment, (first, _) in zip(group.segments, group.header_spans, strict=True):
                        places[segment.index] = first
            return places

        return self._constant("places", device, make)

    def owners(self, device: torch.device) -> Tensor:
        """The layer of each part."""
        return self._constant("owners", device, lambda: torch.tensor([p.layer for s in self.shards for p in s.parts]))

    @cached_property
    def _block_groups(self) -> list[CodecGroup]:
        return [group for group in self.groups if group.codec.scale.kind == "block"]

    @cached_property
    def _one_byte(self) -> bool:
        """Are there parts with one header byte?"""
        return any(not group.codec.scale.agreed and group.codec.scale.kind != "block" for group in self.groups)

    def no_peaks(self, device: torch.device) -> Tensor:
        """Zeros for all parts: not to be written to."""
        return self._constant("no peaks", device, lambda: torch.zeros(self.parts, dtype=torch.int32))

    def peaks(self, source: Tensor, messages: int = 1, stride: int = 0, workspace: NewMemory = NEW_MEMORY) -> Tensor:
        """The largest header byte of each part (255: something is not finite) in any of the messages; int32, of all parts."""
        device, found = source.device, self.no_peaks(source.device)
        if self._one_byte:
            found, places = workspace.empty((self.parts,), torch.int32, device), self.places(device)
            if _in_triton(device):
                from lowp.tensor.lists.headers_triton import largest_headers

                largest_headers(source, places, found, messages, stride)
            else:
                every = source[None, :] if messages == 1 else source.as_strided((messages, self.length), (stride, 1))
                found.copy_(every[:, places].amax(0)).masked_fill_(places < 0, 0)
        for group in self._block_groups:
            peaks = group.peaks_of_blocks(source, messages, stride, self.length, workspace)
            found = peaks if len(self.groups) == 1 else found.index_copy(0, group.indices(device), peaks)
        return found

    def units(self, source: Tensor, usual: Tensor, messages: int, stride: int, workspace: NewMemory, out: Tensor) -> Tensor:
        """Numbers of layers, `usual`; NaN where a part of a layer was not finite in one of the messages. In `out`."""
        device = source.device
        if not _in_triton(device):
            return poisoned(usual, self.peaks(source, messages, stride), self.owners(device), out)
        from lowp.tensor.lists.headers_triton import units_of_layers

        if self._one_byte:
            units_of_layers(source, self.places(device), self.owners(device), usual, out, messages, stride)
            usual = out
        for group in self._block_groups:
            peaks = group.peaks_of_blocks(source, messages, stride, self.length, workspace)
            # The lowest byte of each int32; the others are zero.
            places = group.constant("low bytes", lambda group=group: range(0, 4 * len(group.segments), 4), device)
            owners = group.constant("owners", lambda group=group: [s.part.layer for s in group.segments], device)
            units_of_layers(peaks, places, owners, usual, out, 1, 0)
            usual = out
        return usual

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
            keys = None
            if group.codec.stochastic and noises is not None:
                keys = torch.empty(KEY_SIZE, len(group.segments), dtype=torch.int32, device=device)
                group.write_keys(noises, keys)
            kernel(numbers, numbers, group.table(device), keys)
        return numbers


def _in_triton(device: torch.device) -> bool:
    return device.type == "cuda" and kernels.kernel_policy() != "never"
