"""From a model, a cluster and wires to predictions: throughput, speed-up, efficiency, and where the time of a step goes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lowp.names import matches_nothing
from lowp.predict.architectures import usual_batch, workload_of
from lowp.predict.cluster import Arrangement, Cluster, Device
from lowp.predict.cluster_file import cluster_of
from lowp.predict.exchange_cost import ChunkCost, bucket_costs
from lowp.predict.memory_needs import MemoryNeeds, TrainingFormats, memory_needs
from lowp.predict.timeline import BucketJob, StepTimes, step_times
from lowp.predict.wires import WireChoice, wire_of, wires_of
from lowp.predict.workload import StepCompute, Workload
from lowp.training.exchange.base import buckets_of
from lowp.wire.chunk_scheduler import DEPTH
from lowp.wire.plan import Bucket
from lowp.wire.settings import Parameters

BUCKET_MB = 25.0
MEGABYTE = 1 << 20  # of DistributedDataParallel's bucket_cap_mb
_GLOO_THREADS = 2  # of torch's own collectives on a CPU
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class PredictedStep:
    """One step of a model on so many ranks of a cluster, with one wire. Bytes and messages are of one rank and one step."""

    model: str
    cluster: str
    wire: str
    reduction: str
    ranks: int
    batch: int  # of one rank
    times: StepTimes
    throughput: float  # samples a second, of all ranks
    speedup: float  # over one rank
    bytes_sent: float
    messages: float
    waits: int  # one after the other
    memory: MemoryNeeds
    fits: bool | None  # None: the device does not say how much memory it has

    @property
    def step(self) -> float:
        return self.times.step

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    def record(self) -> dict[str, Any]:
        """One flat dictionary: `pandas.DataFrame(prediction.records())`. Times are in seconds."""
        plain = {key: getattr(self, key) for key in ("model", "cluster", "wire", "reduction", "ranks", "batch")}
        figures = {key: getattr(self, key) for key in ("step", "throughput", "speedup", "efficiency")}
        sent = {"bytes_sent": self.bytes_sent, "messages": self.messages, "waits": self.waits}
        memory = {f"memory_{role}": value for role, value in asdict(self.memory).items()} | {"memory": self.memory.total}
        return plain | figures | asdict(self.times) | sent | memory | {"fits": self.fits}


@dataclass(frozen=True)
class Prediction:
    """Predictions by wire and ranks, in the order in which they were asked for."""

    workload: Workload
    cluster: Cluster
    steps: tuple[PredictedStep, ...]

    def of(self, wire: str, ranks: int) -> PredictedStep:
        for step in self.steps:
            if (step.wire, step.ranks) == (wire, ranks):
                return step
        known = ", ".join(dict.fromkeys(step.wire for step in self.steps))
        raise KeyError(f"there is no prediction for {wire!r} on {ranks} ranks; wires are {known}")

    @cached_property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.wire for step in self.steps))

    def records(self) -> list[dict[str, Any]]:
        return [step.record() for step in self.steps]


def predict(
    model: Any = "resnet50",
    cluster: "str | Path | Cluster" = "dgx-a100",
    wire: "str | Mapping[str, Any] | WireChoice | Iterable[Any]" = ("fp32",),
    ranks: "int | str | Iterable[int]" = "1:64",
    *,
    batch: int | None = None,
    bucket_mb: float = BUCKET_MB,
    buckets: "Sequence[Sequence[str]] | None" = None,
    inputs: Any = None,
    formats: TrainingFormats | None = None,
) -> Prediction:
    """What would these ranks do? A step of data-parallel training, predicted.

        found = lowp.predict("resnet50", "ethernet-25g", wire=["fp32", "e5m2/aps"], ranks="1:1024")
        pandas.DataFrame(found.records())

    Args:
        model: a name (`lowp predict --models`), `module:function` that returns a model and an example batch, an nn.Module
            (with `inputs`), or a Workload.
        cluster: the name of a known one (`lowp predict --clusters`), a TOML file, or a Cluster.
        wire: `FORMAT[/SCALE][@REDUCTION]`, or a dictionary with the arguments of `compress_gradients`, or several.
        ranks: a number, several, or text: "8", "1:4096" (doubling), "8,64,512".
        batch: samples of one rank in a step; without, what is usual for the model.
        bucket_mb: as DistributedDataParallel's `bucket_cap_mb`. `buckets` are names of parameters instead.
        formats: of weights, gradients, optimizer state and activations, for the memory.
    """
    workload, machine = workload_of(model, inputs), cluster_of(cluster)
    batch = usual_batch(workload.name) if batch is None else batch
    compute = workload.on(machine.device, batch)
    scene = _Scene(workload, machine, compute, batch, bucketed(workload, bucket_mb, buckets), formats or TrainingFormats())
    arrangements = [machine.arrange(count) for count in ranks_of(ranks)]
    steps: list[PredictedStep] = []
    known: dict[str, list[Bucket]] = {}  # wires that differ in their reduction alone have the same buckets
    for choice in wires_of(wire):
        codecs = choice.settings.describe()
        if codecs not in known:
            known[codecs] = scene.laid(choice)
        steps += [scene.predicted(choice, known[codecs], arrangement) for arrangement in arrangements]
    return Prediction(workload, machine, tuple(steps))


def predict_collective(numbers: int, cluster: "str | Path | Cluster", wire: "str | WireChoice", ranks: int) -> StepTimes:
    """One reduction of so many numbers, alone, as `lowp.all_reduce` or `dist.all_reduce` would do it."""
    machine, choice = cluster_of(cluster), wire_of(wire)
    bucket = Parameters({"numbers": torch.Size([numbers])}, choice.settings).bucket(["numbers"], 0)
    costs = bucket_costs(bucket, choice, machine.arrange(ranks), machine.device) if ranks > 1 else []
    depth, streamed = under_way(machine.device, choice)
    burst = machine.arrange(ranks).burst
    return step_times(0.0, [BucketJob(0.0, tuple(costs))], depth, machine.device.beside, streamed, burst)


def under_way(device: Device, wire: WireChoice) -> tuple[int, bool]:
    """How many chunks may be under way at once; and whether they follow each other on a stream, which waits for messages."""
    streamed = device.kind == "cuda"
    return 1 if streamed else _GLOO_THREADS if wire.plain else DEPTH, streamed


def ranks_of(ranks: "int | str | Iterable[int]") -> tuple[int, ...]:
    """Numbers of ranks: 8; "1:4096", doubling; "8,64,512"; or several of these."""
    if isinstance(ranks, str):
        found = [count for word in ranks.split(",") for count in _range(word.strip())]
    else:
        found = [ranks] if isinstance(ranks, int) else list(ranks)
    for count in found:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_RANKS:
            raise ValueError(f"ranks: {count!r} must be a whole number from 1 to {_MOST_RANKS:,}")
    if not found:
        raise ValueError("ranks: at least one number is wanted")
    return tuple(dict.fromkeys(found))


def _range(word: str) -> list[int]:
    try:
        first, colon, last = (part.strip() for part in word.partition(":"))
        begin, end = int(first), int(last) if colon else int(first)
    except ValueError:
        raise ValueError(f"ranks: {word!r} is neither a number nor a range such as 1:4096") from None
    if begin < 1:
        raise ValueError(f"ranks: {word!r} must be{' from' if colon else ''} at least 1")
    if end < begin:
        raise ValueError(f"ranks: {word!r} does not ascend; a range is written 1:4096")
    found = []
    while begin <= end:
        found.append(begin)
        begin *= 2
    return found if found[-1] == end else [*found, end]


def bucketed(workload: Workload, limit: float, given: "Sequence[Sequence[str]] | None" = None) -> list[list[str]]:
    """Names of parameters, bucket after bucket, as DistributedDataParallel lays them or as they are given."""
    names = {layer.name for layer in workload.layers}
    if given is not None:
        wrong = [name for bucket in given for name in bucket if name not in names]
        if wrong or sum(len(bucket) for bucket in given) != len(names):
            what = f"{wrong[0]!r} is no parameter" if wrong else f"{len(names)} parameters are wanted once each"
            raise ValueError(f"buckets: {what} of {workload.name}")
        return [list(bucket) for bucket in given]
    if not 0 < limit < 1e9:
        raise ValueError(f"bucket_mb: {limit:g} must be above 0")
    parameters = {layer.name: torch.empty(layer.shape, device="meta") for layer in workload.layers}
    return buckets_of(parameters, limit * MEGABYTE)


@dataclass(frozen=True)
class _Scene:
    """Everything but the wire and the ranks."""

    workload: Workload
    cluster: Cluster
    compute: StepCompute
    batch: int
    buckets: list[list[str]]
    formats: TrainingFormats

    @cached_property
    def _ready(self) -> list[float]:
        """When each bucket's last gradient is there, in seconds of computation."""
        moment, when = self.compute.forward, {}
        for index in self.workload.order:
            moment += self.compute.backward[index]
            when[self.workload.layers[index].name] = moment
        return [max(when[name] for name in bucket) for bucket in self.buckets]

    def laid(self, wire: WireChoice) -> list[Bucket]:
        """The buckets, with the codec of every parameter."""
        shapes = {layer.name: torch.Size(layer.shape) for layer in self.workload.layers}
        if wrong := wire.settings.unmatched(shapes):
            raise ValueError(f"wire {wire.text!r}: {matches_nothing(wrong[0], shapes)}")
        parameters = Parameters(shapes, wire.settings)
        return [parameters.bucket(names, 0) for names in self.buckets]

    def predicted(self, wire: WireChoice, laid: list[Bucket], arrangement: Arrangement) -> PredictedStep:
        ranks, device = arrangement.ranks, self.cluster.device
        costs = [bucket_costs(bucket, wire, arrangement, device) if ranks > 1 else [] for bucket in laid]
        depth, streamed = under_way(device, wire)
        times = self._times(costs, arrangement, depth, streamed, wire.kind)
        chunks = [chunk for own in costs for chunk in own]
        memory = memory_needs(self.workload, self.batch, self.formats, _message_bytes(chunks, depth))
        throughput = ranks * self.batch / times.step
        return PredictedStep(
            self.workload.name, self.cluster.name, wire.text, str(wire.topology(arrangement.node)), ranks, self.batch, times,
            throughput, throughput * self.compute.total / self.batch,
            sum(chunk.bytes_sent for chunk in chunks), sum(chunk.messages for chunk in chunks), sum(c.waits for c in chunks),
            memory, None if device.memory is None else memory.total <= device.memory,
        )  # fmt: skip

    def _times(
        self, costs: list[list[ChunkCost]], arrangement: Arrangement, depth: int, streamed: bool, kind: str
    ) -> StepTimes:
        """Gradients are reduced when the slowest rank has them. What others wait for it is idle time."""
        ranks = arrangement.ranks
        slowest, compute = self.cluster.stragglers.slowest(ranks), self.compute.total
        jobs = [BucketJob(ready * slowest, tuple(own)) for ready, own in zip(self._ready, costs, strict=True)]
        jobs.sort(key=lambda job: job.ready)
        device = self.cluster.device
        times = step_times(compute * slowest, jobs, depth, device.beside, streamed, arrangement.burst)
        overhead = device.step_overhead + self.compute.overhead + self.compute.excess.get(kind, 0.0) if ranks > 1 else 0.0
        return replace(times, compute=compute, idle=compute * (slowest - 1) + overhead)


def _message_bytes(chunks: list[ChunkCost], depth: int) -> float:
    """Bytes of messages that are there at once: sent and received, of the largest chunks."""
    return sum(2 * size for size in sorted((chunk.bytes_sent for chunk in chunks), reverse=True)[:depth])
