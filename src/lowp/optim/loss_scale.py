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

`per_layer` adds an exponent to every layer (layer_exponents.py), since one scale has to suit the largest gradient of the whole
model.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowp import compat
from lowp.optim.layer_exponents import NO_GRADIENT, LayerExponents, ScaledLayer, TimesPowerOfTwo, check_saved_layers
from lowp.tensor.carrier import CARRIERS, F64, exponent_below

FP16_LIMIT = 2.0**15  # the largest power of two in FP16: a scale above it makes the gradient of an FP16 loss infinite


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
        self._layers = LayerExponents(model if kind == "per_layer" else None)

    @property
    def exponents(self) -> dict[str, int]:
        """The exponents of the layers, by name: their gradients carry `value * 2^k`. Tied layers share the first one's."""
        return {layer.name: layer.exponent for layer in self._layers.all}

    def scale(self, loss: Tensor) -> Tensor:
        """The same loss, of any shape, whose gradient is multiplied by the scale. Call it for every loss of a step."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise TypeError(f"scale takes a floating-point tensor, not {getattr(loss, 'dtype', type(loss).__name__)}")
        if not loss.requires_grad or not torch.is_grad_enabled():
            return loss
        if loss.dtype == torch.float16 and not self._fp16_loss:
            self._limit_to_fp16()
        self._loss_scaled = True
        if not torch.compiler.is_compiling():
            self._layers.check_uses(loss)
        return TimesPowerOfTwo.apply(loss, self.value, 0)  # type: ignore[return-value]

    def mark_scaled(self) -> None:
        """Say that a loss was scaled by a pass that Python does not see: a CUDA graph in which `scale` was recorded. The graph
        multiplies by the `value` of that time; record it again where that has changed. Not with "per_layer"."""
        self._loss_scaled = True

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
        exponents = self._layers.applied(called)
        for optimizer in optimizers:
            _step(optimizer, self.value, exponents)
        self._clean(largest, called)
        return True

    def overflowed(self) -> None:
        """Count a step as overflowed without looking: for callers who found out in another way. All ranks must say so."""
        self._leave_out("an overflow was reported by overflowed()")

    def remove(self) -> None:
        """Take the hooks of "per_layer" off the model, between steps. What is left is "dynamic"."""
        self._layers.remove()

    def state_dict(self) -> dict[str, Any]:
        layers = {layer.name: [layer.exponent, layer.ceiling] for layer in self._layers.all}
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
        layers = check_saved_layers(saved["layers"], own["layers"])
        self.value, self._loss_scaled, self._fp16_loss = value, False, False
        self.skipped, self._skipped_in_a_row, self._clean_steps = counts
        for layer in self._layers.all:
            layer.exponent, layer.ceiling = layers[layer.name]

    def _limit_to_fp16(self) -> None:
        if self._minimum > FP16_LIMIT:
            raise ValueError(f"an FP16 loss cannot carry a scale of {self.value}: its gradient ends at 65504; use up to 2^15")
        self._fp16_loss = True
        if not self._loss_scaled:  # else another loss of this step has the larger scale: let it overflow and be left out, once
            self.value = min(self.value, FP16_LIMIT)

    def _agree(self, parameters: Sequence[Tensor]) -> tuple[dict[Tensor, int], list[int]]:
        """Every gradient's largest magnitude on any rank (as bits, see below), and which layers were called by any."""
        called = [layer.called for layer in self._layers.all]
        numbers = _numbers_to_agree_on(parameters, called)
        if self._group is not False and dist.is_available() and dist.is_initialized():
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        agreed = numbers.tolist()
        return dict(zip(parameters, agreed, strict=False)), agreed[len(parameters) :]

    def _to_blame(self, bad: Sequence[Tensor], largest: dict[Tensor, int]) -> list[ScaledLayer]:
        """Layers that overflowed by themselves. None did if the scale has just grown: exponents do not rise in that step."""
        just_grown = self._clean_steps == self._skipped_in_a_row == 0
        return [] if just_grown else self._layers.to_blame(bad, largest)

    def _leave_out(self, culprit: str, layers: Sequence[ScaledLayer] = ()) -> None:
        """Count a step that was not applied, and lower the layers that overflowed by themselves, or else the scale."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._clean_steps = 0
        self._loss_scaled = False
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
            self._layers.raise_ceilings(1)
        else:
            self._layers.adapt(largest, called)
        self._layers.forget_calls()

    def _change(self, value: float) -> None:
        """Set the scale. What layers carry on top gives way, so that growth does not push those at their ceiling over it."""
        powers = exponent_below(value / self.value)
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
        largest = torch.stack(compat.foreach_norm([gradient for _, gradient in members], math.inf))
        bits = _float64_bits(largest).to(device)
        for (i, _), own in zip(members, bits.unbind(), strict=True):
            numbers[i] = own
    return torch.stack([*numbers, *(one if flag else zero for flag in flags)])


def _float64_bits(numbers: Tensor) -> Tensor:
    """The bits of magnitudes as float64 would have them, in integers: a 16-bit model makes no wider tensor, not even here."""
    own = CARRIERS[numbers.dtype]
    if numbers.dtype == torch.float64:
        return numbers.view(torch.int64) & F64.magnitude  # a NaN may have a sign
    bits = numbers.view(own.storage).to(torch.int64) & own.magnitude
    wider = F64.fraction_bits - own.fraction_bits
    normal = (bits << wider) + (F64.bias - own.bias << F64.fraction_bits)
    top = sum((bits >> bit).clamp(max=1) for bit in range(1, own.fraction_bits))  # where a subnormal number's first bit is
    exponent = top + (F64.bias + own.min_exponent - own.fraction_bits - 1)
    subnormal = torch.where(bits == 0, bits, (exponent << F64.fraction_bits) + (bits << (F64.fraction_bits - top)))
    special = F64.infinity + (bits - own.infinity << wider)
    return torch.where(bits >= own.infinity, special, torch.where(bits >> own.fraction_bits == 0, subnormal, normal))


def _elements(gradient: Tensor) -> Tensor:
    """The numbers that this rank holds: a shard's, a sparse gradient's, as a plain tensor on the same memory."""
    gradient = gradient.detach()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[operator]
    gradient = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _step(optimizer: Any, scale: float, exponents: dict[Tensor, int]) -> None:
    """Step with gradients divided by the scale and 2^exponent: by the optimizer, if it can, else in place before."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scales = {parameter: scale * 2.0 ** exponents.get(parameter, 0) for parameter in parameters}
    if getattr(optimizer, "takes_gradient_scale", False):
        optimizer.step(gradient_scale=scales if exponents else scale)
        return
    for divisor in set(scales.values()):
        gradients = [_elements(p.grad) for p, own in scales.items() if own == divisor and p.grad is not None]
        if gradients:
            compat.foreach_mul_(gradients, 1 / divisor)
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
            low = 2.0 ** exponent_below(value)
            near = f"; near it are {low} and {2 * low}"
        raise ValueError(
            f"{name} must be a power of two between 2^-100 and 2^100, so that scaling does not round, not {value!r}{near}"
        )
    return float(value)


def _count(name: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value
