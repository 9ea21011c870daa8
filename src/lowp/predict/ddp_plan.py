"""`lowp.compress_gradients(ddp, "plan")`: a model that finds out in its first steps how its gradients should travel.

1. For some steps gradients travel uncompressed, by torch. When each bucket is ready is noted; of the last of these steps, each
   rank's own gradients are kept.
2. At the beginning of the next forward pass, where all ranks are at the same place, links and codecs are measured
   (calibration.py), unless a cluster is given; rank 0 gathers some ranks' gradients, plans with DDP's own buckets
   (planning.py), and tells the others.
3. From then on gradients travel as planned. The choice is part of `state_dict`: a run that goes on does not measure again.

The handle is the one of `compress_gradients` from then on; until then its figures are of no step.
"""

import logging
import statistics
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lowp import compat
from lowp.predict.auto import first_says
from lowp.predict.calibration import calibrate_cluster
from lowp.predict.cluster import Cluster, ModelTimes
from lowp.predict.cluster_file import cluster_here
from lowp.predict.gradients import MOST_NUMBERS, SampleGradients, share_of
from lowp.predict.planning import MAX_ERROR, WirePlan, plan
from lowp.predict.probes.model import Stamps
from lowp.predict.wires import uncompressed_of
from lowp.predict.workload import ModelLayer, Work, Workload
from lowp.wire.ddp import Handle, compress_gradients, switch_to, synchronised
from lowp.wire.report import WireReport
from lowp.wire.state import AllRanks

logger = logging.getLogger("lowp")

WARM_UP, TIMED = 2, 5  # steps; DDP makes its buckets anew after the first
GATHERED = 4  # ranks whose gradients are looked at
CALIBRATION_SECONDS = 30.0
MODEL = "this model"


class _Observed:
    """Steps that are timed: the forward pass, and every bucket when it is ready."""

    def __init__(self, device: torch.device, share: float) -> None:
        self._stamps, self._share = Stamps(device), share
        self.steps: list[tuple[Any, list[tuple[tuple[str, ...], Any]]]] = []  # the beginning; buckets, each with its moment
        self.gradients: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.steps.append((self._stamps.now(), []))

    def bucket(self, names: tuple[str, ...], gradients: Sequence[Tensor]) -> None:
        self.steps[-1][1].append((names, self._stamps.now()))
        for name, gradient in zip(names, gradients, strict=True):
            own = gradient.detach().reshape(-1)
            self.gradients[name] = own[: max(1, int(self._share * own.numel()))].float().clone()

    def times(self, group: Any) -> tuple[list[list[str]], list[float]]:
        """Names, bucket by bucket in order of time, and seconds from one to the next; of all ranks the mean."""
        laid = [names for names, _ in self.steps[-1][1]]
        timed = [step for step in self.steps if [names for names, _ in step[1]] == laid][-TIMED:]
        self._stamps.wait()
        found = []
        for began, buckets in timed:
            moments = [began, *(moment for _, moment in buckets)]
            found.append([self._stamps.between(a, b) for a, b in pairwise(moments)])
        own = [statistics.median(column) for column in zip(*found, strict=True)]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
        return [list(names) for names in laid], [statistics.fmean(column) for column in zip(*everyone, strict=True)]


