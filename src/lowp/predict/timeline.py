"""The timeline of one step: what computes, what encodes and decodes, what travels, and what of it is hidden.

    compute   | forward | backward: gradients become ready, bucket after bucket |
    processor                 encode 1    encode 2  fold 1  ...          decode n |
    link                              chunk 1   chunk 2   chunk 1 ...

1. A bucket is ready with the last of its gradients. Its chunks then go through their steps: work of the processor, messages,
   work, messages, work. Chunks of all buckets share one processor and one link; each takes what became ready first.
2. At most `depth` chunks are under way: 8 on a CPU, where one thread runs them all; 1 on CUDA, where they follow each other on
   a stream, and for torch's own collectives.
   Where several are under way, what is ready first goes first: with a faster link another order may come about, and the step
   may be slower (2.7 % at most in a search; 11 % with a parameter server, whose buckets travel whole). Chunks that follow each
   other are never slower with less to do.
3. What encodes and decodes takes its time from the computation, but for the share that runs beside it.
4. The link is taken while bytes leave. On a CPU others may use it while messages are on their way (`latency`); a stream waits.
   After a pause some bytes pass at once (`burst`), as many as a token bucket has saved up meanwhile. That spares time of bytes
   alone, not of messages' overhead and latency.
5. Where the network's work is done by the processors that compute (`handling`), messages take that from the computation too;
   and after it, from encoding and decoding.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowp.predict.exchange_cost import ChunkCost, ChunkStep

ENCODE, DECODE, MESSAGES = "encode", "decode", "messages"
Span = tuple[float, float]


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step go. `compute + encode + decode + exposed + idle` is the whole step.

    `encode` and `decode` (with the additions) are what is not hidden behind the computation. `exposed` is when nobody computes
    or codes, and messages are awaited (or handled by processors that would compute); `hidden` is when the link is taken
    meanwhile. `idle` is waiting for slower ranks, and for the framework.
    """

    compute: float
    encode: float
    decode: float
    exposed: float
    hidden: float
    idle: float

    @property
    def step(self) -> float:
        return self.compute + self.encode + self.decode + self.exposed + self.idle


@dataclass(frozen=True)
class BucketJob:
    """A bucket: when in the computation it is ready (seconds from the step's beginning), and its chunks."""

    ready: float
    chunks: tuple[ChunkCost, ...]


@dataclass
class _Lane:
    """The processor or the link: one thing at a time. `burst`: seconds that can be saved up in pauses."""

    burst: float = 0.0
    free: float = 0.0
    saved: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved = self.burst  # since the step before

    def take(self, since: float, seconds: float, latency: float = 0.0, overhead: float = 0.0) -> Span:
        """What is saved up spares neither `overhead` (of the seconds) nor `latency` (for which it is taken afterwards)."""
        begin = max(since, self.free)
        self.saved = min(self.burst, self.saved + begin - self.free)
        used = min(self.saved, seconds - overhead)
        self.saved -= used
        span = begin, begin + seconds - used + latency
        self.free = span[1]
        if seconds + latency:
            self.spans.append(span)
        return span


@dataclass
class _StepRun:
    """One step, event by event, in the order in which they can begin.

    What the processor does while the computation goes on delays the computation by `stealing` times as much, and with it all
    buckets that are not ready yet.
    """

    compute: float
    stealing: float
    streamed: bool
    processor: _Lane = field(default_factory=_Lane)
    link: _Lane = field(default_factory=_Lane)
    end: float = 0.0
    stolen: dict[str, float] = field(default_factory=lambda: {ENCODE: 0.0, DECODE: 0.0, MESSAGES: 0.0})
    after: dict[str, float] = field(default_factory=lambda: {ENCODE: 0.0, DECODE: 0.0})

    @property
    def computed(self) -> float:
        """When the computation ends, as far as is known."""
        return self.compute + sum(self.stolen.values())

    def run(self, jobs: Sequence[BucketJob], depth: int) -> None:
        waiting = [(job.ready, chunk) for job in jobs for chunk in job.chunks][::-1]
        events: list[tuple[float, int, int, bool, ChunkCost]] = []  # since when, which chunk, step, messages?, the chunk
        under_way = number = 0
        while waiting or events:
            delay = sum(self.stolen.values())
            if waiting and under_way < depth and (not events or waiting[-1][0] + delay <= events[0][0]):
                ready, chunk = waiting.pop()
                heapq.heappush(events, (ready + delay, number, 0, False, chunk))
                under_way, number = under_way + 1, number + 1
                continue
            since, which, step, messages, chunk = heapq.heappop(events)
            now = chunk.steps[step]
            if messages:
                heapq.heappush(events, (self._send(since, now), which, step + 1, False, chunk))
                continue
            done = self._work(self._work(since, now.decode, DECODE), now.encode, ENCODE)
            if step + 1 < len(chunk.steps):
                heapq.heappush(events, (done, which, step, True, chunk))
            else:
                under_way -= 1
        self.end = max(self.end, self.computed)

    def _send(self, since: float, step: ChunkStep) -> float:
        begin, done = self.link.take(since, step.busy, step.latency if self.streamed else 0.0, step.overhead)
        arrived = done if self.streamed else done + step.latency
        if step.handling:
            self._handle(begin, done, step.handling)
        self.end = max(self.end, arrived)
        return arrived

    def _handle(self, begin: float, done: float, seconds: float) -> None:
        """Of the processor, evenly while messages leave."""
        share = 1.0 if done <= self.computed else 0.0
        if begin < self.computed < done:
            share = (self.computed - begin) / (done - begin)
        self.stolen[MESSAGES] += share * seconds
        rest = (1 - share) * seconds * self.stealing
        if rest:
            self.processor.free = max(self.processor.free, begin) + rest

    def _work(self, since: float, seconds: float, what: str) -> float:
        begin, done = self.processor.take(since, seconds)
        if begin < self.computed:
            self.stolen[what] += seconds * self.stealing
        self.after[what] += max(0.0, done - max(begin, self.computed))
        self.end = max(self.end, done)
        return done


def step_times(
    compute: float,
    jobs: Sequence[BucketJob],
    depth: int,
    beside: float = 0.0,
    streamed: bool = False,
    burst: float = 0.0,
) -> StepTimes:
    """The times of a step whose computation takes `compute` seconds by itself.

    `streamed`: the link waits for messages to arrive before it takes the next ones. `burst`: seconds of bytes that pass
    at once after a pause.
    """
    step = _StepRun(compute, 1 - beside, streamed, link=_Lane(burst))
    step.run(jobs, depth)
    after = [span for span in step.link.spans if span[1] > step.computed]
    unhidden = sum(until - max(begin, step.computed) for begin, until in after) - _overlap(after, step)
    travels = sum(until - begin for begin, until in step.link.spans)
    encode, decode = (step.stolen[what] + step.after[what] for what in (ENCODE, DECODE))
    exposed = max(0.0, step.end - compute - encode - decode)
    return StepTimes(compute, encode, decode, exposed, max(0.0, travels - unhidden), 0.0)


def _overlap(links: list[Span], step: _StepRun) -> float:
    """Seconds after the computation in which the link and the processor are both busy."""
    found, works = 0.0, [span for span in step.processor.spans if span[1] > step.computed]
    number = 0
    for begin, until in links:
        begin = max(begin, step.computed)
        while number < len(works) and works[number][1] <= begin:
            number += 1
        for start, stop in works[number:]:
            if start >= until:
                break
            found += max(0.0, min(until, stop) - max(begin, start, step.computed))
    return found
