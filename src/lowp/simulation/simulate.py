"""`simulate(model, ...)`: every number of a role in a format of your choice, without a change to the model's code.

    simulation = simulate(model, weights="e4m3fn", activations="e4m3fn", errors="e5m2", layers={"last": {"weights": "fp32"}})
    ...                                  # train as ever: named_parameters and state_dict are what they were
    restore(model)

Roles are tensors that narrow hardware would hold in memory:

- weights: parameters as the forward pass sees them (the optimizer has them in full precision; gradients pass straight through);
- activations: outputs of the modules that compute, which are all leaves but those that only move numbers, and attention;
- errors: the gradients of those activations;
- gradients: of parameters, rounded once for every backward pass, when they are accumulated.

What a module computes inside (an LSTM's gates, attention's scores) and what is computed between modules in plain torch
operations (the addition of a residual) is not rounded until the next module returns it.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.formats import Rounding
from lowp.simulation.layers import OFF, ROLES, FormatName, Layer, Rules, checked_format, checked_roles, checked_rules
from lowp.simulation.modules import LAYER, convert, is_simulated, parts, revert

SCALES = ("none", "tensor")
_STEPS = 40  # bits of a moment that count steps; those above are the rank

Overflowed = dict[str, set[str]]  # layers and their roles


class Row(NamedTuple):
    """One line of `Simulation.formats()`."""

    layer: str
    role: str
    format: str


class _Keep:
    """The default of `Simulation.set`: leave it as it is (None says: switch it off)."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Any = _Keep()


