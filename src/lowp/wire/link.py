"""Messages to and from the other ranks of a `torch.distributed` group."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

_MESSAGES = 1 << 12  # from one rank to another for one chunk
_SEQUENCES = 1 << 18  # after which the numbers of chunks begin again


def agreement_bytes(layers: int, world: int) -> int:
    """What a rank sends to agree on the scales of some layers: a byte each, there and back (by torch)."""
    return 2 * layers if world > 1 else 0


@dataclass(frozen=True)
class Pending:
    """A message under way: torch's handle, and what it is, for errors."""

    work: Any
    what: str

    def wait(self) -> None:
        self.work.wait()


class GroupLink:
    """One rank's link to the ranks of a group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.bytes_sent = 0
        self.tagged = dist.get_backend(group) == "gloo"
        self._taken = 0
        self.chosen: dict[str, Any] = {}  # what reduction='auto' has measured and found (lowp/predict/auto.py)

    def start(self, begin: "Callable[[], list[Pending]]") -> list[Pending]:
        """Everything that NCCL sends goes through here (see replay.py)."""
        return begin()

    def maximum(self, numbers: Tensor) -> list[Pending]:
        """Start replacing each number (a byte) by the largest of all ranks."""
        if self.world == 1:
            return []
        self.bytes_sent += agreement_bytes(numbers.numel(), self.world)

        def begin() -> list[Pending]:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
            return [Pending(work, "agreeing on scales")]

        return self.start(begin)

    def plain_sum(self, numbers: Tensor) -> list[Pending]:
        """Start adding up without compression, to measure errors by. Not counted: it is not part of the exchange."""
        if self.world == 1:
            return []
        return [Pending(dist.all_reduce(numbers, group=self.group, async_op=True), "adding up without compression")]

    def take_number(self) -> int:
        """The next place in the order of everything that this link carries. All ranks take them alike."""
        self._taken += 1
        return self._taken

    def for_chunk(self) -> "ChunkLink":
        """A link for the next chunk."""
        return ChunkLink(self, self.take_number())


class ChunkLink:
    """Messages of one chunk, each with a tag of its own, so that chunks may overtake each other.

    Everything that a reduction sends is a message from one rank to another. That needs no subgroups, no equal sizes and no
    padding, and gloo starts it without a thread of its own. The tag is the chunk's number and the number of the message
    between these two ranks: both ends count alike. NCCL knows no tags: there, chunks follow each other on one stream.
    """

    def __init__(self, link: GroupLink, number: int) -> None:
        self._link = link
        self.number = number
        self._tag = number % _SEQUENCES * _MESSAGES
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.rank = link.rank
        self.world = link.world

    def send_receive(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        """Start sending a message to each rank of `sends`, and receiving one from each rank of `receives`."""
        if self.world == 1:
            return []
        outgoing = {rank: message for rank, message in sends.items() if rank != self.rank and message.numel()}
        incoming = {rank: message for rank, message in receives.items() if rank != self.rank and message.numel()}
        self._link.bytes_sent += sum(message.numel() for message in outgoing.values())
        return self._start_tagged(outgoing, incoming) if self._link.tagged else self._start_together(outgoing, incoming)

    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Pending]:
        """Send this rank's row of [ranks, bytes] to everybody, and receive theirs; of a row, the first `lengths` bytes count.

        NCCL has a collective for it, which is half again as fast as messages from rank to rank.
        """
        if self.world == 1:
            return []
        if self._link.tagged:
            rows = {rank: messages[rank, :length] for rank, length in enumerate(lengths)}
            return self.send_receive(dict.fromkeys(rows, rows[self.rank]), rows)
        self._link.bytes_sent += (self.world - 1) * lengths[self.rank]
        own, every, group = messages[self.rank], messages.view(-1), self._link.group

        def begin() -> list[Pending]:
            return [Pending(dist.all_gather_into_tensor(every, own, group=group, async_op=True), "gathering messages")]

        return self._link.start(begin)

    def _start_tagged(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> list[Pending]:
        pending = []
        for rank, message in incoming.items():
            tag = self._tag + self._received[rank]
            self._received[rank] += 1
            work = dist.irecv(message, group=self._link.group, group_src=rank, tag=tag)
            pending.append(Pending(work, f"receiving {message.numel()} bytes from rank {rank}"))
        for rank, message in outgoing.items():
            tag = self._tag + self._sent[rank]
            self._sent[rank] += 1
            work = dist.isend(message, group=self._link.group, group_dst=rank, tag=tag)
            pending.append(Pending(work, f"sending {message.numel()} bytes to rank {rank}"))
        return pending

    def _start_together(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> list[Pending]:
        group = self._link.group
        operations = [dist.P2POp(dist.irecv, message, group=group, group_peer=rank) for rank, message in incoming.items()]
        operations += [dist.P2POp(dist.isend, message, group=group, group_peer=rank) for rank, message in outgoing.items()]
        if not operations:
            return []
        return self._link.start(lambda: [Pending(work, "exchanging messages") for work in dist.batch_isend_irecv(operations)])
