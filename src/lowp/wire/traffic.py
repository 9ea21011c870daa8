"""What a rank sends: the reduction itself is run, on tensors without memory, against a link that only counts.

Which messages there are follows from shapes and codecs alone, so that no number has to be computed. A formula would be a second
definition of every reduction.

- `bytes_of_bucket`: the bytes of one bucket.
- `waits_of`: what a rank does between its waits, whatever the codec: which messages of how many shards it sends to whom and
  receives, and how many shards it encodes, adds and decodes. The predictor knows the length of a shard for each codec and each
  stage, and multiplies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.formats.floats import FP32
from lowp.tensor.noise import Domain
from lowp.tensor.scale import Scale
from lowp.wire.codec import Codec
from lowp.wire.messages import Messages
from lowp.wire.plan import Bucket, Layer, Part, Shard
from lowp.wire.reductions.base import ChunkJob, MessageBuffers, Reduction
from lowp.wire.rules import Load, Rules, Stage

_NOWHERE = torch.device("meta")


class CountingLink:
    """Takes a ChunkLink's place. Everything has arrived at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.bytes_sent = 0

    def send_receive(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Any]:
        self.bytes_sent += sum(message.numel() for rank, message in sends.items() if rank != self.rank)
        return []

    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Any]:
        self.bytes_sent += (self.world - 1) * lengths[self.rank]
        return []


class LengthRules(Rules):
    """Messages of the right length, and nothing in them."""

    def write(self, load: Load, shard: Shard, stage: Stage, actor: int, out: Tensor | None = None) -> Tensor:
        return self.buffer(shard, stage, _NOWHERE) if out is None else out

    def encode(self, messages: Messages, numbers: Tensor, out: Tensor, *more: Any, **named: Any) -> None:
        pass

    def read(self, message: Tensor, shard: Shard, stage: Stage, out: Tensor | None = None) -> Load:
        return _nothing(shard)

    def addend(self, load: Load, shard: Shard, actor: int) -> Load:
        return load

    def begin(self, load: Load, shard: Shard, actor: int) -> Load:
        return load

    def add(self, total: Load, load: Load, shard: Shard, actor: int) -> Load:
        return total

    def fold_to_total(self, messages: Tensor, shard: Shard, actors: Iterable[int], out: Tensor) -> None:
        pass

    def fold_messages(
        self, messages: Tensor, shard: Shard, stage: Stage, actors: Iterable[int], out: Tensor | None = None
    ) -> Load:
        return _nothing(shard)


class LengthJob(ChunkJob):
    """A chunk without numbers."""

    def load(self, index: int) -> Load:
        return _nothing(self.chunk.shards[index])

    def write_own(self, messages: Messages, indices: Sequence[int], stage: Stage, out: Tensor) -> None:
        pass

    def fold(self, received: Tensor, indices: Sequence[int], stage: Stage, actors: Sequence[int]) -> dict[int, Load]:
        return {index: self.load(index) for index in indices}

    def finish(self, totals: MessageBuffers) -> None:
        pass

    def finish_sum(self, received: Tensor, actors: Iterable[int]) -> None:
        pass


def _nothing(shard: Shard) -> Load:
    return Load(torch.empty(shard.size, device=_NOWHERE), torch.empty(len(shard.parts), dtype=torch.uint8, device=_NOWHERE))


@lru_cache(maxsize=4096)
def bytes_of_bucket(
    bucket: Bucket,
    reduction: Reduction,
    rank: int,
    world: int,
    sum_format: AnyFormat | None,
    kahan: bool,
    cuts: tuple[int, int],
) -> int:
    """What one rank sends for a bucket, after the ranks have agreed on scales."""
    reduction = reduction.of_size(bucket.size)
    addends = reduction.addends(world)
    rules = LengthRules(world=world, domain=Domain.WIRE, sum_format=sum_format, kahan=kahan, rank=rank, addends=addends)
    link: Any = CountingLink(rank, world)  # which takes a ChunkLink's place
    for chunk in bucket.chunks(reduction.shards(world), cuts):
        numbers = torch.empty(chunk.size, device=_NOWHERE)
        for _ in reduction.reduce(LengthJob(chunk, numbers, numbers, rules, link)):
            pass
    return link.bytes_sent


@dataclass(frozen=True)
class CountedMessage:
    """A message to or from another rank: so many shards, as they are at one stage of their way."""

    peer: int
    stage: Stage
    shards: int


@dataclass(frozen=True)
class Wait:
    """What a rank does until it waits, and the messages that it then waits for. After the last wait there is work alone.

    `work`: (what, stage, shards), where what is "encode", "add" (decode and add to a sum) or "decode". `gathers`: are all
    messages sent and received by one all-gather, where there is one?
    """

    work: tuple[tuple[str, Stage, int], ...]
    sent: tuple[CountedMessage, ...] = ()
    received: tuple[CountedMessage, ...] = ()
    gathers: bool = False


# A shard has so many numbers in float32, and at each stage another number of scale bytes: the length of a message then says at
# which stage it is, and of how many shards. No message mixes stages.
_NUMBERS = 1 << 20
_MARKS = {Stage.ADDEND: 1, Stage.INSIDE: 2, Stage.NODE: 4, Stage.PARTIAL: 8, Stage.TOTAL: 16, Stage.HANDED_OUT: 32}
_STEP = 16  # bytes; rows of messages begin at multiples of it
_STAGES = {_STEP * mark: stage for stage, mark in _MARKS.items()}


