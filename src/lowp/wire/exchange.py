"""One bucket of gradients, from a rank's own to the sum of all.

1. Prepare: the scales that all ranks share. With `aps`, one byte a layer is agreed by a MAX over the ranks.
2. For each chunk: enter (float32, scaled), the reduction, leave (unscaled, divided by the number of ranks if it is a mean).
3. Done when the last chunk is: note what was not finite, and the scales for the next step.

Each of the first two is a generator that stops where it waits for messages; a ChunkScheduler runs many of them at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.flat import FlatFunction
from lowp.tensor.noise import Domain
from lowp.wire import scaling
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.feedback import Feedback
from lowp.wire.link import ChunkLink, GroupLink
from lowp.wire.plan import Chunk, Layer, chunks_of, constants, cuts_for
from lowp.wire.reductions.base import Job, Reduction, Steps
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

    def __init__(self, layers: tuple[Layer, ...], world: int, state: State, device: torch.device) -> None:
        self._layers = layers
        self._world = world
        self._state = state
        self._device = device
        self.bounds: Tensor | None = None  # of the layers whose bounds are agreed on now
        self._now = [i for i, layer in enumerate(layers) if layer.codec.scale.agreed or self._first_of_delayed(layer)]

    def _first_of_delayed(self, layer: Layer) -> bool:
        return layer.codec.scale.kind == "aps_delayed" and layer.name not in self._state.bounds

    @property
    def agreeing(self) -> int:
        """How many layers there are whose scale the ranks agree on in this step."""
        return len(self._now)

    def measure(self, numbers: Callable[[int], Tensor]) -> Tensor | None:
        """This rank's bounds (bytes) of the layers whose scale is to be agreed on; None if there are none."""
        if not self._now:
            return None
        self.bounds = scaling.bound_bytes(_all_largest([numbers(i) for i in self._now]), self._world)
        return self.bounds

    def factors(self) -> "list[float] | Tensor":
        """Of each layer: Python floats on a CPU; elsewhere a tensor, so that nothing waits for the device."""
        bounds: dict[int, Tensor] = {}
        if self.bounds is not None:
            bounds = {i: self.bounds[position] for position, i in enumerate(self._now)}
        delayed = [i for i, layer in enumerate(self._layers) if layer.codec.scale.kind == "aps_delayed" and i not in bounds]
        bounds |= {i: self._state.bounds[self._layers[i].name] for i in delayed}
        found = [1.0] * len(self._layers)
        if not bounds:
            return found
        tops = (scaling.emax_of(self._layers[i].codec.format) - (i in delayed) for i in bounds)
        emax = constants(tuple(tops), torch.int32, self._device)
        powers = scaling.power_of_two(scaling.aps_shifts(torch.stack(list(bounds.values())), emax))
        if self._device.type != "cpu":
            places = constants(tuple(bounds), torch.int64, self._device)
            return torch.ones(len(found), device=self._device).index_copy_(0, places, powers)
        for i, value in zip(bounds, powers.tolist(), strict=True):
            found[i] = value
        return found

    def marks(self) -> Tensor:
        """255 for each layer that is known not to be finite on some rank."""
        marks = torch.zeros(len(self._layers), dtype=torch.uint8, device=self._device)
        if self.bounds is not None:
            places = constants(tuple(self._now), torch.int64, self._device)
            marks[places] = torch.where(self.bounds == NONFINITE, NONFINITE, 0).to(torch.uint8)
        return marks


def _all_largest(layers: list[Tensor]) -> Tensor:
    """The largest magnitude of each layer. On CUDA in a few launches for all of them; NaN comes through both ways."""
    if layers[0].is_cuda and all(layer.numel() for layer in layers):
        return torch.stack(torch._foreach_norm(layers, math.inf)).to(torch.float32)
    return torch.stack([_largest(layer) for layer in layers])


def _largest(numbers: Tensor) -> Tensor:
    return scaling.largest(numbers).to(torch.float32) if numbers.numel() else torch.zeros((), device=numbers.device)


@lru_cache(maxsize=64)
def _times_layer(dtype: torch.dtype, number: torch.dtype, layers: int) -> FlatFunction:
    """Each number times the factor of its layer, in float32: one kernel for all layers of a chunk."""

    def product(numbers: Tensor, layer: Tensor, factors: Tensor) -> Tensor:
        return numbers.to(torch.float32) * factors[layer.to(torch.int32)]

    return FlatFunction(product, (dtype, number), ((torch.float32, layers),), torch.float32)


