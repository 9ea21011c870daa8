"""What can be wrong with the formats of a recipe's roles, and with the rules by which they change."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from lowp.formats import AnyFormat, Rounding
from lowp.formats import format as parse_format
from lowp.optim.loss_scale import LossScale
from lowp.simulation.layers import checked_format, checked_products
from lowp.simulation.master import checked_master
from lowp.simulation.policies import GradientDiversity
from lowp.simulation.scales import simulated_scale
from lowp.tensor.matmul import Arithmetic
from lowp.training.keys import Path, written
from lowp.training.mistakes import RecipeError, about, nearest
from lowp.training.numerics import ROLES, arithmetic_of, autocast_dtype, layer_rules, simulated_roles, stored_dtype
from lowp.training.recipe import STORED, ArithmeticSettings, Precision, Recipe

_LOSS_SCALES = ("none", "dynamic", "per_layer")
_OVERFLOWING = ("none", "delayed")  # scales with which numbers can leave their format's range


def check_precision(recipe: Recipe) -> None:
    precision = recipe.precision
    for path, role, text in _formats(precision):
        _check_format(path, role, text)
    _check_rounding(precision)
    _check_scales(precision)
    _check_arithmetic(precision)
    _check_products(precision)
    _check_storage(precision)
    _check_master(precision)
    _check_loss_scale(precision.loss_scale)
    _check_schedule(recipe)
    _check_switch(precision)
    _check_promote(precision)


def _formats(precision: Precision) -> Iterator[tuple[Path, str, str]]:
    """Every format that numbers of the model are rounded to: where it stands, for which role, and its name."""
    for role in ROLES:
        if text := getattr(precision, role):
            yield ("precision", role), role, text
    of_layers = [(("precision", "layers", pattern), roles) for pattern, roles in precision.layers.items()]
    of_phases = [(("precision", "schedule", place), phase) for place, phase in enumerate(precision.schedule)]
    for path, roles in (*of_layers, *of_phases):
        for role in ROLES:
            if (text := getattr(roles, role)) is not None:
                yield (*path, role), role, text
    if precision.promote is not None:
        yield ("precision", "promote", "to"), "every role", precision.promote.to
    if precision.switch is not None:
        for place, text in enumerate(precision.switch.ladder):
            yield ("precision", "switch", "ladder", place), " and ".join(precision.switch.roles), text


def _check_format(path: Path, role: str, text: str) -> None:
    with about(*path):
        checked_format(text, role)
    if text not in STORED and text.strip().lower() in STORED:  # would pass for a format to simulate
        raise RecipeError(f"{written(path)}: write {text.strip().lower()!r}, not {text!r}")


def _by_role(key: str, given: str | dict[str, str]) -> Iterator[tuple[Path, str]]:
    """What a key says of all roles, or of each: where it stands, and the text."""
    if isinstance(given, str):
        yield ("precision", key), given
        return
    for role, text in given.items():
        if role not in ROLES:
            hint = nearest(role, ROLES) or f"; there are {', '.join(ROLES)}"
            raise RecipeError(f"precision.{key}: unknown role {role!r}{hint}")
        yield ("precision", key, role), text


def _check_rounding(precision: Precision) -> None:
    for path, rounding in _by_role("rounding", precision.rounding):
        if rounding not in tuple(Rounding):
            hint = nearest(rounding, map(str, Rounding)) or f"; it is one of {', '.join(Rounding)}"
            raise RecipeError(f"{written(path)}: unknown rounding {rounding!r}{hint}")


def _check_scales(precision: Precision) -> None:
    of_layers = [
        (("precision", "layers", name, "scale"), roles.scale) for name, roles in precision.layers.items() if roles.scale
    ]
    for path, text in (*_by_role("scale", precision.scale), *of_layers):
        with about(*path):
            if simulated_scale(text).kind == "calibrated":
                raise ValueError("'calibrated' wants a pass over data before the run; 'delayed' learns from the steps before")


def _check_arithmetic(precision: Precision) -> None:
    """The format of sums alone, that of products alone, then everything together."""
    settings = precision.arithmetic
    with about("precision", "accumulate"):
        Arithmetic(accumulate=precision.accumulate or "fp32")
    with about("precision", "arithmetic", "multiply"):
        Arithmetic(multiply=settings.multiply or None)
    with about("precision", "arithmetic"):
        arithmetic = arithmetic_of(precision)
    for pattern, roles in precision.layers.items():
        with about("precision", "layers", pattern, "accumulate"):
            layer_rules(precision.model_copy(update={"layers": {pattern: roles}}))
    narrow = arithmetic is not None or any(roles.accumulate is not None for roles in precision.layers.values())
    if narrow and autocast_dtype(precision) is not None:
        raise RecipeError(
            f"precision.accumulate: under autocast torch computes in {precision.activations}; sums are simulated in a float32 "
            "model, or over weights that are stored in 16 bits"
        )


def _check_products(precision: Precision) -> None:
    of_layers = [(("precision", "layers", name), roles.products) for name, roles in precision.layers.items()]
    for path, text in ((("precision",), precision.products), *of_layers):
        if text:
            with about(*path, "products"):
                checked_products(text)
    rounded = precision.products or any(products for _, products in of_layers)
    if rounded and (precision.accumulate or precision.arithmetic != ArithmeticSettings()):
        raise RecipeError("precision.products: operands are rounded, or sums are narrow (precision.accumulate); not both yet")
    if rounded and autocast_dtype(precision) is not None:
        raise RecipeError(
            f"precision.products: under autocast torch computes in {precision.activations}; operands are rounded in a float32 "
            "model, or over weights that are stored in 16 bits"
        )


def _check_storage(precision: Precision) -> None:
    """Weights of 16 bits are all of the model's numbers; only what is rounded further can be simulated over them."""
    weights, activations = precision.weights, precision.activations
    if precision.audit and stored_dtype(precision) == torch.float32:
        raise RecipeError(
            f"precision.audit: looks for FP32 tensors, and {weights!r} weights are some; store them in fp16 or bf16"
        )
    if stored_dtype(precision) == torch.float32:
        return
    if activations in STORED and activations != weights:
        raise RecipeError(
            f"precision.activations: {weights} weights compute in {weights}, not in {activations}; "
            f'leave it "", or take precision.weights = "fp32" for autocast'
        )
    for pattern, roles in precision.layers.items():
        if roles.weights is not None:
            path = written(("precision", "layers", pattern, "weights"))
            raise RecipeError(f"{path}: all weights are stored in {weights}; layers can differ where precision.weights is fp32")


