"""The sum of a chunk over virtual ranks, which are visited one after the other."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lowp.wire.messages import Messages
from lowp.wire.plan import Chunk
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.rules import Load, Rules, Stage
from lowp.wire.scaled import scaled


class ChunkSum(Protocol):
    """What `chunk_sum` gives."""

    def visit(self, rank: int, turn: int, source: Tensor) -> None:
        """Add one rank's numbers, where it is their turn."""

    def total(self) -> tuple[Tensor, Tensor]:
        """The sum as everybody decodes it, and the largest header byte of each part."""
        ...


def chunk_sum(chunk: Chunk, reduction: Reduction, rules: Rules, indices: Sequence[int | None]) -> ChunkSum:
    """`indices` are those of the chunk's shards; None stands for one that is all of them."""
    plain = all(rules.adds_plainly(shard) for shard in chunk.shards)
    if plain and isinstance(reduction, (TwoShot, OneShot)) and indices != [None]:
        return _AllShards(chunk, reduction, rules, indices)
    return _ShardByShard(chunk, reduction, rules, indices)


class _AllShards:
    """Where all shards are added in the order of ranks, in float32: their messages are made and read together.

    (Shard by shard, the number of kernels would grow with the square of the number of ranks.)
    """

    def __init__(self, chunk: Chunk, reduction: Reduction, rules: Rules, indices: Sequence[int | None]) -> None:
        self._chunk, self._reduction, self._rules, self._indices = chunk, reduction, rules, indices
        self._sum: Tensor | None = None
        self._peaks: Tensor | None = None

    def _messages(self, stage: Stage) -> Messages:
        chunk, rules = self._chunk, self._rules
        kind = "virtual", stage, rules.sum_format, rules.choices
        if kind not in chunk.messages:
            starts = [shard.start for shard in chunk.shards]
            chunk.messages[kind] = Messages(chunk.shards, lambda part: rules.codec(part, stage), starts)
        return chunk.messages[kind]

    def visit(self, rank: int, turn: int, source: Tensor) -> None:
        messages, rules, device = self._messages(Stage.ADDEND), self._rules, source.device
        message = torch.empty(messages.length, dtype=torch.uint8, device=device)
        rules.encode(messages, source, message, Stage.ADDEND, rank, rules.factors, peaks_of=rules.world)
        numbers, peaks = self._read(messages, message)
        if rules.feedback is not None:
            lost = scaled(source, self._chunk, rules.factors) - numbers
            rules.feedback.keep(rank, self._chunk, lost, rules.factors, of_sum=False)
        self._sum = numbers if self._sum is None else self._sum.add_(numbers)
        self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks)

    def _read(self, messages: Messages, message: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.empty(self._chunk.size, dtype=torch.float32, device=message.device)
        messages.decode(message, numbers)
        return numbers, messages.peaks(message)

    def total(self) -> tuple[Tensor, Tensor]:
        assert self._sum is not None
        assert self._peaks is not None
        if not self._reduction.rounds_total:
            return self._sum, self._peaks
        messages = self._messages(Stage.TOTAL)
        load = self._rules.marked(Load(self._sum, self._peaks), messages)
        message = torch.empty(messages.length, dtype=torch.uint8, device=self._sum.device)
        self._rules.encode(messages, load.numbers, message, Stage.TOTAL, 0, None, load.peaks)
        numbers, peaks = self._read(messages, message)
        self._keep_lost(load, numbers)
        return numbers, peaks

    def _keep_lost(self, total: Load, numbers: Tensor) -> None:
        """With feedback: what the owner of each shard loses of its sum."""
        rules = self._rules
        if rules.feedback is None:
            return
        lost = total.numbers - numbers
        for index, shard in zip(self._indices, self._chunk.shards, strict=True):
            if rules.loses(total, shard, Stage.TOTAL):
                owner = self._reduction.owner(index, rules.world)
                rules.feedback.keep(owner, shard, shard.take(lost), rules.factors, of_sum=True)


class _ShardByShard:
    """Each shard by the reduction's own adder."""

    def __init__(self, chunk: Chunk, reduction: Reduction, rules: Rules, indices: Sequence[int | None]) -> None:
        self._chunk, self._reduction, self._rules, self._indices = chunk, reduction, rules, indices
        self._adders = [reduction.adder(shard, i, rules) for i, shard in zip(indices, chunk.shards, strict=True)]

    def visit(self, rank: int, turn: int, source: Tensor) -> None:
        chunk, world = self._chunk, self._rules.world
        if "own" not in chunk.messages:
            starts = [shard.start for shard in chunk.shards]
            chunk.messages["own"] = Messages(chunk.shards, lambda part: part.codec, starts)
        numbers, peaks = scaled(source, chunk, self._rules.factors), chunk.messages["own"].own_peaks(source, world)
        for index, (shard, adder) in enumerate(zip(chunk.shards, self._adders, strict=True)):
            if self._reduction.turn(rank, index, world) == turn:
                first, last = chunk.first_parts[index : index + 2]
                adder.add(rank, Load(shard.take(numbers), peaks[first:last]))

    def total(self) -> tuple[Tensor, Tensor]:
        rules, reduction = self._rules, self._reduction
        numbers, every = None, []
        for index, shard, adder in zip(self._indices, self._chunk.shards, self._adders, strict=True):
            total, owners = adder.total(), rules.at(reduction.owner(index, rules.world))
            if numbers is None:
                numbers = torch.empty(self._chunk.size, dtype=torch.float32, device=total.numbers.device)
            if reduction.rounds_total:
                message = owners.write(total, shard, reduction.total_stage, 0)
                own = shard.take(numbers)
                total = rules.read(message, shard, reduction.total_stage, own)
                shard.put(own, numbers)
            else:
                numbers[shard.start : shard.stop] = owners.end(total, shard).numbers
            every.append(total.peaks)
        assert numbers is not None
        return numbers, torch.cat(every)
