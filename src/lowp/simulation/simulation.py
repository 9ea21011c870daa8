"""`Simulation`: the formats of a model while it is simulated, and everything that is asked about them or changed."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowp.simulation.layers import (
    ALL_ROLES,
    OFF,
    PRODUCTS,
    ROLES,
    SUMS,
    ArithmeticName,
    FormatName,
    Observer,
    ProductsName,
    Rules,
    SimulatedLayer,
    checked_format,
    checked_roles,
    plan_of,
)
from lowp.simulation.ranges import Ranges
from lowp.simulation.scales import NONE, Scale, checked_scales
from lowp.simulation.selection import Rule, ends, selected
from lowp.tensor.noise import KeySource

_STEPS = 40  # bits of a moment that count steps; those above are the rank
_NOT_COPIED = ("_model", "hooks", "watch", "keyed_by")  # they belong to one model and its parameters

Overflowed = dict[str, set[str]]  # layers and their roles
ScaleNames = str | Mapping[str, str]


class FormatRow(NamedTuple):
    """One line of `Simulation.formats()`."""

    layer: str
    role: str
    format: str
    scale: str


class _Keep:
    """The default of `Simulation.set`: leave it as it is (None says: switch it off)."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Any = _Keep()


class _SimulationSettings(NamedTuple):
    """What was asked for, before it is worked out for each layer."""

    formats: Mapping[str, str | None]
    scales: Mapping[str, Scale]
    rules: Sequence[Rule]
    exempt_first_last: bool
    promoted: Mapping[str, str | None]


_Settings = _SimulationSettings  # its name in models that were saved before


