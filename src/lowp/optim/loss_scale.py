"""Loss scaling: gradients that FP16 would lose are moved up by a power of two, and moved back where there is room.

FP16 ends at 65504 and at 2^-24; gradients live near the lower end. Multiplying the loss by 2^16 multiplies all gradients by it.
One step:

1. `scale(loss)` leaves the loss alone and multiplies its *gradient* on the way back. (Scaling the loss itself would overflow:
   65536 is not an FP16 number.) Powers of two only, so nothing rounds unless it leaves the range.
2. `step(optimizer)` finds the largest magnitude of every gradient (one number each, one wait for the device) and, with several
   ranks, agrees on it: one MAX of integers, in which NaN counts as larger than infinity. gloo's MAX of floats loses NaN.
3. Something is not finite, or nobody has a gradient any more (`compress_gradients(..., nonfinite="skip")` took it): the step
   is left out on all ranks and the scale goes down. Otherwise the optimizer steps, and after `interval` such steps the scale
   goes up.

Dividing by the scale must not happen in FP16, where it would lose what was saved. lowp's optimizers divide in float32
registers. Any other optimizer gets gradients that were divided in place: exact in float32, lossy in FP16.

`per_layer` adds an exponent k to every layer: the gradient of its output is multiplied by 2^k as it enters and that of its
input by 2^-k as it leaves, so the layer's weight gradients are 2^k larger and the errors between layers are as before. One
global scale has to suit the largest gradient of the whole model; this one suits each. The way out can underflow where the way
in did not; without the exponent the same value would have underflowed too, so for k >= 0 no more is lost than one rounding
among the subnormals. (k < 0, which gives up small errors, happens only when a layer overflowed by itself at k = 0.)
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowp.tensor.carrier import F64

FP16_LIMIT = 2.0**15  # the largest power of two in FP16: a scale above it makes the gradient of an FP16 loss infinite
NO_GRADIENT = -1  # in the place of a gradient's largest magnitude, whose bits are never negative


class LossScaleExhausted(FloatingPointError):
    """Gradients are not finite although the scale is as small as it may be: scaling is not what is wrong."""


class LossScale:
    """Scale losses, unscale gradients, leave out the steps that overflow.

        scale = lowp.LossScale("dynamic")
        scale.scale(loss).backward()  # once or several times
        applied = scale.step(optimizer)  # False if the step was left out
        optimizer.zero_grad()

    Args:
        kind: "dynamic"; "per_layer", which also gives every layer of `model` an exponent of its own; or a number, a power of
            two: static, and never changed.
        model: for "per_layer", and for the names in errors. Make the scale after the model has its final parameters.
        init, minimum, maximum: powers of two, for the global scale. With an FP16 loss it stays at 2^15 or below.
        growth, backoff, interval: times `growth` after `interval` steps in a row without overflow, times `backoff` after one
            with. Overflow at the minimum raises LossScaleExhausted.
        patience: a static scale raises LossScaleExhausted after this many left-out steps in a row.
        group: the ranks that must agree; None is all of them, False is nobody. They must hold the same parameters in the same
            order (or shards of them).

    Several optimizers step together or not at all: `scale.step(first, second)`. Gradients stay scaled until `step`: clip to
    `max_norm * scale.value` (not with "per_layer", where they have no common scale). Inside `torch.compile` the scale is a
    number that the graph takes as an argument: its second value compiles once more, further ones do not. With "per_layer",
    parameters must be used through their layer's forward. Where the wire raises, say so yourself:

        try:
            scale.scale(loss).backward()
        except lowp.NonFiniteGradient:  # on all ranks at once
            scale.overflowed()
    """

    def __init__(
        self,
        kind: str | float = "dynamic",
        *,
        model: nn.Module | None = None,
        init: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
        patience: int = 10,
        group: Any = None,
    ) -> None:
        if isinstance(kind, str) and kind not in ("dynamic", "per_layer"):
            raise ValueError(f"unknown kind {kind!r}; it is 'dynamic', 'per_layer' or a power of two")
        if kind == "per_layer" and not isinstance(model, nn.Module):
            raise ValueError('LossScale("per_layer") needs model=: the nn.Module whose layers get exponents')
        if not isinstance(kind, str):
            init = minimum = maximum = _power_of_two("a static scale", kind)
        self.kind = kind if isinstance(kind, str) else "static"
        self.value = _power_of_two("init", init)
        self._minimum, self._maximum = _power_of_two("minimum", minimum), _power_of_two("maximum", maximum)
        self._growth, self._backoff = _power_of_two("growth", growth), _power_of_two("backoff", backoff)
        self._interval, self._patience = _count("interval", interval), _count("patience", patience)
        if not self._minimum <= self.value <= self._maximum:
            raise ValueError(f"init={init} must lie between minimum={minimum} and maximum={maximum}")
        if self._growth < 1 or self._backoff >= 1:
            raise ValueError(f"growth={growth} must be at least 1 and backoff={backoff} below 1")
        if kind == "per_layer" and interval < 2:
            raise ValueError("per_layer needs an interval of at least 2: exponents rise in the steps between")
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._clean_steps = 0
        self._model, self._group = model, group
        self._fp16_loss = False
        self._loss_scaled = False  # since the last step
        self._layers = LayerExponents(model) if kind == "per_layer" and model is not None else None

    @property
    def exponents(self) -> dict[str, int]:
        """The exponents of the layers, by name: their gradients carry `value * 2^k`. Tied layers share the first one's."""
        return {layer.name: layer.exponent for layer in self._layers.all} if self._layers else {}

    def scale(self, loss: Tensor) -> Tensor:
        """The same loss, of any shape, whose gradient is multiplied by the scale. Call it for every loss of a step."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise TypeError(f"scale takes a floating-point tensor, not {getattr(loss, 'dtype', type(loss).__name__)}")
        if not loss.requires_grad or not torch.is_grad_enabled():
            return loss
        if loss.dtype == torch.float16 and not self._fp16_loss:
            self._limit_to_fp16()
        self._loss_scaled = True
        if self._layers is not None and not torch.compiler.is_compiling():
            self._layers.check_uses(loss)
        return _TimesPowerOfTwo.apply(loss, self.value, 0)  # type: ignore[return-value]

    def step(self, *optimizers: Any) -> bool:
        """Step the optimizers with unscaled gradients, unless one gradient of one of them is not finite on some rank.

        Returns whether they stepped; if not, their parameters and state are as they were, and gradients still scaled.
        """
        if not self._loss_scaled:
            raise RuntimeError(
                "step() without a scaled loss: call scale.scale(loss).backward() first; one step() for all optimizers"
            )
        names = _names(optimizers, self._model)
        parameters = list(names)
        largest, called = self._agree(parameters)
        bad = [parameter for parameter in parameters if largest[parameter] >= F64.infinity]
        if bad:
            # Non-finite values spread from where they arise towards the input: the last parameter is the nearest to it.
            culprit = f"the gradient of {names[bad[-1]]}, the nearest to the loss of {len(bad)}, is infinite or NaN"
            self._leave_out(culprit, self._to_blame(bad, largest))
            return False
        if all(bits == NO_GRADIENT for bits in largest.values()):
            self._leave_out(
                "a loss was scaled, but no parameter has a gradient: the wire left the step out, or backward failed"
            )
            return False
        exponents = self._layers.applied(called) if self._layers else None
        for optimizer in optimizers:
            _step(optimizer, self.value, exponents)
        self._clean(largest, called)
        return True

    def overflowed(self) -> None:
        """Count a step as overflowed without looking: for callers who found out in another way. All ranks must say so."""
        self._leave_out("an overflow was reported by overflowed()")

    def remove(self) -> None:
        """Take the hooks of "per_layer" off the model, between steps. What is left is "dynamic"."""
        if self._layers is not None:
            self._layers.remove()

    def state_dict(self) -> dict[str, Any]:
        layers = {layer.name: [layer.exponent, layer.ceiling] for layer in self._layers.all} if self._layers else {}
        counts = {"skipped": self.skipped, "skipped_in_a_row": self._skipped_in_a_row, "clean_steps": self._clean_steps}
        return {"kind": self.kind, "scale": self.value, **counts, "layers": layers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state of the same kind, for the same layers. A state that does not fit changes nothing."""
        own = self.state_dict()
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            found = ", ".join(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
            raise ValueError(f"this is not the state of a LossScale: it has {', '.join(own)}, not {found or 'nothing'}")
        if saved["kind"] != self.kind:
            raise ValueError(f"this is the state of a {saved['kind']!r} scale; this one is {self.kind!r}")
        value = _power_of_two("the saved scale", saved["scale"])
        if not self._minimum <= value <= self._maximum:
            raise ValueError(
                f"the saved scale {value} is not between {self._minimum} and {self._maximum}, as this one was told"
            )
        counts = [_count(f"the saved {name}", saved[name], 0) for name in ("skipped", "skipped_in_a_row", "clean_steps")]
        layers = _check_layers(saved["layers"], own["layers"])
        self.value, self._loss_scaled, self._fp16_loss = value, False, False
        self.skipped, self._skipped_in_a_row, self._clean_steps = counts
        for layer in self._layers.all if self._layers else ():
            layer.exponent, layer.ceiling = layers[layer.name]

    def _limit_to_fp16(self) -> None:
        if self._minimum > FP16_LIMIT:
            raise ValueError(f"an FP16 loss cannot carry a scale of {self.value}: its gradient ends at 65504; use up to 2^15")
        self._fp16_loss = True
        if not self._loss_scaled:  # else another loss of this step has the larger scale: let it overflow and be left out, once
            self.value = min(self.value, FP16_LIMIT)

    def _agree(self, parameters: Sequence[Tensor]) -> tuple[dict[Tensor, int], list[int]]:
        """Every gradient's largest magnitude on any rank (as bits, see below), and which layers were called by any."""
        called = [layer.called for layer in self._layers.all] if self._layers else []
        numbers = _numbers_to_agree_on(parameters, called)
        if self._group is not False and dist.is_available() and dist.is_initialized():
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        agreed = numbers.tolist()
        return dict(zip(parameters, agreed, strict=False)), agreed[len(parameters) :]

    def _to_blame(self, bad: Sequence[Tensor], largest: dict[Tensor, int]) -> "list[Layer]":
        """Layers that overflowed by themselves. None did if the scale has just grown: exponents do not rise in that step."""
        just_grown = self._clean_steps == self._skipped_in_a_row == 0
        return [] if self._layers is None or just_grown else self._layers.to_blame(bad, largest)

    def _leave_out(self, culprit: str, layers: "Sequence[Layer]" = ()) -> None:
        """Count a step that was not applied, and lower the layers that overflowed by themselves, or else the scale."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._clean_steps = 0
        self._loss_scaled = False
        if self._layers is not None:
            self._layers.forget_calls()
        for layer in layers:
            layer.lower()
        if layers:
            return
        if self.kind != "static" and self.value <= self._minimum:
            raise LossScaleExhausted(f"overflow at the smallest scale, {self.value}: {culprit}")
        if self.kind == "static" and self._skipped_in_a_row >= self._patience:
            raise LossScaleExhausted(f"{self._skipped_in_a_row} steps in a row overflowed at scale {self.value}: {culprit}")
        self._change(max(self._minimum, self.value * self._backoff))

    def _clean(self, largest: dict[Tensor, int], called: Sequence[int]) -> None:
        """Count a step that was applied. The scale rises, or the exponents do, so that an overflow shows which was too much."""
        self._skipped_in_a_row = 0
        self._loss_scaled = False
        self._clean_steps += 1
        if self._clean_steps >= self._interval:
            self._clean_steps = 0
            limit = min(self._maximum, FP16_LIMIT) if self._fp16_loss else self._maximum
            self._change(min(limit, self.value * self._growth))
            if self._layers is not None:
                self._layers.raise_ceilings(1)
        elif self._layers is not None:
            self._layers.adapt(largest, called)
        if self._layers is not None:
            self._layers.forget_calls()

    def _change(self, value: float) -> None:
        """Set the scale. What layers carry on top gives way, so that growth does not push those at their ceiling over it."""
        if self._layers is not None:
            powers = math.frexp(value / self.value)[1] - 1
            self._layers.raise_ceilings(-powers)
        self.value = value


def _numbers_to_agree_on(parameters: Sequence[Tensor], flags: Sequence[bool]) -> Tensor:
    """The largest magnitude in every gradient, and the flags, as integers on the parameters' device.

    A magnitude is given as the bits of a float64, which have the order of the numbers, with NaN on top. It takes one fused pass
    per dtype and is exact, since the largest element is one of the elements. Nothing is copied to the device: that would wait.
    """
    device = parameters[0].device
    none, zero, one = (torch.full((), number, dtype=torch.int64, device=device) for number in (NO_GRADIENT, 0, 1))
    numbers = [none if parameter.grad is None else zero for parameter in parameters]
    together: dict[Any, list[tuple[int, Tensor]]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None:
            gradient = _elements(parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad)
            if gradient.numel():
                together.setdefault((gradient.device, gradient.dtype), []).append((i, gradient))
    for members in together.values():
        largest = torch.stack(torch._foreach_norm([gradient for _, gradient in members], math.inf)).double()
        bits = (largest.view(torch.int64) & F64.magnitude).to(device)  # a NaN may have a sign
        for (i, _), own in zip(members, bits.unbind(), strict=True):
            numbers[i] = own
    return torch.stack([*numbers, *(one if flag else zero for flag in flags)])


def _elements(gradient: Tensor) -> Tensor:
    """The numbers that this rank holds: a shard's, a sparse gradient's, as a plain tensor on the same memory."""
    gradient = gradient.detach()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[operator]
    gradient = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _step(optimizer: Any, scale: float, exponents: dict[Tensor, int] | None) -> None:
    """Step with gradients divided by the scale and 2^exponent: by the optimizer, if it can, else in place before."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scales = {parameter: scale * 2.0 ** (exponents or {}).get(parameter, 0) for parameter in parameters}
    if getattr(optimizer, "takes_gradient_scale", False):
        optimizer.step(gradient_scale=scale if exponents is None else scales)
        return
    for divisor in set(scales.values()):
        gradients = [_elements(p.grad) for p, own in scales.items() if own == divisor and p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / divisor)
    optimizer.step()


def _names(optimizers: Sequence[Any], model: nn.Module | None) -> dict[Tensor, str]:
    """The optimizers' parameters with their names, in the model's order if there is one."""
    names: dict[Tensor, str] = {}
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
            raise TypeError(f"step takes optimizers, not {type(optimizer).__name__}")
        for number, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"parameter {i} of group {number} with shape {tuple(parameter.shape)}")
    if not names:
        raise TypeError("step takes the optimizer (or several) whose gradients were scaled")
    of_model = {parameter: repr(name) for name, parameter in model.named_parameters()} if model is not None else {}
    ordered = {parameter: name for parameter, name in of_model.items() if parameter in names}
    return ordered | {parameter: name for parameter, name in names.items() if parameter not in ordered}


