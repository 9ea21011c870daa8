"""A step inside somebody's `torch.compile`: one opaque call in the graph.

The kernels of a step are compiled already, so there is nothing to gain from tracing it, and much to lose: every new learning
rate would be another constant of the graph. The graph sees that parameters are written to; everything else (learning rate, step
count, states) is read from the optimizer when the call is made.
"""

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

_optimizers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = count()


def register(optimizer: Any) -> int:
    """A number by which a graph can name an optimizer."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def step_in_graph(optimizer: Any, gradient_scale: Any) -> None:
    """Traced by Dynamo."""
    if not isinstance(gradient_scale, (int, float)):
        raise TypeError("inside torch.compile, gradient_scale is one number for all parameters")
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    places = [i for i, p in enumerate(everyone) if p.grad is not None]
    parameters = [everyone[i] for i in places]
    gradients = [p.grad for p in parameters]
    torch.ops.lowp.optimizer_step(parameters, gradients, places, optimizer._handle, float(gradient_scale))


@torch.library.custom_op("lowp::optimizer_step", mutates_args=("parameters",))
def _optimizer_step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], places: Sequence[int], handle: int, gradient_scale: float
) -> None:
    if any(p.is_cuda for p in parameters) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an optimizer's step cannot be captured in a CUDA graph: its learning rate would be frozen")
    optimizer = _optimizers[handle]
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    if any(i >= len(everyone) or everyone[i].shape != p.shape for i, p in zip(places, parameters, strict=True)):
        raise RuntimeError("the optimizer's parameters are not those that its step was compiled for")
    own = [everyone[i] for i in places]
    before = {p: p.grad for p in everyone}
    try:
        for p in everyone:
            p.grad = None
        for p, gradient in zip(own, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            optimizer._step(gradient_scale)
    finally:
        for p, gradient in before.items():
            p.grad = gradient
    # Without inductor's pass that puts mutations back in place, a graph gives copies, and copies them back.
    for given, p in zip(parameters, own, strict=True):
        if given.data_ptr() != p.data_ptr():
            given.copy_(p)


@_optimizer_step.register_fake
def _(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], places: Sequence[int], handle: int, gradient_scale: float
) -> None:
    return None
