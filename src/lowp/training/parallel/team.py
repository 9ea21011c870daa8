"""The ranks that hold one model together, and the three things that they do with each other.

    gather    every rank contributes a message, and all get all of them
    add_up    every rank contributes numbers, and all get the sum, which travels in a codec
    pass_on   one rank sends a message to another

`RealTeam` is one of several processes, `VirtualTeam` is one process that stands for all ranks. Whatever is built on a team is
written once, for "the ranks that live here": one of them, or all. That is why a virtual team computes what the real one does,
bit for bit: the same products of the same shapes, the same bytes. (On the same kind of processor, with as many threads a rank:
torch promises no more, docs/EQUALITY.md.)
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.training.parallel.messages import TensorCodec
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.collectives import all_reduce, communicator_for
from lowp.wire.communicator import agree
from lowp.wire.link import ChunkLink, Pending
from lowp.wire.report import Meter
from lowp.wire.virtual import VirtualExchange


class Team(ABC):
    """`world` ranks, of which `local` live in this process."""

    world: int
    local: range

    def __init__(self) -> None:
        self._sent = self._of_fp32 = 0.0  # by all ranks that live here

    @property
    def bytes_sent(self) -> float:
        """By each rank that lives here so far; where several do, on average."""
        return self._sent / len(self.local)

    @property
    def bytes_of_fp32(self) -> float:
        """What would have been sent in float32."""
        return self._of_fp32 / len(self.local)

    def here(self, rank: int) -> bool:
        return rank in self.local

    def __deepcopy__(self, memo: dict) -> "Team":
        """A copy of a model works with the same ranks."""
        return self

    def _count(self, sent: float, of_fp32: float) -> None:
        self._sent += sent
        self._of_fp32 += of_fp32

    @abstractmethod
    def agree(self, said: str, what: str) -> None:
        """All ranks must say the same; a ValueError names both sides."""

    @abstractmethod
    def gather(self, messages: Sequence[Tensor], lengths: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        """All ranks' messages, from those of the ranks here.

        `lengths` are their bytes, and `counts` how many numbers are in them, both for every rank of the team.
        """

    @abstractmethod
    def add_up(self, addends: Sequence[Tensor], codec: TensorCodec) -> Tensor:
        """The sum over all ranks: decoded and added in float32, in rank order, then sent once more, to all."""

    @abstractmethod
    def pass_on(self, message: Tensor | None, source: int, target: int, room: Tensor | None, count: int) -> Tensor | None:
        """The source's message where the target lives, and None elsewhere.

        The source gives the message, with `count` numbers in it, the target `room` of its length.
        """


class RealTeam(Team):
    """This process's place among the ranks of a `torch.distributed` group (None: all of them)."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("a team of real ranks needs torch.distributed: call torch.distributed.init_process_group first")
        self._group = group
        self.world = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.local = range(rank, rank + 1)

    def agree(self, said: str, what: str) -> None:
        agree(self._group, said, what)

    def gather(self, messages: Sequence[Tensor], lengths: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        (mine,) = messages
        me, others = self.local.start, self.world - 1
        arrived = {r: mine if r == me else mine.new_empty(length) for r, length in enumerate(lengths)}
        self._send_receive(dict.fromkeys(range(self.world), mine), arrived, mine.device, "gathering activations")
        self._count(others * mine.numel(), others * 4 * counts[me])
        return list(arrived.values())

    def add_up(self, addends: Sequence[Tensor], codec: TensorCodec) -> Tensor:
        (mine,) = addends
        total = mine.clone(memory_format=torch.contiguous_format)
        report = all_reduce(total, codec.codec.format, scale=codec.codec.scale, group=self._group)
        self._count(report.bytes_sent, report.bytes_of_fp32)
        return total

    def pass_on(self, message: Tensor | None, source: int, target: int, room: Tensor | None, count: int) -> Tensor | None:
        doing = f"sending activations from rank {source} to rank {target}"
        if message is not None:
            self._count(message.numel(), 4 * count)
            self._send_receive({target: message}, {}, message.device, doing)
        else:
            assert room is not None, "a rank that neither sends nor receives does not take part"
            self._send_receive({}, {source: room}, room.device, doing)
        return room

    def _send_receive(self, sends: dict[int, Tensor], receives: dict[int, Tensor], device: torch.device, doing: str) -> None:
        """Send and wait. A rank that dies meanwhile is named, as everywhere on the wire."""
        communicator = communicator_for(self._group, device)
        link = communicator.link.for_chunk()
        scheduler = ChunkScheduler()
        scheduler.add(Task(link.number, _messages(link, sends, receives), Meter()))
        communicator.run(scheduler, doing)


def _messages(link: ChunkLink, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Generator[list[Pending], None, None]:
    yield link.send_receive(sends, receives)


class VirtualTeam(Team):
    """All ranks in this process."""

    def __init__(self, world: int) -> None:
        super().__init__()
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"a team has at least one rank, not {world!r}")
        self.world = world
        self.local = range(world)

    def agree(self, said: str, what: str) -> None:
        """One process is of one mind."""

    def gather(self, messages: Sequence[Tensor], lengths: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        self._count((self.world - 1) * sum(lengths), (self.world - 1) * 4 * sum(counts))
        return list(messages)

    def add_up(self, addends: Sequence[Tensor], codec: TensorCodec) -> Tensor:
        exchange = VirtualExchange(
            self.world, {"sum": addends[0].shape}, codec.codec.format, scale=codec.codec.scale, reduction="two_shot"
        )
        for rank in self.local:
            self._count(*exchange.bytes_sent(rank, addends[0].device, addends[0].dtype))
        return exchange.reduce(lambda rank: {"sum": addends[rank]}, mean=False)["sum"]

    def pass_on(self, message: Tensor | None, source: int, target: int, room: Tensor | None, count: int) -> Tensor | None:
        assert message is not None
        self._count(message.numel(), 4 * count)
        return message
