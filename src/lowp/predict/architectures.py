"""The models that a prediction can name, and those that a user brings along.

Named ones are built on tensors without memory from the models of recipes and from the few definitions here: neither torchvision
nor transformers is needed. A user's own is `module:function`, which returns the model and an example batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp.names import did_you_mean
from lowp.predict.inception import InceptionV3
from lowp.predict.tracing import CannotTrace, traced
from lowp.predict.workload import Workload
from lowp.training.models import MODELS
from lowp.training.models.resnet import resnet101
from lowp.training.plugins import is_plugin, load_plugin

_TRACED_BATCH = 2  # batch norm wants more than one number a channel


@dataclass(frozen=True)
class Architecture:
    """`build()` makes the model; `shape` is that of a sample; `batch` is what a rank usually has."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    unit: str
    what: str
    classes: int = 1000

    @property
    def example(self) -> Tensor:
        dtype = torch.float32 if len(self.shape) > 1 else torch.int64
        return torch.zeros(_TRACED_BATCH, *self.shape, dtype=dtype, device="meta")


def _of_recipes(name: str, shape: tuple[int, ...], classes: int, batch: int, what: str, **options: Any) -> Architecture:
    unit = "image" if len(shape) > 1 else "text"
    return Architecture(partial(MODELS[name], shape, classes, **options), shape, batch, unit, what, classes)


def _gpt2(width: int, layers: int, heads: int, batch: int) -> Architecture:
    options = {"width": width, "layers": layers, "heads": heads, "tied": True}
    return _of_recipes("gpt", (1024,), 50257, batch, "GPT-2, texts of 1,024 tokens", **options)


def vgg16() -> nn.Sequential:
    """VGG-16 (arXiv 1409.1556) for 224 x 224 pixels: 13 convolutions of 3 x 3 with five pools, and three linear layers."""
    parts: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*parts, nn.Flatten(), *head, nn.Linear(4096, 1000))


_PIXELS = (3, 224, 224)
ARCHITECTURES: dict[str, Architecture] = {
    "resnet18": _of_recipes("resnet18", _PIXELS, 1000, 64, "ResNet-18, 224 x 224"),
    "resnet50": _of_recipes("resnet50", _PIXELS, 1000, 64, "ResNet-50, 224 x 224"),
    "resnet101": Architecture(partial(resnet101, _PIXELS, 1000), _PIXELS, 64, "image", "ResNet-101, 224 x 224"),
    "vgg16": Architecture(vgg16, _PIXELS, 64, "image", "VGG-16, 224 x 224"),
    "alexnet": _of_recipes("alexnet", _PIXELS, 1000, 512, "AlexNet, 224 x 224", batch_norm=False),
    "alexnet_bn": _of_recipes("alexnet", _PIXELS, 1000, 128, "AlexNet with a batch norm after pool5"),
    "inception_v3": Architecture(InceptionV3, (3, 299, 299), 64, "image", "Inception-v3 with its auxiliary head"),
    "inception_v3_no_aux": Architecture(partial(InceptionV3, False), (3, 299, 299), 64, "image", "Inception-v3 without it"),
    "gpt2": _gpt2(768, 12, 12, 8),
    "gpt2-medium": _gpt2(1024, 24, 16, 8),
    "gpt2-large": _gpt2(1280, 36, 20, 4),
    "gpt2-xl": _gpt2(1600, 48, 25, 2),
    "resnet18-cifar": _of_recipes("resnet18", (3, 32, 32), 10, 512, "ResNet-18, CIFAR-10"),
    "davidnet": _of_recipes("davidnet", (3, 32, 32), 10, 512, "DavidNet, CIFAR-10"),
    "mlp": _of_recipes("mlp", (1, 28, 28), 10, 64, "the recipes' MLP, 28 x 28"),
    "cnn": _of_recipes("cnn", (1, 28, 28), 10, 64, "the recipes' small CNN, 28 x 28"),
    "gpt": _of_recipes("gpt", (128,), 65, 64, "the recipes' small GPT, 128 characters"),
    "lstm": _of_recipes("lstm", (128,), 65, 64, "the recipes' LSTM, 128 characters"),
}


class _NothingDrawn(TorchFunctionMode):
    """Tensors without memory need no initial values. (torch would go through Python for each of them.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init" or getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return (args or tuple(kwargs.values()))[0]
        return func(*args, **(kwargs or {}))


def workload_of(model: "str | nn.Module | Workload", inputs: Any = None) -> Workload:
    """The workload of a named model, of `module:function`, of an nn.Module with an example batch, or what is one already."""
    if isinstance(model, Workload):
        return model
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ValueError("inputs: is missing; a model of your own needs an example batch: predict(model, inputs=batch)")
        return traced(type(model).__name__, model, inputs)
    if not isinstance(model, str):
        raise TypeError(f"model: a name, an nn.Module or a Workload, not {type(model).__name__}")
    if is_plugin(model):
        return _from_function(model)
    if model not in ARCHITECTURES:
        raise unknown_model(model)
    return _named(model)


def unknown_model(name: str) -> ValueError:
    hint = did_you_mean(name, ARCHITECTURES, f"there are {', '.join(ARCHITECTURES)}, and module:function")
    return ValueError(f"unknown model {name!r}; {hint}")


@lru_cache(maxsize=64)
def _named(name: str) -> Workload:
    found = ARCHITECTURES[name]
    with torch.device("meta"), _NothingDrawn():
        model = found.build()
    return traced(name, model, found.example, found.unit)


def usual_batch(model: str) -> int:
    return ARCHITECTURES[model].batch if model in ARCHITECTURES else 32


def _from_function(name: str) -> Workload:
    model, inputs, *_ = from_function(name)
    return traced(name, model, inputs)


def from_function(name: str) -> tuple[nn.Module, Any, Any, "Callable[..., Tensor] | None"]:
    """What a user's `module:function` returns: the model, an example batch, and if it has them targets and the loss."""
    made = load_plugin(name, "model")()
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4) or not isinstance(made[0], nn.Module):
        what = type(made[0]).__name__ if isinstance(made, tuple) and made else type(made).__name__
        raise CannotTrace(f"model {name!r}: it must return the model and an example batch, (nn.Module, inputs), not {what}")
    model, inputs, *more = made
    if more and not callable(more[-1]):
        what = type(more[-1]).__name__
        raise CannotTrace(f"model {name!r}: what it returns last is the loss, a function of outputs and targets, not {what}")
    return model, inputs, more[0] if len(more) == 2 else None, more[-1] if more else None
