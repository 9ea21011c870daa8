"""What a reduction is: an order of additions, and who sends what to whom.

The same order is written twice, side by side: `reduce` for one of many real ranks, as a generator that stops wherever it
waits for messages (so that several chunks can be under way at once), and `adder` for the virtual world, which is given one
rank's numbers after the other. `Rules` does the arithmetic of both. The conformance tests compare them bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.formats.floats import FP32
from lowp.wire.link import ChunkLink, Pending
from lowp.wire.messages import Messages
from lowp.wire.plan import Chunk, Shard
from lowp.wire.rules import Load, Rules, Stage
from lowp.wire.scaled import scaled


def row_length(length: int) -> int:
    """From one message in a buffer to the next: NCCL copies byte by byte where an address is no multiple of 16."""
    return -(-length // 16) * 16


@dataclass
class MessageBuffers:
    """The messages of some shards in one buffer, each at its place."""

    messages: Messages
    buffer: Tensor
    lengths: Sequence[int]

    @cached_property
    def _views(self) -> list[Tensor]:
        return [self.messages.view(self.buffer, index) for index in range(len(self.lengths))]

    def __getitem__(self, index: int) -> Tensor:
        return self._views[index]

    @cached_property
    def rows(self) -> Tensor:
        return self.buffer.view(len(self.lengths), -1)


@dataclass
class OwnersBuffers:
    """Messages to the owners of all shards, rank r of shard r, and room for those of all ranks to this one: in one buffer.

    This rank's own message to itself lies among those that it receives, `rows`: [ranks, bytes]; of a row, the first `length`
    count.
    """

    messages: Messages
    buffer: Tensor
    rows: Tensor
    length: int

    @cached_property
    def sent(self) -> dict[int, Tensor]:
        return {rank: self.messages.view(self.buffer, rank) for rank in range(len(self.rows))}

    @cached_property
    def received(self) -> dict[int, Tensor]:
        return dict(enumerate(self.rows[:, : self.length]))


@dataclass
class ChunkJob:
    """One chunk on one rank: from `source`, a rank's gradients as they are, to `target`, which gets the sum.

    `unscale` is given messages, the buffer where they are, how many there are and how far apart; it says by what each layer of
    their sum is to be multiplied, and divided.
    """

    chunk: Chunk
    source: Tensor
    target: Tensor
    rules: Rules
    link: ChunkLink
    unscale: "Callable[[Messages, Tensor, int, int], tuple[Tensor | None, int]]" = lambda *messages: (None, 1)

    @property
    def device(self) -> torch.device:
        return self.source.device

    def empty(self, *shape: int) -> Tensor:
        """Bytes."""
        return self.rules.workspace.empty(shape, torch.uint8, self.device)

    def messages(self, indices: Sequence[int], stage: Stage, begins: Sequence[int] | None = None) -> Messages:
        """Where the parts of some shards lie in one buffer. Worked out once."""
        rules = self.rules
        kind = (tuple(indices), stage, rules.sum_format, rules.choices, None if begins is None else tuple(begins))
        if kind not in self.chunk.messages:
            shards = [self.chunk.shards[index] for index in indices]
            starts = [shard.start for shard in shards]
            self.chunk.messages[kind] = Messages(shards, lambda part: rules.codec(part, stage), starts, begins)
        return self.chunk.messages[kind]

    @property
    def _everything(self) -> range:
        return range(len(self.chunk.shards))

    @cached_property
    def peaks(self) -> Tensor:
        """The header byte of each part, where the codec does not make its own: how large the rank's numbers are."""
        messages = self.messages(self._everything, Stage.ADDEND)
        return messages.own_peaks(self.source, self.rules.world, self.rules.workspace)

    @cached_property
    def numbers(self) -> Tensor:
        """The source in float32, each layer times its factor."""
        return scaled(self.source, self.chunk, self.rules.factors)

    def load(self, index: int) -> Load:
        """A shard's numbers."""
        shard = self.chunk.shards[index]
        first, last = self.chunk.first_parts[index : index + 2]
        return Load(shard.take(self.numbers), self.peaks[first:last])

    def write(self, index: int, stage: Stage, load: Load | None = None, actor: int | None = None) -> Tensor:
        shard = self.chunk.shards[index]
        actor = self.link.rank if actor is None else actor
        return self.rules.write(self.load(index) if load is None else load, shard, stage, actor)

    def write_own(self, messages: Messages, indices: Sequence[int], stage: Stage, out: Tensor) -> None:
        """This rank's own numbers in the messages of some shards, all at once."""
        rules = self.rules
        rules.encode(messages, self.source, out, stage, self.link.rank, rules.factors, peaks_of=rules.world)
        if rules.feedback is None:
            return
        lost = rules.workspace.scratch(self.chunk.size, torch.float32, self.device)
        messages.decode(out, lost)
        torch.sub(self.numbers, lost, out=lost)
        if len(indices) == len(self.chunk.shards):
            rules.feedback.keep(rules.rank, self.chunk, lost, rules.factors, of_sum=False)
            return
        for shard in (self.chunk.shards[index] for index in indices):
            rules.feedback.keep(rules.rank, shard, shard.take(lost), rules.factors, of_sum=False)

    def _kept(self, name: Any, make: Callable[[], Any]) -> Any:
        """What depends on the chunk's cut and the codecs alone."""
        kind = name, self.rules.sum_format, self.rules.choices
        if kind not in self.chunk.messages:
            self.chunk.messages[kind] = make()
        return self.chunk.messages[kind]

    def write_to_owners(self) -> OwnersBuffers:
        """Messages for the owners of all shards, and room for those to this one."""
        me, ranks = self.link.rank, range(self.link.world)

        def make() -> tuple[Messages, int, int]:
            lengths = [self.rules.length(self.chunk.shards[rank], Stage.ADDEND) for rank in ranks]
            begins, end = [], 0
            for rank in ranks:
                begins.append(end)
                end += 0 if rank == me else row_length(lengths[rank])
            begins[me] = end + me * row_length(lengths[me])
            return self.messages(ranks, Stage.ADDEND, begins), end, lengths[me]

        messages, end, length = self._kept(("owners", me), make)
        buffer = self.empty(end + len(ranks) * row_length(length))
        buffers: OwnersBuffers = self.rules.workspace.once(
            messages, "owners", lambda: OwnersBuffers(messages, buffer, buffer[end:].view(len(ranks), -1), length)
        )
        self.write_own(messages, ranks, Stage.ADDEND, buffer)
        return buffers

    def write_to_all(self) -> tuple[Tensor, int]:
        """Room for the whole chunk's messages of all ranks, where this one's lies already: [ranks, bytes]; and their length."""
        messages: Messages = self._kept("all", lambda: self.messages(self._everything, Stage.ADDEND))
        received = self.empty(self.link.world, row_length(messages.length))
        own = self.rules.workspace.once(messages, "own", lambda: received[self.link.rank])
        self.write_own(messages, self._everything, Stage.ADDEND, own)
        return received, messages.length

    def read(self, message: Tensor, index: int, stage: Stage) -> Load:
        return self.rules.read(message, self.chunk.shards[index], stage)

    def buffer(self, index: int, stage: Stage) -> Tensor:
        return self.rules.buffer(self.chunk.shards[index], stage, self.device)

    def join(self, messages: list[Tensor]) -> Tensor:
        """Several messages as one."""
        return (
            messages[0]
            if len(messages) == 1
            else torch.cat(messages)
            if messages
            else self.source.new_empty(0, dtype=torch.uint8)
        )

    def write_all(self, indices: Sequence[int], stage: Stage) -> Tensor:
        """This rank's own numbers of some shards, as one message."""
        messages = self.messages(indices, stage)
        message = self.empty(messages.length)
        self.write_own(messages, indices, stage, message)
        return message

    def buffer_for(self, indices: Iterable[int], stage: Stage) -> Tensor:
        length = sum(self.rules.length(self.chunk.shards[index], stage) for index in indices)
        return self.empty(length)

    def buffer_for_ranks(self, indices: Sequence[int], stage: Stage, ranks: int) -> Tensor:
        """For several ranks' messages of some shards: [ranks, bytes]."""
        return self.empty(ranks, self.messages(indices, stage).length)

    def fold(self, received: Tensor, indices: Sequence[int], stage: Stage, actors: Sequence[int]) -> dict[int, Load]:
        """The sums of such messages, by shard."""
        rules, shards, messages = self.rules, self.chunk.shards, self.messages(indices, stage)
        if not all(rules.adds_plainly(shards[index]) for index in indices):
            views = {index: [messages.view(row, number) for row in received] for number, index in enumerate(indices)}
            return {
                index: rules.fold((rules.read(view, shards[index], stage) for view in views[index]), shards[index], actors)
                for index in indices
            }
        with rules.timed("decode", self.device):
            numbers = self.rules.workspace.empty((self.chunk.size,), torch.float32, self.device)
            messages.decode(received.view(-1), numbers, messages=len(received), stride=messages.length)
            peaks = messages.peaks(received.view(-1), len(received), messages.length)
        split = peaks.split([len(shards[index].parts) for index in indices])
        return {index: Load(shards[index].take(numbers), own) for index, own in zip(indices, split, strict=True)}

    def split(self, message: Tensor, indices: Iterable[int], stage: Stage) -> dict[int, Tensor]:
        """The shards' own messages in one that was joined."""
        found, position = {}, 0
        for index in indices:
            length = self.rules.length(self.chunk.shards[index], stage)
            found[index] = message[position : position + length]
            position += length
        return found

    def under(self, rules: Rules) -> "ChunkJob":
        return replace(self, rules=rules)

    def totals(self) -> MessageBuffers:
        return self.buffers(Stage.TOTAL)

    def buffers(self, stage: Stage) -> MessageBuffers:
        """Room for the messages of all shards, each at a multiple of the longest one's length."""

        def make() -> tuple[Messages, int, list[int]]:
            lengths = [self.rules.length(shard, stage) for shard in self.chunk.shards]
            stride = row_length(max(lengths))
            begins = range(0, len(lengths) * stride, stride) if stride else None
            return self.messages(self._everything, stage, begins), len(lengths) * stride, lengths

        messages, length, lengths = self._kept(("buffers", stage), make)
        buffer = self.empty(length)
        return self.rules.workspace.once(messages, "buffers", lambda: MessageBuffers(messages, buffer, lengths))

    def finish(self, totals: MessageBuffers) -> None:
        """Take the sum from the bytes that everybody gets."""
        factors, divisor = self.unscale(totals.messages, totals.buffer, 1, 0)
        with self.rules.timed("decode", self.device):
            totals.messages.decode(totals.buffer, self.target, factors, divisor)

    def finish_sum(self, received: Tensor, actors: Iterable[int]) -> None:
        """Take the sum of messages [ranks, bytes] of the whole chunk, which nobody rounds once more."""
        (shard,) = self.chunk.shards
        rules, messages = self.rules, self.messages([0], Stage.ADDEND)
        if rules.adds_plainly(shard):
            flat = received.view(-1)
            factors, divisor = self.unscale(messages, flat, len(received), received.shape[1])
            with rules.timed("decode", self.device):
                messages.decode(flat, self.target, factors, divisor, len(received), received.shape[1])
            return
        total = rules.fold_messages(received, shard, Stage.ADDEND, actors)
        rules.end(total, shard)
        factors, divisor = self.unscale(messages, received.view(-1), len(received), received.shape[1])
        self.target.copy_(scaled(total.numbers, self.chunk, factors, divisor))


