"""How a module comes to compute with rounded numbers, and back: its class is exchanged for a subclass made for it.

- A parameter's name becomes a property of the subclass that gives the rounded value. Whoever computes with `module.weight` gets
  it, the module itself or another (attention reads the weights of its `out_proj`, a tied output layer those of the embedding).
  The parameter stays where it was, so `named_parameters`, `state_dict`, optimizers and DDP see it, in full precision and
  under its own name: that is what `torch.nn.utils.parametrize`, which does the same otherwise, would change.
- `forward` rounds what it returns.
- A parameter's gradient is rounded on its way back from the rounded value: where the layer has computed it, and in compiled
  code where it can be fused. Of a parameter that several layers share the sum counts, which only a hook on the parameter sees.
  One that is replaced hands its hook on to the one that takes its place.
- What would go around all this (a new `forward`, a parametrization, a parameter of a new name) is refused.

Swapping parameters for the time of `forward` was the other way. It loses uses from outside, and leaves a half-swapped module
behind when something raises.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp import compat
from lowp.simulation.layers import SimulatedLayer
from lowp.simulation.refusals import check_module, check_parameter
from lowp.simulation.special import forward_of, overrides
from lowp.simulation.weights import guarded

# Leaves that give numbers on as they are, and those whose result is no activation.
_MOVE = (nn.Identity, nn.Sequential, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unfold)
_PICK = (compat.MaxPoolNd, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_CIRCULAR = (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
_PAD = (compat.ConstantPadNd, compat.ReflectionPadNd, compat.ReplicationPadNd, *_CIRCULAR)
_SILENT = (*_MOVE, *_PICK, *_PAD, compat.Loss)
_WHOLE = (nn.MultiheadAttention,)  # computes as one: its children only hold weights

LAYER = "_lowp_layer"  # in a simulated module's __dict__


def computes(module: nn.Module) -> bool:
    """Does the module return numbers that it made itself (and not its children)?"""
    if isinstance(module, _WHOLE):
        return True
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not any(True for _ in module.children()) and not isinstance(module, _SILENT)


def sums_products(module: nn.Module) -> bool:
    """May the module multiply matrices? Torch's own do if they have one (and do not look things up in it); others may."""
    if not type(module).__module__.startswith("torch.nn."):
        return True
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not is_table and any(p is not None and p.dim() > 1 for p in module._parameters.values())


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module once: name, module, and whether its output is an activation. One that cannot be simulated raises."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        check_module(name, module)
        yield name, module, computes(module) and id(module) not in inside
        if isinstance(module, _WHOLE):
            inside.update(id(child) for child in module.modules())


def is_simulated(module: nn.Module) -> bool:
    return hasattr(type(module), "_lowp_original")


def convert(module: nn.Module, layer: SimulatedLayer | None, rounds_output: bool) -> None:
    """Exchange the module's class; `layer` has the formats (None: a container whose short cuts are all that changes)."""
    original = type(module)
    names = tuple(module._parameters) if layer is not None else ()
    if layer is None and not overrides(original):
        return
    module.__class__ = _simulated(original, names, rounds_output)
    if layer is not None:
        vars(module)[LAYER] = layer
        _hook_gradients(module)


def check_can_revert(module: nn.Module) -> None:
    if "_lowp_original" not in vars(type(module)):
        raise ValueError(
            f"{vars(module)[LAYER].name if LAYER in vars(module) else type(module).__name__!r} has become a "
            f"{type(module).__name__} since it was simulated (sharded or parametrized?); that must be undone first"
        )


def revert(module: nn.Module) -> None:
    """The inverse of `convert`, but for the hooks, which the simulation has."""
    vars(module).pop(LAYER, None)
    module.__class__ = type(module)._lowp_original  # type: ignore[missing-attribute]
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()  # parameters may have been replaced meanwhile


def _hook_gradients(module: nn.Module) -> None:
    for place, (name, parameter) in enumerate(module._parameters.items()):
        if parameter is not None:
            _hook_gradient(vars(module)[LAYER], name, place, parameter)


def _hook_gradient(layer: SimulatedLayer, name: str, place: int, parameter: Tensor) -> None:
    """Round the gradient of a parameter that layers share, or of what stands in its place, unless one does already."""
    if name not in layer.owned & layer.shared or parameter in layer.simulation.hooks:
        return
    needed = parameter.requires_grad
    # A hook stays on a tensor that is frozen; it can only not be put there.
    handle = parameter.requires_grad_(True).register_hook(partial(layer.gradient, place=place))
    parameter.requires_grad_(needed)
    layer.simulation.hooks[parameter] = layer, handle


