"""The optimizer that a recipe asks for, and the format that it keeps weights in."""

import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from lowp.optim import LAMB, LARS, SGD, AdamW
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.sharding import NoisePlace
from lowp.simulation.master import MasterWeights
from lowp.training.parallel import Placement
from lowp.training.plugins import blamed
from lowp.training.recipe import OptimizerSettings, Precision, Recipe

NAMES = ("sgd", "lars", "adamw", "lamb")


def optimizer_for(recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    settings = recipe.optimizer
    if settings.name.startswith("torch:"):
        return _torch_optimizer(settings, parameters)
    options = _options(recipe.precision) | {"seed": recipe.seed}
    if by_torch(recipe):
        options["nonfinite"] = "propagate"  # it would wait for the device: CheckedUpdate looks (update.py)
    named = list(parameters.items())
    exclude = () if settings.decay_vectors else None  # None: biases and norms neither decay nor have a trust ratio
    if settings.name == "lars":
        return LARS(
            named, settings.lr, settings.momentum, weight_decay=settings.weight_decay, nesterov=settings.nesterov,
            trust=settings.trust, exclude=exclude, **options,
        )  # fmt: skip
    if settings.name == "lamb":
        return LAMB(named, settings.lr, settings.betas, settings.eps, settings.weight_decay, exclude=exclude, **options)
    groups = _groups(settings, parameters)
    if settings.name == "adamw":
        return AdamW(groups, settings.lr, settings.betas, settings.eps, settings.weight_decay, **options)
    if settings.name == "sgd":
        return SGD(
            groups, settings.lr, settings.momentum, weight_decay=settings.weight_decay, nesterov=settings.nesterov, **options
        )
    raise ValueError(f"unknown optimizer {settings.name!r}; there are {', '.join(NAMES)} and torch:CLASS")


def numbers_of(recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """How the recipe's optimizer counts a model's parameters. The numbers key its noise."""
    if recipe.optimizer.name in ("lars", "lamb"):
        return {name: number for number, name in enumerate(parameters)}
    groups = _groups(recipe.optimizer, parameters)
    return {name: number for number, (name, _) in enumerate(chain.from_iterable(group["params"] for group in groups))}


def draw_as_the_whole(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], placement: Placement, numbers: Mapping[str, int]
) -> None:
    """Of a divided model, every rank numbers its own parameters: let them draw by the `numbers_of` the whole model."""
    if isinstance(optimizer, LowPrecisionOptimizer):
        wholes = {parameter: placement.whole_of(name) for name, parameter in parameters.items()}
        optimizer.draw_as_parts({parameter: NoisePlace(numbers[name], first) for parameter, (name, first) in wholes.items()})


def by_torch(recipe: Recipe) -> bool:
    """Do functions of torch update all weights? They do not look whether gradients are finite."""
    precision, name = recipe.precision, recipe.optimizer.name
    narrow = precision.weights in ("fp16", "bf16") or precision.state
    return name.startswith("torch:") or (name in ("sgd", "adamw") and not narrow)


def master_weights_for(recipe: Recipe, optimizer: torch.optim.Optimizer) -> MasterWeights | None:
    """What rounds the weights after each of the optimizer's steps, if the recipe asks for it."""
    precision = recipe.precision
    if precision.master in ("", "fp32"):
        return None
    return MasterWeights(optimizer, precision.master, precision.update or "stochastic", recipe.seed)


def _options(precision: Precision) -> dict[str, Any]:
    """How states and updates are rounded. Float32 weights (a simulated format's too) take updates to the nearest."""
    stored = precision.weights in ("fp16", "bf16")
    return {"update": (precision.update or "stochastic") if stored else "nearest", "state": precision.state or None}


def _groups(settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Biases and norms (one dimension) do not decay, unless the recipe says so."""
    if settings.decay_vectors or not settings.weight_decay:
        return [{"params": list(parameters.items())}]
    matrices = [(name, p) for name, p in parameters.items() if p.dim() > 1]
    vectors = [(name, p) for name, p in parameters.items() if p.dim() <= 1]
    return [{"params": matrices}] * bool(matrices) + [{"params": vectors, "weight_decay": 0.0}] * bool(vectors)


def _torch_optimizer(settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    name = settings.name.removeprefix("torch:")
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}")
    make: Any = found  # each class has arguments of its own
    options = dict(settings.options)
    if settings.weight_decay or "weight_decay" in inspect.signature(found).parameters:  # Rprop has none
        options = {"weight_decay": settings.weight_decay} | options
    with blamed(f"optimizer {settings.name!r}"):
        return make(_groups(settings, parameters), lr=settings.lr, **options)
