"""`search(model, data, ...)`: formats layer by layer, the fewest bits for the loss or the least loss for the bits.

    result = search(model, batches, tolerance=0.01)     # the cheapest formats that add at most 0.01 to the loss
    result = search(model, batches, budget=6.0)         # the least loss with 6 bits a number on average
    print(result.table())
    result.apply(model)                                 # simulate it so; or simulate(model, policy=result.policy, ...)

Nothing is trained: an assignment is judged by the loss on the batches given, in evaluation mode. Each is rounded with the same
noise and sees the same random numbers, so that two losses differ by their formats alone. greedy.py has the algorithm.

Bits are counted over all numbers of the roles searched, activations as many as the first batch makes: what memory would hold
while one batch passes. A larger batch gives activations more weight against weights.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowp.compat import tree_map_only
from lowp.formats import format as parse_format
from lowp.simulation.frontier import Assignment, Point, SearchResult, Sensitivity
from lowp.simulation.greedy import Choice, Measurements, descend, improve
from lowp.simulation.layers import FormatName, checked_format, checked_roles
from lowp.simulation.measuring import FormatSlot, call, measure, undisturbed
from lowp.simulation.modules import is_simulated
from lowp.simulation.policies.fixed import exactly
from lowp.simulation.simulate import restore, simulate
from lowp.simulation.simulation import Simulation

LADDER = ("e2m1fn", "e4m3fn", "fp16", "fp32")
ROLES = ("weights", "activations")  # the roles that a forward pass has
UNITS = ("layer", "tensor")

Loss = Callable[[Any, Any], Tensor | float]


def search(
    model: nn.Module,
    data: Iterable[Any],
    *,
    budget: float | None = None,
    tolerance: float | None = None,
    loss: Loss | None = None,
    evaluate: Callable[[nn.Module, Any], Tensor | float] | None = None,
    formats: Sequence[FormatName] = LADDER,
    roles: Sequence[str] = ROLES,
    by: str = "layer",
    rounds: int = 4,
    rounding: str = "nearest",
    scale: str = "tensor",
    seed: int = 0,
    progress: bool | None = None,
) -> SearchResult:
    """Find formats for the layers of a model, which is afterwards what it was, whatever happens.

    Args:
        data: batches, which are all used for every evaluation: a few hundred samples tell formats apart. A batch is (inputs,
            targets), where inputs are one argument of the model, a tuple of them or a mapping; or what `evaluate` takes.
        budget: mean bits a number. The result is the least loss found within it.
        tolerance: what may be added to the loss of the model as it is. Without a budget, the result has the fewest bits found.
        loss: `loss(output, targets)`, the mean over a batch; cross entropy if nothing is given. Every batch counts the same.
        evaluate: instead of `loss`, for other batches and models: `evaluate(model, batch)` gives the loss.
        formats: to choose from, from few bits to many.
        roles: weights, activations or both; others do not show in a forward pass.
        by: "layer": one format for all weights, and one for all activations, of a layer with a matrix of weights and what
            follows it (batch norm, ReLU), which mostly rounds what is rounded already; or "tensor": one for each of them.
        rounds: of improvement, at most. More take longer and find better formats; 0 goes by the first, greedy pass alone.
        rounding, scale, seed: as in `simulate`. The scale is one without memory.
        progress: a line on the terminal; None shows it where there is one.
    """
    ladder = _checked_ladder(formats, roles)
    _check_arguments(model, budget, tolerance, loss, evaluate, by, scale)
    batches = [data] if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data) else list(data)
    if not batches:
        raise ValueError("search needs data: there is no batch in it")
    settings = {"rounding": rounding, "scale": scale, "seed": seed}
    with undisturbed(model), _shown(progress) as show, torch.no_grad():
        model.eval()
        judge = evaluate or _judged_by(loss or cross_entropy)
        evaluation = _Evaluation(model, batches, judge, seed, show)
        reference = evaluation()
        if not math.isfinite(reference):
            raise ValueError(f"the loss of the model as it is, {reference}, is not finite: there is nothing to compare with")
        simulation = simulate(model, **settings)
        try:
            places = measure(model, lambda: judge(model, evaluation.batch(0)))
            task = _FormatChoices(simulation, [place for place in places if place.role in roles], ladder, by, evaluation)
            chosen = _solve(task, reference, budget, tolerance, rounds)
        finally:
            restore(model)
    return task.result(chosen, reference, settings)


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Classes in the last dimension, as text models have them, or in the second, as torch has them."""
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returns {type(output).__name__}, not a tensor: search(..., loss=...) says what its loss is")
    if output.shape[:-1] == targets.shape:
        output, targets = output.flatten(0, -2) if output.dim() > 1 else output, targets.flatten()
    return F.cross_entropy(output.float(), targets)


