"""Recipes that cannot be run, found before any process starts: keys that are right one by one, and wrong together.

Each check is one line to the user, with the path of the key to change. Formats are in check_precision.py. Names of layers need
the model that they are in: `check_model`.

Nothing is checked twice: where a part of lowp refuses something by itself (an optimizer, the wire's settings, a model), it is
asked here with as little as it takes, and its answer gets the key's path.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lowp.names import did_you_mean, matches_nothing
from lowp.simulation import restore, simulate
from lowp.training.check_precision import check_precision
from lowp.training.data import SET_NAMES
from lowp.training.data.order import shares
from lowp.training.data.sets import IMAGE_SETS
from lowp.training.keys import Path, written
from lowp.training.mistakes import RecipeError, about, nearest
from lowp.training.models import MODELS, build_model
from lowp.training.numerics import arithmetic_of, layer_rules, simulated_roles, stored_dtype, wire_settings
from lowp.training.optimizers import NAMES as OPTIMIZERS
from lowp.training.optimizers import optimizer_for
from lowp.training.parallel.messages import TensorCodec
from lowp.training.plugins import blamed, is_plugin, load_plugin
from lowp.training.recipe import LARGEST_RATE, PLAN, LearningRate, Recipe, Wire
from lowp.training.regular_file import check_regular, user_path
from lowp.training.toml import to_toml
from lowp.wire.naming import all_names
from lowp.wire.settings import Settings

_SIDE, _CLASSES = 32, 10  # of what a model is asked with


def check(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe asks for something impossible. No data are read."""
    to_toml(recipe, comments=False)  # what cannot be written down cannot be kept beside its results
    _check_ranks(recipe)
    _check_data(recipe)
    _check_model_settings(recipe)
    check_precision(recipe)
    _check_optimizer(recipe)
    _check_learning_rate(recipe.learning_rate, recipe.epochs)
    _check_largest_rate(recipe)
    _check_wire(recipe)
    _check_parallel(recipe)


def check_model(recipe: Recipe, model: nn.Module) -> None:
    """Raise RecipeError if a pattern of the recipe matches nothing in its model."""
    names = list(all_names(model))
    for pattern in wire_settings(recipe, 1).unmatched(names):
        path = ("wire", "layers", pattern) if pattern in recipe.wire.layers else ("wire", "skip")
        raise RecipeError(f"{written(path)}: {matches_nothing(pattern, names)}")
    if layers := layer_rules(recipe.precision):
        with about("precision"):
            simulate(model, layers=layers)
            restore(model)


def _check_ranks(recipe: Recipe) -> None:
    if recipe.ranks > 1 and recipe.virtual_ranks > 1:
        raise RecipeError(
            f"virtual_ranks: {recipe.virtual_ranks} virtual ranks are one process, and ranks = {recipe.ranks} are several; "
            "one of them must be 1"
        )
    with about("batch"):
        shares(torch.empty(recipe.batch, device="meta"), 0, recipe.batch, recipe.shares, recipe.micro_batches)
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device: there is no CUDA device here; 'auto' takes one where there is one")


def _check_data(recipe: Recipe) -> None:
    data = recipe.data
    for key, plugin in (("transform", data.transform), ("filter", data.filter)):
        if plugin:
            with about("data", key):
                load_plugin(plugin, key)
    if _is_text(data.name):
        if data.augment:
            raise RecipeError(f"data.augment: is for images, and {data.name} is text")
        if recipe.test_flip:
            raise RecipeError(f"test_flip: is for images, and {data.name} is text")
        if data.name.startswith("text:"):
            with about("data", "name"):
                check_regular(user_path(data.name.removeprefix("text:")))
    elif data.name in SET_NAMES:
        pass
    elif is_plugin(data.name):
        with about("data", "name"):
            load_plugin(data.name, "data set")
        return
    else:
        hint = nearest(data.name, SET_NAMES) or f"; there are {', '.join(SET_NAMES)}, text:FILE and module:function"
        raise RecipeError(f"data.name: unknown data set {data.name!r}{hint}")
    if data.options:
        raise RecipeError(f"data.options: {data.name} has none; they are for a module:function")


def _is_text(name: str) -> bool:
    return name == "shakespeare" or name.startswith("text:")