def _power_of_two(name: str, value: Any) -> float:
    """2^-100 to 2^100: float32 then has room for a layer's exponent, and for the reciprocal."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 2.0**-100 <= value <= 2.0**100 or math.frexp(value)[0] != 0.5:
        near = ""
        if number and 2.0**-100 <= value <= 2.0**100:
            low = 2.0 ** (math.frexp(value)[1] - 1)
            near = f"; near it are {low} and {2 * low}"
        raise ValueError(
            f"{name} must be a power of two between 2^-100 and 2^100, so that scaling does not round, not {value!r}{near}"
        )
    return float(value)


def _count(name: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


class _TimesPowerOfTwo(torch.autograd.Function):
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
class Layer:
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
        return math.frexp(self.factor)[1] - 1

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
    by `check_uses`, which walks the first step's graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.all = _find_layers(model)
        self._unchecked = True
        self._hooks: list[Any] = []
        for number, layer in enumerate(self.all, 1):
            for module in layer.modules:
                before, after = _hooks(layer, number)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after))

    def applied(self, called: Sequence[int]) -> dict[Tensor, int]:
        """The exponent that each parameter's gradient carries."""
        pairs = zip(self.all, called, strict=True)
        return {parameter: layer.exponent for layer, was_called in pairs if was_called for parameter in layer.parameters()}

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

    def to_blame(self, bad: Sequence[Tensor], largest: dict[Tensor, int]) -> list[Layer]:
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
        if not self._unchecked:
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
            if node.name() == "_TimesPowerOfTwoBackward":
                inside = max(node.boundary, 0)
            stack.extend((following, inside) for following, _ in node.next_functions)


