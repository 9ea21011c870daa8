"""What computation, codecs and messages take from each other where they share processors.

The computation runs again and again, first alone, then while a second thread encodes and decodes (as the wire's thread does) or
exchanges messages, then alone again. What it loses meanwhile is what the other has taken from it:

    beside     1 - seconds lost / seconds that the codec takes alone
    processor  seconds lost / bytes sent

On CUDA messages and codecs have streams of their own: neither is measured there.
"""

import statistics
import threading
import time
from collections.abc import Callable

from lowp.predict.probes.meeting import Meeting

PERIOD = 0.8  # seconds for which a second thread is kept busy, where there is time
ROUNDS = 5
Work = Callable[[], object]


def beside(meeting: Meeting, compute: Work, codec: Work, seconds: float) -> float:
    """The share of a codec's time that the computation does not lose."""
    alone = statistics.median(meeting.mean([meeting.seconds(codec) for _ in range(5)]))
    count = max(1, round(min(PERIOD, seconds / 4) / max(alone, 1e-4)))
    lost = _median_loss(meeting, compute, codec, count, seconds)
    return min(1.0, max(0.0, 1 - lost / (count * alone)))


def processor(meeting: Meeting, compute: Work, exchange: Work, size: int, bandwidth: float, seconds: float) -> float:
    """Seconds of computation for each byte that a rank sends; `exchange` sends `size` bytes, and receives as many."""
    count = max(1, round(min(PERIOD, seconds / 4) * bandwidth / size))
    return max(0.0, _median_loss(meeting, compute, exchange, count, seconds)) / (count * size)


def _median_loss(meeting: Meeting, compute: Work, other: Work, count: int, seconds: float) -> float:
    """Seconds that the computation loses to `count` calls of `other`: the mean over ranks, the median over rounds."""
    losses: list[float] = []
    began = time.perf_counter()
    for number in range(ROUNDS):
        losses.append(_loss(meeting, compute, lambda: [other() for _ in range(count)]))
        (elapsed,) = meeting.largest([time.perf_counter() - began])
        if elapsed * (number + 2) / (number + 1) > seconds:
            break
    return statistics.median(meeting.mean(losses))


def _loss(meeting: Meeting, compute: Work, other: Work) -> float:
    meeting.together()
    before = _mean_seconds(compute)
    meeting.together()
    thread = threading.Thread(target=other, name="lowp calibrate", daemon=True)
    began, calls = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        compute()
        calls += 1
    elapsed = time.perf_counter() - began
    thread.join()
    meeting.together()
    after = _mean_seconds(compute)
    return elapsed - calls * (before + after) / 2


def _mean_seconds(compute: Work) -> float:
    """Of one call, while nothing else is done."""
    began, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - began < PERIOD / 4:
        compute()
        calls += 1
    return (time.perf_counter() - began) / calls
