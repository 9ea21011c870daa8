"""How a module comes to compute with rounded numbers, and back: its class is exchanged for a subclass made for it.

- A parameter's name becomes a property of the subclass that gives the rounded value. Whoever computes with `module.weight` gets
  it, the module itself or another (attention reads the weights of its `out_proj`, a tied output layer those of the embedding).
  The parameter stays where it was, so `named_parameters`, `state_dict`, optimizers and DDP see it, in full precision and
  under its own name: that is what `torch.nn.utils.parametrize`, which does the same otherwise, would change.
- `forward` rounds what it returns.
- Gradients are rounded by a hook on the parameter, which autograd calls once with the sum over all uses.

Swapping parameters for the time of `forward` was the other way. It loses uses from outside, and leaves a half-swapped module
behind when something raises.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.nn.modules.padding import _ConstantPadNd, _ReflectionPadNd, _ReplicationPadNd
from torch.nn.modules.pooling import _MaxPoolNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from lowp.simulation.layers import Layer

# Leaves that give numbers on as they are, and those whose result is no activation.
_MOVE = (nn.Identity, nn.Sequential, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unfold)
_PICK = (_MaxPoolNd, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_PAD = (_ConstantPadNd, _ReflectionPadNd, _ReplicationPadNd, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
_SILENT = (*_MOVE, *_PICK, *_PAD, _Loss)
_WHOLE = (nn.MultiheadAttention,)  # computes as one: its children only hold weights

LAYER, HOOKS = "_lowp_layer", "_lowp_hooks"  # in a simulated module's __dict__


def computes(module: nn.Module) -> bool:
    """Does the module return numbers that it made itself (and not its children)?"""
    if isinstance(module, _WHOLE):
        return True
    has_forward = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
    return has_forward and not any(True for _ in module.children()) and not isinstance(module, _SILENT)


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module once: name, module, and whether its output is an activation. One that cannot be simulated raises."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        _check_can_be_simulated(name, module)
        yield name, module, computes(module) and id(module) not in inside
        if isinstance(module, _WHOLE):
            inside.update(id(child) for child in module.modules())


def _check_can_be_simulated(name: str, module: nn.Module) -> None:
    """A clear error for modules whose numbers would escape."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{name!r} cannot be simulated: TorchScript has fixed what it computes")
    if "forward" in vars(module):
        raise ValueError(f"{name!r} has a forward of its own, not its class's: it would hide the simulated one")
    if parametrize.is_parametrized(module):
        raise ValueError(f"{name!r} is parametrized; torch.nn.utils.parametrize.remove_parametrizations makes it plain")
    if any(isinstance(parameter, UninitializedParameter) for parameter in module._parameters.values()):
        raise ValueError(f"{name!r} has no weights yet ({type(module).__name__}): run the model once before it is simulated")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise ValueError(f"{name!r} has max_norm: its forward pass rewrites its weights, which a simulated one cannot")


def is_simulated(module: nn.Module) -> bool:
    return hasattr(type(module), "_lowp_original")


def convert(module: nn.Module, layer: Layer | None, rounds_output: bool) -> None:
    """Exchange the module's class; `layer` has the formats (None: a container whose short cuts are all that changes)."""
    original = type(module)
    names = tuple(module._parameters) if layer is not None else ()
    if layer is None and not _overrides(original):
        return
    module.__class__ = _simulated(original, names, rounds_output)
    if layer is not None:
        vars(module)[LAYER] = layer
        _hook_gradients(module)


def revert(module: nn.Module) -> None:
    """The inverse of `convert`."""
    for hook in vars(module).pop(HOOKS, ()):
        hook.remove()
    vars(module).pop(LAYER, None)
    module.__class__ = type(module)._lowp_original  # type: ignore[missing-attribute]
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()  # parameters may have been replaced meanwhile


def _hook_gradients(module: nn.Module) -> None:
    layer: Layer = vars(module)[LAYER]
    hooks = vars(module)[HOOKS] = []
    for place, (name, parameter) in enumerate(module._parameters.items()):
        if parameter is not None and name in layer.owned:
            needed = parameter.requires_grad
            # A hook stays on a tensor that is frozen; it can only not be put there.
            hooks.append(parameter.requires_grad_(True).register_hook(partial(layer.gradient, place=place)))
            parameter.requires_grad_(needed)


@cache
def _simulated(original: type[nn.Module], names: tuple[str, ...], rounds_output: bool) -> type[nn.Module]:
    """The subclass for a class, the names of its parameters, and whether its output is an activation."""

    class Simulated(original):  # type: ignore[valid-type,misc]
        _lowp_original = original

        def __reduce_ex__(self, protocol: Any) -> Any:
            """For pickle and copy: the subclass has no name to be found by, and hooks belong to this very parameter."""
            _, _, *parts = super().__reduce_ex__(protocol)
            state: Any = parts[0]
            return _rebuild, (original, names, rounds_output), {k: v for k, v in state.items() if k != HOOKS}, *parts[1:]

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            if LAYER in vars(self):
                _hook_gradients(self)

    if rounds_output:
        Simulated.forward = _rounded_forward(original)  # type: ignore[method-assign]
    for place, name in enumerate(names):
        setattr(Simulated, name, _rounded_parameter(name, place))
    for name, value in _overrides(original).items():
        setattr(Simulated, name, value)
    Simulated.__name__ = Simulated.__qualname__ = f"Simulated{original.__name__}"
    return Simulated


def _rebuild(original: type[nn.Module], names: tuple[str, ...], rounds_output: bool) -> nn.Module:
    kind = _simulated(original, names, rounds_output)
    return kind.__new__(kind)


def _rounded_forward(original: type[nn.Module]) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._lowp_layer.output(original.forward(self, *args, **kwargs))  # type: ignore[operator,union-attr]

    return forward


def _rounded_parameter(name: str, place: int) -> Any:
    def get(self: nn.Module) -> Any:
        parameter = self._parameters[name]
        return None if parameter is None else self._lowp_layer.weight(parameter, place)  # type: ignore[operator,union-attr]

    return property(get)


def _overrides(original: type[nn.Module]) -> dict[str, Any]:
    """What else must change in some of torch's own modules, which look past their attributes."""
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
