"""`simulate(model, ...)`: every number of a role in a format of your choice, without a change to the model's code.

    simulation = simulate(model, weights="e4m3fn", activations="e4m3fn", errors="e5m2", layers={"last": {"weights": "fp32"}})
    ...                                  # train as ever: named_parameters and state_dict are what they were
    restore(model)

Roles are tensors that narrow hardware would hold in memory:

- weights: parameters as the forward pass sees them (the optimizer has them in full precision; gradients pass straight through);
- activations: outputs of the modules that compute, which are all leaves but those that only move numbers, and attention;
- errors: the gradients of those activations;
- gradients: of parameters, as each layer's backward pass computes them. (A layer that is called several times in a pass adds up
  rounded ones. Of a parameter that several layers share, the sum is rounded.)

and two that it would not:

- accumulate: the sums inside a matrix product or a convolution, forward and backward, each partial one rounded (`Arithmetic`);
- products: the operands of linear layers' three products, each rounded along the dimension that is summed over (`Products`).

What a module computes inside (an LSTM's gates, attention's scores) and what is computed between modules in plain torch
operations (the addition of a residual) is not rounded until the next module returns it.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import count

import torch
from torch import nn

from lowp.formats import Rounding
from lowp.formats import format as parse_format
from lowp.simulation.layers import (
    PRODUCTS,
    ROLES,
    SUMS,
    ArithmeticName,
    FormatName,
    ProductsName,
    Rules,
    SimulatedLayer,
    checked_format,
)
from lowp.simulation.modules import LAYER, check_can_revert, convert, is_simulated, parts, revert, sums_products
from lowp.simulation.policies.policy import Policy
from lowp.simulation.ranges import Ranges
from lowp.simulation.simulation import ScaleNames, Simulation
from lowp.simulation.special import channel_axis
from lowp.tensor.fitting import largest
from lowp.tensor.ops import quantize


def simulate(
    model: nn.Module,
    weights: FormatName = None,
    activations: FormatName = None,
    errors: FormatName = None,
    gradients: FormatName = None,
    accumulate: ArithmeticName = None,
    rounding: str | Mapping[str, str] = "nearest",
    scale: ScaleNames = "none",
    layers: Rules | None = None,
    seed: int = 0,
    count_overflow: bool = False,
    exempt_first_last: bool = False,
    policy: Policy | None = None,
    products: ProductsName = None,
) -> Simulation:
    """Let `model` compute in the given formats from now on. It is changed in place; `restore(model)` gives it back.

    Args:
        weights, activations, errors, gradients: the format of each role (see above); None or "fp32" leaves it alone.
        accumulate: how sums of products are computed: the format of partial sums, or an `Arithmetic`.
        rounding: any of lowp's, for all roles, or {role: rounding} (others: "nearest"); "stochastic" is keyed by `seed` and by
            the simulation's `step` and `rank`.
        scale: the power of two by which tensors are brought into their format's range: "none", "tensor", "channel", "aps",
            "block:<n>", "delayed", "delayed:<n>" or "calibrated" (scales.py says what each is), for all roles, or
            {role: scale}. Block formats have scales of their own.
        layers: formats and scales of some layers: {key: {role: format, "scale": scale}}, the first match counts. A key is the
            name of a module or a shell pattern for names, a class or its name, "first" or "last", or a predicate
            `(name, module) -> bool`; it is for everything inside that module too.
        count_overflow: count finite numbers that leave their format's range, for `Simulation.overflowed`, in passes that have
            gradients enabled: what is run under `torch.no_grad()` is a test, and changes no decision about training.
        exempt_first_last: leave the first and the last layer that have a matrix of weights as they are, unless `layers` says
            otherwise.
        policy: what chooses formats, at the start and while the model trains (policies/); its `start` is called here.
        products: how the operands of linear layers' products are rounded: a format, or `Products` (products.py).

    While a model is simulated, `module.weight` is the rounded weight, as with torch's parametrizations, and cannot be written
    to. The parameter itself is in `named_parameters()`. A module that is called several times in one step rounds with the same
    noise each time: so does a pass that is repeated to save memory (`torch.utils.checkpoint`), which must.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"simulate takes an nn.Module, not {type(model).__name__}")
    if any(is_simulated(module) for module in model.modules()):
        raise ValueError(
            "the model is simulated already: simulation_of(model).set(...) changes formats, restore(model) ends it"
        )
    count_overflow = count_overflow or (policy is not None and policy.count_overflow)
    simulation = Simulation(model, _checked_roundings(rounding), seed, count_overflow)
    found = _layers_of(model, simulation)
    simulation.layers = tuple(layer for _, layer, _ in found if layer is not None)
    if not simulation.layers:
        raise ValueError(f"{type(model).__name__} has nothing to simulate: no parameters and no module that computes")
    simulation.ranges = Ranges(simulation.layers)
    simulation.set(
        weights=weights,
        activations=activations,
        errors=errors,
        gradients=gradients,
        accumulate=accumulate,
        products=products,
        scale=scale,
        layers=layers,
        exempt_first_last=exempt_first_last,
    )
    for module, layer, _ in found:
        if layer is not None and layer.formats["weights"] == checked_format(weights, "weights"):  # and not one of its own
            _check_weights_survive(module, layer)
    for module, layer, rounds_output in found:
        convert(module, layer, rounds_output)
    if policy is not None:
        try:
            policy.start(simulation, model)
        except BaseException:
            restore(model)
            raise
    return simulation