def _judged_by(loss: Loss) -> Callable[[nn.Module, Any], Tensor | float]:
    def judge(model: nn.Module, batch: Any) -> Tensor | float:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError("a batch is (inputs, targets); for others, search(..., evaluate=...) gives the loss of a batch")
        return loss(call(model, batch[0]), batch[1])

    return judge


class _Evaluation:
    """The mean loss of the model over all batches, as it computes at the moment."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], judge: Any, seed: int, show: Callable[[str], None]) -> None:
        self._model, self._batches, self._judge, self._seed, self._show = model, batches, judge, seed, show
        tensors = (*model.parameters(), *model.buffers())
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self.count = 0

    def batch(self, number: int) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), self._batches[number])

    def __call__(self, of: str = "the model as it is") -> float:
        self._seed_generators()
        losses = [self._loss(self._judge(self._model, self.batch(number))) for number in range(len(self._batches))]
        mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
        self.count += 1
        self._show(f"evaluation {self.count}: {of}, loss {mean:.6g}")
        return mean

    def _seed_generators(self) -> None:
        """What the model draws, if it does, is the same every time."""
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(self._seed)

    @staticmethod
    def _loss(given: Any) -> float:
        if isinstance(given, Tensor) and given.numel() != 1:
            raise ValueError(f"a loss is one number, and this one is a tensor of {tuple(given.shape)}: take its mean")
        return float(given)


class _FormatChoices:
    """Choices of formats for the units of a model, as greedy.py numbers them."""

    def __init__(
        self, simulation: Simulation, places: Sequence[FormatSlot], ladder: Sequence[str], by: str, evaluation: _Evaluation
    ) -> None:
        self._simulation, self._evaluation = simulation, evaluation
        self.formats = tuple(reversed(ladder))  # widest first
        self.units = [(place,) for place in places] if by == "tensor" else _by_layer(places)
        elements = [sum(place.elements for place in unit) for unit in self.units]
        if not sum(elements):
            raise ValueError("there is nothing to search: no number of these roles was made or read")
        self.elements = sum(elements)
        self.measured = Measurements(elements, [parse_format(name).bits for name in self.formats], self._loss)

    def mean_bits(self, choice: Choice) -> float:
        return self.measured.bits(choice) / self.elements

    def _loss(self, choice: Choice) -> float:
        self._simulation.set(layers=exactly(self._assignment(choice)))
        return self._evaluation(f"{self.mean_bits(choice):.3f} bits a number")

    def _assignment(self, choice: Choice) -> Assignment:
        found: Assignment = {row.layer: {} for row in self._simulation.formats()}
        for unit, index in zip(self.units, choice, strict=True):
            for place in unit:
                for layer in place.layers:
                    found[layer][place.role] = self.formats[index]
        return {layer: formats for layer, formats in found.items() if formats}

    def _point(self, choice: Choice) -> Point:
        bits = self.measured.bits(choice)
        return Point(bits / self.elements, bits, self.measured.losses[choice], self._assignment(choice))

    def result(self, chosen: Choice, reference: float, settings: dict[str, Any]) -> SearchResult:
        sensitivity = [
            Sensitivity(
                layers=tuple(dict.fromkeys(layer for place in unit for layer in place.layers)),
                roles=tuple(dict.fromkeys(place.role for place in unit)),
                elements=self.measured.elements[number],
                format=name,
                added_loss=self.measured.sensitivity(number, index),
            )
            for number, unit in enumerate(self.units)
            for index, name in enumerate(self.formats)
            if index
        ]
        points = tuple(self._point(choice) for choice in self.measured.frontier())
        return SearchResult(self._point(chosen), points, tuple(sensitivity), reference, self._evaluation.count, settings)


def _by_layer(places: Sequence[FormatSlot]) -> list[tuple[FormatSlot, ...]]:
    units: dict[tuple[int, str], list[FormatSlot]] = {}
    for place in places:
        units.setdefault((place.stage, place.role), []).append(place)
    return [tuple(unit) for unit in units.values()]


def _solve(task: _FormatChoices, reference: float, budget: float | None, tolerance: float | None, rounds: int) -> Choice:
    """Measure, then pick the best of all that was measured."""
    measured = task.measured
    limit = math.inf if tolerance is None else reference + tolerance
    allowed = math.inf if budget is None else budget * task.elements
    if measured.bits(measured.narrowest) > allowed:
        raise ValueError(
            f"a budget of {budget:g} bits a number cannot be met: all in {task.formats[-1]} takes "
            f"{task.mean_bits(measured.narrowest):g}"
        )
    added = measured.loss(measured.widest) - reference
    if not added <= (math.inf if tolerance is None else tolerance) or math.isinf(added):
        raise ValueError(f"all in {task.formats[0]}, the widest format, adds {added:.3g} to the loss already")

    def rank(bits: float, loss: float) -> tuple[float, ...]:
        """Choices that keep to the limits come first: of these the cheapest, or with a budget the one that loses least."""
        beyond = bits > allowed or loss > limit or not math.isfinite(loss)
        return (beyond, bits, loss) if budget is None else (beyond, loss, bits)

    measured.measure_sensitivity()
    descend(measured)
    best = improve(measured, rank, rounds)
    if rank(measured.bits(best), measured.loss(best))[0]:
        good = [found for found, loss in measured.losses.items() if loss <= limit and math.isfinite(loss)]
        raise ValueError(
            f"no formats of {budget:g} bits a number were found whose loss is "
            f"{'finite' if tolerance is None else 'within the tolerance'}; the cheapest found take "
            f"{min(map(task.mean_bits, good)):.3f}"
        )
    return best


def _checked_ladder(formats: Sequence[FormatName], roles: Sequence[str]) -> list[str]:
    checked_roles(dict.fromkeys(roles), "roles")
    other = [role for role in roles if role not in ROLES]
    if other or not roles:
        raise ValueError(f"search judges forward passes: roles are {' or '.join(ROLES)}, not {other[0] if other else 'none'}")
    names = [checked_format(name, role) or "fp32" for name in formats for role in roles[:1]]
    bits = [parse_format(name).bits for name in names]
    if len(names) < 2 or any(narrow >= wide for narrow, wide in pairwise(bits)):
        given = ", ".join(f"{name} ({width:g})" for name, width in zip(names, bits, strict=True))
        raise ValueError(f"formats are two or more, from few bits to many, no two with as many; these are {given}")
    return names


def _check_arguments(
    model: nn.Module, budget: float | None, tolerance: float | None, loss: Any, evaluate: Any, by: str, scale: str
) -> None:
    if any(is_simulated(module) for module in model.modules()):
        raise ValueError("the model is simulated already; search begins with a plain one: restore(model) gives it back")
    if budget is None and tolerance is None:
        raise ValueError("search needs a budget (bits a number), a tolerance (what may be added to the loss), or both")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance is what may be added to the loss, 0 or more, not {tolerance}")
    if loss is not None and evaluate is not None:
        raise ValueError("either loss(output, targets) or evaluate(model, batch), not both")
    if by not in UNITS:
        raise ValueError(f"search is by {' or by '.join(UNITS)}, not by {by!r}")
    if scale.startswith(("delayed", "calibrated")):
        raise ValueError(f"a {scale!r} scale remembers what it saw: losses would depend on the order of the search")


@contextmanager
def _shown(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """A line that says how far the search is, on a terminal."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True, force_terminal=progress).status("search") as status:
        yield status.update