def _check_master(precision: Precision) -> None:
    """Master weights are for a float32 model, and updates are rounded to what is kept in less."""
    if precision.master:
        with about("precision", "master"):
            checked_master(precision.master)
    stored = stored_dtype(precision) != torch.float32
    if precision.master and stored:
        raise RecipeError(
            f"precision.master: {precision.weights} weights are what the optimizer keeps; master weights are for a float32 "
            "model: precision.weights = 'fp32', or a format that is simulated"
        )
    if precision.master and precision.update == "kahan":
        raise RecipeError(
            "precision.update: 'kahan' is for weights that are stored in 16 bits (fp16, bf16); master weights take updates "
            "to 'nearest' or 'stochastic'"
        )
    if precision.update in ("stochastic", "kahan") and not stored and precision.master in ("", "fp32"):
        raise RecipeError(
            f"precision.update: {precision.update!r} is for weights that are stored in 16 bits (fp16, bf16), and "
            f"{precision.weights!r} is kept in float32"
        )


def _check_loss_scale(scale: str | float) -> None:
    if not isinstance(scale, str):
        with about("precision", "loss_scale"):
            LossScale(scale)
    elif scale not in _LOSS_SCALES:
        listed = f"{', '.join(_LOSS_SCALES)} or a power of two"
        raise RecipeError(f"precision.loss_scale: {scale!r} is not one of {listed}{nearest(scale, _LOSS_SCALES)}")


