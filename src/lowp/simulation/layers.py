"""Layers and their formats: which tensors of a model are rounded, and how. Data about modules, not the modules themselves.

Every role of a layer has a format or none, and a scale. The format is found in this order:

1. the format that the layer was promoted to, if it was;
2. the first entry of `layers` that matches the layer and names the role (selection.py);
3. none, if the first and the last layer are exempt and it is one of them;
4. the format given for the role.

The scale is that of the first matching entry that gives the role one, else the one given for the role.

"accumulate" and "products" are roles of another kind: not of tensors but of the sums inside a layer (accumulate.py) and of the
operands of its products (products.py). Their formats are an `Arithmetic` and `Products`, by their names; they have no scale and
are not promoted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lowp.compat import tree_flatten, tree_leaves, tree_unflatten
from lowp.formats import BlockFormat, FormatLike
from lowp.formats import format as parse_format
from lowp.formats.floats import E8M0FNU
from lowp.formats.parse import text_of
from lowp.names import did_you_mean
from lowp.simulation.accumulate import NarrowSums
from lowp.simulation.products import Products, RoundedProducts
from lowp.simulation.rounding import UNKNOWN, Target, passed
from lowp.simulation.scales import NONE, Scale, known_shift
from lowp.tensor.matmul import Arithmetic
from lowp.tensor.noise import Domain, Noise

if TYPE_CHECKING:
    from lowp.simulation.simulation import Simulation

ROLES = ("weights", "activations", "errors", "gradients")
SUMS = "accumulate"
PRODUCTS = "products"
ALL_ROLES = (*ROLES, SUMS, PRODUCTS)
OFF = "fp32"  # how a role that is left alone is written
_OUTPUTS = 8  # tensors of one output whose ranges are remembered one by one; those behind them share the last one's

FormatName = FormatLike | None
ArithmeticName = FormatLike | Arithmetic | None
ProductsName = FormatLike | Products | None
Selector = str | type | Callable[[str, nn.Module], bool]
Rules = Mapping[Any, Mapping[str, Any]]  # selectors; formats by role, and "scale"


class Observer(Protocol):
    """Who is shown numbers before and after they are rounded, while it is `sampling`: `lowp.health.watch` returns one."""

    @property
    def sampling(self) -> bool: ...

    def observe(
        self, role: str, layer: str, numbers: Tensor, rounded: Tensor, label: str, limit: float | None = None
    ) -> None: ...


class Plan(NamedTuple):
    """A role's format and scale, worked out: what its tensors become."""

    format: str  # with `block:<n>`, the block format
    scale: str  # "none", "fitting", "aps", "delayed" or "calibrated"
    by_channel: bool
    can_overflow: bool
    saturates: bool = False


