"""Runs the generators of many chunks at once, on one thread.

A chunk's generator stops wherever it waits for messages. While it does, the next chunks encode and send theirs: the link and
the processor are both busy. Which generator runs when does not matter to the numbers, nor to the other ranks: messages carry
tags (link.py).
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from lowp.wire.link import Pending
from lowp.wire.report import Meter

DEPTH = 4  # chunks under way at once


class Pump:
    """First in, first out, up to `depth` at once."""

    def __init__(self, depth: int | None = None) -> None:
        self._depth = DEPTH if depth is None else depth
        self._ready: deque[tuple[Generator, Meter, Callable[[], Any]]] = deque()
        self._under_way: deque[tuple[Generator, list[Pending], Meter, Callable[[], Any]]] = deque()
        self.waiting_for = ""  # for errors: what the pump is waiting for

    def feed(self, steps: Iterable[Generator], meter: Meter, done: Callable[[], Any] = lambda: None) -> None:
        """Queue generators; `done` is called after each."""
        self._ready.extend((generator, meter, done) for generator in steps)

    @property
    def idle(self) -> bool:
        return not self._ready and not self._under_way

    def turn(self) -> None:
        """Start a chunk if there is room, else bring the oldest a step further."""
        if self._ready and len(self._under_way) < self._depth:
            self._advance(*self._ready.popleft())
        elif self._under_way:
            generator, pending, meter, done = self._under_way.popleft()
            self._wait(pending, meter)
            self._advance(generator, meter, done)

    def run(self) -> None:
        while not self.idle:
            self.turn()

    def _wait(self, pending: list[Pending], meter: Meter) -> None:
        began = time.perf_counter()
        for message in pending:
            self.waiting_for = message.what
            message.wait()
        self.waiting_for = ""
        meter.report.transfer_seconds += time.perf_counter() - began

    def _advance(self, generator: Generator, meter: Meter, done: Callable[[], Any]) -> None:
        try:
            pending = next(generator)
        except StopIteration:
            done()
            return
        self._under_way.append((generator, pending, meter, done))

    def drop(self) -> None:
        """Forget everything that is queued or under way."""
        self._ready.clear()
        self._under_way.clear()
