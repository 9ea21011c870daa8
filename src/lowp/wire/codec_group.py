"""The parts of one codec in some messages: where their numbers and bytes lie, and the kernels over all of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.tensor.lists.parts import PartsFunction, PartsKernel, PartTable
from lowp.tensor.noise import KEY_SIZE, Domain, Noise, signed, state_after
from lowp.tensor.recorded_step import KEYS
from lowp.wire.codec import Codec, PartLayout
from lowp.wire.part_kernels import (
    decode_function,
    encode_function,
    fold_function,
    largest_byte_function,
    measure,
    measure_sum_function,
    round_function,
)
from lowp.wire.plan import Part
from lowp.wire.workspace import NewMemory

_FUNCTIONS: dict[str, Callable[..., PartsFunction | None]] = {
    "encode": encode_function,
    "decode": decode_function,
    "round": round_function,
    "fold": fold_function,
    "measure_sum": measure_sum_function,
}


class PartNoise(NamedTuple):
    """The noise of one rounding of every part, counted by element of the layer: it does not matter how a bucket is cut."""

    domain: Domain
    seed: int
    step: int
    level: int
    stage: int
    actor: int

    def __call__(self, part: Part) -> Noise:
        place = (part.number, self.level, self.stage, self.actor)
        return Noise.of(self.domain, self.seed, self.step, *place, offset=part.start)


Noises = Callable[[Part], Noise]


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
    def _kept(self) -> dict[Any, Tensor]:
        return {}

    def constant(self, name: Any, values: Callable[[], Iterable[int]], device: torch.device) -> Tensor:
        """Int64 numbers of the segments, made once."""
        if (name, device) not in self._kept:
            self._kept[name, device] = torch.tensor(list(values()), dtype=torch.int64).to(device)
        return self._kept[name, device]

    def indices(self, device: torch.device) -> Tensor:
        """Of the segments' parts among all."""
        return self.constant("indices", lambda: (segment.index for segment in self.segments), device)

    @cached_property
    def header_spans(self) -> list[tuple[int, int]]:
        """Where the header bytes of each part begin, and how many there are."""
        codec = self.codec
        return [(s.begin + PartLayout.of(codec, s.part.size).header, codec.header_bytes(s.part.size)) for s in self.segments]

    def peaks_of_blocks(self, source: Tensor, messages: int, stride: int, length: int, workspace: NewMemory) -> Tensor:
        """Where blocks have headers: the largest one of each part in any of the messages, int32."""
        device = source.device
        peaks = workspace.zeros((len(self.segments),), device)
        table = self._header_table(device)
        kernel = None if device.type == "meta" else largest_byte_function().kernel(table)
        if kernel is not None:
            for message in range(messages):
                kernel(source[message * stride :] if message else source, None, table, maxima=peaks)
            return peaks
        every = source[None, :] if messages == 1 else source.as_strided((messages, length), (stride, 1))
        return peaks.copy_(torch.stack([every[:, first : first + count].amax() for first, count in self.header_spans]))

    def _header_table(self, device: torch.device) -> PartTable:
        """The header bytes of each part, as a part of their own."""
        if device not in self._header_tables:
            rows = [(count, 0, first) for first, count in self.header_spans]
            self._header_tables[device] = PartTable(rows, device)
        return self._header_tables[device]

    @cached_property
    def _header_tables(self) -> dict[torch.device, PartTable]:
        return {}

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

    def measure(self, numbers: Tensor, kinds: tuple[bool, bool], out: Tensor) -> None:
        """The largest magnitudes of the parts, and (or) the largest finite ones: the first rows of `out`, zeros before."""
        if any(kinds):
            measure(numbers, self.table(numbers.device), kinds, out)

    def rows(self, kinds: tuple[bool, bool]) -> int:
        """Rows of int32 numbers of each part that are made where maxima are found: an encoder's further numbers find room."""
        function = self.function("encode", torch.float32) if kinds == self.codec.measures else None
        return sum(kinds) if function is None else max(sum(kinds), function.numbers)

    def write_keys(self, noises: Noises, out: Tensor) -> None:
        """The keys of the parts' noise: int32 `out` [KEY_SIZE, parts]."""
        device = out.device
        if not isinstance(noises, PartNoise):
            first = noises(self.segments[0].part)
            domain, seed, step, place = first.domain, first.seed, first.step, noises
        else:
            domain, seed, step, place = noises.domain, noises.seed, noises.step, (noises[0], *noises[3:])

        def each(of: Callable[[Noise], int]) -> Callable[[], Iterable[int]]:
            return lambda: [signed(of(noises(segment.part))) for segment in self.segments] * KEY_SIZE

        streams = self.constant(("streams", place), each(lambda noise: noise.stream), device)
        offsets = self.constant(("offsets", place), each(lambda noise: noise.offset), device)
        columns = self.constant("columns", lambda: (i for i in range(KEY_SIZE) for _ in self.segments), device)
        KEYS([streams, offsets, columns], [out.view(-1)], state_after(domain, seed, step))