def _scale_layers(source: Tensor, factors: Tensor, chunk: Chunk, out: Tensor) -> None:
    """`out = source * factor of the layer`, on a device. The table is padded, so that few kernels serve all buckets."""
    mine = factors[chunk.run_layers(source.device)]
    room = 16
    while room < len(chunk.runs):
        room *= 4
    table = torch.nn.functional.pad(mine, (0, room - mine.numel()))
    number = chunk.layer_of_each(source.device)
    _times_layer(source.dtype, number.dtype, room)([source, number], [table], out)


def peaks_of(source: Tensor, chunk: Chunk, world: int) -> Tensor:
    """The header byte of each part of a chunk, where the codec does not make its own: how large the rank's numbers are."""
    peaks = torch.zeros(len(chunk.parts), dtype=torch.uint8, device=source.device)
    sending = [index for index, (part, _) in enumerate(chunk.parts) if part.codec.sends_peaks]
    if sending:
        stretches = [source[first : first + part.size] for part, first in (chunk.parts[index] for index in sending)]
        places = constants(tuple(sending), torch.int64, source.device)
        peaks[places] = scaling.bound_bytes(_all_largest(stretches), world)
    return peaks


def enter(flat: Tensor, chunk: Chunk, factors: "list[float] | Tensor", world: int) -> tuple[Tensor, Tensor]:
    """A chunk's numbers, float32 and scaled, and the header byte of each part. Without scaling, float32 stays where it is."""
    source = flat[chunk.start : chunk.stop]
    peaks = peaks_of(source, chunk, world)
    if flat.dtype == torch.float32 and isinstance(factors, list) and all(factors[layer] == 1 for layer, _, _ in chunk.runs):
        return source, peaks
    numbers = torch.empty(chunk.size, dtype=torch.float32, device=flat.device)
    if isinstance(factors, Tensor):
        _scale_layers(source, factors, chunk, numbers)
        return numbers, peaks
    for layer, first, last in chunk.runs:
        if flat.dtype == torch.float32:
            torch.mul(source[first:last], factors[layer], out=numbers[first:last])
        else:
            numbers[first:last].copy_(source[first:last]).mul_(factors[layer])
    return numbers, peaks


def leave(
    numbers: Tensor, peaks: Tensor, chunk: Chunk, factors: "list[float] | Tensor", marks: Tensor, divisor: int, flat: Tensor
) -> Tensor:
    """Unscale, divide, and put the sums where they belong; NaN for layers that were not finite. Returns their new marks.

    `marks` has 255 for layers that are known to be bad already. A layer is bad as soon as one of its parts is.
    """
    marks = marks.scatter_reduce(
        0, chunk.owners(flat.device), torch.where(peaks == NONFINITE, NONFINITE, 0).to(torch.uint8), "amax"
    )
    exact, rest = (divisor, 1) if divisor & (divisor - 1) == 0 else (1, divisor)  # a power of two goes into the unit
    if flat.device.type == "cpu":
        _unscale(numbers, [(math.nan if mark else 1.0) / exact for mark in marks.tolist()], factors, chunk)
    else:
        poison = torch.where(marks == NONFINITE, math.nan, 1.0 / exact)
        known = factors if isinstance(factors, Tensor) else torch.ones_like(poison)
        _scale_layers(numbers, poison / known, chunk, numbers)
    if rest != 1:
        numbers.div_(rest)
    target = flat[chunk.start : chunk.stop]
    if target.data_ptr() != numbers.data_ptr():
        target.copy_(numbers)
    return marks


def _unscale(numbers: Tensor, units: list[float], factors: "list[float] | Tensor", chunk: Chunk) -> None:
    for layer, first, last in chunk.runs:
        unit = units[layer] / factors[layer]
        if unit != 1:
            numbers[first:last].mul_(unit)