Steps = Generator[list[Pending], None, Any]


class Adder(Protocol):
    """A shard's sum in the virtual world, given one rank's numbers after the other."""

    def add(self, rank: int, load: Load) -> None: ...

    def total(self) -> Load: ...


class Reduction(ABC):
    """Frozen; printed as the name that `reduction_of` parses."""

    one_order = False  # are all shards added in the same order of ranks, so that it does not matter where a chunk is cut?
    rounds_total = True  # is the sum of all ranks rounded, to be sent?
    sums_in_format = True  # are partial sums rounded to the wire's format unless told otherwise?

    @property
    def total_stage(self) -> Stage:
        """As what the sum of all ranks is rounded, to be sent."""
        return Stage.TOTAL

    def shards(self, world: int) -> int:
        return world

    def addends(self, world: int) -> int:
        """How many messages in the wire's format are added up: one of each rank, or of each node."""
        return world

    def steps(self, world: int) -> int | None:
        """How often `reduce` waits, if that is the same on all ranks: it lets chunks overlap more."""
        return None

    @abstractmethod
    def reduce(self, job: ChunkJob) -> Steps:
        """What one rank does for one chunk."""

    @abstractmethod
    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Adder:
        """The same additions in the same order, for one shard of the virtual world.

        Where all shards are added in one order, the virtual world may have cut none: then the index is None.
        """

    @abstractmethod
    def owner(self, index: int | None, world: int) -> int | None:
        """The rank that rounds a shard's total; for all shards in one (None), None stands for the owner of each element."""

    def turn(self, rank: int, index: int, world: int) -> int:
        """Where shard `index` does not begin with rank 0: the pass over all ranks (0 or 1) in which this rank is added."""
        return 0

    def of_size(self, elements: int) -> "Reduction":
        """The reduction for a bucket of this many elements."""
        return self


def default_sum_format(reduction: Reduction, sum_format: AnyFormat | None) -> AnyFormat | None:
    """The format of sums for `Rules`: where it is not given, float32 or (None) the wire's own."""
    return sum_format if sum_format is not None or reduction.sums_in_format else FP32
