"""An exponent for every layer, on top of the loss scale.

The gradient of a layer's output is multiplied by 2^k as it enters and that of its input by 2^-k as it leaves, so the layer's
weight gradients are 2^k larger and the errors between layers are as before. One global scale has to suit the largest gradient
of the whole model; this one suits each. The way out can underflow where the way in did not; without the exponent the same value
would have underflowed too, so for k >= 0 no more is lost than one rounding among the subnormals. (k < 0, which gives up small
errors, happens only when a layer overflowed by itself at k = 0.)
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.compat import tree_map_only
from lowp.tensor.carrier import F64, exponent_below

NO_GRADIENT = -1  # in the place of a gradient's largest magnitude, whose bits are never negative


class TimesPowerOfTwo(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `factor`. `boundary` is n on leaving layer n forward, -n on entering it.

    Torch multiplies by a Python number in float32 registers whatever the tensor's dtype, so that 2^16 and 2^-30 are no problem
    in FP16. The result is an alias, not a view: the next layer may change it in place (ReLU(inplace=True)), which views that
    come from a Function do not allow.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float, boundary: int) -> Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.factor, ctx.boundary = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return (gradient if ctx.factor == 1 else gradient * ctx.factor), None, None


@dataclass(eq=False)
class ScaledLayer:
    """A leaf module, or several that share a parameter, with one exponent.

    The exponent follows the largest gradient: below 2^8 it rises, above 2^12 it falls (not below 0), four powers a step at
    most. FP16's top is then 2^3 away, and values 2^-32 times the largest are kept. A gradient of zeros has underflowed, or the
    layer is idle, which cannot be told apart: the exponent rises slowly, and not so far that waking up would cost many steps.
    A layer can overflow although its weight gradients are small, if its input is; the ceiling remembers that, and rises when
    the scale would.
    """

    LOW, HIGH, STEP, BLIND, FLOOR, CEILING = 8, 12, 4, 16, -16, 32

    name: str
    modules: list[nn.Module]
    # 2^k and 2^-k, kept as floats: Dynamo makes floats that change symbolic, but would compile anew for every int k in 2.0**k.
    factor: float = 1.0
    inverse: float = 1.0
    ceiling: int = CEILING
    called: bool = False  # since the last step, with gradients

    @property
    def exponent(self) -> int:
        return exponent_below(self.factor)

    @exponent.setter
    def exponent(self, exponent: int) -> None:
        self.factor, self.inverse = 2.0**exponent, 2.0**-exponent

    def parameters(self) -> Iterable[nn.Parameter]:
        """Looked up each time: sharding and casting a model replace its parameters."""
        return (parameter for module in self.modules for parameter in module.parameters(recurse=False))

    def follow(self, exponent_of_max: int | None) -> None:
        """Adapt to the largest gradient of a step; None is a gradient of zeros."""
        if exponent_of_max is None:
            if self.exponent < self.BLIND:
                self.exponent = min(self.ceiling, self.exponent + 1)
        elif exponent_of_max < self.LOW:
            self.exponent = min(self.ceiling, self.exponent + min(self.STEP, self.LOW - exponent_of_max))
        elif exponent_of_max > self.HIGH and self.exponent > 0:
            self.exponent = max(0, self.exponent - min(self.STEP, exponent_of_max - self.HIGH))

    def lower(self) -> None:
        """Down by a step, and no higher for now. Below 0 only from 0, since that costs small errors on their way through."""
        self.exponent = self.ceiling = max(0 if self.exponent > 0 else self.FLOOR, self.exponent - self.STEP)


class LayerExponents:
    """The layers of a model, in its order, and the hooks that apply their exponents.

    A parameter's gradient carries its layer's exponent only if it is used by the layer's forward alone. Layers that are never
    called (the output projection of nn.MultiheadAttention) count as 0; those that are called *and* reached into are refused
    by `check_uses`, which walks the first step's graph. Without a model there are no layers, and nothing here does anything.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.all = [] if model is None else _find_layers(model)
        self._unchecked = True
        self._hooks: list[Any] = []
        for number, layer in enumerate(self.all, 1):
            for module in layer.modules:
                before, after = _hooks(layer, number)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after))

    def applied(self, called: Sequence[int]) -> dict[Tensor, int]:
        """The exponent that each parameter's gradient carries: none if its layer was not called."""
        exponents = [layer.exponent if was_called else 0 for layer, was_called in zip(self.all, called, strict=True)]
        return {own: exponent for layer, exponent in zip(self.all, exponents, strict=True) for own in layer.parameters()}

    def adapt(self, largest: dict[Tensor, int], called: Sequence[int]) -> None:
        for layer, was_called in zip(self.all, called, strict=True):
            bits = max((largest.get(parameter, NO_GRADIENT) for parameter in layer.parameters()), default=NO_GRADIENT)
            if was_called and bits != NO_GRADIENT:
                layer.follow((bits >> F64.fraction_bits) - F64.bias if bits else None)

    def raise_ceilings(self, powers: int) -> None:
        """Or lower them, and the exponents with them (but not below 0: what a layer can bear is more than nothing)."""
        for layer in self.all:
            layer.ceiling = max(layer.FLOOR, min(layer.CEILING, layer.ceiling + powers))
            if layer.exponent > 0:
                layer.exponent = max(0, layer.exponent + min(powers, 0))
            layer.ceiling = max(layer.ceiling, layer.exponent)

    def to_blame(self, bad: Sequence[Tensor], largest: dict[Tensor, int]) -> list[ScaledLayer]:
        """The layers whose exponents are too high, or none if the errors between the layers overflowed.

        Suspect is the layer of the non-finite parameter nearest to the loss. It is to blame if its exponent is above 0, or if a
        parameter nearer to the input is finite: the errors that passed were finite too, so the layer's own sum was not.
        Non-finite layers at their ceiling go down with it: they may be next, and every one would cost a step.
        """
        nearest = bad[-1]
        suspect = next((layer for layer in self.all if any(nearest is own for own in layer.parameters())), None)
        if suspect is None or suspect.exponent <= suspect.FLOOR:
            return []
        own = set(suspect.parameters())
        before = itertools.takewhile(lambda item: item[0] is not nearest, largest.items())
        passed = any(NO_GRADIENT < bits < F64.infinity for parameter, bits in before if parameter not in own)
        if suspect.exponent <= 0 and not passed:
            return []
        high = [layer for layer in self.all if layer.exponent == layer.ceiling > 0 and set(layer.parameters()) & set(bad)]
        return [suspect, *(layer for layer in high if layer is not suspect)]

    def forget_calls(self) -> None:
        for layer in self.all:
            layer.called = False

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.all = []

    def check_uses(self, loss: Tensor) -> None:
        """Refuse, once, a parameter that is used outside of its layer's forward: its gradient would have no one scale.

        Walks from the loss. `inside` is the layer whose output was passed and whose input was not.
        """
        if not self._unchecked or not self.all:
            return
        self._unchecked = False
        called = [(number, layer) for number, layer in enumerate(self.all, 1) if layer.called]
        owner = {parameter: number for number, layer in called for parameter in layer.parameters()}
        stack: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
        seen: set[tuple[Any, int]] = set()
        while stack:
            node, inside = stack.pop()
            if node is None or (node, inside) in seen or "CompiledFunction" in node.name():  # what is compiled has no nodes
                continue
            seen.add((node, inside))
            parameter = getattr(node, "variable", None)
            if parameter is not None and owner.get(parameter, inside) != inside:
                name, shape = self.all[owner[parameter] - 1].name, tuple(parameter.shape)
                raise ValueError(
                    f"the parameter of {name!r} of shape {shape} is used outside of that layer's forward, so its gradient has "
                    'no one scale: call the layer, or use LossScale("dynamic")'
                )
            if node.name() == "TimesPowerOfTwoBackward":
                inside = max(node.boundary, 0)
            stack.extend((following, inside) for following, _ in node.next_functions)


