"""Whole steps of a model, as they are trained, through the real links: what they take beyond the sum of their parts.

Parts that were measured alone do not add up to a step where they share processors. Steps of two ranks on two processors were
traced (docs/LOG.md, 2026-11-18): the thread that encodes takes turns with backward, and needs twice the time and more; gloo's
threads wait for a turn; and ranks reach their last bucket 5 to 13 ms after each other, and all wait for the last one. On CUDA
hooks in Python keep the host from launching, and NCCL and the computation slow each other down.

So a few whole steps are measured for each kind of wire (`WireChoice.kind`): torch's all-reduce, a hook of torch's, a codec of
lowp's. What such a step takes longer than is predicted from the parts is the model's `excess`. It belongs to every wire of
that kind, whatever its bytes: links, codecs and reductions still come from their own figures. On a CPU the causes are the same
whoever sends, and steps of the same kind differ by a tenth: there the three are three measurements of one excess, their median.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowp.predict.cluster import Cluster, ModelTimes
from lowp.predict.prediction import predict
from lowp.predict.probes.meeting import FEWEST, Meeting
from lowp.predict.probes.model import plain_step
from lowp.predict.subjects import Subject
from lowp.predict.wires import COMPRESSED, FP32, HOOK, compress_arguments
from lowp.predict.workload import ModelLayer, Work, Workload
from lowp.wire.ddp import compress_gradients

PROBES = {FP32: "fp32", HOOK: "bf16", COMPRESSED: "int8/block:256@two_shot"}
WARM_UP = {"cpu": 3, "cuda": 6}  # steps; the wire records its launches in the fourth
BLOCK_SECONDS, MOST_STEPS = 0.4, 10  # of steps that follow each other, as in training
ROUNDS = 15
LATE = 2.0  # times as long as it may take: then steps are not measured


def with_excess(
    meeting: Meeting, subject: Subject, cluster: Cluster, kinds: Mapping[str, str], seconds: float
) -> tuple[ModelTimes, dict[str, float]]:
    """The model's times with their excess, and the seconds that steps took, by kind of wire. No time is left: no seconds.

    `kinds`: wires to be measured, of `PROBES`. Steps take turns with the bare computation, and are compared with that: where
    the machine is slower for some seconds, both are. For the same reason the times of the computation become the median of
    those that were found so far and those that are found here.
    """
    times = cluster.device.times[subject.name]
    found = {}
    for kind, wire in kinds.items():
        gc.collect()  # DDPs that nobody has any more: their hooks are still called
        probe = _Probe(subject, wire, meeting.group)
        try:
            pair = _measured(meeting, probe, plain_step(subject), seconds / len(kinds))
        finally:
            probe.end()
        if pair is None:
            return times, {}
        found[kind] = pair
    workload = measured_workload(subject, times)
    predicted = predict(workload, cluster, list(kinds.values()), meeting.ranks, batch=times.batch).steps
    computed = times.forward + times.backward
    excess = {
        kind: max(0.0, (step - plain) - (parts.step - computed))
        for (kind, (step, plain)), parts in zip(found.items(), predicted, strict=True)
    }
    if meeting.device.type == "cpu":
        excess = dict.fromkeys(excess, statistics.median(excess.values()))
    now = statistics.median([computed, *(plain for _, plain in found.values())])
    return replace(scaled(times, now / computed), excess=excess), {kind: step for kind, (step, _) in found.items()}


def scaled(times: ModelTimes, factor: float) -> ModelTimes:
    """The computation, so many times as slow."""
    layers = {name: factor * own for name, own in times.layers.items()}
    return replace(times, forward=factor * times.forward, backward=factor * times.backward, layers=layers)


class _Probe:
    """Steps under DistributedDataParallel that send in one way."""

    def __init__(self, subject: Subject, wire: str, group: Any) -> None:
        self._subject, self._handle, self.steps = subject, None, 1
        self._ddp = DistributedDataParallel(subject.module, process_group=group, init_sync=False)
        if wire == PROBES[HOOK]:
            self._ddp.register_comm_hook(group, _bf16_hook)
        elif wire != PROBES[FP32]:
            self._handle = compress_gradients(self._ddp, **compress_arguments(wire))

    def step(self) -> None:
        self._ddp.zero_grad(set_to_none=True)
        self._subject.forward(self._ddp).backward()

    def block(self) -> None:
        for _ in range(self.steps):
            self.step()

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # DDP looks at name and annotations
    """torch's bf16_compress_hook, step by step; that one refuses gloo. (Its fp16_compress_hook does the same in float16.)"""
    buffer = bucket.buffer()
    sent = buffer.to(torch.bfloat16).div_(dist.get_world_size(group))
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def widened(done: Any) -> Tensor:
        return buffer.copy_(done.value()[0])

    return future.then(widened)


def _measured(meeting: Meeting, probe: _Probe, plain: Callable[[], None], seconds: float) -> tuple[float, float] | None:
    """Seconds of a step of the slowest rank, and of its computation alone, the ranks' mean.

    None where that would take much longer than it may.
    """
    began, warm_up = time.perf_counter(), WARM_UP[meeting.device.type]
    probe.step()
    (took,) = meeting.largest([meeting.seconds(probe.step)])
    probe.steps = max(1, min(MOST_STEPS, round(BLOCK_SECONDS / max(took, 1e-6))))
    (elapsed,) = meeting.largest([time.perf_counter() - began])
    if elapsed + took * (warm_up + 2 * FEWEST * probe.steps) > LATE * seconds:
        return None
    for _ in range(warm_up):
        probe.step()

    def alone() -> None:
        for _ in range(probe.steps):
            plain()

    times = meeting.in_turns({"step": probe.block, "plain": alone}, max(0.0, seconds - elapsed), ROUNDS)
    step = meeting.slowest(times)["step"] / probe.steps
    return step, statistics.median(meeting.mean(times["plain"])) / probe.steps


def measured_workload(subject: Subject, times: ModelTimes) -> Workload:
    """A model whose layers were timed needs no tracing."""
    turns = {name: turn for turn, name in enumerate(times.layers)}
    layers = (ModelLayer(name, tuple(p.shape), Work(), Work(), turns[name]) for name, p in subject.parameters.items())
    return Workload(subject.name, tuple(layers))
