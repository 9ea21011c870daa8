"""How many bytes a rank sends: the reduction itself is run, on tensors without memory, against a link that only counts.

Which messages there are follows from shapes and codecs alone, so that no number has to be computed. A formula would be a second
definition of every reduction.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.tensor.noise import Domain
from lowp.wire.messages import Messages
from lowp.wire.plan import Bucket, Shard
from lowp.wire.reductions.base import ChunkJob, Reduction, Rooms
from lowp.wire.rules import Load, Rules, Stage

_NOWHERE = torch.device("meta")


class CountingLink:
    """Takes a ChunkLink's place. Everything has arrived at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.bytes_sent = 0

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Any]:
        self.bytes_sent += sum(message.numel() for rank, message in sends.items() if rank != self.rank)
        return []

    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Any]:
        self.bytes_sent += (self.world - 1) * lengths[self.rank]
        return []


class LengthRules(Rules):
    """Messages of the right length, and nothing in them."""

    def write(self, load: Load, shard: Shard, stage: Stage, actor: int, out: Tensor | None = None) -> Tensor:
        return self.room(shard, stage, _NOWHERE) if out is None else out

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

    def finish(self, totals: Rooms) -> None:
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
    accumulate: AnyFormat | None,
    kahan: bool,
    cuts: tuple[int, int],
) -> int:
    """What one rank sends for a bucket, after the ranks have agreed on scales."""
    reduction = reduction.of_size(bucket.size)
    addends = reduction.addends(world)
    rules = LengthRules(world=world, domain=Domain.WIRE, accumulate=accumulate, kahan=kahan, rank=rank, addends=addends)
    link: Any = CountingLink(rank, world)  # which takes a ChunkLink's place
    for chunk in bucket.chunks(reduction.shards(world), cuts):
        numbers = torch.empty(chunk.size, device=_NOWHERE)
        for _ in reduction.exchange(LengthJob(chunk, numbers, numbers, rules, link)):
            pass
    return link.bytes_sent
