"""What a recipe needs in memory and sends in a step, counted on a model that is built but not trained."""

from dataclasses import dataclass, replace

import torch

from lowp.health.memory import Memory, memory
from lowp.training.exchange import buckets_of
from lowp.training.models import build_model
from lowp.training.numerics import stored_dtype, wire_settings
from lowp.training.optimizers import optimizer_for
from lowp.training.recipe import Recipe
from lowp.wire.auto import best_for
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters
from lowp.wire.virtual import VirtualExchange


@dataclass(frozen=True)
class Footprint:
    memory: Memory
    wire_bytes: int  # a step's gradients of one rank, in the wire's format
    fp32_bytes: int
    ranks: int
    sent: int  # by rank 0 in a step


def footprint(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Footprint:
    """Build model and optimizer on the CPU, and take one step with gradients of zero: states are made in the first step."""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model.name, shape=shape, classes=classes, options=recipe.model.options)
    model.to(stored_dtype(recipe.precision))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_for(recipe, parameters)
    optimizer.step()
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    names, settings = all_names(model), wire_settings(recipe, 1)
    if settings.reduction == "auto":  # if it compresses
        settings = replace(settings, reduction=best_for(recipe.shares))
    buckets = buckets_of(parameters, recipe.wire.bucket_mb * 1e6)
    sent, _ = VirtualExchange(recipe.shares, shapes, settings, buckets=buckets, names=names).bytes_sent()
    layers = Parameters(shapes, settings, names).bucket(parameters, 0).layers
    return Footprint(
        memory(model, optimizer),
        sum(layer.codec.wire_bytes(layer.size) for layer in layers),
        sum(4 * layer.size for layer in layers),
        recipe.shares,
        sent,
    )
