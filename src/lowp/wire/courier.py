"""The thread that carries gradients, so that backward can go on computing.

One thread, one queue, buckets in order. (A second collective started from a future's callback hangs or mismatches on gloo as
soon as there are several buckets.) On CUDA there is no thread: nothing here waits for the device, and a side stream keeps the
order.

Whoever watches the operations of the thread that sends a bucket (`lowp.audit`, say) also sees what is done to it here: the
sender's dispatch modes travel with the bucket.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from lowp.wire.communicator import Communicator
from lowp.wire.exchange import BucketExchange
from lowp.wire.faults import CollectiveError, blames_this_rank, explain
from lowp.wire.pump import Pump
from lowp.wire.report import Meter


@dataclass
class Parcel:
    """A bucket to carry. `arrived` is called when it is done, or has failed. `modes` are the sender's, noted by `send`."""

    exchange: BucketExchange
    meter: Meter
    name: str
    arrived: Callable[[], None]
    modes: tuple[TorchDispatchMode, ...] = ()


class Courier:
    """Carries buckets one after the other. After a failure `error` says what happened, and nothing is carried any more."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self.error: Exception | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._open: list[Parcel] = []
        self._thread: threading.Thread | None = None
        if self._stream is None:
            self._thread = threading.Thread(target=self._carry, name="lowp-courier", daemon=True)
            self._thread.start()
            _couriers.add(self)

    def send(self, parcel: Parcel) -> None:
        if self.error is not None:
            parcel.arrived()
        elif self._stream is not None:
            self._carry_on_stream(parcel)
        else:
            parcel.modes = _watching_modes()
            self._parcels.put(parcel)

    def _carry_on_stream(self, parcel: Parcel) -> None:
        """Issue everything on the side stream; `arrived` runs there too, so that a future knows what to wait for."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        pump = Pump()
        try:
            with torch.cuda.stream(self._stream):
                parcel.exchange.start(pump)
                pump.run()
        except Exception as error:
            self._fail(error, parcel.name, pump)
        with torch.cuda.stream(self._stream):
            parcel.arrived()

    def _carry(self) -> None:
        pump = Pump()
        while True:
            try:
                parcel = self._parcels.get(block=pump.idle)
            except queue.Empty:
                parcel = None
            else:
                if parcel is None:
                    return
            try:
                if parcel is not None:
                    self._open.append(parcel)
                    parcel.exchange.start(pump)
                self._turn(pump)
                self._hand_over()
            except Exception as error:
                self._fail(error, self._open[0].name if self._open else "a bucket", pump)
                return

    def _turn(self, pump: Pump) -> None:
        """A turn of the pump, seen by whoever watches one of the buckets that are open: it may bring any of them further."""
        modes = dict.fromkeys(mode for parcel in self._open for mode in parcel.modes)
        if modes:
            with _inside(modes):
                pump.turn()
        else:
            pump.turn()

    def _hand_over(self) -> None:
        """Tell whom it concerns that a bucket has arrived."""
        for parcel in [parcel for parcel in self._open if parcel.exchange.complete]:
            self._open.remove(parcel)
            parcel.arrived()

    def _fail(self, error: Exception, name: str, pump: Pump) -> None:
        """Nobody waits for ever: everything that was on its way arrives, and the step raises the error.

        That is a CollectiveError, unless it was this rank's own work that failed: then the user sees the error itself.
        """
        try:
            explained = explain(error, name, pump.waiting_for, self._communicator.group)
            if blames_this_rank(error):
                error.add_note(f"lowp: {name} on rank {self._communicator.rank} ended with this; no gradient is sent any more")
                self.error = error
            else:
                explained.__cause__ = error
                self.error = explained
        except Exception as second:  # the process is being taken down around us
            self.error = CollectiveError(f"{name} failed: {error} (and calling the roll: {second})")
        pump.drop()
        self._communicator.close(failed=True)
        for parcel in self._open:
            parcel.arrived()
        self._open.clear()
        while True:
            try:
                parcel = self._parcels.get_nowait()
            except queue.Empty:
                return
            if parcel is not None:
                parcel.arrived()

    def close(self) -> None:
        """Finish what is on its way and end the thread."""
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._parcels.put(None)
            self._thread.join(timeout=self._communicator.timeout.total_seconds() + 10)
        self._communicator.close(failed=self.error is not None)

    def abandon(self) -> None:
        """At the interpreter's end: do not let gloo wait for a timeout."""
        if self._open:
            self._communicator.close(failed=True)


def _watching_modes() -> tuple[TorchDispatchMode, ...]:
    """The dispatch modes of this thread, outermost first, without those that a compiler works in (fake tensors, say)."""
    return tuple(mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode())


@contextmanager
def _inside(modes: Collection[TorchDispatchMode]) -> Iterator[None]:
    """Enter modes on this thread alone.

    `with mode:` would also set torch's flag "in a mode", which all threads share; where the sender leaves before us, we would
    set it again on our way out, for ever, and torch.compile would not compile any more.
    """
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


_couriers: "weakref.WeakSet[Courier]" = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for courier in list(_couriers):
        courier.abandon()
