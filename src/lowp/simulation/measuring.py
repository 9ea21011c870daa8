"""How many numbers every role of every layer holds, and a model that is run on the side without a trace.

Sizes of parameters are known; those of activations are seen in one forward pass, through hooks. Errors are as many as
activations, gradients as many as parameters. A parameter that several layers share is counted once, and its layers are one
place: two formats for one tensor would be no assignment.

Places are also put into the groups of arXiv 2301.13464, in order of execution:

1. Group 0 is the model's input. Every layer with a matrix of weights begins a new group; what follows it (batch norm, ReLU) is
   in the same one.
2. Activations and errors belong to the group of the layer that makes them.
3. Weights and gradients belong to the group of what their layer reads: a product has both factors in one precision.

The group that a layer's own output is in, whatever it reads, is its stage: a layer with weights and what follows it.

Who made a layer's input is known where the very tensor comes from another layer. Behind plain torch operations (the addition of
a residual, a reshape) it is taken to be the layer that ran last.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from lowp.compat import tree_leaves
from lowp.simulation.layers import ROLES, SimulatedLayer
from lowp.simulation.modules import LAYER

_INPUT = 0  # the group of the model's input


@dataclass(frozen=True)
class FormatSlot:
    """What has one format: a role of a layer, or of the layers that share a parameter."""

    role: str
    layers: tuple[str, ...]
    elements: int
    group: int
    stage: int


def measure(model: nn.Module, run: Callable[[], object]) -> list[FormatSlot]:
    """All places of a simulated model, in order of registration; `run` is a forward pass. The model stays as it is."""
    modules = {layer.name: module for module in model.modules() if (layer := vars(module).get(LAYER)) is not None}
    layers: dict[str, SimulatedLayer] = {name: vars(module)[LAYER] for name, module in modules.items()}
    recorder = _Recorder()
    with undisturbed(model), recorder.attached(modules, layers), torch.no_grad():
        model.eval()
        run()
    places = []
    for role in ROLES:
        own = [name for name, layer in layers.items() if role in layer.roles]
        if role in ("activations", "errors"):
            for name in own:
                stage = recorder.group_made_by(name)
                places.append(FormatSlot(role, (name,), recorder.elements.get(name, 0), stage, stage))
            continue
        for names, elements in _sharing({name: modules[name] for name in own}):
            group, stage = recorder.group_read_by(names[0]), recorder.group_made_by(names[0])
            places.append(FormatSlot(role, names, elements, group, stage))
    order = {name: number for number, name in enumerate(layers)}
    return sorted(places, key=lambda place: (order[place.layers[0]], ROLES.index(place.role)))


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for what a batch gives it: one argument, a tuple or list of them, or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if type(inputs) in (tuple, list) else model(inputs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside: afterwards modes, buffers, gradients and torch's generators are what they were, errors or not."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    devices = {tensor.device for tensor in (*parameters, *model.buffers()) if tensor.device.type == "cuda"}
    with torch.random.fork_rng([device.index for device in devices]):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, name, buffer, content in buffers:
                with torch.no_grad():
                    module._buffers[name] = buffer.copy_(content)
            for module, training in modes:
                module.training = training


def _sharing(modules: Mapping[str, nn.Module]) -> list[tuple[tuple[str, ...], int]]:
    """Layers that have a parameter in common, and how many numbers they hold together, each counted once."""
    found: list[tuple[list[str], dict[int, int]]] = []
    for name, module in modules.items():
        sizes = {id(parameter): parameter.numel() for parameter in module._parameters.values() if parameter is not None}
        names, apart = [name], []
        for others, theirs in found:
            if theirs.keys() & sizes.keys():
                names, sizes = others + names, theirs | sizes
            else:
                apart.append((others, theirs))
        found = [*apart, (names, sizes)]
    return [(tuple(names), sum(sizes.values())) for names, sizes in found]


class _Recorder:
    """Hooks for one forward pass: elements of outputs, and the groups."""

    def __init__(self) -> None:
        self.elements: dict[str, int] = {}
        self._made: dict[str, int] = {}  # the group of a layer's output
        self._read: dict[str, int] = {}  # the group of its input
        self._makers: Any = WeakIdKeyDictionary()  # of tensors: the group that they belong to
        self._last = self._groups = _INPUT

    @contextmanager
    def attached(self, modules: Mapping[str, nn.Module], layers: Mapping[str, SimulatedLayer]) -> Iterator[None]:
        hooks = []
        try:
            for name, module in modules.items():
                layer = layers[name]
                hooks.append(module.register_forward_pre_hook(self._before(layer), with_kwargs=True))
                if "activations" in layer.roles:
                    hooks.append(module.register_forward_hook(self._after(layer)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, layer: SimulatedLayer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            known = [self._makers[leaf] for leaf in _numbers((args, kwargs)) if leaf in self._makers]
            self._read.setdefault(layer.name, known[0] if known else self._last)

        return hook

    def _after(self, layer: SimulatedLayer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if layer.has_matrix and layer.name not in self._made:
                self._groups += 1
                self._last = self._groups
            self._last = self._made.setdefault(layer.name, self._last)
            for leaf in _numbers(output):
                self.elements[layer.name] = self.elements.get(layer.name, 0) + leaf.numel()
                self._makers[leaf] = self._last

        return hook

    def group_made_by(self, name: str) -> int:
        return _of_it_or_around(name, self._made)

    def group_read_by(self, name: str) -> int:
        return _of_it_or_around(name, self._read)


def _of_it_or_around(name: str, groups: Mapping[str, int]) -> int:
    """Of a layer that never ran itself (attention's `out_proj`), the group of the module around it."""
    while name not in groups and "." in name:
        name = name.rpartition(".")[0]
    return groups.get(name, _INPUT)


def _numbers(value: Any) -> list[Tensor]:
    leaves = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