def _hooks(layer: ScaledLayer, number: int) -> tuple[Callable, Callable]:
    """What is done to a layer's inputs and outputs, in whatever tuples and dicts they come."""

    def times(values: Any, factor: float, boundary: int) -> Any:
        def wrap(x: Tensor) -> Any:
            return TimesPowerOfTwo.apply(x, factor, boundary) if x.requires_grad else x

        return tree_map_only(Tensor, wrap, values)

    def before(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        return times((inputs, named), layer.inverse, -number) if torch.is_grad_enabled() else None

    def after(module: nn.Module, inputs: tuple, outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        layer.called = True
        return times(outputs, layer.factor, number)

    return before, after


def _find_layers(model: nn.Module) -> list[ScaledLayer]:
    """Modules with parameters to train and without submodules that have any; those that share a parameter are one layer."""
    layers: list[ScaledLayer] = []
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False))
        has_submodules = any(True for child in module.children() for _ in child.parameters())
        if has_submodules or not any(parameter.requires_grad for parameter in own):
            continue
        tied = [layer for layer in layers if own & set(layer.parameters())]
        joined = ScaledLayer(tied[0].name if tied else name or "model", [*(m for layer in tied for m in layer.modules), module])
        layers = [layer for layer in layers if layer not in tied] + [joined]
    return layers


def check_saved_layers(saved: Any, own: dict[str, list[int]]) -> dict[str, list[int]]:
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        different = sorted(map(str, set(saved) ^ set(own))) if isinstance(saved, dict) else [type(saved).__name__]
        raise ValueError(f"the saved exponents are not for this model's layers; they differ in {', '.join(different[:5])}")
    for name, pair in saved.items():
        whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not whole or not ScaledLayer.FLOOR <= pair[0] <= pair[1] <= ScaledLayer.CEILING:
            raise ValueError(
                f"layer {name!r}: an exponent and its ceiling between {ScaledLayer.FLOOR} and {ScaledLayer.CEILING}, not {pair}"
            )
    return saved
