"""One bucket of gradients, from a rank's own to the sum of all.

1. Prepare: the scales that all ranks share. With `aps`, one byte a layer is agreed by a MAX over the ranks.
2. For each chunk: enter (float32, scaled), the reduction, leave (unscaled, divided by the number of ranks if it is a mean).
3. Done when the last chunk is: note what was not finite, and the scales for the next step.

Each of the first two is a generator that stops where it waits for messages; a ChunkScheduler runs many of them at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists.parts import PartTable
from lowp.tensor.noise import Domain
from lowp.wire import scaling
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.feedback import Feedback
from lowp.wire.link import ChunkLink, GroupLink
from lowp.wire.messages import Messages
from lowp.wire.part_kernels import measure
from lowp.wire.plan import Bucket, Chunk, Layer, constants, cuts_for
from lowp.wire.reductions.base import ChunkJob, Reduction, Steps
from lowp.wire.report import Meter
from lowp.wire.rules import Rules
from lowp.wire.scaling import NONFINITE, ZERO
from lowp.wire.settings import Settings


@dataclass
class State:
    """What is remembered between steps, by parameter: residuals, and the last bounds of `aps_delayed` (bytes)."""

    residuals: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def memory(self) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
        """Copies of residuals and bounds, to go back to when a step is skipped. (Bounds are replaced, never written to.)"""
        return {name: residual.clone() for name, residual in self.residuals.items()}, dict(self.bounds)

    def snapshot(self) -> "tuple[int, dict[str, Tensor], dict[str, Tensor]]":
        return self.step, *self.memory()

    def restore(self, before: "tuple[int, dict[str, Tensor], dict[str, Tensor]]") -> None:
        self.step, self.residuals, self.bounds = before

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "residuals": dict(self.residuals), "bounds": dict(self.bounds)}

    def load_state_dict(self, saved: dict[str, Any], device: torch.device | None = None) -> None:
        missing = {"step", "residuals", "bounds"} - saved.keys()
        if missing:
            raise ValueError(f"this is no state of a gradient compression: {', '.join(sorted(missing))} missing")
        self.step = int(saved["step"])
        self.residuals = {name: residual.to(device, copy=True) for name, residual in saved["residuals"].items()}
        self.bounds = {name: bound.to(device, copy=True) for name, bound in saved["bounds"].items()}


class SharedScales:
    """By which power of two every layer is multiplied before it enters, and what it counts in when it leaves."""

    def __init__(self, bucket: Bucket, world: int, state: State, device: torch.device) -> None:
        self._bucket = bucket
        self._layers = layers = bucket.layers
        self._world = world
        self._state = state
        self._device = device
        self.bounds: Tensor | None = None  # of the layers whose bounds are agreed on now
        kinds = bucket.scale_kinds
        if "aps_delayed" in kinds:
            self._now = [i for i, layer in enumerate(layers) if layer.codec.scale.agreed or self._first_of_delayed(layer)]
        else:
            self._now = kinds.get("aps", [])

    def _first_of_delayed(self, layer: Layer) -> bool:
        return layer.codec.scale.kind == "aps_delayed" and layer.name not in self._state.bounds

    @property
    def agreeing(self) -> int:
        """How many layers there are whose scale the ranks agree on in this step."""
        return len(self._now)

    def measure(self, flat: Tensor) -> Tensor | None:
        """This rank's bounds (bytes) of the layers whose scale is to be agreed on; None if there are none."""
        if not self._now:
            return None
        kind = flat.device, tuple(self._now)
        if kind not in self._bucket.tables:
            rows = [(self._layers[i].size, i, self._bucket.begins[i]) for i in self._now]
            self._bucket.tables[kind] = PartTable(rows, flat.device)
        maxima = measure(flat, self._bucket.tables[kind], (True, False))
        self.bounds = scaling.bound_bytes(maxima[0].view(torch.float32), self._world)
        return self.bounds

    def factors(self) -> Tensor | None:
        """Of each layer, float32 on its device, so that nothing waits for it; None where all are 1."""
        if self.bounds is not None and len(self._now) == len(self._layers):
            return scaling.aps_factors(self.bounds, self._emax(range(len(self._layers))))
        bounds: dict[int, Tensor] = {}
        if self.bounds is not None:
            bounds = {i: self.bounds[position] for position, i in enumerate(self._now)}
        delayed = [i for i in self._bucket.scale_kinds.get("aps_delayed", []) if i not in bounds]
        bounds |= {i: self._state.bounds[self._layers[i].name] for i in delayed}
        if not bounds:
            return None
        emax = self._emax(bounds, delayed)
        powers = scaling.aps_factors(torch.stack(list(bounds.values())), emax)
        places = constants(tuple(bounds), torch.int64, self._device)
        return torch.ones(len(self._layers), device=self._device).index_copy_(0, places, powers)

    def _emax(self, layers: Iterable[int], delayed: Collection[int] = ()) -> Tensor:
        """The exponents that layers are scaled up to."""
        kind = "emax", self._device, tuple(layers), tuple(delayed)
        if kind not in self._bucket.tables:
            tops = [scaling.emax_of(self._layers[i].codec.format) - (i in delayed) for i in kind[2]]
            self._bucket.tables[kind] = torch.tensor(tops, dtype=torch.int32).to(self._device)
        return self._bucket.tables[kind]

    def units(self, divisor: int) -> Tensor:
        """What the sum of each layer counts in: 1 / divisor; NaN for layers that are known not to be finite on some rank."""
        kind = "units", self._device, divisor
        if kind not in self._bucket.tables:
            self._bucket.tables[kind] = torch.full((len(self._layers),), 1.0 / divisor, device=self._device)
        usual: Tensor = self._bucket.tables[kind]
        if self.bounds is None:
            return usual
        if len(self._now) == len(self._layers):
            return torch.where(self.bounds == NONFINITE, math.nan, usual)
        places = constants(tuple(self._now), torch.int64, self._device)
        return usual.index_add(0, places, torch.where(self.bounds == NONFINITE, math.nan, 0.0))