@dataclass(eq=False)
class SimulatedLayer:
    """One module that is simulated: format and scale of each of its roles, and the rounding of its tensors."""

    name: str
    number: int
    lineage: tuple[tuple[str, type], ...]  # names and classes: its own, and those of the modules around it
    roles: frozenset[str]  # those that it has
    owned: frozenset[str]  # the parameters whose gradients it rounds: of one that layers share, the first of them is the owner
    shared: frozenset[str]  # the parameters that other layers have as well
    has_matrix: bool
    channel_axis: int | None  # of its outputs, where its class says which
    parameters: int
    elements: dict[str, int]  # of each role, as far as they are known: of outputs, since the last pass that was not compiled
    simulation: "Simulation"
    formats: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    scales: dict[str, Scale] = field(default_factory=lambda: dict.fromkeys(ROLES, NONE))
    arithmetic: Arithmetic | None = None  # of the sums inside it, where they are narrow
    products: Products | None = None  # of the operands inside it, where they are rounded
    plans: dict[str, Plan | None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    ready: dict[str, Target | None] = field(
        default_factory=lambda: dict.fromkeys(ROLES)
    )  # where it is the same for all tensors
    overflows: dict[str, Tensor] = field(default_factory=lambda: {role: torch.zeros((), dtype=torch.int64) for role in ROLES})
    # For scales that remember (ranges.py): the largest magnitudes seen lately, and those to scale by
    seen: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    calibrated: dict[str, dict[int, float]] = field(default_factory=dict)  # role, place, largest magnitude
    fixed: dict[str, dict[int, str]] = field(default_factory=dict)  # the same as exponents: see `Target.scale`
    parameter_names: tuple[str, ...] = ()

    @property
    def kind(self) -> type:
        return self.lineage[0][1]

    @property
    def tensor_roles(self) -> list[str]:
        return [role for role in ROLES if role in self.roles]

    def places(self, role: str) -> int:
        """How many tensors of a role have ranges of their own."""
        return self.parameters if role in ("weights", "gradients") else _OUTPUTS

    def assign(self, formats: Mapping[str, str | None], scales: Mapping[str, Scale]) -> None:
        """Take on new formats and scales, made by `plan_of`, which has checked them."""
        sums = formats[SUMS] if SUMS in self.roles else None
        operands = formats[PRODUCTS] if PRODUCTS in self.roles else None
        self.arithmetic = None if sums is None else Arithmetic.parse(sums)
        self.products = None if operands is None else Products.parse(operands)
        for role in self.tensor_roles:
            self.formats[role], self.scales[role] = formats[role], scales[role]
            self.plans[role] = plan_of(formats[role], scales[role], f"the {role} of {self.name!r}")
            self.ready[role] = self._ready(role)
        self.fix()

    def fix(self) -> None:
        """Turn what was calibrated into exponents for the formats of now."""
        self.fixed = {}
        for role, maxima in self.calibrated.items():
            if (plan := self.plans[role]) is not None:
                fmt = parse_format(plan.format)
                self.fixed[role] = {
                    place: str(known_shift(maximum, fmt)) if maximum else "fitting" for place, maximum in maxima.items()
                }

    def move_to(self, device: torch.device) -> None:
        for tensors in (self.overflows, self.seen, self.bounds):
            for role, tensor in tensors.items():
                if tensor.device != device:
                    tensors[role] = tensor.to(device)

    def weight(self, parameter: Tensor, place: int, rounds_gradient: bool) -> Tensor:
        """A parameter as the forward pass sees it, whose gradient by this use is rounded, or left to a hook."""
        behind = self._target("gradients", parameter, place) if rounds_gradient else None
        return passed(parameter, self._target("weights", parameter, place), behind)

    def gradient(self, gradient: Tensor, place: int) -> Tensor | None:
        """The gradient of a parameter that layers share, by all uses; None (for autograd: as it is) if it is not rounded."""
        target = self._target("gradients", gradient, place)
        return None if target is None else target(gradient)

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, in the arithmetic of this layer."""
        if self.arithmetic is None and self.products is None:
            return forward(*args, **kwargs)
        whose = self.name, self.number, self.simulation.seed, self.simulation.moment
        with NarrowSums(self.arithmetic, *whose) if self.arithmetic is not None else RoundedProducts(self.products, *whose):  # type: ignore[arg-type]
            return forward(*args, **kwargs)

    def output(self, value: Any) -> Any:
        """What the module returns: every floating-point tensor in it."""
        if not torch.compiler.is_compiling():
            self.elements["activations"] = self.elements["errors"] = _count(value)
        if self.plans["activations"] is None and self.plans["errors"] is None:
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

    def _ready(self, role: str) -> Target | None:
        """How every tensor of a role is rounded at any time; None where that depends. Spares Dynamo most of `_target`."""
        plan, simulation = self.plans[role], self.simulation
        if plan is None or plan.by_channel or plan.scale in ("delayed", "calibrated"):
            return None
        if simulation.roundings[role] == "stochastic" or (simulation.count_overflow and plan.can_overflow):
            return None
        return Target(plan.format, simulation.roundings[role], plan.scale, saturates=plan.saturates)

    def _target(self, role: str, tensor: Tensor, place: int) -> Target | None:
        """How a role's tensor, the `place`-th of its kind in this layer, is rounded now."""
        target = self._unwatched(role, tensor, place)
        if target is None or torch.compiler.is_compiling():
            return target
        watch = self.simulation.watch
        if watch is None or not watch.sampling or self.simulation.rank or not _is_training(role):
            return target
        of_parameter = role in ("weights", "gradients") and place < len(self.parameter_names)
        name = f"{self.name}.{self.parameter_names[place]}" if of_parameter else self.name
        label = target.format if self.scales[role] == NONE else f"{target.format}/{self.scales[role]}"
        limit = parse_format(target.format).max if target.scale == "none" else None
        return replace(target, shown=partial(_show, watch, role, name, label, limit))

    def _unwatched(self, role: str, tensor: Tensor, place: int) -> Target | None:
        if (ready := self.ready[role]) is not None:
            return ready
        plan = self.plans[role]
        if plan is None:
            return None
        simulation = self.simulation
        noise = overflows = seen = bounds = None
        if simulation.roundings[role] == "stochastic":
            noise = Noise.of(Domain.SIMULATION, simulation.seed, simulation.moment, self.number, ROLES.index(role), place)
        if self.overflows[role].device != tensor.device:
            self.move_to(tensor.device)
        if simulation.count_overflow and plan.can_overflow and _is_training(role):
            overflows = self.overflows[role]
        scale, place = plan.scale, min(place, self.places(role) - 1)
        if scale == "delayed":
            seen = self.seen[role] if _is_training(role) else None
            scale, bounds = "fitting", self.bounds[role]
        elif scale == "calibrated":
            seen = self.seen[role] if simulation.calibrating else None
            scale = "fitting" if simulation.calibrating else self._fixed_exponent(role, place)
        axis = self._axis(role, tensor) if plan.by_channel else None
        rounding = simulation.roundings[role]
        return Target(plan.format, rounding, scale, axis, plan.saturates, noise, overflows, seen, bounds, place)

    def _fixed_exponent(self, role: str, place: int) -> str:
        """As text; what was not calibrated is found out when it is used: no error is rounded without a backward pass."""
        if role in self.fixed and place in self.fixed[role]:
            return self.fixed[role][place]
        return f"{UNKNOWN} of the {role} of layer {self.name!r}"

    def _axis(self, role: str, tensor: Tensor) -> int:
        """The dimension of channels: of parameters the first; of outputs what the class says, else the last one, or the second
        of what looks like images or volumes and was made without parameters."""
        if role in ("weights", "gradients"):
            return 0
        if self.channel_axis is not None:
            return self.channel_axis
        return 1 if tensor.dim() in (4, 5) and not self.parameters else -1


def _is_training(role: str) -> bool:
    """What is run without gradients is not part of training: it is not counted, remembered or shown to a watch. (Hooks of
    gradients are part of it, and run so.)"""
    return torch.is_grad_enabled() or role == "gradients"


def _show(watch: Observer, role: str, name: str, label: str, limit: float | None, numbers: Tensor, rounded: Tensor) -> None:
    watch.observe(role, name, numbers, rounded, label, limit)


def _count(output: Any) -> int:
    """Floating-point numbers in an output."""
    leaves = [output.data] if isinstance(output, PackedSequence) else tree_leaves(output)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


Layer = SimulatedLayer  # its name in models that were saved before


def plan_of(format: str | None, scale: Scale, what: str) -> Plan | None:
    """How tensors get into a format by way of a scale; None if they are left alone."""
    if format is None:
        return None
    fmt = parse_format(format)
    if isinstance(fmt, BlockFormat):  # which has scales of its own
        return Plan(format, "none", by_channel=False, can_overflow=False)
    if scale.kind == "block":
        if fmt.bits > 16:
            raise ValueError(f"{fmt} has no room for {what}: numbers that share a block's scale have at most 16 bits")
        return Plan(str(BlockFormat(fmt, scale.size, E8M0FNU)), "none", by_channel=False, can_overflow=False)
    if scale.kind in ("tensor", "channel"):
        return Plan(format, "fitting", scale.kind == "channel", can_overflow=False)
    return Plan(format, scale.kind, by_channel=False, can_overflow=True, saturates=scale.kind in ("delayed", "calibrated"))


def checked_format(name: FormatName, role: str) -> str | None:
    """The name of a format with room for the numbers of a role; None if the role is off."""
    fmt = parse_format(OFF if name is None else name)
    text = text_of(fmt)
    if text == OFF:
        return None
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if not element.signed or not element.has_zero:
        raise ValueError(f"{fmt} has no room for {role}: it holds no {'zero' if element.signed else 'negative numbers'}")
    return text


def checked_arithmetic(given: ArithmeticName) -> str | None:
    """The name of an arithmetic for the sums of a layer; None if they are left alone."""
    if given is None or given == OFF:
        return None
    if isinstance(given, str):
        given = Arithmetic.parse(given)
    given = given if isinstance(given, Arithmetic) else Arithmetic(accumulate=given)
    for fmt in (given.sum_format, given.product_format):
        if fmt is not None:
            text_of(fmt)  # a layer keeps the name alone
    return None if str(given) == OFF else str(given)


def checked_products(given: ProductsName) -> str | None:
    """The name of what becomes of a layer's operands; None if they are left alone."""
    if given is None or given == OFF:
        return None
    if not isinstance(given, (str, Products)):
        given = text_of(parse_format(given))
    given = given if isinstance(given, Products) else Products.parse(given)
    for fmt in (given.format, given.errors):
        text_of(fmt)  # type: ignore[arg-type]  # a layer keeps the name alone
    return str(given)


def checked_roles(formats: Mapping[str, Any], where: str) -> dict[str, str | None]:
    """Formats by role, after a look at the roles' names."""
    for role in formats:
        if role not in ALL_ROLES:
            hint = did_you_mean(str(role), ALL_ROLES, f"roles are {', '.join(ALL_ROLES)}")
            raise ValueError(f"unknown role {role!r} in {where}; {hint}")
    check = {SUMS: checked_arithmetic, PRODUCTS: checked_products}
    return {role: check[role](name) if role in check else checked_format(name, role) for role, name in formats.items()}
