"""How a bucket of gradients is cut: into chunks that are under way one after the other, shards of a chunk, parts of a shard.

- A *layer* is one parameter's gradient: its own codec, its own scale, its own noise.
- A *chunk* is a stretch of the bucket, short enough for its messages to be under way while the next one is encoded.
- A *shard* is what one rank adds up. Shards of a chunk take about the same number of bytes.
- A *part* is what one layer has in one shard, cut where it is long. Its codes and its exponent travel together.

Shards are stretches of the chunk; where a layer is adaptive, they are *striped*: each has some stripes of every layer. An
adaptive message spends its bits where its own numbers are large, so it should have its share of all that the chunk has. (With
stretches the errors of a GPT and an LSTM on 8 ranks are 1.5 to 3.7 times as large, and as many parts in a message.)

The cuts depend on sizes, codecs and the number of shards alone, so every rank and the virtual world cut alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lowp.wire.adaptive_tables import GROUP
from lowp.wire.codec import Codec

CPU_CUTS = (1 << 21, 1 << 18)
"""Elements of a chunk and of a part on a CPU: messages of about a megabyte (whatever its size, a message costs as much as
encoding 100,000 elements), scaled and encoded in stretches that stay in a core's cache."""
CUDA_CUTS = (1 << 28, 1 << 28)
"""On CUDA streams overlap by themselves, and kernels want to be large."""


def cuts_for(chunk: int | None, device: torch.device) -> tuple[int, int]:
    """The longest chunk and the longest part. One that is asked for is the same on all devices, and so are the numbers then."""
    return (chunk, chunk) if chunk is not None else CPU_CUTS if device.type == "cpu" else CUDA_CUTS


