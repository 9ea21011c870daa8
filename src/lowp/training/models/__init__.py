"""The models that a recipe can name, and those that it can bring along.

A model is a function of the shape of one sample, the number of classes and its own options. Its weights are drawn from torch's
global generator: whoever builds it seeds that first. Nothing in a forward pass makes a tensor of a dtype that the parameters do
not have, so `.half()` or `.bfloat16()` is all that pure 16-bit training takes.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowp.names import did_you_mean
from lowp.training.models.alexnet import alexnet
from lowp.training.models.cnn import cnn
from lowp.training.models.davidnet import davidnet
from lowp.training.models.gpt import gpt
from lowp.training.models.lstm import lstm
from lowp.training.models.mlp import mlp
from lowp.training.models.options import check_options
from lowp.training.models.resnet import resnet18, resnet50
from lowp.training.plugins import blamed, is_plugin, load_plugin

MODELS: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function for function in (mlp, cnn, alexnet, davidnet, resnet18, resnet50, lstm, gpt)
}

_TORCHVISION = "torchvision:"


def build_model(name: str, *, shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Module:
    """The model that a recipe names.

    Args:
        name: one of `MODELS`, "torchvision:<model>", or "module:function" for a function of one's own. That one is called with
            `options`, and with `shape` and `classes` if it has parameters of these names.
        shape: of one sample, without the batch: (channels, height, width), or (length,) of a text.
        classes: the number of classes, or of characters in the vocabulary.
    """
    if name.startswith(_TORCHVISION):
        return _from_torchvision(name, classes, options)
    given = {"shape": tuple(shape), "classes": classes}
    if not is_plugin(name):
        function = _known(name, MODELS, "model")
        check_options(name, function, options)
        with blamed(f"model {name!r}", passing=(ValueError,)):  # weights that do not fit into memory, say
            return _call(name, function, given, options)
    function = load_plugin(name, "model")
    taken = {parameter for parameter in inspect.signature(function).parameters if parameter in given}
    model = _call(name, function, {key: given[key] for key in taken}, options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def model_options(name: str) -> dict[str, Any]:
    """The options of one of `MODELS`, with their defaults."""
    parameters = inspect.signature(_known(name, MODELS, "model")).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _call(name: str, function: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]) -> Any:
    """`function(**given, **options)`; an option that it does not have is the user's mistake, and is answered in one line."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    own = [key for key in parameters if key not in ("shape", "classes")]
    for option in options:
        if option in given or (option not in own and not takes_all):
            raise ValueError(f"model {name!r} has no option {option!r}; it has {', '.join(own) or 'none'}")
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in given and parameter.name not in options:
            raise ValueError(f"model {name!r} needs the option {parameter.name!r}")
    return function(**given, **options)


def _from_torchvision(name: str, classes: int, options: dict[str, Any]) -> nn.Module:
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name in ("torchvision", "torchvision.models"):
            raise ValueError(f"model {name!r} needs torchvision: pip install torchvision") from None
        raise ValueError(f"model {name!r}: torchvision needs {error.name}, which is not installed") from error
    except Exception as error:  # one that was built for another torch fails in many ways
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"model {name!r}: torchvision cannot be imported ({why}); install the version that goes with torch "
            f"{torch.__version__}"
        ) from error
    known = {entry: models.get_model_builder(entry) for entry in models.list_models(module=models)}
    builder = _known(name.removeprefix(_TORCHVISION), known, "torchvision model")
    with blamed(f"model {name!r}"):  # options are passed on through several functions: only the call itself knows them all
        return builder(num_classes=classes, **options)


def _known(name: str, known: dict[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    if name in known:
        return known[name]
    raise ValueError(f"unknown {what} {name!r}; {did_you_mean(name, known, f'there are {_some(known)}, and module:function')}")


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:10])
