"""Ranks whose buckets become ready at other times than the others' never wait for each other for ever.

The ranks are threads, and messages lie in memory. Waits depend on each other as those of a ring do: for the n-th message of a
chunk, the rank before must have received its own n-1st one.
"""

import queue
import random
import threading
from collections import defaultdict

import pytest
import torch

from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.link import Pending
from lowp.wire.report import Meter
from lowp.wire.settings import Parameters, Settings
from lowp.wire.warm_up import SilentLink

RANKS, PATIENCE = 4, 2.0  # seconds


class Letter:
    def __init__(self, box):
        self._box = box

    def wait(self):
        self._box.get(timeout=PATIENCE)


class Post:
    def __init__(self):
        self._boxes, self._lock = defaultdict(queue.SimpleQueue), threading.Lock()

    def _box(self, *address):
        with self._lock:
            return self._boxes[address]

    def exchange(self, rank, others_to, others_from, tag):
        for other in others_to:
            self._box(rank, other, tag).put(None)
        return [Pending(Letter(self._box(other, rank, tag)), str(tag)) for other in others_from]

    def agree(self, rank, number):
        others = [other for other in range(RANKS) if other != rank]
        yield self.exchange(rank, others, others, number)

    def ring(self, rank, number, steps):
        for hop in range(steps):
            yield self.exchange(rank, [(rank + 1) % RANKS], [(rank - 1) % RANKS], (number, hop))


class Rank(threading.Thread):
    """`groups`: the buckets that are ready at once; then everything of them is done before the next ones are ready."""

    def __init__(self, rank, post, groups, chunks, steps):
        super().__init__(daemon=True)
        self._rank, self._post, self._groups, self._chunks, self._steps = rank, post, groups, chunks, steps
        self._scheduler, self._taken = ChunkScheduler(), 0
        self.stuck = None

    def _add_bucket(self):
        first = self._taken + 1
        last = self._taken = self._taken + 1 + self._chunks

        def begin_chunks():
            for number in range(first + 1, last + 1):
                ring = self._post.ring(self._rank, number, self._steps)
                self._scheduler.add(Task(number, ring, Meter(), steps=self._steps, last=last))

        self._scheduler.add(Task(first, self._post.agree(self._rank, first), Meter(), begin_chunks))

    def run(self):
        try:
            for count in self._groups:
                for _ in range(count):
                    self._add_bucket()
                self._scheduler.run()
        except queue.Empty:
            self.stuck = f"rank {self._rank} waits for {self._scheduler.waiting_for}"


def parted(count, draw):
    """A number as a random sum."""
    found = []
    while count:
        found.append(draw.choice([1, draw.randint(1, count), count]))
        count -= found[-1]
    return found


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 5, 12])
def test_ranks_with_buckets_at_other_times_do_not_wait_for_each_other(steps, chunks):
    draw = random.Random(steps * chunks)
    for _ in range(10):
        post = Post()
        ranks = [Rank(rank, post, parted(9, draw), chunks, steps) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.stuck for rank in ranks if rank.stuck] == []


def test_chunks_know_the_last_one_of_their_bucket():
    settings, tasks = Settings.of("e5m2", scale="local", chunk=10), []

    class Noting(ChunkScheduler):
        def add(self, *added):
            tasks.extend(added)
            super().add(*added)

    scheduler, state, link = Noting(), State(), SilentLink(0, 1)
    for _ in range(2):
        bucket = Parameters({"p": torch.Size([35])}, settings).bucket(["p"], 0)
        args = (settings, settings.reduction, link, state, Meter(), True, lambda marks: None)
        BucketExchange(torch.ones(35), bucket, *args).start(scheduler)
        scheduler.run()
    chunks = [task for task in tasks if task.steps is not None]
    first, second = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
    assert len(first) > 1
    assert {task.last for task in first} == {first[-1].number}
    assert {task.last for task in second} == {second[-1].number}
    assert second[0].number == first[-1].number + 2  # between them is the agreement on scales
