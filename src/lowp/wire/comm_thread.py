"""The thread that reduces gradients while backward goes on computing.

One thread takes buckets from one queue, in order. (A second collective that is started from a future's callback hangs or
mismatches on gloo as soon as there are several buckets.)

On CUDA there is no thread: the host does not wait for the device, and a side stream keeps the order. (With a thread, which
launches beside backward, steps took longer: the two wait for each other's turn at Python's lock. docs/LOG.md has figures.)

A dispatch mode of the thread that sends a bucket (that of `lowp.audit`, say) is entered here too while the bucket is reduced.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lowp import compat
from lowp.compat import TorchDispatchMode
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.communicator import Communicator
from lowp.wire.exchange import BucketExchange
from lowp.wire.faults import CollectiveError, blames_this_rank, explain
from lowp.wire.replay import ReplayedBucket
from lowp.wire.report import Meter


@dataclass
class PendingBucket:
    """A bucket to reduce. `arrived` is called when it is done, or has failed. `modes` are the sender's, noted by `send`."""

    exchange: BucketExchange
    meter: Meter
    name: str
    arrived: Callable[[], None]
    modes: tuple[TorchDispatchMode, ...] = ()


class CommThread:
    """Reduces buckets one after the other. After a failure `error` says what happened, and no bucket is reduced any more."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self.error: Exception | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[PendingBucket | None] = queue.SimpleQueue()
        self._open: list[PendingBucket] = []
        self._thread: threading.Thread | None = None
        if self._stream is None:
            self._thread = threading.Thread(target=self._carry, name="lowp-comm", daemon=True)
            self._thread.start()
            _open_threads.add(self)

    def send(self, bucket: PendingBucket) -> None:
        if self.error is not None:
            bucket.arrived()
        elif self._stream is not None:
            self._carry_on_stream(bucket)
        else:
            bucket.modes = _watching_modes()
            self._queue.put(bucket)
            if self.error is not None:  # the thread may have ended before it saw this bucket
                self._give_up()

    def launch(self, bucket: ReplayedBucket, name: str) -> bool:
        """Launch a recorded bucket on the side stream. False: nothing was launched, it must be sent."""
        with self._on_side_stream():
            try:
                return bucket.launch()
            except Exception as error:
                self._fail(error, name, ChunkScheduler())
                return True

    def _carry_on_stream(self, bucket: PendingBucket) -> None:
        """Issue everything on the side stream."""
        scheduler = ChunkScheduler()
        with self._on_side_stream():
            try:
                bucket.exchange.start(scheduler)
                scheduler.run()
            except Exception as error:
                self._fail(error, bucket.name, scheduler)
            bucket.arrived()

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """What is launched within waits for what was launched before. (`torch.cuda.stream` and `wait_stream` do the same; this
        takes a third of their time, and is entered for each bucket.)"""
        assert self._stream is not None
        assert self._event is not None
        caller = torch.cuda.current_stream(self._stream.device)
        self._event.record(caller)
        self._stream.wait_event(self._event)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(caller)

    def join_stream(self) -> None:
        """On CUDA, what comes next on the current stream waits for all that was sent."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _carry(self) -> None:
        scheduler = ChunkScheduler()
        while True:
            try:
                bucket = self._queue.get(block=scheduler.idle)
            except queue.Empty:
                bucket = None
            else:
                if bucket is None:
                    return
            try:
                if bucket is not None:
                    self._open.append(bucket)
                    bucket.exchange.start(scheduler)
                self._turn(scheduler)
                self._hand_over()
            except Exception as error:
                self._fail(error, self._open[0].name if self._open else "a bucket", scheduler)
                return

    def _turn(self, scheduler: ChunkScheduler) -> None:
        """A turn of the scheduler, in the dispatch modes of all open buckets: it may advance any of them."""
        modes = dict.fromkeys(mode for bucket in self._open for mode in bucket.modes)
        if modes:
            with compat.in_dispatch_modes(modes):
                scheduler.turn()
        else:
            scheduler.turn()

    def _hand_over(self) -> None:
        """Call `arrived` of the buckets that are complete."""
        for bucket in [bucket for bucket in self._open if bucket.exchange.complete]:
            self._open.remove(bucket)
            bucket.arrived()

    def _fail(self, error: Exception, name: str, scheduler: ChunkScheduler) -> None:
        """Call `arrived` of every bucket, so that no one waits for ever. The step raises the error.

        That is a CollectiveError, unless it was this rank's own work that failed: then the user sees the error itself.
        """
        try:
            explained = explain(error, name, scheduler.waiting_for, self._communicator.group)
            if blames_this_rank(error):
                error.add_note(f"lowp: {name} on rank {self._communicator.rank} ended with this; no gradient is sent any more")
                self.error = error
            else:
                explained.__cause__ = error
                self.error = explained
        except Exception as second:  # the process is being taken down around us
            self.error = CollectiveError(f"{name} failed: {error} (and calling the roll: {second})")
        scheduler.drop()
        self._communicator.close(failed=True)
        for bucket in self._open:
            bucket.arrived()
        self._open.clear()
        self._give_up()

    def _give_up(self) -> None:
        """Call `arrived` of the buckets that nobody will reduce."""
        while True:
            try:
                bucket = self._queue.get_nowait()
            except queue.Empty:
                return
            if bucket is not None:
                bucket.arrived()

    def close(self) -> None:
        """Finish the buckets that were sent, and end the thread."""
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join(timeout=self._communicator.timeout.total_seconds() + 10)
        self._communicator.close(failed=self.error is not None)

    def abandon(self) -> None:
        """At the interpreter's end: do not let gloo wait for a timeout."""
        if self._open:
            self._communicator.close(failed=True)


def _watching_modes() -> tuple[TorchDispatchMode, ...]:
    """The dispatch modes of this thread, outermost first, without those that a compiler works in (fake tensors, say)."""
    return tuple(mode for mode in compat.dispatch_modes() if not mode.is_infra_mode())


_open_threads: "weakref.WeakSet[CommThread]" = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for thread in list(_open_threads):
        thread.abandon()