class Simulation:
    """A model's formats while it is simulated: read them, change them, ask what overflowed.

    `step` and `rank` key stochastic rounding, together with the seed and the tensor's number: the same key rounds the same way.
    Set `step` before every step; a virtual cluster sets `rank` before each of its ranks' passes.
    """

    def __init__(self, rounding: str, scale: str, seed: int, count_overflow: bool) -> None:
        self.rounding, self.scale, self.seed, self.count_overflow = rounding, scale, seed, count_overflow
        self.layers: tuple[Layer, ...] = ()
        self._roles: dict[str, str | None] = dict.fromkeys(ROLES)
        self._rules: Rules = {}
        self._promoted: dict[str, str | None] = {}
        self._step = self._rank = 0
        self._moment_tensor = torch.zeros((), dtype=torch.int64)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not 0 <= step < 1 << _STEPS:
            raise ValueError(f"step counts from 0 to 2^{_STEPS}, it cannot be {step}")
        self._step = step
        self._moment_tensor = torch.tensor(self._moment)

    @property
    def rank(self) -> int:
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not 0 <= rank < 1 << (63 - _STEPS):
            raise ValueError(f"rank is a number from 0 to 2^{63 - _STEPS}, it cannot be {rank}")
        self._rank = rank
        self._moment_tensor = torch.tensor(self._moment)

    @property
    def _moment(self) -> int:
        return self._rank << _STEPS | self._step

    @property
    def moment(self) -> int | Tensor:
        """Step and rank as one number. Compiled code gets a tensor: for a number that changes it would be compiled again."""
        return self._moment_tensor if torch.compiler.is_dynamo_compiling() else self._moment

    def set(
        self,
        *,
        weights: FormatName = KEEP,
        activations: FormatName = KEEP,
        errors: FormatName = KEEP,
        gradients: FormatName = KEEP,
        layers: Rules | None = KEEP,
    ) -> None:
        """Change formats of the live model; what is not given stays. Layers that were promoted stay promoted."""
        given = {"weights": weights, "activations": activations, "errors": errors, "gradients": gradients}
        roles = self._roles | checked_roles({role: name for role, name in given.items() if name is not KEEP}, "set")
        rules = self._rules if layers is KEEP else {k: dict(v) for k, v in (layers or {}).items()}
        self._resolve(roles, rules, self._promoted)
        self._roles, self._rules = roles, rules

    def promote(self, layer: str, format: FormatName) -> None:
        """Put every role of one layer that is rounded at all into `format`, for good."""
        if layer not in {entry.name for entry in self.layers}:
            raise ValueError(f"there is no layer {layer!r} to promote; `formats()` lists them")
        promoted = self._promoted | {layer: checked_format(format, "every role")}
        self._resolve(self._roles, self._rules, promoted)
        self._promoted = promoted

    def _resolve(self, roles: Mapping[str, str | None], rules: Rules, promoted: Mapping[str, str | None]) -> None:
        """Give every layer its formats (layers.py has the order). All is checked before anything changes."""
        entries = checked_rules(rules, self.layers)
        for layer in self.layers:
            for role in layer.roles:
                ruled = [formats[role] for numbers, formats in entries if layer.number in numbers and role in formats]
                found = ruled[0] if ruled else roles[role]
                layer.formats[role] = promoted.get(layer.name, found) if found is not None else None

    def formats(self) -> list[Row]:
        """Layer, role and format of everything that could be rounded; what is not says "fp32"."""
        return [
            Row(layer.name, role, layer.formats[role] or OFF) for layer in self.layers for role in ROLES if role in layer.roles
        ]

    def overflowed(self, agree: Callable[[Tensor], Tensor] | None = None) -> Overflowed:
        """Layers, and their roles, of which some finite number left the format's range since the last call.

        Only with `count_overflow=True`. This waits for the device, once. `agree` is given the counts of this rank as one tensor
        and returns those to go by: an all-reduce, say, so that all ranks promote the same layers.
        """
        counts = self.overflow_counts()
        self.load_overflow_counts(torch.zeros_like(counts))
        found: Overflowed = {}
        agreed = (counts if agree is None else agree(counts)).tolist()
        for (layer, role), times in zip(self._places(), agreed, strict=True):
            if times:
                found.setdefault(layer.name, set()).add(role)
        return found

    def _places(self) -> list[tuple[Layer, str]]:
        return [(layer, role) for layer in self.layers for role in ROLES if role in layer.roles]

    def overflow_counts(self) -> Tensor:
        """How often each layer's roles have overflowed here since `overflowed` was asked: a rank's own, to be saved with it."""
        if not self.count_overflow:
            raise ValueError("nobody counted: simulate(..., count_overflow=True) does")
        counts = [layer.overflows[role] for layer, role in self._places()]
        return torch.stack([count.to(counts[0].device) for count in counts])

    def load_overflow_counts(self, counts: Tensor) -> None:
        for (layer, role), times in zip(self._places(), counts, strict=True):
            layer.overflows[role].copy_(times)

    def state_dict(self) -> dict[str, Any]:
        """The formats as they are now, for a checkpoint; plain data. (`step` and `rank` are the loop's.)"""
        rules = {pattern: checked_roles(formats, pattern) for pattern, formats in self._rules.items()}
        return {"roles": dict(self._roles), "layers": rules, "promoted": dict(self._promoted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        unknown = set(state["promoted"]) - {layer.name for layer in self.layers}
        if unknown:
            raise ValueError(f"the saved simulation promoted {min(unknown)!r}, which this model does not have")
        self._resolve(state["roles"], state["layers"], state["promoted"])
        self._roles, self._rules, self._promoted = dict(state["roles"]), dict(state["layers"]), dict(state["promoted"])


def simulate(
    model: nn.Module,
    weights: FormatName = None,
    activations: FormatName = None,
    errors: FormatName = None,
    gradients: FormatName = None,
    rounding: str = "nearest",
    scale: str = "none",
    layers: Rules | None = None,
    seed: int = 0,
    count_overflow: bool = False,
) -> Simulation:
    """Let `model` compute in the given formats from now on. It is changed in place; `restore(model)` gives it back.

    Args:
        weights, activations, errors, gradients: the format of each role (see above); None or "fp32" leaves it alone.
        rounding: any of lowp's; "stochastic" is keyed by `seed` and by the simulation's `step` and `rank`.
        scale: "none", or "tensor": every tensor is scaled by the power of two that brings its largest number just below the
            format's. Block formats have scales of their own.
        layers: formats of some layers: {pattern: {role: format}}, the first match counts. A pattern is the name of a module or
            a shell pattern for names, the class of one, or "first" or "last"; it is for everything inside that module too.
        count_overflow: count finite numbers that leave their format's range, for `Simulation.overflowed`.

    While a model is simulated, `module.weight` is the rounded weight, as with torch's parametrizations, and writing to it is
    lost. The parameter itself is in `named_parameters()`. A parameter that is replaced by another object afterwards keeps its
    weights' format but loses that of its gradients. Modules called several times in one step round with the same noise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"simulate takes an nn.Module, not {type(model).__name__}")
    if any(is_simulated(module) for module in model.modules()):
        raise ValueError(
            "the model is simulated already: simulation_of(model).set(...) changes formats, restore(model) ends it"
        )
    if rounding not in list(Rounding):
        raise ValueError(f"unknown rounding {rounding!r}; it is one of {', '.join(Rounding)}")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; it is one of {', '.join(SCALES)}")
    simulation = Simulation(rounding, scale, seed, count_overflow)
    found = _layers_of(model, simulation)
    simulation.layers = tuple(layer for _, layer, _ in found if layer is not None)
    if not simulation.layers:
        raise ValueError(f"{type(model).__name__} has nothing to simulate: no parameters and no module that computes")
    simulation.set(weights=weights, activations=activations, errors=errors, gradients=gradients, layers=layers)
    for module, layer, rounds_output in found:
        convert(module, layer, rounds_output)
    return simulation


def restore(model: nn.Module) -> None:
    """The exact model that `simulate` was given: its classes, without our hooks. One that is not simulated stays as it is."""
    for module in model.modules():
        if is_simulated(module):
            revert(module)


def simulation_of(model: nn.Module) -> Simulation:
    """The simulation that a model is in: of a copy or an unpickled model, its own."""
    for module in model.modules():
        if (layer := vars(module).get(LAYER)) is not None:
            return layer.simulation
    raise ValueError(f"{type(model).__name__} is not simulated")


def _layers_of(model: nn.Module, simulation: Simulation) -> list[tuple[nn.Module, Layer | None, bool]]:
    """Every module, the layer that it is (None: it has no role), and whether its output is an activation."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    owners: set[int] = set()
    numbers = count()
    found: list[tuple[nn.Module, Layer | None, bool]] = []
    for name, module, rounds_output in parts(model):
        own = {key: value for key, value in module._parameters.items() if value is not None}
        layer = None
        if own or rounds_output:
            owned = frozenset(key for key, value in own.items() if id(value) not in owners)
            owners.update(id(value) for value in own.values())
            layer = Layer(
                name=name or type(module).__name__,
                number=next(numbers),
                lineage=_lineage(name, kinds),
                roles=_roles(bool(own), bool(owned), rounds_output),
                owned=owned,
                has_matrix=any(value.dim() > 1 for value in own.values()),
                simulation=simulation,
            )
        found.append((module, layer, rounds_output))
    return found


def _lineage(name: str, kinds: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Names and classes from the module itself outwards. The model as a whole counts only where it is the layer."""
    names = name.split(".")
    around = [".".join(names[:end]) for end in range(len(names), 0, -1)]
    return tuple((entry or kinds[entry], kinds[entry]) for entry in around)


def _roles(has_parameters: bool, owns_parameters: bool, rounds_output: bool) -> frozenset[str]:
    there = {
        "weights": has_parameters,
        "activations": rounds_output,
        "errors": rounds_output,
        "gradients": owns_parameters,
    }
    return frozenset(role for role, is_there in there.items() if is_there)