def poisoned(units: Tensor, peaks: Tensor, chunk: Chunk) -> Tensor:
    """Units of a chunk's layers. A layer is bad, and its unit NaN, as soon as one of its parts is."""
    if not chunk.sends_headers:
        return units
    return units.index_add(0, chunk.owners(units.device), torch.where(peaks == NONFINITE, math.nan, 0.0))


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
        accumulate=settings.sums(reduction),
        kahan=settings.kahan,
        seed=settings.seed,
        step=step,
        rank=rank,
        feedback=feedback,
        factors=factors,
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
        self._scales = SharedScales(bucket, link.world, state, flat.device)
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
        if self._flat.dtype == torch.float64:
            self._source = self._flat.to(torch.float32)
        if self._settings.error_feedback:
            residuals = self._state.residuals
            self._feedback = Feedback(lambda _: residuals, self._bucket.layers)
            self._source = self._feedback.add(link.rank, self._flat, self._flat if self._flat.dtype == torch.float32 else None)
        bounds = self._scales.measure(self._source)
        pending = [] if bounds is None else link.maximum(bounds)
        if self._settings.measure:
            pending += link.plain_sum(self._exact)
        if pending:
            yield pending
        factors = self._scales.factors()
        exact, self._rest = exact_and_rest(self._divisor)
        self._usual = self._scales.units(exact)
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
            scheduler.add(Task(link.number, self._reduce(chunk, link), self._meter, steps=steps))

    def _reduce(self, chunk: Chunk, link: ChunkLink) -> Steps:
        def unscale(messages: Messages, buffer: Tensor, count: int, stride: int) -> tuple[Tensor | None, int]:
            factors, found = self._rules.factors, None
            if not chunk.remembers_peaks:
                found = messages.units(buffer, chunk.owners(buffer.device), self._usual, factors, count, stride)
            if found is None:
                peaks = messages.peaks(buffer, count, stride)
                units = poisoned(self._usual, peaks, chunk)
                self._peaks = largest_peaks(self._peaks, chunk, peaks, len(units))
                found = units if factors is None else units / factors
            self._units.append(found)
            return found, self._rest

        source, target = (x[chunk.start : chunk.stop] for x in (self._source, self._flat))
        direct = target.dtype != torch.float64
        sums = target if direct else torch.empty(chunk.size, dtype=torch.float32, device=target.device)
        job = ChunkJob(chunk, source, sums, self._rules, link, unscale)
        yield from self._reduction.exchange(job)
        job.buffers.give_back()
        if not direct:
            target.copy_(sums)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        if self._feedback is not None:
            self._feedback.finish()
        remember_bounds(self._state, self._bucket.layers, self._travelled())
        if self._settings.measure:
            self._meter.compare(self._flat, self._exact.div_(self._divisor))
        units = self._units or [torch.ones(len(self._bucket.layers), device=self._flat.device)]
        self._done(lambda: marks_of(units))

    def _travelled(self) -> dict[int, Tensor]:
        """Bounds that came with the messages."""
        if self._peaks is None:
            return {}
        return {i: self._peaks[i] for i, layer in enumerate(self._bucket.layers) if layer.codec.scale.kind == "aps_delayed"}


def largest_peaks(before: Tensor | None, chunk: Chunk, peaks: Tensor, layers: int) -> Tensor | None:
    """The largest byte that each layer's messages had, for the next step of `aps_delayed`; None where no layer has that."""
    if not chunk.remembers_peaks:
        return before
    before = torch.zeros(layers, dtype=torch.uint8, device=peaks.device) if before is None else before
    return before.scatter_reduce(0, chunk.owners(peaks.device), peaks, "amax")


def remember_bounds(state: State, layers: tuple[Layer, ...], bounds: dict[int, Tensor]) -> None:
    """For the next step of `aps_delayed`; nothing is learnt from a step that was zero or not finite.

    A layer of which nothing is known agrees on its scale when it is next sent. (On CUDA, to know that nothing is known would be
    to wait for the device: there a layer that begins with zeros is sent unscaled once.)
    """
    for i, layer in enumerate(layers) if bounds else ():
        if layer.codec.scale.kind == "aps_delayed":
            before = state.bounds.get(layer.name, torch.zeros_like(bounds[i]))
            unknown = (bounds[i] == NONFINITE) | (bounds[i] == ZERO)
            state.bounds[layer.name] = torch.where(unknown, before, bounds[i]).clone()
            if bounds[i].device.type == "cpu" and state.bounds[layer.name] == ZERO:
                del state.bounds[layer.name]
