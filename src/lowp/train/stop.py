"""Stopping at a step that all ranks agree on.

A signal reaches ranks at different moments, in different steps. Every rank says at the beginning of each step whether it has
been asked to stop, and reads the answer of all at the end: the message travels while the step computes, and costs no waiting.
"""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lowp.train.world import named_failure

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Has anybody been asked to stop? Use as a context; signals are the process's own again afterwards."""

    def __init__(self, ranks: int) -> None:
        self.by: signal.Signals | None = None  # what this rank was asked by
        self._group = dist.new_group(backend="gloo", group_desc="lowp stop") if ranks > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Any = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        for each in SIGNALS:
            self._before[each] = signal.signal(each, self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None and self._group is None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now. (With several ranks the launcher repeats the terminal's signal.)
        self.by = signal.Signals(number)

    def ask(self) -> None:
        """At the beginning of a step."""
        self._flag.fill_(0 if self.by is None else int(self.by))
        if self._group is not None:
            self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> signal.Signals | None:
        """At its end: the signal after which all ranks stop here."""
        if self._pending is not None:
            with named_failure("agreeing whether to stop"):
                self._pending.wait()
            self._pending = None
        number = int(self._flag) if self._group is not None else int(self.by or 0)
        return signal.Signals(number) if number else None