class PlannedHandle(Handle):
    """As `compress_gradients` gives one. `plan` is what was decided, on rank 0; `arguments`, on all; None before."""

    def __init__(self, ddp: DistributedDataParallel, max_error: float | None, cluster: Any, options: dict[str, Any]) -> None:
        self.max_error = MAX_ERROR if max_error is None else max_error
        if not 0 <= self.max_error < float("inf"):
            raise ValueError(f"max_error: {self.max_error:g} must be at least 0")
        self._options = options
        self._ddp = weakref.ref(ddp)
        self._group: Any = ddp.process_group
        self._parameters = synchronised(ddp)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device
        self._cluster = None if cluster is None else cluster_here(cluster, self._device)
        self._seen = self._done = 0
        self._inner: Handle | None = None
        self.plan: WirePlan | None = None
        self.arguments: dict[str, Any] | None = None
        numbers = sum(parameter.numel() for parameter in self._parameters.values())
        self._observed: _Observed | None = _Observed(self._device, share_of(numbers, MOST_NUMBERS))
        self._switch = switch_to(ddp, self)
        self._before_forward = ddp.register_forward_pre_hook(lambda *_: self._forward_begins())

    def _forward_begins(self) -> None:
        ddp = self._ddp()
        if self._observed is None or ddp is None or not torch.is_grad_enabled():
            return
        if compat.joins(ddp):
            raise ValueError("compress_gradients(ddp, 'plan'): make the plan before ddp.join(): ranks may be missing there")
        if self._done < WARM_UP + TIMED:
            self._observed.begin()
            return
        observed, self._observed = self._observed, None
        self._apply(ddp, self._decided(observed))

    def _hook(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        if self._observed is not None and self._observed.steps:
            names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
            self._observed.bucket(names, bucket.gradients())
            self._seen += len(names)
            if self._seen >= len(self._names):
                self._seen, self._done = 0, self._done + 1
        return allreduce_hook(self._group, bucket)

    def _decided(self, observed: _Observed) -> dict[str, Any]:
        """By rank 0, from what all have measured."""
        buckets, seconds = observed.times(self._group)
        cluster = self._cluster or calibrate_cluster(seconds=CALIBRATION_SECONDS, device=self._device, group=self._group)
        gradients = self._gathered(observed.gradients)
        failure, arguments = "", {}
        if dist.get_rank(self._group) == 0:
            try:
                self.plan = self._planned(cluster, buckets, seconds, gradients)
                arguments = self.plan.arguments
            except ValueError as error:
                failure = str(error)
        failure, arguments = first_says(self._group, (failure, arguments))
        if failure:
            raise ValueError(failure)
        return arguments

    def _planned(
        self, cluster: Cluster, buckets: list[list[str]], seconds: list[float], gradients: SampleGradients
    ) -> WirePlan:
        workload, times = observed_workload({n: tuple(p.shape) for n, p in self._parameters.items()}, buckets, seconds)
        found = plan(
            workload,
            cluster.with_times(MODEL, times),
            dist.get_world_size(self._group),
            max_error=self.max_error,
            batch=1,
            buckets=buckets,
            torchs=(own := uncompressed_of(self._parameters.values()),),
            gradients=gradients,
            uncompressed=own,
        )
        step = found.chosen.step
        logger.info("plan: %s, predicted %.1f ms a step (%s)", found.chosen.wire, 1e3 * step.step, found.gradients)
        return found

    def _gathered(self, own: Mapping[str, Tensor]) -> SampleGradients:
        """Of the first ranks, on every rank. A broadcast of each: their sum over ranks is never needed."""
        ranks = min(GATHERED, dist.get_world_size(self._group))
        flat = torch.cat(list(own.values()))
        found = []
        for rank in range(ranks):
            theirs = flat.clone()
            dist.broadcast(theirs, dist.get_global_rank(self._group, rank), group=self._group)
            pieces = theirs.cpu().split([gradient.numel() for gradient in own.values()])
            found.append(dict(zip(own, pieces, strict=True)))
        return SampleGradients(tuple(found), f"gradients of {ranks} ranks in step {self._done}")

    def _apply(self, ddp: DistributedDataParallel, arguments: dict[str, Any]) -> None:
        self._before_forward.remove()
        self._observed, self.arguments, self._switch.handle = None, arguments, None
        if arguments:
            self._inner = compress_gradients(ddp, **(self._options | arguments))

    # What a handle offers, from the one that compresses; before there is one, nothing.

    @property
    def compresses(self) -> bool:
        return self._inner is not None and self._inner.compresses

    @property
    def buckets(self) -> list[list[str]]:
        return [] if self._inner is None else self._inner.buckets

    def buckets_at(self, step: int) -> list[list[str]]:
        if self._inner is None:
            raise ValueError(f"the buckets of step {step} are not known here: nothing is compressed yet")
        return self._inner.buckets_at(step)

    @property
    def step(self) -> int:
        """Compressed ones."""
        return 0 if self._inner is None else self._inner.step

    def report(self) -> WireReport:
        return WireReport() if self._inner is None else self._inner.report()

    def total(self) -> WireReport:
        if self._inner is not None:
            return self._inner.total()
        return WireReport(notes=["no plan yet" if self.arguments is None else "not compressed: the plan found nothing faster"])

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        inner = None if self._inner is None else self._inner.state_dict(all_ranks)
        return {"plan": self.arguments, "wire": inner}

    def load_state_dict(self, saved: Mapping[str, Any], step_only: bool = False) -> None:
        """With what was planned before: nothing is measured again."""
        ddp = self._ddp()
        if ddp is None or set(saved) != {"plan", "wire"}:
            raise ValueError("this state is not of compress_gradients(ddp, 'plan')")
        if saved["plan"] is not None and self.arguments is None:
            self._apply(ddp, dict(saved["plan"]))
        if self.arguments != saved["plan"]:
            raise ValueError(f"this model's plan is {self.arguments}, and the saved one {saved['plan']}")
        if self._inner is not None:
            self._inner.load_state_dict(saved["wire"], step_only)

    @property
    def all_ranks(self) -> AllRanks:
        return AllRanks(self)

    def remove(self) -> None:
        self._before_forward.remove()
        self._observed = None
        if self._switch.handle is self:
            self._switch.handle = None
        if self._inner is not None:
            self._inner.remove()


def observed_workload(
    shapes: Mapping[str, tuple[int, ...]], buckets: Sequence[Sequence[str]], seconds: Sequence[float]
) -> tuple[Workload, ModelTimes]:
    """A model of which is known when its buckets are ready: the time of each is its last parameter's."""
    turn = {name: number for number, name in enumerate(name for bucket in buckets for name in bucket)}
    layers = tuple(ModelLayer(name, shape, Work(), Work(), turn[name]) for name, shape in shapes.items())
    times = dict.fromkeys(shapes, 0.0)
    for bucket, took in zip(buckets, seconds, strict=True):
        times[bucket[-1]] = max(0.0, took)
    return Workload(MODEL, layers), ModelTimes(1, 0.0, sum(times.values()), times)
