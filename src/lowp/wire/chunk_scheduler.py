"""Runs the generators of many chunks at once, on one thread.

A chunk's generator stops wherever it waits for messages. While it does, the next chunks encode and send theirs: the link and
the processor are both busy.

One thread can wait for one thing at a time, and gloo does not say whether a message has come. So ranks must wait in an order in
which nobody waits for somebody who waits for him, although buckets become ready at different times. Every wait has a date, the
same on all ranks: chunk k's first is k, its last k + 1.5, those between spread evenly; where ranks take different numbers of
steps, all of them are k. The earliest comes first. What a rank waits for at some date was sent by others after waits of earlier
dates only; and with two chunks or more under way, chunk k begins as soon as chunk k - 2 is done, which is before k.
"""

import heapq
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from lowp.wire.link import Pending
from lowp.wire.report import Meter

DEPTH = 4  # chunks under way at once; at least 2
SPREAD = 1.5  # from the first wait of a chunk to its last


@dataclass(order=True)
class Task:
    """A generator to be run. `number` is its place in the order that all ranks share, `steps` how often it waits."""

    number: int
    generator: Generator[list[Pending], None, Any] = field(compare=False)
    meter: Meter = field(compare=False)
    done: Callable[[], Any] = field(compare=False, default=lambda: None)
    steps: int | None = field(compare=False, default=None)
    waits: int = field(compare=False, default=0)
    pending: list[Pending] = field(compare=False, default_factory=list)

    @property
    def date(self) -> float:
        if self.steps is None or self.steps < 2:
            return self.number
        return self.number + SPREAD * self.waits / (self.steps - 1)


class ChunkScheduler:
    """In the order of their numbers, up to `depth` at once."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._ready: list[Task] = []  # a heap
        self._under_way: list[Task] = []
        self.waiting_for = ""  # for errors

    def add(self, *tasks: Task) -> None:
        for task in tasks:
            heapq.heappush(self._ready, task)

    @property
    def idle(self) -> bool:
        return not self._ready and not self._under_way

    def turn(self) -> None:
        """Start a task if there is room, else bring the one of the earliest date a step further."""
        if self._ready and len(self._under_way) < self._depth:
            self._advance(heapq.heappop(self._ready))
        elif self._under_way:
            task = min(self._under_way, key=lambda task: (task.date, task.number))
            self._under_way.remove(task)
            self._wait(task)
            self._advance(task)

    def run(self) -> None:
        while not self.idle:
            self.turn()

    def drop(self) -> None:
        """Forget everything that is queued or under way."""
        self._ready.clear()
        self._under_way.clear()

    def _wait(self, task: Task) -> None:
        began = time.perf_counter()
        for message in task.pending:
            self.waiting_for = message.what
            message.wait()
        self.waiting_for = ""
        task.meter.report.transfer_seconds += time.perf_counter() - began
        task.waits += 1

    def _advance(self, task: Task) -> None:
        try:
            task.pending = next(task.generator)
        except StopIteration:
            task.done()
        else:
            self._under_way.append(task)
