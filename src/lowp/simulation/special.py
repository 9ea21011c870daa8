"""Modules of torch's that look past their attributes, or know more about themselves than their outputs show."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowp import compat

_IMAGES = (compat.ConvNd, compat.AvgPoolNd, compat.AdaptiveAvgPoolNd, compat.LPPoolNd, compat.InstanceNormNd)


def overrides(original: type[nn.Module]) -> dict[str, Any]:
    """What else must change in a module of this class when it is simulated."""
    if issubclass(original, nn.RNNBase):
        # They keep their weights in a list, and renew it where a weight is another object than before: here it always is.
        flat = property(_rounded_flat_weights, _keep_flat_weights)
        return {"_flat_weights": flat, "_update_flat_weights": lambda self: None}
    if issubclass(original, nn.TransformerEncoderLayer):
        # In evaluation one fused operation would replace the layer, activations and all.
        return {"activation_relu_or_gelu": property(lambda self: 0)}
    if issubclass(original, nn.TransformerEncoder):
        return {"use_nested_tensor": property(lambda self: False)}  # the same, for batches with padding
    return {}


def _rounded_flat_weights(self: nn.RNNBase) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _keep_flat_weights(self: nn.RNNBase, weights: list[Any]) -> None:
    """What is kept are the parameters, whatever rounded ones somebody read and writes back."""
    vars(self)["_flat_weights"] = [self._parameters.get(name) for name in self._flat_weights_names]


def forward_of(original: type[nn.Module]) -> Callable[..., Any]:
    """The forward pass of a class. Recurrent ones warn on CUDA of weights that do not lie together: rounded ones never do."""
    if not issubclass(original, nn.RNNBase):
        return original.forward

    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not next(self.parameters()).is_cuda:
            return original.forward(self, *args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            return original.forward(self, *args, **kwargs)

    return forward


def channel_axis(module: nn.Module) -> int | None:
    """The dimension of channels in the output of a module that has them first; None if its class does not say."""
    if isinstance(module, _IMAGES):
        # Counted from the end, where the dimensions of images are: the batch may be left out.
        torch_own = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn"))
        return -1 - int(torch_own.__name__[-2])  # of "Conv2d", say
    return 1 if isinstance(module, (compat.BatchNormNd, nn.GroupNorm)) else None