def _checked_roundings(given: str | Mapping[str, str]) -> dict[str, str]:
    found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(ROLES, given)
    for role, rounding in found.items():
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r} in rounding; roles are {', '.join(ROLES)}")
        if rounding not in list(Rounding):
            raise ValueError(f"unknown rounding {rounding!r}; it is one of {', '.join(Rounding)}")
    return dict.fromkeys(ROLES, "nearest") | found


def restore(model: nn.Module) -> None:
    """The exact model that `simulate` was given: its classes, without our hooks. One that is not simulated stays as it is."""
    simulated = [module for module in model.modules() if is_simulated(module)]
    for module in simulated:
        check_can_revert(module)
    layers = {layer for module in simulated if (layer := vars(module).get(LAYER)) is not None}
    for simulation in {layer.simulation for layer in layers}:
        simulation.unhook(layers)
    for module in simulated:
        revert(module)


def simulation_of(model: nn.Module) -> Simulation:
    """The simulation that a model is in: of a copy or an unpickled model, its own."""
    for module in model.modules():
        if (layer := vars(module).get(LAYER)) is not None:
            if layer.simulation.is_orphan:
                layer.simulation.belongs_to(_root(model, module, layer))
            return layer.simulation
    raise ValueError(f"{type(model).__name__} is not simulated")


def _root(model: nn.Module, module: nn.Module, layer: SimulatedLayer) -> nn.Module:
    """The model that was simulated, of which this may be a part, or something around it."""
    path, _ = layer.lineage[0]
    return next((root for root in model.modules() if dict(root.named_modules()).get(path) is module), model)


def _layers_of(model: nn.Module, simulation: Simulation) -> list[tuple[nn.Module, SimulatedLayer | None, bool]]:
    """Every module, the layer that it is (None: it has no role), and whether its output is an activation."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    holders = Counter(id(value) for module in model.modules() for value in module._parameters.values())
    owners: set[int] = set()
    numbers = count()
    found: list[tuple[nn.Module, SimulatedLayer | None, bool]] = []
    for name, module, rounds_output in parts(model):
        own = {key: value for key, value in module._parameters.items() if value is not None}
        layer = None
        if own or rounds_output:
            owned = frozenset(key for key, value in own.items() if id(value) not in owners)
            owners.update(id(value) for value in own.values())
            sizes = {key: value.numel() for key, value in own.items()}
            layer = SimulatedLayer(
                name=name or type(module).__name__,
                number=next(numbers),
                lineage=_lineage(name, kinds),
                roles=_roles(bool(own), bool(owned), rounds_output, rounds_output and sums_products(module)),
                owned=owned,
                shared=frozenset(key for key, value in own.items() if holders[id(value)] > 1),
                has_matrix=any(value.dim() > 1 for value in own.values()),
                channel_axis=channel_axis(module),
                parameters=len(module._parameters),
                parameter_names=tuple(module._parameters),
                elements={"weights": sum(sizes.values()), "gradients": sum(sizes[key] for key in owned)},
                simulation=simulation,
            )
            layer.move_to(_device(module, model))
        found.append((module, layer, rounds_output))
    return found


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    """Where a module's counters belong: with its parameters or, if it has none, with the model's first."""
    parameter = next(module.parameters(), next(model.parameters(), None))
    return torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device


def _lineage(name: str, kinds: Mapping[str, type]) -> tuple[tuple[str, type], ...]:
    """Names and classes from the module itself outwards. The model as a whole counts only where it is the layer."""
    names = name.split(".")
    around = [".".join(names[:end]) for end in range(len(names), 0, -1)]
    return tuple((entry, kinds[entry]) for entry in around)


def _roles(has_parameters: bool, owns_parameters: bool, rounds_output: bool, sums: bool) -> frozenset[str]:
    there = {
        "weights": has_parameters,
        "activations": rounds_output,
        "errors": rounds_output,
        "gradients": owns_parameters,
        SUMS: sums,
        PRODUCTS: sums,
    }
    return frozenset(role for role, is_there in there.items() if is_there)


def _check_weights_survive(module: nn.Module, layer: SimulatedLayer) -> None:
    """A format whose numbers all lie above a layer's weights has no room for them, unless a scale brings them there."""
    plan, rounding = layer.plans["weights"], layer.simulation.roundings["weights"]
    if plan is None or plan.scale != "none" or rounding == "stochastic":
        return
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.dim() < 2 or parameter.is_meta or not parameter.numel():
            continue
        maximum = largest(parameter, None, True)
        if maximum > 0 and quantize(maximum, plan.format, rounding) == 0 and quantize(-maximum, plan.format, rounding) == 0:
            raise ValueError(
                f"{plan.format} has no room for the weights of {layer.name!r}: {name} would be all zeros, as its largest is "
                f"{maximum.item():.2g} and the format's smallest {parse_format(plan.format).smallest:.2g}; try scale='tensor'"
            )
