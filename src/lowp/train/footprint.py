"""What a recipe needs in memory and sends in a step, counted on a model that is built but not trained."""

from dataclasses import dataclass

import torch

from lowp.health.memory import Memory, memory
from lowp.train.models import build_model
from lowp.train.numerics import stored_dtype, wire_settings
from lowp.train.optimizers import optimizer_for
from lowp.train.recipe import Recipe
from lowp.wire.naming import all_names
from lowp.wire.report import ring_bytes
from lowp.wire.settings import Parameters


@dataclass(frozen=True)
class Footprint:
    memory: Memory
    wire_bytes: int  # a step's gradients of one rank, in the wire's format
    fp32_bytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """By each rank in a step."""
        return ring_bytes(self.wire_bytes, self.ranks)


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
    layers = Parameters(shapes, wire_settings(recipe, 1), all_names(model)).layers(parameters, 0)
    return Footprint(
        memory(model, optimizer),
        sum(layer.codec.wire_bytes(layer.size) for layer in layers),
        sum(4 * layer.size for layer in layers),
        recipe.shares,
    )
