"""A cluster in one process: the same reductions over n ranks' gradients, bit for bit what n real processes compute.

Ranks are visited one after the other; what is kept is the sums so far. Memory does not grow with the number of ranks, except
for the logarithm of it in a tree, and for error feedback: a residual for each rank, and during a step what each rank loses of
the sums that it rounds (once the model in two_shot and sequential, where every sum has one owner; a model for each node in
hierarchical, for each rank in a ring or a tree). Some need the gradients more than once, and then ask for them again: `aps`
looks for the largest numbers first, and a ring's shards begin at different ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lowp.wire.exchange import (
    SharedScales,
    State,
    exact_and_rest,
    largest_peaks,
    marks_of,
    remember_bounds,
    rules_for,
)
from lowp.wire.feedback import Feedback
from lowp.wire.layer_tensors import Residuals
from lowp.wire.link import agreement_bytes
from lowp.wire.plan import Bucket, Shard, cuts_for
from lowp.wire.reductions.base import Reduction
from lowp.wire.report import ring_bytes
from lowp.wire.scale_warnings import warn_of_scales
from lowp.wire.scaled import scaled
from lowp.wire.scaling import poisoned
from lowp.wire.settings import Parameters, Scheduled, Settings
from lowp.wire.traffic import bytes_of_bucket
from lowp.wire.virtual_sums import chunk_sum

Gradients = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class VirtualWorld:
    """`size` ranks in one process.

    >>> world = lowp.VirtualWorld(256)
    >>> total = world.all_reduce(lambda rank: gradient_of(rank), "e5m2", scale="aps")
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"a world has at least one rank, not {size!r}")
        self.size = size

    def all_reduce(
        self,
        gradients: "Sequence[Gradients] | Callable[[int], Gradients]",
        format: Any,
        *,
        op: str = "sum",
        step: int = 0,
        **settings: Any,
    ) -> Any:
        """The sum (or `op="mean"`) of all ranks' gradients, as every one of them would have it after `lowp.all_reduce`.

        Args:
            gradients: one entry for each rank, or a function of the rank that can be asked several times. An entry is a tensor,
                or several (a list, or a dict by name), each of which is a layer with a scale of its own.
            format, settings: as for `lowp.all_reduce`.
            step: for stochastic rounding and schedules.
        """
        source = self._source(gradients)
        if op not in ("sum", "mean"):
            raise ValueError(f"op is 'sum' or 'mean', not {op!r}")
        first = source(0)
        names, tensors = _named(first)
        exchange = VirtualExchange(
            self.size, {n: t.shape for n, t in zip(names, tensors, strict=True)}, Settings.of(format, **settings)
        )
        exchange.state.step = step
        sums = exchange.reduce(lambda rank: _as_first(names, source(rank), rank), mean=op == "mean")
        if isinstance(first, Tensor):
            return sums[names[0]]
        return sums if isinstance(first, Mapping) else list(sums.values())

    def _source(self, gradients: Any) -> Callable[[int], Gradients]:
        if callable(gradients):
            return gradients
        if len(gradients) != self.size:
            raise ValueError(f"a world of {self.size} needs {self.size} gradients, not {len(gradients)}")
        return gradients.__getitem__


def _named(gradient: Gradients) -> tuple[list[str], list[Tensor]]:
    if isinstance(gradient, Tensor):
        return ["tensor"], [gradient]
    if isinstance(gradient, Mapping):
        return list(gradient), list(gradient.values())
    return [str(i) for i in range(len(gradient))], list(gradient)


def _as_first(names: list[str], gradient: Gradients, rank: int) -> dict[str, Tensor]:
    """A rank's gradients by the first rank's names. Those that have names are found by them, in whatever order they come."""
    theirs, tensors = _named(gradient)
    if sorted(theirs) != sorted(names):
        raise ValueError(f"rank {rank} has gradients of {', '.join(theirs)}, rank 0 of {', '.join(names)}")
    found = dict(zip(theirs, tensors, strict=True))
    return {name: found[name] for name in names}