def _check_schedule(recipe: Recipe) -> None:
    precision = recipe.precision
    for before, after in pairwise(precision.schedule):
        if after.epoch <= before.epoch:
            raise RecipeError(
                f"precision.schedule: phases begin one after the other, not at {before.epoch}, then {after.epoch}"
            )
    for place, phase in enumerate(precision.schedule):
        path = written(("precision", "schedule", place))
        if phase.epoch >= recipe.epochs:
            raise RecipeError(f"{path}.epoch: the run has {recipe.epochs} epochs, counted from 0, and none is {phase.epoch}")
        roles = [role for role in ROLES if getattr(phase, role) is not None]
        if not roles and phase.wire is None:
            raise RecipeError(f"{path}: names no format; give one of {', '.join(ROLES)}, wire")
        if roles and stored_dtype(precision) != torch.float32:
            raise RecipeError(
                f"{path}.{roles[0]}: formats that change are simulated in a float32 model, and precision.weights stores "
                f"{precision.weights}"
            )
        for role in roles:
            if precision.switch is not None and role in precision.switch.roles:
                raise RecipeError(f"{path}.{role}: precision.switch decides about {role}; one of the two must go")


def _check_switch(precision: Precision) -> None:
    switch = precision.switch
    if switch is None:
        return
    if stored_dtype(precision) != torch.float32:
        raise RecipeError(f"precision.switch: needs weights in float32, and precision.weights stores {precision.weights}")
    with about("precision", "switch"):
        GradientDiversity(switch.ladder, switch.threshold, switch.window, switch.patience, switch.roles)
    widths = [parse_format(text).bits for text in switch.ladder]
    if widths != sorted(widths) or len(set(switch.ladder)) < len(switch.ladder):
        raise RecipeError(
            f"precision.switch.ladder: the narrowest format comes first and the widest last, not {', '.join(switch.ladder)}"
        )
    for role in switch.roles:
        given = getattr(precision, role)
        if given not in ("", "fp32", switch.ladder[0]):
            raise RecipeError(
                f"precision.{role}: {given!r}, but precision.switch begins with {switch.ladder[0]!r}; leave the choice to it"
            )


def _check_promote(precision: Precision) -> None:
    """A layer that overflows must be able to, and must get more room."""
    promote, switch = precision.promote, precision.switch
    if promote is None:
        return
    if stored_dtype(precision) != torch.float32:
        raise RecipeError(f"precision.promote: needs weights in float32, and precision.weights stores {precision.weights}")
    given = precision.scale
    scales = dict.fromkeys(ROLES, "none") | given if isinstance(given, dict) else dict.fromkeys(ROLES, given)
    if not any(simulated_scale(text).kind in _OVERFLOWING for text in scales.values()):
        raise RecipeError(f"precision.promote: nothing overflows with precision.scale = {given!r}")
    if switch is not None and parse_format(promote.to).bits < parse_format(switch.ladder[-1]).bits:
        raise RecipeError(
            f"precision.promote.to: {promote.to!r} is narrower than {switch.ladder[-1]!r}, to which precision.switch climbs: "
            "promoted layers would stay behind"
        )
    rounded = _simulated(precision)
    if not rounded:
        raise RecipeError("precision.promote: no role is simulated, so that nothing overflows; set precision.weights, say")
    for where, fmt in rounded:
        if parse_format(promote.to).max < fmt.max:
            raise RecipeError(f"precision.promote.to: {promote.to!r} has less room than {fmt} ({written(where)})")


def _simulated(precision: Precision) -> list[tuple[Path, AnyFormat]]:
    """Where numbers are rounded to less than float32, at the beginning or later."""
    start = {("precision", role): text for role, text in simulated_roles(precision).items()}
    later = {path: text for path, _, text in _formats(precision) if path[1] in ("layers", "schedule", "switch")}
    return [(path, parse_format(text)) for path, text in (start | later).items() if text != "fp32"]