def rules_for(
    settings: Settings,
    reduction: Reduction,
    world: int,
    rank: int,
    step: int,
    feedback: Feedback | None,
    factors: "list[float] | Tensor",
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
        layers: tuple[Layer, ...],
        settings: Settings,
        reduction: Reduction,
        link: GroupLink,
        state: State,
        meter: Meter,
        mean: bool,
        done: Callable[[Tensor], None],
    ) -> None:
        self._flat = flat
        self._layers = layers
        self._settings = settings
        self._reduction = reduction.of_size(flat.numel())
        self._link = link
        self._state = state
        self._meter = meter
        self._divisor = link.world if mean else 1
        self._done = done
        self._step = state.step
        self.complete = False
        self._scales = SharedScales(layers, link.world, state, flat.device)
        self._chunks = chunks_of(layers, self._reduction.shards(link.world), cuts_for(settings.chunk, flat.device))
        self._number = link.take_number()
        self._links = [link.for_chunk() for _ in self._chunks]  # numbered now: buckets come in the same order on all ranks
        self._left = len(self._chunks)
        self._bad = torch.zeros(len(layers), dtype=torch.uint8, device=flat.device)
        self._peaks = torch.zeros(len(layers), dtype=torch.uint8, device=flat.device)

    def _prepare(self) -> Steps:
        """Agree on scales; then `jobs` may begin."""
        offsets = [0]
        for layer in self._layers:
            offsets.append(offsets[-1] + layer.size)
        if self._settings.measure:
            self._exact = self._flat.to(torch.float32, copy=True)
        self._source, self._feedback, link = self._flat, None, self._link
        if self._settings.error_feedback:
            residuals = self._state.residuals
            self._feedback = Feedback(lambda _: residuals, self._layers)
            self._source = self._feedback.add(link.rank, self._flat, self._flat if self._flat.dtype == torch.float32 else None)
        bounds = self._scales.measure(lambda i: self._source[offsets[i] : offsets[i + 1]])
        pending = [] if bounds is None else link.maximum(bounds)
        if self._settings.measure:
            pending += link.plain_sum(self._exact)
        if pending:
            yield pending
        self._factors = self._scales.factors()
        self._marks = self._scales.marks()
        self._rules = rules_for(
            self._settings, self._reduction, link.world, link.rank, self._step, self._feedback, self._factors
        )
        self._rules.meter = self._meter

    def start(self, scheduler: ChunkScheduler) -> None:
        """Let a scheduler do everything. The chunks begin when the scales are known."""
        scheduler.add(Task(self._number, self._prepare(), self._meter, lambda: self._begin_chunks(scheduler)))

    def _begin_chunks(self, scheduler: ChunkScheduler) -> None:
        if not self._chunks:
            self._finish()
        steps = self._reduction.steps(self._link.world)
        for chunk, link in zip(self._chunks, self._links, strict=True):
            scheduler.add(Task(link.number, self._job(chunk, link), self._meter, steps=steps))

    def _job(self, chunk: Chunk, link: ChunkLink) -> Steps:
        with self._meter.timed("encode", self._flat.device):
            numbers, peaks = enter(self._source, chunk, self._factors, self._link.world)
        yield from self._reduction.exchange(Job(chunk, numbers, peaks, self._rules, link))
        with self._meter.timed("decode", self._flat.device):
            marks = leave(numbers, peaks, chunk, self._factors, self._marks, self._divisor, self._flat)
        self._bad = torch.maximum(self._bad, marks)
        self._peaks = largest_peaks(self._peaks, chunk, peaks)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        if self._feedback is not None:
            self._feedback.finish()
        remember_bounds(self._state, self._layers, self._travelled())
        if self._settings.measure:
            self._meter.compare(self._flat, self._exact.div_(self._divisor))
        self._done(self._bad)

    def _travelled(self) -> dict[int, Tensor]:
        """Bounds that came with the messages."""
        return {i: self._peaks[i] for i, layer in enumerate(self._layers) if layer.codec.scale.kind == "aps_delayed"}


def largest_peaks(before: Tensor, chunk: Chunk, peaks: Tensor) -> Tensor:
    """The largest byte that each layer's messages had, for the next step of `aps_delayed`."""
    if not any(part.codec.scale.kind == "aps_delayed" for part, _ in chunk.parts):
        return before
    return before.scatter_reduce(0, chunk.owners(peaks.device), peaks, "amax")


def remember_bounds(state: State, layers: tuple[Layer, ...], bounds: dict[int, Tensor]) -> None:
    """For the next step of `aps_delayed`; nothing is learnt from a step that was zero or not finite.

    A layer of which nothing is known agrees on its scale when it is next sent. (On CUDA, to know that nothing is known would be
    to wait for the device: there a layer that begins with zeros is sent unscaled once.)
    """
    for i, layer in enumerate(layers):
        if layer.codec.scale.kind == "aps_delayed":
            before = state.bounds.get(layer.name, torch.zeros_like(bounds[i]))
            unknown = (bounds[i] == NONFINITE) | (bounds[i] == ZERO)
            state.bounds[layer.name] = torch.where(unknown, before, bounds[i]).clone()
            if bounds[i].device.type == "cpu" and state.bounds[layer.name] == ZERO:
                del state.bounds[layer.name]
