"""What a recipe needs in memory and sends in a step, counted on a model that is built but not trained, beside FP32.

Weights, gradients, optimizer state and buffers are counted from the tensors that a step of this recipe makes. Activations are
what forward keeps for backward, of the samples that a rank computes at once; of models that are the user's own they are not
known, since nobody says what such a model takes.

A simulated format lives in float32: the run itself needs as much as FP32. `hardware` is what a machine would hold that stores
every role in its format: the weights that are multiplied, beside them those that the optimizer updates, and gradients and
activations in the formats of their layers. States are stored in their formats here too.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowp.formats import format as parse_format
from lowp.health.memory import MEMORY_ROLES, Memory, memory
from lowp.simulation import Simulation, restore
from lowp.simulation.measuring import FormatSlot, measure
from lowp.training.exchange import buckets_of
from lowp.training.models import build_model
from lowp.training.numerics import Numerics, autocast_dtype, stored_dtype, wire_settings
from lowp.training.optimizers import optimizer_for
from lowp.training.plugins import is_plugin
from lowp.training.reading import with_changes
from lowp.training.recipe import Precision, Recipe
from lowp.training.world import World
from lowp.wire.auto import best_for
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters
from lowp.wire.virtual import VirtualExchange

_FEW, _MORE = 2, 4  # samples that activations are counted on: batch norm wants more than one
MASTER, ACTIVATIONS = "master", "activations"


@dataclass(frozen=True)
class HardwareRole:
    """What a machine would hold of a role, in these formats."""

    bytes: float
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Footprint:
    memory: Memory
    fp32: Memory  # of the same model and optimizer
    samples: int  # that a rank computes at once: a micro-batch
    activations: float | None  # bytes for these samples; None: not known
    fp32_activations: float | None
    hardware: dict[str, HardwareRole]  # by role; empty where nothing is simulated
    wire_bytes: int  # a step's gradients of one rank, in the wire's format
    fp32_bytes: int
    ranks: int
    sent: int  # by rank 0 in a step


def footprint(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Footprint:
    """Build model and optimizer on the CPU, and take one step with gradients of zero: states are made in the first step."""
    model, counted = _stepped(recipe, shape, classes)
    plain = with_changes(recipe, precision=Precision())
    _, fp32 = _stepped(plain, shape, classes)
    stored = stored_dtype(recipe.precision)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    names, settings = all_names(model), wire_settings(recipe, 1)
    if settings.reduction == "auto":  # if it compresses
        settings = replace(settings, reduction=best_for(recipe.shares))
    buckets = buckets_of(parameters, recipe.wire.bucket_mb * 1e6)
    sent, _ = VirtualExchange(recipe.shares, shapes, settings, buckets=buckets, names=names).bytes_sent(dtype=stored)
    layers = Parameters(shapes, settings, names).bucket(parameters, 0, stored).layers
    samples = recipe.batch // (recipe.shares * recipe.micro_batches)
    whole = _activations(_build(plain, shape, classes), plain, samples, shape, classes)
    return Footprint(
        counted,
        fp32,
        samples,
        _activations(model, recipe, samples, shape, classes),
        whole,
        _on_hardware(recipe, counted, whole, shape, classes),
        sum(layer.codec.wire_bytes(layer.size) for layer in layers),
        sum(4 * layer.size for layer in layers),
        recipe.shares,
        sent,
    )


def _build(recipe: Recipe, shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model.name, shape=shape, classes=classes, options=recipe.model.options)
    return model.to(stored_dtype(recipe.precision))


def _stepped(recipe: Recipe, shape: tuple[int, ...], classes: int) -> tuple[nn.Module, Memory]:
    model = _build(recipe, shape, classes)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_for(recipe, parameters)
    optimizer.step()
    return model, memory(model, optimizer)


def _inputs(model: nn.Module, samples: int, shape: tuple[int, ...], classes: int) -> Tensor:
    """Of text, one number a place; of anything else, numbers like the weights."""
    if len(shape) == 1:
        return torch.randint(0, classes, (samples, *shape))
    return torch.randn(samples, *shape, dtype=next(model.parameters()).dtype)


def _activations(model: nn.Module, recipe: Recipe, samples: int, shape: tuple[int, ...], classes: int) -> float | None:
    """Bytes that forward keeps for backward. Not all of them grow with the samples: autocast keeps weights that it has cast."""
    if is_plugin(recipe.model.name):
        return None
    few, more = (_kept(model, recipe, _inputs(model, count, shape, classes)) for count in (_FEW, _MORE))
    each = (more - few) / (_MORE - _FEW)
    return few + (samples - _FEW) * each


def _kept(model: nn.Module, recipe: Recipe, inputs: Tensor) -> int:
    """Every memory once, and none that is a parameter's."""
    seen = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if (reference := StorageWeakRef(storage)) not in seen:
            seen.add(reference)
            kept += storage.nbytes()
        return tensor

    dtype = autocast_dtype(recipe.precision)
    casting = nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), casting:
        model.train()(inputs)
    return kept


def _on_hardware(
    recipe: Recipe, counted: Memory, activations: float | None, shape: tuple[int, ...], classes: int
) -> dict[str, HardwareRole]:
    """By role, where a format is simulated. `activations`: bytes in float32, which all of them are kept in alike."""
    model = _build(recipe, shape, classes)
    simulation = Numerics(recipe, model, World(0, 1, torch.device("cpu"))).simulation
    if simulation is None:
        return {}
    slots = measure(model, lambda: None if activations is None else model(_inputs(model, _FEW, shape, classes)))
    outputs = sum(slot.elements for slot in slots if slot.role == ACTIVATIONS)
    found: dict[str, HardwareRole] = {}
    for role in ("weights", "gradients", ACTIVATIONS):
        bits, formats = _bits(simulation, slots, role)
        if role == ACTIVATIONS and activations is not None:
            found[role] = HardwareRole(activations * bits / (32 * outputs), formats)
        elif role != ACTIVATIONS:
            others = counted.parameters - sum(slot.elements for slot in slots if slot.role == role)
            found[role] = HardwareRole((bits + 32 * others) / 8, formats)
    if found["weights"].formats != ("fp32",):
        kept = recipe.precision.master or "fp32"
        found[MASTER] = HardwareRole(counted.parameters * parse_format(kept).bits / 8, (kept,))
    restore(model)
    return found | {role: HardwareRole(counted.bytes_of(role), ()) for role in MEMORY_ROLES if role not in found}


def _bits(simulation: Simulation, slots: list[FormatSlot], role: str) -> tuple[float, tuple[str, ...]]:
    """Bits of all numbers of a role, and the formats that they are in."""
    formats = {row.layer: row.format for row in simulation.formats() if row.role == role}
    own = [(formats[slot.layers[0]], slot.elements) for slot in slots if slot.role == role and slot.elements]
    return sum(parse_format(name).bits * count for name, count in own), tuple(dict.fromkeys(name for name, _ in own))
