"""One bucket of gradients, from a rank's own to the sum of all.

1. Prepare: the scales that all ranks share. With `aps`, one byte a layer is agreed by a MAX over the ranks.
2. For each chunk: enter (float32, scaled), the reduction, leave (unscaled, divided by the number of ranks if it is a mean).
3. Done when the last chunk is: note what was not finite, and the scales for the next step.

Each of the first two is a generator that stops where it waits for messages; a ChunkScheduler runs many of them at once.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists.parts import PartTable
from lowp.tensor.noise import Domain
from lowp.wire import scaling
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.feedback import Feedback
from lowp.wire.layer_tensors import Bounds, Residuals
from lowp.wire.link import ChunkLink, GroupLink
from lowp.wire.messages import Messages
from lowp.wire.part_kernels import measure
from lowp.wire.plan import Bucket, Chunk, constants, cuts_for
from lowp.wire.reductions.base import ChunkJob, Reduction, Steps
from lowp.wire.report import Meter
from lowp.wire.rules import Rules
from lowp.wire.scaling import NONFINITE
from lowp.wire.settings import Settings
from lowp.wire.workspace import NEW_MEMORY, NewMemory, Workspaces

Memory = tuple[Residuals, Bounds]


@dataclass
class State:
    """What is remembered between steps: residuals, and the last bounds of `aps_delayed` (bytes). And memory to work in."""

    residuals: Residuals = field(default_factory=Residuals)
    bounds: Bounds = field(default_factory=Bounds)
    step: int = 0
    workspaces: Workspaces = field(default_factory=Workspaces)

    def memory(self) -> Memory:
        """Copies of residuals and bounds, to go back to when a step is skipped."""
        return self.residuals.copy(), self.bounds.copy()

    def snapshot(self) -> "tuple[int, Memory]":
        return self.step, self.memory()

    def restore(self, before: "tuple[int, Memory]") -> None:
        self.step, (self.residuals, self.bounds) = before

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "residuals": self.residuals.named(), "bounds": self.bounds.named()}

    def load_state_dict(self, saved: dict[str, Any], device: torch.device | None = None) -> None:
        missing = {"step", "residuals", "bounds"} - saved.keys()
        if missing:
            raise ValueError(f"this is no state of a gradient compression: {', '.join(sorted(missing))} missing")
        self.step = int(saved["step"])
        self.residuals = Residuals({name: residual.to(device, copy=True) for name, residual in saved["residuals"].items()})
        self.bounds = Bounds({name: bound.to(device, copy=True) for name, bound in saved["bounds"].items()})


class SharedScales:
    """By which power of two every layer is multiplied before it enters, and what it counts in when it leaves."""

    def __init__(
        self, bucket: Bucket, world: int, state: State, device: torch.device, workspace: NewMemory = NEW_MEMORY
    ) -> None:
        self._bucket, self._world, self._state = bucket, world, state
        self._device, self._workspace = device, workspace
        self.bounds: Tensor | None = None  # of the layers whose bounds are agreed on now
        self._now = bucket.scale_kinds.get("aps", [])
        self._delayed = "aps_delayed" in bucket.scale_kinds
        if self._delayed:
            self._now = sorted([*self._now, *state.bounds.unknown(bucket)])

    @property
    def agreeing(self) -> int:
        """How many layers there are whose scale the ranks agree on in this step."""
        return len(self._now)

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What depends on which layers agree now. (Only delayed scales change that.)"""
        kind = name, self._device, tuple(self._now) if self._delayed else None
        if kind not in self._bucket.tables:
            self._bucket.tables[kind] = make()
        return self._bucket.tables[kind]

    def measure(self, flat: Tensor) -> Tensor | None:
        """This rank's bounds (bytes) of the layers whose scale is to be agreed on; None if there are none."""
        if not self._now:
            return None
        layers, begins, workspace = self._bucket.layers, self._bucket.begins, self._workspace
        table = self._kept("table", lambda: PartTable([(layers[i].size, i, begins[i]) for i in self._now], flat.device))
        maxima = measure(flat, table, (True, False), workspace.zeros((len(self._now),), flat.device))
        self.bounds = workspace.empty((len(self._now),), torch.uint8, flat.device)
        scaling.write_bounds(maxima, self._world, self.bounds)
        return self.bounds

    def factors_and_units(self, divisor: int) -> tuple[Tensor | None, Tensor]:
        """Of each layer, float32 on its device, so that nothing waits for it: factors, None where all are 1; and what its sum
        counts in: 1 / (divisor * factor), NaN for layers that are known not to be finite on some rank."""
        count, device, tables = len(self._bucket.layers), self._device, self._bucket.tables
        kind = "usual", device, divisor
        if kind not in tables:
            tables[kind] = torch.full((count,), 1.0 / divisor, dtype=torch.float32, device=device)
        usual: Tensor = tables[kind]
        if not self._now and not self._delayed:
            return None, usual
        factors, units = (self._workspace.empty((count,), torch.float32, device) for _ in range(2))
        scaling.write_factors(self._all_bounds(), self._kept("emax", self._emax), usual, factors, units)
        return factors, units

    def _all_bounds(self) -> Tensor:
        """Those agreed on now, those of the last step, and 0 for layers that are not scaled."""
        if self.bounds is not None and len(self._now) == len(self._bucket.layers):
            return self.bounds
        if self._delayed:
            others = self._state.bounds.of(self._bucket, self._device)
        else:
            layers = len(self._bucket.layers)
            others = self._kept("no bounds", lambda: torch.zeros(layers, dtype=torch.uint8, device=self._device))
        if self.bounds is None:
            return others
        return others.index_copy(0, constants(tuple(self._now), torch.int64, self._device), self.bounds)

    def _emax(self) -> Tensor:
        """The exponents that layers are scaled up to: one less where the bounds are those of the last step."""
        now = set(self._now)
        tops = [
            scaling.emax_of(layer.codec.format) - (i not in now and layer.codec.scale.kind == "aps_delayed")
            for i, layer in enumerate(self._bucket.layers)
        ]
        return torch.tensor(tops, dtype=torch.int32).to(self._device)