def _hooks(layer: Layer, number: int) -> tuple[Callable, Callable]:
    """What is done to a layer's inputs and outputs, in whatever tuples and dicts they come."""

    def times(values: Any, factor: float, boundary: int) -> Any:
        def wrap(x: Tensor) -> Any:
            return _TimesPowerOfTwo.apply(x, factor, boundary) if x.requires_grad else x

        return tree_map_only(Tensor, wrap, values)

    def before(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        return times((inputs, named), layer.inverse, -number) if torch.is_grad_enabled() else None

    def after(module: nn.Module, inputs: tuple, outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        layer.called = True
        return times(outputs, layer.factor, number)

    return before, after


def _find_layers(model: nn.Module) -> list[Layer]:
    """Modules with parameters to train and without submodules that have any; those that share a parameter are one layer."""
    layers: list[Layer] = []
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False))
        has_submodules = any(True for child in module.children() for _ in child.parameters())
        if has_submodules or not any(parameter.requires_grad for parameter in own):
            continue
        tied = [layer for layer in layers if own & set(layer.parameters())]
        joined = Layer(tied[0].name if tied else name or "model", [*(m for layer in tied for m in layer.modules), module])
        layers = [layer for layer in layers if layer not in tied] + [joined]
    return layers


def _check_layers(saved: Any, own: dict[str, list[int]]) -> dict[str, list[int]]:
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        different = sorted(map(str, set(saved) ^ set(own))) if isinstance(saved, dict) else [type(saved).__name__]
        raise ValueError(f"the saved exponents are not for this model's layers; they differ in {', '.join(different[:5])}")
    for name, pair in saved.items():
        whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not whole or not Layer.FLOOR <= pair[0] <= pair[1] <= Layer.CEILING:
            raise ValueError(
                f"layer {name!r}: an exponent and its ceiling between {Layer.FLOOR} and {Layer.CEILING}, not {pair}"
            )
    return saved
