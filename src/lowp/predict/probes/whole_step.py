"""Whole steps of a model, as they are trained, through the real links: what they take beyond the sum of their parts.

Parts that were measured alone do not add up to a step where they share processors. Steps of two ranks on two processors were
traced (docs/LOG.md, 2026-11-18): the thread that encodes takes turns with backward, and needs twice the time and more; gloo's
threads wait for a turn; and ranks reach their last bucket 5 to 13 ms after each other, and all wait for the last one. On CUDA
hooks in Python keep the host from launching, and NCCL and the computation slow each other down.

So a few whole steps are measured for each kind of wire (`WireChoice.kind`): torch's all-reduce, a hook of torch's, a codec of
lowp's. What such a step takes longer than is predicted from the parts is the model's `excess`. It belongs to every wire of
that kind, whatever its bytes: links, codecs and reductions still come from their own figures.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowp.predict.cluster import Cluster, ModelTimes
from lowp.predict.prediction import predict
from lowp.predict.probes.meeting import FEWEST, Meeting
from lowp.predict.subjects import Subject
from lowp.predict.wires import COMPRESSED, FP32, HOOK, compress_arguments
from lowp.predict.workload import ModelLayer, Work, Workload
from lowp.wire.ddp import compress_gradients

PROBES = {FP32: "fp32", HOOK: "bf16", COMPRESSED: "int8/block:256@two_shot"}
WARM_UP = {"cpu": 3, "cuda": 6}  # steps; the wire records its launches in the fourth
BLOCK_SECONDS, MOST_STEPS = 0.4, 10  # of steps that follow each other, as in training
ROUNDS = 7
LATE = 2.0  # times as long as it may take: then steps are not measured


def with_excess(
    meeting: Meeting, subject: Subject, cluster: Cluster, kinds: Mapping[str, str], seconds: float
) -> tuple[ModelTimes, dict[str, float]]:
    """The model's times with their excess, and the seconds that steps took, by kind of wire. No time is left: no seconds.

    `kinds`: wires to be measured, of `PROBES`.
    """
    times = cluster.device.times[subject.name]
    probes = [_Probe(subject, wire, meeting.group) for wire in kinds.values()]
    try:
        found = _measured(meeting, dict(zip(kinds, probes, strict=True)), seconds)
    finally:
        for probe in probes:
            probe.end()
    if not found:
        return times, {}
    workload = measured_workload(subject, times)
    predicted = predict(workload, cluster, [kinds[kind] for kind in found], meeting.ranks, batch=times.batch).steps
    excess = {kind: max(0.0, took - parts.step) for (kind, took), parts in zip(found.items(), predicted, strict=True)}
    return replace(times, excess=excess), found


class _Probe:
    """Steps under DistributedDataParallel that send in one way. (A DDP around a module leaves other DDPs around it alone.)"""

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


def _measured(meeting: Meeting, probes: Mapping[str, _Probe], seconds: float) -> dict[str, float]:
    """Seconds of a step of the slowest rank, in turns; nothing where that would take much longer than it may."""
    began, warm_up = time.perf_counter(), WARM_UP[meeting.device.type]
    needed = 0.0
    for probe in probes.values():
        probe.step()
        (took,) = meeting.largest([meeting.seconds(probe.step)])
        probe.steps = max(1, min(MOST_STEPS, round(BLOCK_SECONDS / max(took, 1e-6))))
        needed += took * (warm_up + FEWEST * probe.steps)
    (elapsed,) = meeting.largest([time.perf_counter() - began])
    if elapsed + needed > LATE * seconds:
        return {}
    for probe in probes.values():
        for _ in range(warm_up):
            probe.step()
    found = meeting.slowest(
        meeting.in_turns({kind: probe.block for kind, probe in probes.items()}, max(0.0, seconds - elapsed), ROUNDS)
    )
    return {kind: took / probes[kind].steps for kind, took in found.items()}


def measured_workload(subject: Subject, times: ModelTimes) -> Workload:
    """A model whose layers were timed needs no tracing."""
    turns = {name: turn for turn, name in enumerate(times.layers)}
    layers = (ModelLayer(name, tuple(p.shape), Work(), Work(), turns[name]) for name, p in subject.parameters.items())
    return Workload(subject.name, tuple(layers))