def exact_and_rest(divisor: int) -> tuple[int, int]:
    """A divisor as a power of two, which goes into the unit, and what is left: one of them is 1."""
    return (divisor, 1) if divisor & (divisor - 1) == 0 else (1, divisor)


def marks_of(units: "Sequence[Tensor]") -> Tensor:
    """255 for each layer that was not finite in some chunk."""
    bad = torch.stack(list(units)).isnan().any(0)
    return torch.where(bad, NONFINITE, 0).to(torch.uint8)


def rules_for(
    settings: Settings,
    reduction: Reduction,
    world: int,
    rank: int,
    step: int,
    feedback: Feedback | None,
    factors: Tensor | None,
) -> Rules:
    """The rules for a bucket, in either world."""
    return Rules(
        world=world,
        domain=Domain.WIRE,
        sum_format=settings.sums(reduction),
        kahan=settings.kahan,
        seed=settings.seed,
        step=step,
        rank=rank,
        feedback=feedback,
        factors=factors,
        addends=reduction.addends(world),
    )


class BucketExchange:
    """One bucket on one real rank. `done` is called with the layers' marks (255: not finite) when everything has arrived."""

    def __init__(
        self,
        flat: Tensor,
        bucket: Bucket,
        settings: Settings,
        reduction: Reduction,
        link: GroupLink,
        state: State,
        meter: Meter,
        mean: bool,
        done: "Callable[[Callable[[], Tensor]], None]",
    ) -> None:
        self._flat = flat
        self._bucket = bucket
        self._settings = settings
        self._reduction = reduction.of_size(flat.numel())
        self._link = link
        self._state = state
        self._meter = meter
        self._divisor = link.world if mean else 1
        self._done = done
        self._step = state.step
        self.complete = False
        self._chunks = bucket.chunks(self._reduction.shards(link.world), cuts_for(settings.chunk, flat.device))
        self._number = link.take_number()
        self._links = [link.for_chunk() for _ in self._chunks]  # numbered now: buckets come in the same order on all ranks
        self._left = len(self._chunks)
        self._units: list[Tensor] = []  # of the chunks that are done
        self._peaks: Tensor | None = None

    def _prepare(self) -> Steps:
        """Agree on scales; then chunks may begin."""
        if self._settings.measure:
            self._exact = self._flat.to(torch.float32, copy=True)
        self._source, self._feedback, link = self._flat, None, self._link
        self._workspace = self._state.workspaces.of(self._bucket)
        scales = SharedScales(self._bucket, link.world, self._state, self._flat.device, self._workspace)
        if self._flat.dtype == torch.float64:
            self._source = self._flat.to(torch.float32)
        if self._settings.error_feedback:
            residuals = self._state.residuals
            self._feedback = Feedback(lambda _: residuals, self._bucket)
            self._source = self._feedback.add(link.rank, self._flat, self._flat if self._flat.dtype == torch.float32 else None)
        bounds = scales.measure(self._source)
        pending = [] if bounds is None else link.maximum(bounds)
        if self._settings.measure:
            pending += link.plain_sum(self._exact)
        if pending:
            yield pending
        exact, self._rest = exact_and_rest(self._divisor)
        factors, self._usual = scales.factors_and_units(exact)
        self._rules = rules_for(self._settings, self._reduction, link.world, link.rank, self._step, self._feedback, factors)
        self._rules.meter = self._meter

    def start(self, scheduler: ChunkScheduler) -> None:
        """Let a scheduler do everything. The chunks begin when the scales are known."""
        scheduler.add(Task(self._number, self._prepare(), self._meter, lambda: self._begin_chunks(scheduler)))

    def _begin_chunks(self, scheduler: ChunkScheduler) -> None:
        if not self._chunks:
            self._finish()
        steps = self._reduction.steps(self._link.world)
        for chunk, link in zip(self._chunks, self._links, strict=True):
            scheduler.add(Task(link.number, self._reduce(chunk, link), self._meter, steps=steps, last=self._links[-1].number))

    def _reduce(self, chunk: Chunk, link: ChunkLink) -> Steps:
        workspace = self._state.workspaces.take()
        rules = copy(self._rules)
        rules.workspace = workspace

        def unscale(messages: Messages, buffer: Tensor, count: int, stride: int) -> tuple[Tensor, int]:
            units = self._usual
            if chunk.remembers_peaks:
                peaks = messages.peaks(buffer, count, stride, workspace)
                units = scaling.poisoned(units, peaks, chunk.owners(units.device))
                self._peaks = largest_peaks(self._peaks, chunk, peaks, len(units))
            elif chunk.sends_headers:
                room = self._workspace.empty((len(units),), torch.float32, units.device)
                units = messages.units(buffer, units, count, stride, workspace, room)
            self._units.append(units)
            return units, self._rest

        source, target = (x[chunk.start : chunk.stop] for x in (self._source, self._flat))
        direct = target.dtype != torch.float64
        sums = target if direct else torch.empty(chunk.size, dtype=torch.float32, device=target.device)
        yield from self._reduction.reduce(ChunkJob(chunk, source, sums, rules, link, unscale))
        self._state.workspaces.give_back(workspace)
        if not direct:
            target.copy_(sums)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        if self._feedback is not None:
            self._feedback.finish()
        if self._peaks is not None:
            remember_bounds(self._state, self._bucket, self._peaks)
        if self._settings.measure:
            self._meter.compare(self._flat, scaling.divide_(self._exact, self._divisor))
        units = self._units or [torch.ones(len(self._bucket.layers), dtype=torch.float32, device=self._flat.device)]
        self._done(lambda: marks_of(units))


def largest_peaks(before: Tensor | None, chunk: Chunk, peaks: Tensor, layers: int) -> Tensor | None:
    """The largest byte that each layer's messages had, for the next step of `aps_delayed`; None where no layer has that."""
    if not chunk.remembers_peaks:
        return before
    before = torch.zeros(layers, dtype=torch.int32, device=peaks.device) if before is None else before
    return before.scatter_reduce(0, chunk.owners(peaks.device), peaks, "amax")


def remember_bounds(state: State, bucket: Bucket, found: Tensor) -> None:
    """For the next step of `aps_delayed`: the largest byte of each layer. Nothing is learnt from a step that was zero or not
    finite. A layer of which nothing is known agrees on its scale when it is next sent (but see `Bounds`)."""
    kind = "delayed", found.device
    if kind not in bucket.tables:
        delayed = [layer.codec.scale.kind == "aps_delayed" for layer in bucket.layers]
        bucket.tables[kind] = torch.tensor(delayed, dtype=torch.uint8).to(found.device)
    scaling.write_remembered(found, bucket.tables[kind], state.bounds.of(bucket, found.device))
