"""Where the time of a step goes: samples, forward and backward, the exchange of gradients, the update.

Phases follow each other: entering one ends the one before it. On a CPU that is a look at the clock. On CUDA the host runs ahead
of the device, and its clock says nothing; there an event is recorded between two phases, in one step of those between two
records. Events are read when the record is written, which waits for the device anyway.

Real ranks send a bucket while backward goes on: `exchange` is what remains to be waited for.
"""

import time
from itertools import pairwise

import torch

INPUT, COMPUTE, EXCHANGE, UPDATE = PHASES = ("input", "compute", "exchange", "update")


class StepClock:
    """Seconds by phase. Between steps no phase is under way."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._phase, self._since = "", 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        self._events: list[tuple[str, torch.cuda.Event]] = []  # of the first step; each begins a phase, "" ends the last one

    def enter(self, phase: str) -> None:
        if self._on_cuda:
            if self._steps == 0:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._events.append((phase, event))
            return
        now = time.perf_counter()
        if self._phase:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def step_done(self) -> None:
        self.enter("")
        self._steps += 1

    def leave(self) -> None:
        """The step was not completed: what is known of it does not count, on CUDA; on a CPU it is a part of the mean."""
        if self._on_cuda and self._steps == 0:
            self._events.clear()
        self._phase = ""

    def take(self) -> dict[str, float]:
        """Seconds of a step, by phase: the mean of the steps since the last call (on CUDA, of one). Empty: not known."""
        if self._on_cuda:
            found = self._read_events()
        else:
            found = {phase: seconds / self._steps for phase, seconds in self._seconds.items()} if self._steps else {}
        self._seconds, self._steps = dict.fromkeys(PHASES, 0.0), 0
        return found

    def _read_events(self) -> dict[str, float]:
        events, self._events = self._events, []
        if not events or events[-1][0]:
            return {}
        events[-1][1].synchronize()
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in pairwise(events):
            found[phase] += begin.elapsed_time(end) / 1e3
        return found
