"""What a reduction is: an order of additions, and who sends what to whom.

The same order is written twice, side by side: `exchange` for one of many real ranks, as a generator that stops wherever it
waits for messages (so that several chunks can be under way at once), and `adder` for the virtual world, which is given one
rank's numbers after the other. `Rules` does the arithmetic of both. The conformance tests compare them bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.formats.floats import FP32
from lowp.wire.link import ChunkLink, Pending
from lowp.wire.plan import Chunk, Shard
from lowp.wire.rules import Load, Rules, Stage


@dataclass
class Job:
    """One chunk on one rank. The sum takes the place of the numbers."""

    chunk: Chunk
    numbers: Tensor
    peaks: Tensor
    rules: Rules
    link: ChunkLink

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def load(self, index: int) -> Load:
        """A shard's numbers, as views: what is written to them is written to the job's."""
        shard = self.chunk.shards[index]
        first, last = self.chunk.first_parts[index : index + 2]
        return Load(self.numbers[shard.start : shard.stop], self.peaks[first:last])

    def write(self, index: int, stage: Stage, load: Load | None = None, actor: int | None = None) -> Tensor:
        shard = self.chunk.shards[index]
        actor = self.link.rank if actor is None else actor
        return self.rules.write(self.load(index) if load is None else load, shard, stage, actor)

    def read(self, message: Tensor, index: int, stage: Stage) -> Load:
        return self.rules.read(message, self.chunk.shards[index], stage)

    def room(self, index: int, stage: Stage) -> Tensor:
        return self.rules.room(self.chunk.shards[index], stage, self.device)

    def join(self, messages: list[Tensor]) -> Tensor:
        """Several messages as one."""
        return (
            messages[0]
            if len(messages) == 1
            else torch.cat(messages)
            if messages
            else self.numbers.new_empty(0, dtype=torch.uint8)
        )

    def write_all(self, indices: Iterable[int], stage: Stage) -> Tensor:
        return self.join([self.write(index, stage) for index in indices])

    def room_for(self, indices: Iterable[int], stage: Stage) -> Tensor:
        length = sum(self.rules.length(self.chunk.shards[index], stage) for index in indices)
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def split(self, message: Tensor, indices: Iterable[int], stage: Stage) -> dict[int, Tensor]:
        """The shards' own messages in one that was joined."""
        found, position = {}, 0
        for index in indices:
            length = self.rules.length(self.chunk.shards[index], stage)
            found[index] = message[position : position + length]
            position += length
        return found

    def under(self, rules: Rules) -> "Job":
        return replace(self, rules=rules)

    def finish(self, message: Tensor, index: int) -> None:
        """Take a shard's total from the bytes that everybody gets."""
        load = self.load(index)
        load.peaks.copy_(self.rules.read(message, self.chunk.shards[index], Stage.TOTAL, load.numbers).peaks)


Steps = Generator[list[Pending], None, Any]


class Adder(Protocol):
    """A shard's sum in the virtual world, given one rank's numbers after the other."""

    def add(self, rank: int, load: Load) -> None: ...

    def total(self) -> Load: ...


class Reduction(ABC):
    """Frozen; printed as the name that `reduction_of` parses."""

    one_order = False  # are all shards added in the same order of ranks, so that it does not matter where a chunk is cut?
    rounds_total = True  # is the sum of all ranks rounded to the wire's format, to be sent?
    sums_in_format = True  # are partial sums rounded to the wire's format unless told otherwise?

    def shards(self, world: int) -> int:
        return world

    def steps(self, world: int) -> int | None:
        """How often `exchange` waits, if that is the same on all ranks: it lets chunks overlap more."""
        return None

    @abstractmethod
    def exchange(self, job: Job) -> Steps:
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


def default_accumulate(reduction: Reduction, accumulate: AnyFormat | None) -> AnyFormat | None:
    """The format of sums for `Rules`: where it is not given, float32 or (None) the wire's own."""
    return accumulate if accumulate is not None or reduction.sums_in_format else FP32
