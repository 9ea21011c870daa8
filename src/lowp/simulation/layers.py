"""Layers and their formats: which tensors of a model are rounded, and to what. Data about modules, not the modules themselves.

Every role of a layer has a format or none. It is found in this order:

1. the format that the layer was promoted to, if it was;
2. the first entry of `layers` that matches the layer and names the role;
3. the format given for the role.

An entry matches a layer by its name or that of a module around it, as a shell pattern ("layer1.*", "blocks.0"); by the class of
either ("BatchNorm2d"); or it is "first" or "last", of the layers that have a matrix of weights, in order of registration.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.simulation.rounding import Target, passed
from lowp.tensor.noise import Noise

if TYPE_CHECKING:
    from lowp.simulation.simulate import Simulation

ROLES = ("weights", "activations", "errors", "gradients")
OFF = "fp32"  # how a role that is left alone is written
_STREAMS = 256  # tensors of one role in one layer that have noise of their own

FormatName = str | AnyFormat | None
Rules = Mapping[str, Mapping[str, FormatName]]


@dataclass(eq=False)
class Layer:
    """One module that is simulated: the format of each of its roles, and the rounding of its tensors."""

    name: str
    number: int
    lineage: tuple[tuple[str, str], ...]  # names and classes: its own, and those of the modules around it
    roles: frozenset[str]  # those that it has
    owned: frozenset[str]  # the parameters whose gradients it rounds: of a tied one, the first layer is the owner
    has_matrix: bool
    simulation: "Simulation"
    formats: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    overflows: dict[str, Tensor] = field(default_factory=lambda: {role: torch.zeros((), dtype=torch.int64) for role in ROLES})

    def matches(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) or kind == pattern for name, kind in self.lineage)

    def weight(self, parameter: Tensor, place: int) -> Tensor:
        """A parameter as the forward pass sees it."""
        return passed(parameter, self._target("weights", parameter, place), None)

    def gradient(self, gradient: Tensor, place: int) -> Tensor | None:
        """A parameter's gradient as it is accumulated; None (for autograd: as it is) if that is not rounded."""
        target = self._target("gradients", gradient, place)
        return None if target is None else target(gradient)

    def output(self, value: Any) -> Any:
        """What the module returns: every floating-point tensor in it."""
        if self.formats["activations"] is None and self.formats["errors"] is None:
            return value
        if isinstance(value, Tensor):
            return self._activation(value, 0)
        if isinstance(value, PackedSequence):  # which pytree takes for a leaf
            return value._replace(data=self._activation(value.data, 0))
        leaves, structure = tree_flatten(value)
        return tree_unflatten([self._activation(leaf, place) for place, leaf in enumerate(leaves)], structure)

    def _activation(self, leaf: Any, place: int) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return passed(leaf, self._target("activations", leaf, place), self._target("errors", leaf, place))

    def _target(self, role: str, tensor: Tensor, place: int) -> Target | None:
        """How a role's tensor, the `place`-th of its kind in this layer, is rounded now."""
        name = self.formats[role]
        if name is None:
            return None
        simulation = self.simulation
        noise = overflows = None
        if simulation.rounding == "stochastic":
            stream = (self.number * len(ROLES) + ROLES.index(role)) * _STREAMS + place
            noise = Noise(simulation.seed, simulation.moment, stream)
        scaled = simulation.scale == "tensor" and not _is_block(name)
        if simulation.count_overflow and not scaled:
            if self.overflows[role].device != tensor.device:
                self.overflows[role] = self.overflows[role].to(tensor.device)
            overflows = self.overflows[role]
        return Target(name, simulation.rounding, scaled, noise, overflows)


def _is_block(name: str) -> bool:
    """Block formats bring scales of their own."""
    return isinstance(parse_format(name), BlockFormat)


_is_block._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see tensor/dynamo.py


def checked_format(name: FormatName, role: str) -> str | None:
    """The name of a format with room for the numbers of a role; None if the role is off."""
    fmt = parse_format(OFF if name is None else name)
    if str(fmt) == OFF:
        return None
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if not element.signed or not element.has_zero:
        raise ValueError(f"{fmt} has no room for {role}: it holds no {'zero' if element.signed else 'negative numbers'}")
    return str(fmt)


def checked_roles(formats: Mapping[str, FormatName], where: str) -> dict[str, str | None]:
    """Formats by role, after a look at the roles' names."""
    for role in formats:
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), ROLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"roles are {', '.join(ROLES)}"
            raise ValueError(f"unknown role {role!r} in {where}; {hint}")
    return {role: checked_format(name, role) for role, name in formats.items()}


def checked_rules(rules: Rules | None, layers: Sequence[Layer]) -> list[tuple[frozenset[int], dict[str, str | None]]]:
    """Each entry of `layers=`: the numbers of the layers that it is for, and their formats."""
    found = []
    for pattern, formats in (rules or {}).items():
        numbers = frozenset(layer.number for layer in _matching(pattern, layers))
        if not numbers:
            names = [layer.name for layer in layers]
            near = difflib.get_close_matches(str(pattern), names, n=3, cutoff=0.5) or [*names[:3], "..."][: len(names)]
            raise ValueError(f"layers: {pattern!r} matches nothing; there are {', '.join(near)}")
        found.append((numbers, checked_roles(formats, f"layers[{pattern!r}]")))
    return found


def _matching(pattern: str, layers: Sequence[Layer]) -> list[Layer]:
    named = [layer for layer in layers if layer.matches(pattern)]
    if named or pattern not in ("first", "last"):
        return named
    with_matrix = [layer for layer in layers if layer.has_matrix]
    return with_matrix[:1] if pattern == "first" else with_matrix[-1:]
