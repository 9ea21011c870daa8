"""A bucket's launches on CUDA as graphs: from its fourth step on the host makes one call for each, not one for each kernel.

All that a bucket's kernels are given stays the same from step to step: DDP's buffer, tables, and the memory of the workspaces.
So what a step launches is recorded in CUDA graphs, one for each stretch between two messages, and launched again in the next
steps. Messages are not recorded: torch starts each of them as always, so that its timeouts see them.

Not recorded are steps in which something depends on the step: noise, error feedback, delayed scales, measurements, one step in
64 whose figures are sampled, and anything that a dispatch mode (an audit) looks at.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.tensor import kernels
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.exchange import BucketExchange
from lowp.wire.link import GroupLink, Pending
from lowp.wire.plan import Bucket
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import Meter
from lowp.wire.settings import Settings
from lowp.wire.workspace import Workspaces

logger = logging.getLogger("lowp")

BEFORE = 3  # steps of a bucket, with the same memory, before it is recorded: tables and workspaces are made in them
_ATTEMPTS = 3  # recordings of a bucket, at most: a bucket that lies elsewhere again and again is not worth it

Begin = Callable[[], list[Pending]]
Marks = Callable[[], Tensor]
Make = Callable[[GroupLink, Callable[[Marks], None], Meter], BucketExchange]


def completed(flat: Tensor) -> "torch.futures.Future[Tensor]":
    """A future that is complete, and knows of no device.

    One that knows of a device pickles its result to find the tensors in it, which takes longer than all the rest of a step's
    launch. So streams are joined elsewhere, once in a step (`Compressor.step_done`).
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


class RecordingLink(GroupLink):
    """A link that keeps what is to be started, instead of starting it."""

    def __init__(self, link: GroupLink) -> None:
        self.group, self.rank, self.world, self.tagged = link.group, link.rank, link.world, link.tagged
        self.bytes_sent, self._taken = 0, 0
        self._kept: list[Begin] = []

    def start(self, begin: Begin) -> list[Pending]:
        self._kept.append(begin)
        return [Pending(None, "recorded")]  # something to wait for: here a graph ends

    @property
    def has_messages(self) -> bool:
        return bool(self._kept)

    def taken(self) -> list[Begin]:
        """What was to be started since the last call."""
        kept, self._kept = self._kept, []
        return kept


class _GraphScheduler(ChunkScheduler):
    """Runs the generators of one bucket. Where messages are to be started, it ends one graph and begins the next."""

    def __init__(self, link: RecordingLink) -> None:
        super().__init__()
        self._link = link
        self.segments: list[tuple[torch.cuda.CUDAGraph, list[Begin]]] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, exchange: BucketExchange) -> None:
        try:
            self._begin()
            exchange.start(self)
            self.run()
        finally:
            self._end()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")  # other threads work on

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.segments.append((graph, self._link.taken()))

    def _wait(self, task: Task) -> None:
        if task.pending and self._link.has_messages:  # those of other chunks may have been taken with the last graph
            self._end()
            self._begin()
        task.waits += 1


class ReplayedBucket:
    """What a step of one bucket launches and sends. It is recorded when it is first launched.

    `future` is what every such step returns: it is complete already, since all of a step is launched before it is returned.
    """

    def __init__(self, make: Make, link: GroupLink, workspaces: Workspaces, flat: Tensor) -> None:
        self._make, self._link, self._workspaces = make, link, workspaces
        self._recorded: tuple[Any, ...] | None = None  # what must live as long as the graphs do
        self._segments: Sequence[tuple[torch.cuda.CUDAGraph, list[Begin]]] = ()
        self._bytes = 0
        self.marks: Marks | None = None
        self.future = completed(flat)

    def launch(self) -> bool:
        """All of a step, on the current stream. False: it cannot be recorded, and nothing was launched."""
        if self._recorded is None and not self._record():
            return False
        for graph, begins in self._segments:
            graph.replay()
            for begin in begins:
                for pending in begin():
                    pending.wait()
        self._link.bytes_sent += self._bytes
        return True

    def _record(self) -> bool:
        link, found = RecordingLink(self._link), []
        exchange, recorder = self._make(link, found.append, Meter(samples=False)), _GraphScheduler(link)
        try:
            recorder.record(exchange)
        except RuntimeError as error:
            logger.warning("a bucket's kernels cannot be recorded as a CUDA graph, and are launched one by one: %s", error)
            return False
        self._segments, self._bytes, (self.marks,) = recorder.segments, link.bytes_sent, found
        self._recorded = exchange, self._workspaces.memory()
        return True


@dataclass
class _Seen:
    """A bucket: where it lay, how often in a row, how many recordings of it may still be made, and what was recorded."""

    bucket: Bucket
    address: int = 0
    times: int = 0
    recordings_left: int = _ATTEMPTS
    replayed: ReplayedBucket | None = None


@dataclass
class Replays:
    """The recorded buckets of one model."""

    settings: Settings
    reduction: Reduction | None
    _seen: dict[tuple[str, ...], _Seen] = field(default_factory=dict)

    def find(
        self, flat: Tensor, names: tuple[str, ...], bucket: Bucket, new: Callable[[], ReplayedBucket]
    ) -> ReplayedBucket | None:
        """The bucket's recording, to be started; None where everything must be launched anew."""
        if not flat.is_cuda or torch.cuda.is_current_stream_capturing() or compat.dispatch_modes():
            return None
        seen = self._seen.setdefault(names, _Seen(bucket))
        if seen.address != flat.data_ptr() or seen.bucket is not bucket:
            seen.address, seen.bucket, seen.times, seen.replayed = flat.data_ptr(), bucket, 0, None
            if not self._suits(flat, bucket):
                seen.recordings_left = 0
        seen.times += 1
        if seen.replayed is None and seen.times > BEFORE and seen.recordings_left > 0:
            seen.recordings_left -= 1
            seen.replayed = new()
        return seen.replayed

    def give_up(self, names: tuple[str, ...]) -> None:
        """This bucket cannot be recorded."""
        self._seen[names].replayed, self._seen[names].recordings_left = None, 0

    def _suits(self, flat: Tensor, bucket: Bucket) -> bool:
        settings = self.settings
        return (
            isinstance(self.reduction, (TwoShot, OneShot))
            and not (settings.error_feedback or settings.measure or settings.kahan or settings.sum_format)
            and not any(layer.codec.stochastic or layer.codec.keep < 1 for layer in bucket.layers)
            and "aps_delayed" not in bucket.scale_kinds
            and flat.dtype != torch.float64
            and kernels.kernel_policy() != "never"
        )