class Simulation:
    """A model's formats while it is simulated: read them, change them, ask what overflowed.

    `step` and `rank` key stochastic rounding, together with the seed and the tensor's number: the same key rounds the same way.
    Set `step` before every step, which also moves on the histories of delayed scales; a virtual cluster sets `rank` before each
    of its ranks' passes.
    """

    def __init__(self, model: nn.Module, roundings: Mapping[str, str], seed: int, count_overflow: bool) -> None:
        self.roundings, self.seed, self.count_overflow = dict(roundings), seed, count_overflow
        self.layers: tuple[SimulatedLayer, ...] = ()
        self.ranges = Ranges(())
        self.calibrating = False
        self.computing = 0  # how many forward passes of torch's own modules are under way (see weights.py)
        self.hooks: Any = WeakTensorKeyDictionary()  # of the parameters that layers share: layer and handle
        self.watch: Observer | None = None  # is shown what rank 0 rounds, in passes that are not compiled
        self.keyed_by: KeySource | None = None  # where stochastic rounding finds its keys instead, in a pass that is recorded
        self.changes = 0  # of formats and scales, so far
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._settings = _SimulationSettings(dict.fromkeys(ALL_ROLES), dict.fromkeys(ROLES, NONE), (), False, {})
        self._step = self._rank = 0
        self._moment_tensor = torch.zeros((), dtype=torch.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Models that were saved before have no number of changes.
        vars(self).update({"changes": 0} | state, hooks=WeakTensorKeyDictionary(), watch=None, keyed_by=None, _model=None)

    def unhook(self, layers: Collection[SimulatedLayer]) -> None:
        """Round the gradients of parameters that these layers share no more: of those that they have, and of those they had."""
        for parameter, (layer, hook) in list(self.hooks.items()):
            if layer in layers:
                hook.remove()
                del self.hooks[parameter]

    @property
    def is_orphan(self) -> bool:
        """Is the model unknown, as of a copy that nobody has asked for its simulation yet?"""
        return self._model is None or self._model() is None

    def belongs_to(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def _modules(self) -> dict[str, nn.Module]:
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("a predicate needs the model: take simulation_of(model).set(...)")
        return dict(model.named_modules(remove_duplicate=False))

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not 0 <= step < 1 << _STEPS:
            raise ValueError(f"step counts from 0 to 2^{_STEPS}, it cannot be {step}")
        self._step = step
        self._moment_tensor = torch.tensor(self.moment_number)
        self.ranges.begin(step)

    @property
    def rank(self) -> int:
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not 0 <= rank < 1 << (63 - _STEPS):
            raise ValueError(f"rank is a number from 0 to 2^{63 - _STEPS}, it cannot be {rank}")
        self._rank = rank
        self._moment_tensor = torch.tensor(self.moment_number)

    @property
    def moment_number(self) -> int:
        """Step and rank as one number."""
        return self._rank << _STEPS | self._step

    @property
    def moment(self) -> int | Tensor | KeySource:
        """The same for noise. Compiled code gets a tensor: for a number that changes it would be compiled again."""
        if torch.compiler.is_dynamo_compiling():
            return self._moment_tensor
        return self.moment_number if self.keyed_by is None else self.keyed_by

    def set(
        self,
        *,
        weights: FormatName = KEEP,
        activations: FormatName = KEEP,
        errors: FormatName = KEEP,
        gradients: FormatName = KEEP,
        accumulate: ArithmeticName = KEEP,
        products: ProductsName = KEEP,
        scale: ScaleNames = KEEP,
        layers: Rules | None = KEEP,
        exempt_first_last: bool = KEEP,
    ) -> None:
        """Change formats and scales of the live model; what is not given stays. Layers that were promoted stay promoted."""
        given = {"weights": weights, "activations": activations, "errors": errors, "gradients": gradients}
        given |= {SUMS: accumulate, PRODUCTS: products}
        old = self._settings
        new = old._replace(
            formats={**old.formats, **checked_roles({r: name for r, name in given.items() if name is not KEEP}, "set")},
            scales=old.scales if scale is KEEP else {**old.scales, **checked_scales(scale, ROLES, "scale")},
            rules=old.rules if layers is KEEP else selected(layers, self.layers, self._modules),
            exempt_first_last=old.exempt_first_last if exempt_first_last is KEEP else exempt_first_last,
        )
        self._apply(new)

    def promote(self, layer: str, format: FormatName) -> None:
        """Put every role of one layer that is rounded at all into `format`, for good."""
        if layer not in {entry.name for entry in self.layers}:
            raise ValueError(f"there is no layer {layer!r} to promote; `formats()` lists them")
        promoted = {**self._settings.promoted, layer: checked_format(format, "every role")}
        self._apply(self._settings._replace(promoted=promoted))

    def _apply(self, settings: _SimulationSettings) -> None:
        """Give every layer its formats and scales (layers.py has the order). All is checked before anything changes."""
        rules = [*settings.rules, *([ends(self.layers)] if settings.exempt_first_last else [])]
        found = []
        for layer in self.layers:
            formats, scales = dict(settings.formats), dict(settings.scales)
            for rule in reversed(rules):
                if layer.name in rule.layers:
                    formats |= rule.formats
                    scales |= rule.scales
            if layer.name in settings.promoted:
                rounded = [role for role in ROLES if formats[role] is not None]
                formats |= dict.fromkeys(rounded, settings.promoted[layer.name])
            if formats[SUMS] is not None and formats[PRODUCTS] is not None and SUMS in layer.roles:
                raise ValueError(f"layer {layer.name!r}: accumulate and products cannot be had together yet; give one of them")
            for role in layer.tensor_roles:
                plan_of(formats[role], scales[role], f"the {role} of {layer.name!r}")
            found.append((layer, formats, scales))
        for layer, formats, scales in found:
            layer.assign(formats, scales)
        self._settings = settings
        self.changes += 1
        self.ranges.prepare()

    def formats(self) -> list[FormatRow]:
        """Layer, role, format and scale of every tensor that could be rounded; what is not says "fp32"."""
        return [
            FormatRow(layer.name, role, layer.formats[role] or OFF, str(layer.scales[role])) for layer, role in self._places()
        ]

    def overflowed(self, agree: Callable[[Tensor], Tensor] | None = None) -> Overflowed:
        """Layers, and their roles, of which some finite number left the format's range since the last call.

        Only with `count_overflow=True`, and not of passes under `torch.no_grad()`, which are tests. This waits for the device,
        once. `agree` is given the counts of this rank as one tensor and returns those to go by: an all-reduce, say, so that all
        ranks promote the same layers.
        """
        counts = self.overflow_counts()
        self.load_overflow_counts(torch.zeros_like(counts))
        found: Overflowed = {}
        agreed = (counts if agree is None else agree(counts)).tolist()
        for (layer, role), times in zip(self._places(), agreed, strict=True):
            if times:
                found.setdefault(layer.name, set()).add(role)
        return found

    def _places(self) -> list[tuple[SimulatedLayer, str]]:
        return [(layer, role) for layer in self.layers for role in layer.tensor_roles]

    def overflow_counts(self) -> Tensor:
        """How often each layer's roles have overflowed here since `overflowed` was asked: a rank's own, to be saved with it."""
        if not self.count_overflow:
            raise ValueError("nobody counted: simulate(..., count_overflow=True) does")
        counts = [layer.overflows[role] for layer, role in self._places()]
        return torch.stack([count.to(counts[0].device) for count in counts])

    def load_overflow_counts(self, counts: Tensor) -> None:
        for (layer, role), times in zip(self._places(), counts, strict=True):
            layer.overflows[role].copy_(times)

    def agree(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Let ranks that train together have the same delayed scales; without such scales this does nothing.

        `agree` is given the largest magnitudes that this rank has met in the step under way, as one tensor, and returns those
        of all ranks: an all-reduce with MAX. To be called when the step's passes are done, before it is saved and before
        `step` moves on. (Ranks that are virtual meet in the same tensor anyway.)
        """
        self.ranges.agree(agree)

    def state_dict(self) -> dict[str, Any]:
        """Formats and scales as they are now, for a checkpoint; plain data and tensors. (`step` and `rank` are the loop's.)"""
        formats, scales, rules, exempt, promoted = self._settings
        return {
            "formats": dict(formats),
            "scales": {role: str(scale) for role, scale in scales.items()},
            "rules": [rule.state() for rule in rules],
            "exempt_first_last": exempt,
            "promoted": dict(promoted),
            "ranges": self.ranges.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        unknown = set(state["promoted"]) - {layer.name for layer in self.layers}
        if unknown:
            raise ValueError(f"the saved simulation promoted {min(unknown)!r}, which this model does not have")
        self._apply(
            _SimulationSettings(
                dict.fromkeys(ALL_ROLES) | checked_roles(state["formats"], "the saved simulation"),
                checked_scales(state["scales"], ROLES, "the saved simulation"),
                [Rule.from_state(rule, self.layers) for rule in state["rules"]],
                state["exempt_first_last"],
                dict(state["promoted"]),
            )
        )
        self.ranges.load_state_dict(state["ranges"])