def _check_model_settings(recipe: Recipe) -> None:
    """Build the model, without memory for its weights, for an image and for a text: one that takes images is for images."""
    settings, data = recipe.model, recipe.data
    if settings.name.startswith("torchvision:"):  # takes images, and is not told their size
        if _is_text(data.name):
            raise RecipeError(f"model.name: {settings.name} takes images, and {data.name} is text")
        with about("model"), torch.device("meta"):
            build_model(settings.name, shape=(), classes=_CLASSES, options=settings.options)
        return
    if is_plugin(settings.name):
        with about("model", "name"):
            load_plugin(settings.name, "model")
        return
    refusals: dict[str, ValueError] = {}
    channels = next((len(image_set.mean) for image_set in IMAGE_SETS if image_set.name == data.name), 3)
    for kind, shape in (("images", (channels, _SIDE, _SIDE)), ("text", (data.context,))):
        try:
            with torch.device("meta"):
                build_model(settings.name, shape=shape, classes=_CLASSES, options=settings.options)
        except ValueError as error:
            refusals[kind] = error
    given = "text" if _is_text(data.name) else "images"
    if len(refusals) == 2:
        raise RecipeError(f"{'model' if settings.name in MODELS else 'model.name'}: {refusals[given]}")
    taken = "text" if "images" in refusals else "images"
    if taken != given and not is_plugin(data.name.removeprefix("text:")):
        raise RecipeError(f"model.name: {settings.name} takes {taken}, and {data.name} is {given}")


def _check_optimizer(recipe: Recipe) -> None:
    settings, precision = recipe.optimizer, recipe.precision
    if settings.name.startswith("torch:"):
        _check_torch_optimizer(recipe)
    elif settings.name not in OPTIMIZERS:
        hint = nearest(settings.name, OPTIMIZERS) or f"; there are {', '.join(OPTIMIZERS)} and torch:CLASS"
        raise RecipeError(f"optimizer.name: unknown optimizer {settings.name!r}{hint}")
    elif settings.options:
        raise RecipeError(f"optimizer.options: are for a torch:CLASS, and {settings.name} has keys of its own")
    if settings.nesterov and not settings.momentum:
        raise RecipeError("optimizer.nesterov: needs a momentum, and optimizer.momentum is 0")
    # With its first optimizer torch loads its compiler, which takes seconds: only where something can still be refused.
    if precision.state or settings.name.startswith("torch:"):
        _try_optimizer(recipe)


def _try_optimizer(recipe: Recipe) -> None:
    """Make the optimizer for one small parameter: first with states as the weights are, then as the recipe has them.

    One of torch's also takes a step, if the run is on a CPU: some options are refused only there.
    """
    precision = recipe.precision
    parameters = {"weight": nn.Parameter(torch.zeros(64, 64, dtype=stored_dtype(precision)))}
    as_weights = recipe.model_copy(update={"precision": precision.model_copy(update={"state": ""})})
    with about("optimizer", *(["options"] if recipe.optimizer.options else [])):
        optimizer = optimizer_for(as_weights, parameters)
        on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
        if recipe.optimizer.name.startswith("torch:") and on_cpu:
            parameters["weight"].grad = torch.zeros(64, 64)
            with blamed(f"optimizer {recipe.optimizer.name!r}"):
                optimizer.step()
    if precision.state:
        with about("precision", "state"):
            optimizer_for(recipe, parameters)


