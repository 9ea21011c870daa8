"""A cluster in one process: the same reductions over n ranks' gradients, bit for bit what n real processes compute.

Ranks are visited one after the other; what is kept is the sums so far. Memory does not grow with the number of ranks, except
for the logarithm of it in a tree, and for error feedback (a residual for each rank). Some need the gradients more than once,
and then ask for them again: `aps` looks for the largest numbers first, and a ring's shards begin at different ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.wire.exchange import SharedScales, State, enter, largest_peaks, leave, remember_bounds, rules_for
from lowp.wire.plan import Chunk, Layer, chunks_of, cuts_for
from lowp.wire.reductions.base import Adder, Reduction
from lowp.wire.rules import Load, Rules, Stage
from lowp.wire.settings import Parameters, Scheduled, Settings

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
        sums = exchange.reduce(lambda rank: dict(zip(names, _named(source(rank))[1], strict=True)), mean=op == "mean")
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


class VirtualExchange:
    """Steps of a virtual cluster, with what is remembered between them.

    Args:
        shapes: of the parameters, by name, in the model's order.
        format, options: as for `lowp.compress_gradients`.
        buckets: names, bucket by bucket, in the order in which gradients lie there: to repeat a real run bit for bit, take
            those of its handle (`handle.buckets`). By default there is one bucket in the order of the shapes.
    """

    def __init__(
        self,
        world: int,
        shapes: Mapping[str, torch.Size],
        format: "Scheduled | Settings",
        *,
        buckets: "Sequence[Sequence[str]] | None" = None,
        **options: Any,
    ) -> None:
        settings = format if isinstance(format, Settings) else Settings.of(format, **options)
        if settings.reduction == "auto":
            raise ValueError("a virtual world has no link to measure: name a reduction instead of 'auto'")
        assert isinstance(settings.reduction, Reduction)
        self._world = world
        self._shapes = dict(shapes)
        self._parameters = Parameters(shapes, settings)
        self._settings = settings
        self._reduction = settings.reduction
        self.buckets = [list(bucket) for bucket in buckets] if buckets is not None else [list(shapes)]
        self.state = State()
        self.residuals: list[dict[str, Tensor]] = [{} for _ in range(world)]
        self.nonfinite: list[str] = []  # layers of the last step that were not finite

    def reduce(self, gradients: Callable[[int], Mapping[str, Tensor]], mean: bool = True) -> dict[str, Tensor]:
        """One step: every parameter's gradient, summed (or averaged) over the ranks."""
        results: dict[str, Tensor] = {}
        self.nonfinite = []
        for names in self.buckets:
            flat, bad = self._bucket(names, lambda rank, names=names: _flat(gradients(rank), names), mean)
            sizes = [self._shapes[name].numel() for name in names]
            results |= {n: piece.view(self._shapes[n]) for n, piece in zip(names, flat.split(sizes), strict=True)}
            self.nonfinite += [name for name, mark in zip(names, bad.tolist(), strict=True) if mark]
        self.state.step += 1
        return {name: results[name] for name in self._shapes if name in results}

    def _bucket(self, names: list[str], flat_of: Callable[[int], Tensor], mean: bool) -> tuple[Tensor, Tensor]:
        layers = self._parameters.layers(names, self.state.step)
        example = flat_of(0)
        reduction = self._reduction.of_size(example.numel())
        scales = SharedScales(layers, self._world, self.state, example.device)
        self._agree(scales, layers, flat_of)
        rules = rules_for(
            self._settings, reduction, self._world, self.state.step, layers, scales.factors(), self.residuals.__getitem__
        )
        # Where it makes no difference, chunks are not cut into a shard for each rank: time would grow with their square.
        whole = reduction.one_order and all(layer.codec.elementwise for layer in layers)
        shards = 1 if whole else reduction.shards(self._world)
        chunks = chunks_of(layers, shards, cuts_for(self._settings.chunk, example.device))
        adders = [[reduction.adder(shard, i, rules) for i, shard in enumerate(chunk.shards)] for chunk in chunks]
        turns = {reduction.turn(rank, i, self._world) for rank in range(self._world) for i in range(shards)}
        for turn in sorted(turns):
            for rank in range(self._world):
                if rules.feedback is not None:
                    rules.feedback.rank = rank
                self._visit(rank, turn, flat_of(rank), chunks, adders, reduction, rules)
        return self._totals(example, layers, chunks, adders, rules, scales.marks(), mean, reduction.rounds_total)

    def _agree(self, scales: SharedScales, layers: tuple[Layer, ...], flat_of: Callable[[int], Tensor]) -> None:
        agreed = None
        for rank in range(self._world):
            pieces = flat_of(rank).split([layer.size for layer in layers]) if layers else []
            bounds = scales.measure(pieces.__getitem__)
            if bounds is None:
                return
            agreed = bounds if agreed is None else torch.maximum(agreed, bounds)
        scales.bounds = agreed

    def _visit(
        self,
        rank: int,
        turn: int,
        flat: Tensor,
        chunks: tuple[Chunk, ...],
        adders: list[list[Adder]],
        reduction: Reduction,
        rules: Rules,
    ) -> None:
        """Add one rank's numbers wherever it is their turn."""
        for chunk, row in zip(chunks, adders, strict=True):
            numbers, peaks = enter(flat, chunk, rules.factors, self._world)
            for index, (shard, adder) in enumerate(zip(chunk.shards, row, strict=True)):
                if reduction.turn(rank, index, self._world) == turn:
                    first, last = chunk.first_parts[index : index + 2]
                    adder.add(rank, Load(numbers[shard.start : shard.stop], peaks[first:last]))

    def _totals(
        self,
        example: Tensor,
        layers: tuple[Layer, ...],
        chunks: tuple[Chunk, ...],
        adders: list[list[Adder]],
        rules: Rules,
        marks: Tensor,
        mean: bool,
        rounds: bool,
    ) -> tuple[Tensor, Tensor]:
        """What everybody decodes, and each layer's mark (255: not finite)."""
        result = torch.empty_like(example)
        bad = torch.zeros(len(layers), dtype=torch.uint8, device=example.device)
        travelled = torch.zeros_like(bad)
        for chunk, row in zip(chunks, adders, strict=True):
            numbers = torch.empty(chunk.size, dtype=torch.float32, device=example.device)
            peaks = []
            for shard, adder in zip(chunk.shards, row, strict=True):
                total = adder.total()
                if rounds:
                    message = rules.write(total, shard, Stage.TOTAL, 0)
                    total = rules.read(message, shard, Stage.TOTAL, numbers[shard.start : shard.stop])
                else:
                    numbers[shard.start : shard.stop] = total.numbers
                peaks.append(total.peaks)
            divisor = self._world if mean else 1
            bad = torch.maximum(bad, leave(numbers, torch.cat(peaks), chunk, rules.factors, marks, divisor, result))
            travelled = largest_peaks(travelled, chunk, torch.cat(peaks))
        remember_bounds(self.state, layers, dict(enumerate(travelled)))
        return result, bad


def _flat(gradients: Mapping[str, Tensor], names: list[str]) -> Tensor:
    pieces = [gradients[name].detach().reshape(-1) for name in names]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