class VirtualExchange:
    """Steps of a virtual cluster, with what is remembered between them.

    Args:
        shapes: of the parameters, by name, in the model's order.
        format, options: as for `lowp.compress_gradients`.
        buckets: names, bucket by bucket, in the order in which gradients lie there: to repeat a real run bit for bit, take
            those of its handle (`handle.buckets`). By default there is one bucket in the order of the shapes.
        names: all names of parameters that have several (`lowp.wire.naming.all_names(model)`): patterns may name any of them.
    """

    def __init__(
        self,
        world: int,
        shapes: Mapping[str, torch.Size],
        format: "Scheduled | Settings",
        *,
        buckets: "Sequence[Sequence[str]] | None" = None,
        names: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = format if isinstance(format, Settings) else Settings.of(format, **options)
        if settings.reduction == "auto":
            raise ValueError("a virtual world has no link to measure: name a reduction instead of 'auto'")
        assert isinstance(settings.reduction, Reduction)
        warn_of_scales(settings.codecs(), world)
        self._world = world
        self._shapes = dict(shapes)
        self._parameters = Parameters(shapes, settings, names)
        self._settings = settings
        self._reduction = settings.reduction
        self.buckets = [list(bucket) for bucket in buckets] if buckets is not None else [list(shapes)]
        self.state = State()
        self.residuals = [Residuals() for _ in range(world)]
        self._marks: list[tuple[list[str], Tensor]] = []

    @property
    def nonfinite(self) -> list[str]:
        """Layers of the last step that were not finite. On CUDA, asking waits for the device."""
        return [name for names, marks in self._marks for name, mark in zip(names, marks.tolist(), strict=True) if mark]

    @property
    def asks_twice(self) -> bool:
        """Will the next step ask for a rank's gradients more than once?"""
        codecs = [layer.codec for names in self.buckets for layer in self._parameters.bucket(names, self.state.step).layers]
        agreed = any(codec.scale.agreed or codec.scale.kind == "aps_delayed" for codec in codecs)
        return agreed or not self._reduction.one_order

    @property
    def steady(self) -> bool:
        """Is every step the same launches, which find all that they need in memory? Not where noise or formats depend on the
        step, where top-k looks for its limits, nor where something is learnt from a step for the next one."""
        if self._settings.scheduled or self._settings.error_feedback:
            return False
        codecs = [layer.codec for names in self.buckets for layer in self._parameters.bucket(names, self.state.step).layers]
        return not any(codec.stochastic or codec.keep < 1 or codec.scale.kind == "aps_delayed" for codec in codecs)

    def reduce(self, gradients: Callable[[int], Mapping[str, Tensor | None]], mean: bool = True) -> dict[str, Tensor]:
        """One step: every parameter's gradient, summed (or averaged) over the ranks.

        None stands for zeros of a parameter that a rank has not used. What no rank has used has no result, as with DDP.
        """
        results = self.sums(gradients, mean)
        self.state.step += 1
        return results

    def sums(self, gradients: Callable[[int], Mapping[str, Tensor | None]], mean: bool = True) -> dict[str, Tensor]:
        """The same, without counting the step.

        All buckets are open at once, so that a rank's gradients are asked for once, or where the ranks first agree on scales,
        twice: asking may mean computing them.
        """
        example = gradients(0)
        buckets = [self._open(names, example) for names in self.buckets]
        if any(bucket.agrees for bucket in buckets):
            for rank in range(self._world):
                theirs = gradients(rank)
                for bucket in buckets:
                    bucket.measure(rank, theirs)
        for bucket in buckets:
            bucket.begin(self._settings, self._reduction, self.state)
        for turn in sorted({turn for bucket in buckets for turn in bucket.turns}):
            for rank in range(self._world):
                theirs = gradients(rank)
                for bucket in buckets:
                    bucket.visit(rank, turn, theirs)
        results: dict[str, Tensor] = {}
        self._marks = []
        for bucket in buckets:
            flat, bad = bucket.totals(mean, self.state)
            pieces = dict(zip(bucket.names, flat.split(bucket.sizes), strict=True))
            results |= {name: piece.view(self._shapes[name]) for name, piece in pieces.items() if name in bucket.used}
            unused = {n: p if mean else p / self._world for n, p in pieces.items() if n not in bucket.used}
            for residuals in self.residuals if unused and self._settings.error_feedback else ():
                residuals.give_back(unused)
            self._marks.append((bucket.names, bad))
        return {name: results[name] for name in self._shapes if name in results}

    def _open(self, names: list[str], example: Mapping[str, Tensor | None]) -> "_OpenBucket":
        known = [gradient for name in names if (gradient := example[name]) is not None]
        known = known or [next((gradient for gradient in example.values() if gradient is not None), torch.empty(0))]
        first, dtype = known[0], reduce(torch.promote_types, (gradient.dtype for gradient in known))
        bucket, first = self._parameters.bucket(names, self.state.step, dtype), first.new_empty(0, dtype=dtype)
        feedback = Feedback(self.residuals.__getitem__, bucket) if self._settings.error_feedback else None
        sizes = [self._shapes[name].numel() for name in names]
        scales = SharedScales(bucket, self._world, self.state, first.device)
        return _OpenBucket(names, sizes, bucket, self._world, scales, first, feedback)

    def bytes_sent(
        self, rank: int = 0, device: "torch.device | str" = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple[int, float]:
        """What a rank of a real cluster would send in the next step, and what it would send in float32, in a ring.

        `device` is where the gradients are: it decides how they are cut, and with that the headers of messages. `dtype` is
        theirs: uncompressed, they travel in it.
        """
        sent, elements, device = 0, 0, torch.device(device)
        for names in self.buckets:
            bucket = self._parameters.bucket(names, self.state.step, dtype)
            reduction = self._reduction.of_size(bucket.size)
            sums, cuts = self._settings.sums(reduction), cuts_for(self._settings.chunk, device)
            sent += bytes_of_bucket(bucket, reduction, rank, self._world, sums, self._settings.kahan, cuts)
            sent += agreement_bytes(SharedScales(bucket, self._world, self.state, device).agreeing, self._world)
            elements += bucket.size
        return sent, ring_bytes(4 * elements, self._world)


class _OpenBucket:
    """One bucket of a virtual step: scales agreed, every rank's numbers added, the sum taken out."""

    def __init__(
        self,
        names: list[str],
        sizes: list[int],
        bucket: Bucket,
        world: int,
        scales: SharedScales,
        example: Tensor,
        feedback: Feedback | None,
    ) -> None:
        self.names, self.sizes = names, sizes
        self.used: set[str] = set()  # by some rank
        self._bucket, self._world, self._scales, self._example, self._feedback = bucket, world, scales, example, feedback
        self.agrees = scales.agreeing > 0

    def _flat(self, rank: int, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """A rank's gradients, with what rounding took from the last ones."""
        self.used.update(name for name in self.names if gradients[name] is not None)
        pieces = [
            self._example.new_zeros(size) if (gradient := gradients[name]) is None else gradient.detach().reshape(-1)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if self._feedback is not None:
            return self._feedback.add(rank, flat)
        return flat if flat.dtype != torch.float64 else flat.to(torch.float32)

    def measure(self, rank: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Agree on scales: the largest bound of all ranks counts."""
        before = self._scales.bounds
        bounds = self._scales.measure(self._flat(rank, gradients))
        if before is not None and bounds is not None:
            self._scales.bounds = torch.maximum(before, bounds)

    def begin(self, settings: Settings, reduction: Reduction, state: State) -> None:
        bucket = self._bucket
        self._reduction = reduction = reduction.of_size(bucket.size)
        factors, _ = self._scales.factors_and_units(1)
        self._cuts = cuts_for(settings.chunk, self._example.device)
        self._rules = rules_for(settings, reduction, self._world, 0, state.step, self._feedback, factors)
        # Where it makes no difference, chunks are not cut into a shard for each rank: time would grow with their square.
        whole = reduction.one_order and all(layer.codec.elementwise for layer in bucket.layers)
        self._indices = [None] if whole else list(range(reduction.shards(self._world)))
        self._chunks = bucket.chunks(len(self._indices), self._cuts)
        self._sums = [chunk_sum(chunk, reduction, self._rules, self._indices) for chunk in self._chunks]
        self.turns = {reduction.turn(rank, i or 0, self._world) for rank in range(self._world) for i in self._indices}

    def visit(self, rank: int, turn: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Add one rank's numbers wherever it is their turn."""
        flat = self._flat(rank, gradients)
        for chunk, own in zip(self._chunks, self._sums, strict=True):
            own.visit(rank, turn, flat[chunk.start : chunk.stop])

    def totals(self, mean: bool, state: State) -> tuple[Tensor, Tensor]:
        """What everybody decodes, and each layer's mark (255: not finite)."""
        result = self._example.new_empty(self._bucket.size)
        exact, rest = exact_and_rest(self._world if mean else 1)
        _, usual = self._scales.factors_and_units(exact)
        every_unit, travelled = [usual], None
        for chunk, own in zip(self._chunks, self._sums, strict=True):
            numbers, peaks = own.total()
            units = poisoned(usual, peaks, chunk.owners(usual.device)) if chunk.sends_headers else usual
            result[chunk.start : chunk.stop] = scaled(numbers, chunk, units, rest)
            every_unit.append(units)
            travelled = largest_peaks(travelled, chunk, peaks, len(units))
        if travelled is not None:
            remember_bounds(state, self._bucket, travelled)
        if self._feedback is not None:
            self._feedback.finish(list(self._owners()))
        return result, marks_of(every_unit)

    def _owners(self) -> Iterator[tuple[int, Shard]]:
        """Who adds up which shard in a real world."""
        for chunk in self._bucket.chunks(self._reduction.shards(self._world), self._cuts):
            for index, shard in enumerate(chunk.shards):
                owner = self._reduction.owner(index, self._world)
                assert owner is not None
                yield owner, shard