@cache
def _simulated(original: type[nn.Module], names: tuple[str, ...], rounds_output: bool) -> type[nn.Module]:
    """The subclass for a class, the names of its parameters, and whether its output is an activation."""

    class Simulated(original):  # type: ignore[valid-type,misc]
        _lowp_original = original

        def __reduce_ex__(self, protocol: Any) -> Any:
            """For pickle and copy: the subclass has no name to be found by."""
            _, _, *parts = super().__reduce_ex__(protocol)
            return _rebuild, (original, names, rounds_output), *parts

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            if LAYER in vars(self):
                _hook_gradients(self)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise AttributeError(f"{_name(self)} is simulated: a forward of its own would hide the one that rounds")
            if name in names and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                raise TypeError(
                    f"{_name(self)} is simulated: {name} must be an nn.Parameter, not a tensor. (What `module.{name}` gives is "
                    "a rounded copy: to tie weights, take the parameter from named_parameters())"
                )
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if name in names:
                raise AttributeError(
                    f"{_name(self)} is simulated: {name} can be neither removed nor parametrized; lowp.restore(model) first"
                )
            super().__delattr__(name)

        def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
            if LAYER in vars(self):
                _check_new_parameter(self, name, param, names)
            super().register_parameter(name, param)
            if LAYER in vars(self) and param is not None:
                _hook_gradient(vars(self)[LAYER], name, names.index(name), param)

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            if (layer := vars(self).get(LAYER)) is not None:  # to another device, perhaps, and with other parameters
                layer.move_to(fn(torch.empty(0, device=layer.overflows["weights"].device)).device)
                _hook_gradients(self)
            return self

    if rounds_output:
        Simulated.forward = _rounded_forward(original)  # type: ignore[method-assign]
    for place, name in enumerate(names):
        setattr(Simulated, name, _rounded_parameter(name, place))
    for name, value in overrides(original).items():
        setattr(Simulated, name, value)
    Simulated.__name__ = Simulated.__qualname__ = f"Simulated{original.__name__}"
    Simulated.__module__ = original.__module__  # torch.fx asks whether it is torch's
    return Simulated


def _rebuild(original: type[nn.Module], names: tuple[str, ...], rounds_output: bool) -> nn.Module:
    kind = _simulated(original, names, rounds_output)
    return kind.__new__(kind)


def _name(module: nn.Module) -> str:
    layer = vars(module).get(LAYER)
    return type(module).__name__ if layer is None else f"layer {layer.name!r}"


def _check_new_parameter(module: nn.Module, name: str, parameter: Tensor | None, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"{_name(module)} is simulated and takes no further parameters ({name!r}); lowp.restore(model) first")
    if parameter is not None:
        layer: SimulatedLayer = vars(module)[LAYER]
        check_parameter(f"{layer.name}.{name}", parameter)
        if name not in layer.owned and parameter not in layer.simulation.hooks:
            raise ValueError(
                f"{_name(module)} shared {name!r} with another layer when it was simulated; to give it one of its own, "
                "lowp.restore(model) first"
            )


def _rounded_forward(original: type[nn.Module]) -> Any:
    compute, only_reads = forward_of(original), original.__module__.startswith("torch.")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer: SimulatedLayer = self._lowp_layer  # type: ignore[assignment]
        if torch.compiler.is_compiling() or not only_reads:
            return layer.output(layer.compute(compute, self, *args, **kwargs))
        layer.simulation.computing += 1
        try:
            result = layer.compute(compute, self, *args, **kwargs)
        finally:
            layer.simulation.computing -= 1
        return layer.output(result)

    return forward


def _rounded_parameter(name: str, place: int) -> Any:
    def get(self: nn.Module) -> Any:
        parameter = self._parameters[name]
        if parameter is None:
            return None
        layer: SimulatedLayer = self._lowp_layer  # type: ignore[assignment]
        is_shared = name in layer.shared
        if torch.compiler.is_compiling():
            return layer.weight(parameter, place, rounds_gradient=not is_shared)
        if is_shared and compat.is_functorch_wrapped_tensor(parameter):
            is_shared = False  # torch.func knows no hooks: of each use
        elif is_shared and parameter.requires_grad:
            _hook_gradient(layer, name, place, parameter)  # somebody may have put another one there
        rounded = layer.weight(parameter, place, rounds_gradient=not is_shared)
        return rounded if rounded is parameter or layer.simulation.computing else guarded(rounded)

    return property(get)
