"""Where a run that diverged went wrong: the first thing, in the order of computation, that is not finite."""

from typing import Any

import torch
from torch import Tensor, nn

from lowp.optim.loss_scale import LossScaleExhausted
from lowp.tensor.errors import NonFiniteGradient

DIVERGED = (NonFiniteGradient, LossScaleExhausted)


class Diverged(FloatingPointError):
    """Training cannot go on. The message names the step and the layer; the state before the step is saved."""


def first_not_finite(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> str | None:
    """A sentence about the first thing that is not finite: a weight, the inputs, or a layer's output."""
    weight = bad_weight(model)
    if weight is not None:
        return f"the weights of {weight!r} are not finite"
    if any(inputs.is_floating_point() and not bool(inputs.isfinite().all()) for inputs, _ in batches):
        return "the inputs are not finite"
    layer = _first_bad_layer(model, batches)
    return None if layer is None else f"the first layer whose output is not finite is {layer!r}"


def bad_weight(model: nn.Module) -> str | None:
    return next((name for name, p in model.named_parameters() if not bool(p.detach().isfinite().all())), None)


@torch.no_grad()
def _first_bad_layer(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> str | None:
    """The first layer whose output is not finite for some of the inputs. The model's buffers stay as they are."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
            if not found and any(t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors):
                found.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(watch(name)) for name, module in leaves]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for inputs, _ in batches:
            if not found:
                model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return found[0] if found else None