@lru_cache(maxsize=4096)
def constants(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Known numbers as a tensor, kept: to send them to a GPU again would be to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class Layer:
    """One parameter's gradient. `number` keys its noise, whatever the bucket it is in.

    `budget`: bits for each number of an adaptive layer (adaptive.py); 0 stands for the codec's.
    """

    name: str
    size: int
    codec: Codec
    number: int
    budget: float = 0.0


@dataclass(frozen=True)
class Part:
    """`size` numbers of a layer, from its element `start` on; in the shard's own numbering they begin at `offset`.

    `place`: where they begin in the chunk, in striped shards. None: the shard is a stretch, and its `start` says it.
    """

    layer: int  # index in the plan's layers
    codec: Codec
    number: int
    start: int
    offset: int
    size: int
    layer_size: int = 0
    budget: float = 0.0  # its layer's
    place: int | None = None


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop`, and what was worked out for them once."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @cached_property
    def messages(self) -> dict[Any, Any]:
        """Where the parts lie in messages of every kind (rules.py, reductions/base.py)."""
        return {}

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """Tables on some device: of the runs (scaled.py), and others."""
        return {}

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(layer, first, last) of stretches of one layer each, one after the other."""
        raise NotImplementedError


@dataclass(frozen=True)
class Shard(Stretch):
    """A stretch of the chunk; striped ones have as many elements, at the places of their parts."""

    parts: tuple[Part, ...]

    @cached_property
    def striped(self) -> bool:
        return any(part.place is not None for part in self.parts)

    def take(self, numbers: Tensor) -> Tensor:
        """Its numbers of a chunk's: a view, or a copy where it is striped."""
        if not self.striped:
            return numbers[self.start : self.stop]
        return torch.cat([numbers[part.place : part.place + part.size] for part in self.parts])  # type: ignore[operator]  # striped

    def put(self, own: Tensor, numbers: Tensor) -> None:
        """The inverse. (What is a view is there already.)"""
        if self.striped:
            for part in self.parts:
                numbers[part.place : part.place + part.size] = own[part.offset : part.offset + part.size]  # type: ignore[operator]

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Those of its parts."""
        return tuple((part.layer, part.offset, part.offset + part.size) for part in self.parts)


@dataclass(frozen=True)
class Chunk(Stretch):
    """A stretch of the bucket."""

    shards: tuple[Shard, ...]

    @cached_property
    def parts(self) -> tuple[tuple[Part, int], ...]:
        """All parts, and where in the chunk each begins."""
        return tuple(
            (part, shard.start + part.offset if part.place is None else part.place)
            for shard in self.shards
            for part in shard.parts
        )

    def owners(self, device: torch.device) -> Tensor:
        """The layer of each part."""
        kind = "owners", device
        if kind not in self.tables:
            self.tables[kind] = constants(tuple(part.layer for part, _ in self.parts), torch.int64, device)
        return self.tables[kind]

    @cached_property
    def remembers_peaks(self) -> bool:
        """Are the header bytes needed in the next step?"""
        return any(part.codec.scale.kind == "aps_delayed" for part, _ in self.parts)

    @cached_property
    def sends_headers(self) -> bool:
        """Do messages have bytes that may say that something is not finite?"""
        return any(not part.codec.scale.agreed for part, _ in self.parts)

    @cached_property
    def first_parts(self) -> tuple[int, ...]:
        """For each shard, how many parts come before it."""
        return (0, *accumulate(len(shard.parts) for shard in self.shards))

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Those of its layers, across shards."""
        found: list[tuple[int, int, int]] = []
        for part, first in sorted(self.parts, key=lambda each: each[1]):
            if found and found[-1][0] == part.layer:
                found[-1] = (part.layer, found[-1][1], first + part.size)
            else:
                found.append((part.layer, first, first + part.size))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Layers that lie one after the other in memory, and everything that was worked out for them: there is one of each."""

    layers: tuple[Layer, ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(layers: tuple[Layer, ...]) -> "Bucket":
        return Bucket(layers)

    @cached_property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where each layer begins, and where the last one ends."""
        return (0, *accumulate(layer.size for layer in self.layers))

    @cached_property
    def scale_kinds(self) -> dict[str, list[int]]:
        """The layers by kind of scale."""
        found: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            found.setdefault(layer.codec.scale.kind, []).append(i)
        return found

    @cached_property
    def _chunks(self) -> dict[tuple[int, tuple[int, int]], tuple[Chunk, ...]]:
        return {}

    def chunks(self, shards: int, cuts: tuple[int, int] = CPU_CUTS) -> tuple[Chunk, ...]:
        if (shards, cuts) not in self._chunks:
            self._chunks[shards, cuts] = chunks_of(self.layers, shards, cuts)
        return self._chunks[shards, cuts]

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """Where layers lie, on some device (exchange.py)."""
        return {}


def chunks_of(layers: tuple[Layer, ...], shards: int, cuts: tuple[int, int] = CPU_CUTS) -> tuple[Chunk, ...]:
    """Cut a bucket of these layers, one after the other in memory.

    Where there are many chunks, the first and the last are short: until the first has been encoded, the link has nothing to do,
    and when the last arrives, the processor still has to decode it.
    """
    total = sum(layer.size for layer in layers)
    count = -(-total // cuts[0])
    weights = [1.0] * count if count < 4 else [0.25, 0.5, *[1.0] * (count - 2), 0.5, 0.25]
    edges = [0, *(round(total * share / sum(weights)) for share in accumulate(weights))]
    return tuple(_chunk(layers, start, stop, shards, cuts[1]) for start, stop in pairwise(edges))


def _chunk(layers: tuple[Layer, ...], start: int, stop: int, shards: int, longest: int) -> Chunk:
    if shards > 1 and any(layer.codec.adaptive for _, layer, _, _, _ in _stretches(layers, start, stop)):
        return Chunk(start, stop, _striped(layers, start, stop, shards, longest))
    edges = _balanced(layers, start, stop, shards)
    cut = []
    for first, last in pairwise(edges):
        cut.append(Shard(first - start, last - start, tuple(_parts(layers, first, last, longest))))
    return Chunk(start, stop, tuple(cut))


def _stretches(layers: tuple[Layer, ...], start: int, stop: int) -> Iterator[tuple[int, Layer, int, int, int]]:
    """(index, layer, first, last) of the layers between two positions in the bucket, positions in the bucket too."""
    position = 0
    for index, layer in enumerate(layers):
        first, last = max(position, start), min(position + layer.size, stop)
        if first < last:
            yield index, layer, first, last, position
        position += layer.size


def _balanced(layers: tuple[Layer, ...], start: int, stop: int, shards: int) -> list[int]:
    """Edges of the shards: each takes the same share of the bits, cut at multiples of 8 elements from the chunk's start."""
    stretches = [(first, last, layer.codec.bits) for _, layer, first, last, _ in _stretches(layers, start, stop)]
    whole = sum((last - first) * bits for first, last, bits in stretches)
    edges, before, walk = [start], 0.0, iter(stretches)
    first, last, bits = next(walk, (start, stop, 1.0))
    for shard in range(1, shards):
        goal = whole * shard / shards
        while before + (last - first) * bits < goal:
            before += (last - first) * bits
            first, last, bits = next(walk)
        edge = first + int((goal - before) / bits)
        edges.append(max(edges[-1], min(stop, start + (edge - start + 4) // 8 * 8)))
    return [*edges, stop]


def _parts(layers: tuple[Layer, ...], start: int, stop: int, longest: int) -> Iterator[Part]:
    for index, layer, first, last, position in _stretches(layers, start, stop):
        for begin in range(first, last, longest):
            size = min(longest, last - begin)
            place = (begin - position, begin - start, size, layer.size, layer.budget)
            yield Part(index, layer.codec, layer.number, *place)


STRIPES = 4  # of a layer in each shard; fewer where each would have fewer than
SHORTEST_STRIPE = 16  # groups


def _striped(layers: tuple[Layer, ...], start: int, stop: int, shards: int, longest: int) -> tuple[Shard, ...]:
    """Shards that have stripes of every layer.

    A layer is cut into rounds, a round into a stripe of whole groups for each shard; shards take turns to have a longer one.
    """
    own: list[list[Part]] = [[] for _ in range(shards)]
    sizes, turn = [0] * shards, 0
    for index, layer, first, last, position in _stretches(layers, start, stop):
        groups = -(-(last - first) // GROUP)
        rounds = max(1, min(STRIPES, groups // (shards * SHORTEST_STRIPE)))
        for one in range(rounds):
            begin, end = groups * one // rounds, groups * (one + 1) // rounds
            each, longer = divmod(end - begin, shards)
            edges = [begin + each * k + min(k, longer) for k in range(shards + 1)]
            for k, (low, high) in enumerate(pairwise(edges)):
                shard = (turn + k) % shards
                for at in range(first + GROUP * low, min(last, first + GROUP * high), longest):
                    size = min(longest, first + GROUP * high - at, last - at)
                    place = (at - position, sizes[shard], size, layer.size, layer.budget, at - start)
                    own[shard].append(Part(index, layer.codec, layer.number, *place))
                    sizes[shard] += size
            turn += longer
    begins = (0, *accumulate(sizes))
    return tuple(Shard(*edges, tuple(parts)) for edges, parts in zip(pairwise(begins), own, strict=True))
