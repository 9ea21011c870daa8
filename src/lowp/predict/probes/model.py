"""How long a model takes: forward, and backward from one parameter's gradient to the next.

Autograd calls a hook of every parameter when its gradient is there, as it does for DistributedDataParallel; the hook notes the
time (on CUDA: an event on the stream). All ranks compute at once. What DistributedDataParallel itself takes (copies into
buckets, its hooks) is the difference to a step whose hook sends nothing.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowp.predict.cluster import ModelTimes, expected_maximum
from lowp.predict.probes.meeting import FEWEST, Meeting
from lowp.predict.subjects import Subject
from lowp.wire.replay import completed

ROUNDS = 25
WARM_UP = 2  # steps; DDP makes its buckets anew after the first


class Stamps:
    """Moments on the host's clock or on the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has come so far."""
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, first: Any, second: Any) -> float:
        """Seconds. On CUDA the device must have come so far."""
        return first.elapsed_time(second) / 1e3 if self._cuda else second - first


class TimedSteps:
    """Steps of a model in which every moment is noted."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self._subject, self._stamps = subject, Stamps(device)
        self.rounds: list[tuple[float, dict[str, float]]] = []  # forward, and backward by parameter, in order of time

    def __call__(self) -> None:
        subject, stamps = self._subject, self._stamps
        moments: dict[str, Any] = {}

        def note(name: str) -> Callable[[Tensor], None]:
            return lambda parameter: moments.__setitem__(name, stamps.now())

        hooks = [p.register_post_accumulate_grad_hook(note(name)) for name, p in subject.parameters.items()]
        try:
            subject.module.zero_grad(set_to_none=True)
            began = stamps.now()
            loss = subject.forward()
            computed = stamps.now()
            loss.backward()
            ended = stamps.now()
        finally:
            for hook in hooks:
                hook.remove()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        if not moments:
            raise ValueError(f"model {subject.name}: backward reached no gradient")
        if unused := [name for name in subject.parameters if name not in moments]:
            raise ValueError(
                f"model {subject.name}: backward reached no gradient of {unused[0]}; DistributedDataParallel would wait for it"
            )
        last, times = computed, {}
        for name, moment in moments.items():
            times[name], last = stamps.between(last, moment), moment
        times[name] += stamps.between(last, ended)  # what comes after the last gradient is its
        self.rounds.append((stamps.between(began, computed), times))


def plain_step(subject: Subject) -> Callable[[], None]:
    def step() -> None:
        subject.module.zero_grad(set_to_none=True)
        subject.forward().backward()

    return step


def silent_step(subject: Subject, group: Any) -> Callable[[], None]:
    """Under DistributedDataParallel, with a hook that sends nothing."""
    ddp = DistributedDataParallel(subject.module, process_group=group, init_sync=False)
    ddp.register_comm_hook(None, _silent)

    def step() -> None:
        ddp.zero_grad(set_to_none=True)
        subject.forward(ddp).backward()

    return step


def _silent(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # DDP looks at names and annotations
    return completed(bucket.buffer())


def model_times(meeting: Meeting, subject: Subject, seconds: float) -> tuple[ModelTimes, float]:
    """The times of a model, and how much they differ between ranks (see `Stragglers`)."""
    timed = TimedSteps(subject, meeting.device)
    calls: dict[str, Callable[[], object]] = {"timed": timed, "plain": plain_step(subject)}
    if meeting.ranks > 1:
        calls["silent"] = silent_step(subject, meeting.group)
    (first,) = meeting.largest([meeting.seconds(timed)])
    # Of a step that takes seconds there is one to warm up and one round: it varies less, and the time has a limit.
    slow = first * len(calls) * (WARM_UP + FEWEST) > seconds
    for call in calls.values():
        for _ in range(WARM_UP - (call is timed) - slow):
            call()
    timed.rounds.clear()
    found = meeting.in_turns(calls, seconds, ROUNDS, 1 if slow else FEWEST)
    forward = statistics.median(meeting.mean([own for own, _ in timed.rounds]))
    names = list(timed.rounds[0][1])
    layers = {name: statistics.median(meeting.mean([times[name] for _, times in timed.rounds])) for name in sorted(names)}
    plain = statistics.median(meeting.mean(found["plain"]))
    whole = forward + sum(layers.values())
    # Medians of parts do not add up to the median of the whole, and hooks in Python take time of their own.
    factor = plain / whole
    layers = {name: layers[name] * factor for name in names}
    overhead = max(0.0, statistics.median(meeting.mean(found["silent"])) - plain) if "silent" in found else 0.0
    times = ModelTimes(subject.batch, forward * factor, sum(layers.values()), layers, overhead)
    return times, variation(meeting, found["plain"])


def variation(meeting: Meeting, times: list[float]) -> float:
    """The coefficient of variation with which the slowest of these ranks is expected to be as slow as it was."""
    if meeting.ranks == 1:
        return 0.0
    slowest = statistics.median(most / mean for most, mean in zip(meeting.largest(times), meeting.mean(times), strict=True))
    return min(1.0, max(0.0, slowest - 1) / expected_maximum(meeting.ranks))
