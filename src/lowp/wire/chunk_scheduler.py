"""Runs the generators of several chunks at once, on one thread.

A chunk's generator yields where it waits for messages. Meanwhile other chunks encode and send: the link and the processor are
busy at the same time.

The thread blocks in one wait at a time, because gloo cannot be asked whether a message has arrived. Two ranks that wait for
each other would deadlock, and buckets become ready at different times on different ranks. So all ranks have one order of waits:

1. Every wait has a date, which is the same on all ranks. Chunk k has its first wait at date k, its last at k + 3.5, and the
   others at equal distances between, but all before the first date of the next bucket. Only the last wait of a chunk may be
   later than that: no message depends on it. Where ranks wait different numbers of times in a chunk, all dates are k.
2. A rank takes the wait of the earliest date first.
3. A rank starts every chunk that it may start before it waits at that chunk's date, also above DEPTH. (Agreements on scales of
   many later buckets may be under way.)

There is no cycle. A rank that waits needs a message that another rank sends when it starts the chunk, or after the chunk's wait
before. Call the date of that the needed date. If the other rank waits too, its own needed date is earlier: either it waits at
an earlier date, or it does not have that chunk's bucket yet; then it waits for a bucket before, whose needed dates are all
before the first date of this one.

DEPTH and SPREAD are so large that the link has messages of other chunks to carry while a rank waits for the last ones of
chunk k and decodes them, also where the operating system keeps the rank from running for some milliseconds.
"""

import heapq
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from lowp.wire.link import Pending
from lowp.wire.report import Meter

DEPTH = 8  # chunks under way at once
SPREAD = 3.5  # from the first wait of a chunk to its last


@dataclass(order=True)
class Task:
    """A generator to be run. `number` is its place in the order that all ranks share, `steps` how often it waits.

    `last` is the number of the last chunk of its bucket.
    """

    number: int
    generator: Generator[list[Pending], None, Any] = field(compare=False)
    meter: Meter = field(compare=False)
    done: Callable[[], Any] = field(compare=False, default=lambda: None)
    steps: int | None = field(compare=False, default=None)
    last: int = field(compare=False, default=0)
    waits: int = field(compare=False, default=0)
    pending: list[Pending] = field(compare=False, default_factory=list)

    @property
    def date(self) -> tuple[float, float, int]:
        """Of the next wait, to be compared."""
        if self.steps is None or self.steps < 2:
            return self.number, self.number, self.number
        date = self.number + SPREAD * self.waits / (self.steps - 1)
        is_last = self.waits == self.steps - 1
        return date if is_last else min(date, max(self.last, self.number) + 0.5), date, self.number


class ChunkScheduler:
    """Runs tasks in the order of their numbers, up to DEPTH at once."""

    def __init__(self) -> None:
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
        """Start a task if fewer than DEPTH run, or if the next wait is not before its number; else wait, and advance."""
        earliest = min(self._under_way, key=lambda task: task.date, default=None)
        if self._ready and (earliest is None or len(self._under_way) < DEPTH or self._ready[0].number <= earliest.date[0]):
            self._advance(heapq.heappop(self._ready))
        elif earliest is not None:
            self._under_way.remove(earliest)
            self._wait(earliest)
            self._advance(earliest)

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
