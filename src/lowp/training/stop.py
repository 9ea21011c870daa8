"""Stopping at a step that all ranks agree on.

A signal reaches ranks at different moments, in different steps. At the beginning of a step every rank says whether it has been
asked to stop, and at its end reads the answer of all: the message travels while the step computes. Short steps are not worth a
message each: with it ranks agree on how many steps later they ask again, so that they do some ten times a second.

SIGINT ends a process at once until its first step is done: there is nothing to save, and that step may build kernels for a
minute.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lowp.training.world import named_failure

BETWEEN = 0.1  # seconds between two questions, about
MOST = 64  # steps


class Stop:
    """Has anybody been asked to stop? Use as a context; signals are the process's own again afterwards."""

    def __init__(self, ranks: int) -> None:
        self.by: signal.Signals | None = None  # what this rank was asked by
        self._group = dist.new_group(backend="gloo", group_desc="lowp stop") if ranks > 1 else None
        self._answer = torch.zeros(2, dtype=torch.int32)  # the signal, and steps until the next question
        self._pending: Any = None
        self._steps = 0  # until the next question
        self._since: float | None = None  # when the last question was asked
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        self._listen(signal.SIGTERM)
        if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Stop):
            self._listen(signal.SIGINT)  # instead of the one around this one
        return self

    def _listen(self, each: signal.Signals) -> None:
        in_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
        if each not in self._before and in_main:
            self._before[each] = signal.signal(each, self._asked)

    def __exit__(self, *exception: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None and self._group is None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now. (Of several ranks, the launcher ends all.)
        self.by = signal.Signals(number)

    def ask(self) -> None:
        """At the beginning of a step."""
        if self._group is None or self._steps > 0:
            self._steps -= 1
            return
        self._answer[0] = 0 if self.by is None else int(self.by)
        self._answer[1] = self._steps_worth_waiting(int(self._answer[1]))
        self._pending = dist.all_reduce(self._answer, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _steps_worth_waiting(self, taken: int) -> int:
        """How many steps go into the time between two questions, by the last `taken` of them; 1 while nothing is known."""
        before, self._since = self._since, time.monotonic()
        if before is None:
            return 1
        each = (self._since - before) / max(1, taken)
        return min(MOST, max(1, int(BETWEEN / max(each, 1e-6))))

    def agreed(self) -> signal.Signals | None:
        """At its end: the signal after which all ranks stop here."""
        self._listen(signal.SIGINT)
        if self._group is None:
            return self.by
        if self._pending is None:
            return None
        with named_failure("agreeing whether to stop"):
            self._pending.wait()
        self._pending = None
        number, after = self._answer.tolist()
        self._steps = after - 1
        return signal.Signals(number) if number else None