def _counted_message(peer: int, length: int) -> CountedMessage:
    shards, scale_bytes = divmod(length, 4 * _NUMBERS)
    if scale_bytes % shards or scale_bytes // shards not in _STAGES:  # scale bytes of so many shards reach into the numbers
        raise ValueError(f"ranks: too many to count ({shards:,} shards in a message); take a multiple of the ranks of a node")
    return CountedMessage(peer, _STAGES[scale_bytes // shards], shards)


class RoundsLink(CountingLink):
    """Keeps what is sent and received at each wait."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.sent: list[CountedMessage] = []
        self.received: list[CountedMessage] = []
        self.gathers = False

    def send_receive(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Any]:
        self.sent += [_counted_message(peer, message.numel()) for peer, message in sends.items() if peer != self.rank]
        self.received += [_counted_message(peer, message.numel()) for peer, message in receives.items() if peer != self.rank]
        return super().send_receive(sends, receives)

    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Any]:
        others = [peer for peer in range(self.world) if peer != self.rank]
        self.sent += [_counted_message(peer, lengths[self.rank]) for peer in others]
        self.received += [_counted_message(peer, lengths[peer]) for peer in others]
        self.gathers = True
        return super().share(messages, lengths)


@dataclass
class MarkedRules(LengthRules):
    """Messages whose lengths say at which stage they are; and what is encoded, added and decoded is counted."""

    work: Counter[tuple[str, Stage]] = field(default_factory=Counter)

    def codec(self, part: Part, stage: Stage) -> Codec:
        return Codec(FP32, scale=Scale("block", _NUMBERS // (_STEP * _MARKS[stage])))

    def write(self, load: Load, shard: Shard, stage: Stage, actor: int, out: Tensor | None = None) -> Tensor:
        self.work["encode", stage] += 1
        return super().write(load, shard, stage, actor, out)

    def read(self, message: Tensor, shard: Shard, stage: Stage, out: Tensor | None = None) -> Load:
        self.work["decode", stage] += 1
        return super().read(message, shard, stage, out)

    def addend(self, load: Load, shard: Shard, actor: int) -> Load:
        self.work["encode", Stage.ADDEND] += 1
        self.work["decode", Stage.ADDEND] += 1
        return super().addend(load, shard, actor)

    def add(self, total: Load, load: Load, shard: Shard, actor: int) -> Load:
        self.work["add", Stage.PARTIAL] += 1
        return super().add(total, load, shard, actor)

    def fold_to_total(self, messages: Tensor, shard: Shard, actors: Iterable[int], out: Tensor) -> None:
        self.work["add", Stage.ADDEND] += len(messages)
        self.work["encode", Stage.TOTAL] += 1

    def fold_messages(
        self, messages: Tensor, shard: Shard, stage: Stage, actors: Iterable[int], out: Tensor | None = None
    ) -> Load:
        self.work["add", stage] += len(messages)
        return super().fold_messages(messages, shard, stage, actors, out)


@dataclass
class MarkedJob(LengthJob):
    """A chunk without numbers, which counts as its rules do."""

    work: Counter[tuple[str, Stage]] = field(default_factory=Counter)

    def write_own(self, messages: Messages, indices: Sequence[int], stage: Stage, out: Tensor) -> None:
        self.work["encode", stage] += len(indices)

    def fold(self, received: Tensor, indices: Sequence[int], stage: Stage, actors: Sequence[int]) -> dict[int, Load]:
        self.work["add", stage] += len(received) * len(indices)
        return super().fold(received, indices, stage, actors)

    def finish(self, totals: MessageBuffers) -> None:
        length = max(totals.lengths)
        self.work["decode", _counted_message(0, length).stage] += len(totals.lengths)

    def finish_sum(self, received: Tensor, actors: Iterable[int]) -> None:
        self.work["add", Stage.ADDEND] += len(received)


@lru_cache(maxsize=1 << 14)
def waits_of(reduction: Reduction, rank: int, world: int, kahan: bool = False) -> tuple[Wait, ...]:
    """What one rank does for one chunk, wait by wait. (Kahan's compensation counts as a second shard.)"""
    shards = reduction.shards(world)
    layer = Layer("", shards * _NUMBERS, Codec(FP32), 0)
    (chunk,) = Bucket.of((layer,)).chunks(shards, (layer.size, layer.size))
    rules = MarkedRules(world, Domain.WIRE, kahan=kahan, rank=rank, addends=reduction.addends(world))
    link = RoundsLink(rank, world)
    numbers = torch.empty(chunk.size, device=_NOWHERE)
    job = MarkedJob(chunk, numbers, numbers, rules, link, work=rules.work)  # type: ignore[arg-type]  # in a ChunkLink's place
    found: list[Wait] = []

    def noted() -> None:
        work = tuple((what, stage, count) for (what, stage), count in sorted(rules.work.items()))
        found.append(Wait(work, tuple(link.sent), tuple(link.received), link.gathers))
        rules.work.clear()
        link.sent, link.received, link.gathers = [], [], False

    for _ in reduction.reduce(job):
        noted()
    noted()
    return tuple(found)
