"""What an optimizer is about to do: the update before it is rounded to the weights' dtype."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowp.formats import AnyFormat
from lowp.health.measures import named_tensors
from lowp.health.measures import sample as sample_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Intent:
    """What an optimizer is about to do to a parameter, and the parameter before it: samples of the same elements."""

    update: Tensor
    weight: Tensor
    bits: Tensor


def look(optimizer: Optimizer, parameter: Tensor, most: int, fmt: AnyFormat | None) -> tuple[Tensor, Tensor]:
    """A sample of a weight as it is now: in float64, with what the optimizer keeps beside it against rounding; and its bits."""
    full_weight = getattr(optimizer, "full_weight", None)
    stored = sample_of(parameter, most, fmt)
    weight = stored if full_weight is None else sample_of(full_weight(parameter), most, fmt)
    return weight.to(torch.float64, copy=True), stored.clone().view(_INTEGERS[stored.dtype.itemsize])


def intended_updates(
    optimizer: Optimizer, parameters: list[Tensor], gradient_scale: Any = 1.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and the update that its gradient and state call for, before rounding to the weights' dtype.

    An optimizer of lowp says so itself. Of any other, a copy takes the step in float64: float32 would lose, beside a large
    weight, the very updates that are to be found lost. torch's own optimizers treat every parameter by itself, so theirs are
    copied one by one, in little memory; in others parameters may depend on each other, and the copy has all of them.
    """
    say = getattr(optimizer, "intended_update", None)
    if say is not None:
        scaled = {} if gradient_scale == 1.0 else {"gradient_scale": gradient_scale}
        yield from ((parameter, say(parameter, **scaled)) for parameter in parameters)
    elif type(optimizer).__module__.startswith("torch.optim."):
        for parameter in parameters:
            yield from _step_in_float64(optimizer, [parameter])
    elif parameters:
        yield from _step_in_float64(optimizer, parameters)


def _step_in_float64(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Let a copy of the optimizer, in float64 and with these parameters only, take its step.

    `deepcopy` is told beforehand what becomes of each parameter, of each tensor of their states and of the optimizer itself, so
    that no reference in the copy, wherever the class may keep one, leads back to the user's numbers.
    """
    wide = {parameter: _widened(parameter) for parameter in parameters}
    chosen = set(parameters)
    attributes = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks") and name != "step"}
    attributes["param_groups"] = [
        group | {"params": [p for p in group["params"] if p in chosen]} for group in optimizer.param_groups
    ]
    state = optimizer.state.items()
    attributes["state"] = defaultdict(dict, {key: kept for key, kept in state if not isinstance(key, Tensor) or key in chosen})
    shadow = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): shadow} | {id(parameter): copied for parameter, copied in wide.items()}
    for name, tensor in named_tensors({str(number): kept for number, kept in enumerate(attributes["state"].values())}):
        if tensor.is_floating_point() and not name.endswith(".step"):  # fused kernels count steps in float32
            memo[id(tensor)] = tensor.detach().to(torch.float64, copy=True)
    vars(shadow).update(copy.deepcopy(attributes, memo))
    vars(shadow).update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # hooks on all optimizers of the process do not mean this one
        step = step.__wrapped__  # type: ignore[attr-defined]
    devices = {parameter.device for parameter in parameters if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):  # noise that the copy draws is not missing later
        step(shadow)
    for parameter, copied in wide.items():
        yield parameter, copied.detach() - parameter.detach()


def _widened(parameter: Tensor) -> Tensor:
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    copied = parameter.detach().to(dtype, copy=True).requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        copied.grad = parameter.grad.detach().to(dtype, copy=True)
    return copied
