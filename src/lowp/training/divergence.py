"""Where a run that diverged went wrong: the first thing, in the order of computation, that is not finite."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.optim.loss_scale import LossScaleExhausted
from lowp.tensor.errors import NonFiniteGradient

DIVERGED = (NonFiniteGradient, LossScaleExhausted)


class Diverged(FloatingPointError):
    """Training cannot go on. The message names the step and the layer; the state before the step is saved."""


Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trouble:
    """What is not finite, in a sentence; the layer or parameter, and the rank that met it, where there is one."""

    sentence: str
    layer: str | None = None
    rank: int | None = None


def first_not_finite(model: nn.Module, batches: Mapping[int, Batches]) -> Trouble | None:
    """The first thing that is not finite: a weight, the inputs of a rank, or a layer's output for them."""
    weight = bad_weight(model)
    if weight is not None:
        return Trouble(f"the weights of {weight!r} are not finite", weight)
    for rank, own in batches.items():
        if any(inputs.is_floating_point() and not bool(inputs.isfinite().all()) for inputs, _ in own):
            return Trouble("the inputs are not finite", None, rank)
    for rank, own in batches.items():
        if (layer := _first_bad_layer(model, own)) is not None:
            return Trouble(f"the first layer whose output is not finite is {layer!r}", layer, rank)
    return None


def bad_weight(model: nn.Module) -> str | None:
    return next((name for name, p in model.named_parameters() if not bool(p.detach().isfinite().all())), None)


@torch.no_grad()
def _first_bad_layer(model: nn.Module, batches: Batches) -> str | None:
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