def _check_torch_optimizer(recipe: Recipe) -> None:
    name = recipe.optimizer.name.removeprefix("torch:")
    kinds = {
        key for key, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    kinds -= {"Optimizer", "LBFGS", "SparseAdam"}  # abstract, needs a closure, needs sparse gradients
    if name not in kinds:
        known = [f"torch:{kind}" for kind in sorted(kinds)]
        hint = did_you_mean(recipe.optimizer.name, known, f"there are {', '.join(known)}", likely=0.8)  # all have the prefix
        raise RecipeError(f"optimizer.name: torch.optim has no optimizer {name!r} that can be used here; {hint}")
    precision = recipe.precision
    for key, value in (("state", precision.state), ("update", precision.update if not precision.master else "")):
        if value:
            raise RecipeError(f"precision.{key}: torch's own optimizers round nothing; take one of {', '.join(OPTIMIZERS)}")
    if stored_dtype(recipe.precision) != torch.float32:
        raise RecipeError(
            f"optimizer.name: torch's own optimizers lose small updates of {recipe.precision.weights} weights; take one of "
            f"{', '.join(OPTIMIZERS)}"
        )


def _check_learning_rate(settings: LearningRate, epochs: int) -> None:
    points = settings.points
    listed = ", ".join(f"{point:g}" for point in points)
    if settings.kind in ("linear", "steps"):
        if not points:
            raise RecipeError(f"learning_rate.points: {settings.kind} needs at least one")
        if points[0] < 0 or any(b <= a for a, b in pairwise(points)):
            raise RecipeError(f"learning_rate.points: epochs begin with 0 and ascend, not {listed}")
    if settings.kind == "linear" and len(settings.factors) != len(points):
        raise RecipeError(f"learning_rate.factors: one for each point is wanted: {len(points)}, not {len(settings.factors)}")
    falls = settings.kind in ("poly", "cosine")
    if settings.kind == "linear":
        return  # its points may lie beyond the end too: a part of the schedule is a run
    if settings.warmup > epochs or (falls and settings.warmup >= epochs):
        raise RecipeError(f"learning_rate.warmup: {settings.warmup:g} epochs, and the run has {epochs}")


def _check_largest_rate(recipe: Recipe) -> None:
    """The largest learning rate of all steps, in powers of ten: the number itself may be too large for Python."""
    settings, decades = recipe.learning_rate, math.log10(recipe.optimizer.lr)
    if settings.kind == "linear" and max(settings.factors) > 0:
        decades += math.log10(max(settings.factors))
    elif settings.kind == "steps":
        decades += max(0.0, math.log10(settings.factor)) * len(settings.points)
    if decades > math.log10(LARGEST_RATE):
        raise RecipeError(f"learning_rate: the rate reaches 1e{decades:.0f}, and may be at most {LARGEST_RATE:g}")


def _check_wire(recipe: Recipe) -> None:
    """Ask about one key at a time, to know which one it is, and then about all of them together."""
    wire = recipe.wire
    if wire.format == PLAN:
        raise RecipeError("wire.format: plan is no format of its own; `lowp train`, or lowp.predict.recipe_plan, makes it one")
    if wire.reduction == "auto":
        raise RecipeError(
            "wire.reduction: 'auto' chooses by a measurement of the link, so that the same recipe could give other numbers the "
            "next time; name one, such as two_shot"
        )
    alone: dict[Path, dict[str, Any]] = {
        ("wire", "format"): {"format": wire.format},
        ("wire", "scale"): {"scale": wire.scale or None},
        ("wire", "reduction"): {"reduction": wire.reduction},
        ("wire", "rounding"): {"rounding": wire.rounding},
        ("wire", "sum_format"): {"sum_format": wire.sum_format or None},
        **{("wire", "layers", pattern): {"format": fmt} for pattern, fmt in wire.layers.items()},
        **{
            ("precision", "schedule", place, "wire"): {"format": phase.wire}
            for place, phase in enumerate(recipe.precision.schedule)
            if phase.wire is not None
        },
    }
    for path, setting in alone.items():
        arguments: dict[str, Any] = {"format": "e5m2", **setting}
        with about(*path):
            Settings.of(**arguments)
    with about("wire"):
        wire_settings(recipe, 1)


def _check_parallel(recipe: Recipe) -> None:
    parallel, ranks = recipe.parallel, max(recipe.ranks, recipe.virtual_ranks)
    with about("parallel", "format"):
        TensorCodec.of(parallel.format)
    with about("parallel", "scale"):
        TensorCodec.of(parallel.format, parallel.scale or None)
    if parallel.kind == "data":
        if parallel.format != "fp32":
            raise RecipeError("parallel.format: is for split and pipeline; in data parallel runs, wire.format is what travels")
        return
    if ranks < 2 or (parallel.kind == "pipeline" and ranks > 2):
        wanted = "exactly 2" if parallel.kind == "pipeline" else "2 or more"
        raise RecipeError(f"parallel.kind: {parallel.kind} takes {wanted} ranks, real or virtual, not {ranks}")
    for key, default in Wire():
        value = getattr(recipe.wire, key)
        if value != default and (key, value) != ("scale", "none"):  # the default of runs that were saved before
            raise RecipeError(f"wire.{key}: no gradients of weights travel in {parallel.kind}; set parallel.format instead")
    precision = recipe.precision
    simulated = simulated_roles(precision)
    for key in (*simulated, "master", "layers", "schedule", "promote", "switch"):
        if key in simulated or getattr(precision, key):
            raise RecipeError(f"precision.{key}: formats cannot be simulated in {parallel.kind}")
    if arithmetic_of(precision) is not None:
        key = "accumulate" if precision.accumulate else "arithmetic"
        raise RecipeError(f"precision.{key}: sums cannot be simulated in {parallel.kind}")
    if precision.loss_scale != "none":
        raise RecipeError(f"precision.loss_scale: ranks of {parallel.kind} have different layers, and cannot agree on a scale")
