"""What a model computes: its forward and backward are run on tensors without memory, and every operation is counted.

Products and convolutions count by their floating-point operations, everything else (norms, activations, sums) by the bytes that
it reads and writes. Where in backward a parameter's gradient is ready is not guessed from the order of layers: autograd calls a
hook of each parameter, as it does for DistributedDataParallel, and what was counted until then is noted.

Attention is counted as GPUs compute it, fused: on tensors without memory torch would make the matrix of all scores.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lowp.compat import TorchDispatchMode, fused_attention, tree_leaves, tree_map
from lowp.predict.workload import ModelLayer, Work, Workload


class CannotTrace(ValueError):
    """A model that does not run on tensors without memory; the message says where it stopped."""


@dataclass
class _Counter(TorchDispatchMode):
    """Counts what runs inside. In forward, an operation belongs to the module whose parameters were last used."""

    names: dict[int, str]  # the first parameter of the same module, by a parameter's identity
    total: Work = Work()  # noqa: RUF009  # frozen
    forward: dict[str, Work] = field(default_factory=dict)
    current: str = ""
    operation: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = object.__hash__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operation = str(func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self.current = self.names.get(id(tensor), self.current)
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in flop_registry:
            work = Work(flops=float(flop_registry[packet](*args, **kwargs, out_val=out)))
        elif func.is_view:
            return out
        else:
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            work = Work(bytes=float(sum(tensor.numel() * tensor.element_size() for tensor in [*inputs, *outputs])))
        self.total += work
        self.forward[self.current] = self.forward.get(self.current, Work()) + work
        return out


class _FusedAttention(TorchFunctionMode):
    """Attention without a mask of its own becomes the fused operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or fused_attention is None:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        alike = given["query"].dim() == 4 and given["query"].shape[1] == given["key"].shape[1]
        if given.get("attn_mask") is not None or not alike:
            return func(*args, **kwargs)
        return fused_attention(
            given["query"], given["key"], given["value"], given.get("dropout_p", 0.0), given.get("is_causal", False)
        )[0]


def traced(name: str, model: nn.Module, inputs: Any, unit: str = "sample") -> Workload:
    """The workload of a model, from one example batch.

    Args:
        inputs: a tensor, or a tuple of arguments. The first dimension of the first tensor counts the samples.

    The model itself is not touched: a copy of it is run, in training mode.
    """
    model, inputs = _without_memory(name, model, inputs)
    batch = next((leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if not batch:
        raise CannotTrace(f"model {name}: the example batch has no tensor whose first dimension counts samples")
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise CannotTrace(f"model {name}: it has no parameter that takes a gradient")
    first_of = {key.rpartition(".")[0]: key for key in reversed(parameters)}
    counter = _Counter({id(parameter): first_of[key.rpartition(".")[0]] for key, parameter in parameters.items()})
    ready: dict[str, Work] = {}

    def note(key: str) -> Callable[[Tensor], None]:
        return lambda parameter: ready.__setitem__(key, counter.total)

    hooks = [parameter.register_post_accumulate_grad_hook(note(key)) for key, parameter in parameters.items()]
    saved = _Saved({StorageWeakRef(p.untyped_storage()) for p in model.parameters()})
    with _told_where(name, model, counter), counter:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), _FusedAttention():
            loss = _sum(name, model(*inputs) if isinstance(inputs, tuple) else model(inputs))
        forward, counter.total = dict(counter.forward), Work()
        loss.backward()
    for hook in hooks:
        hook.remove()
    if unused := [key for key in parameters if key not in ready]:
        some = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        raise CannotTrace(f"model {name}: backward reached no gradient of {some}; DistributedDataParallel would wait for it")
    return Workload(name, _layers(parameters, forward, ready, batch), saved.bytes / batch, unit)


def _layers(parameters: dict[str, nn.Parameter], forward: dict[str, Work], ready: dict[str, Work], batch: int) -> tuple:
    turns = {key: turn for turn, key in enumerate(ready)}
    before = dict(zip(ready, [Work(), *ready.values()], strict=False))
    first = next(iter(parameters))
    layers = []
    for key, parameter in parameters.items():
        own = forward.get(key, Work())
        if key == first:
            own += forward.get("", Work())  # what ran before any parameter was used
        backward = ready[key] - before[key]
        layers.append(ModelLayer(key, tuple(parameter.shape), own / batch, backward / batch, turns[key]))
    return tuple(layers)


def _without_memory(name: str, model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    try:
        model = copy.deepcopy(model).to("meta").train()
    except Exception as error:
        raise CannotTrace(f"model {name}: it cannot be copied ({_why(error)})") from error
    return model, tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, inputs)


@dataclass
class _Saved:
    """Counts the bytes that forward keeps for backward: every memory once, and none that is a parameter's."""

    seen: set[Any]
    bytes: int = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (reference := StorageWeakRef(storage)) not in self.seen:
            self.seen.add(reference)
            self.bytes += storage.nbytes()
        return tensor


def _sum(name: str, out: Any) -> Tensor:
    numbers = [
        leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not numbers:
        raise CannotTrace(f"model {name}: what it returns has no gradient to go back from")
    return torch.stack([leaf.sum() for leaf in numbers]).sum()


class _told_where:  # noqa: N801  # a context, used like a function
    """Whatever goes wrong inside is an error that names the module and the operation where it did."""

    def __init__(self, name: str, model: nn.Module, counter: _Counter) -> None:
        self._name, self._counter = name, counter
        self._inside: list[str] = []
        self._hooks: list[Any] = []
        self._model = model

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(self._leave))

    def _leave(self, *_: Any) -> None:  # what a hook returns would take the module's output's place
        self._inside.pop()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if isinstance(error, Exception) and not isinstance(error, CannotTrace):
            place = next((each for each in reversed(self._inside) if each), "")
            where = f" in its module {place!r}" if place else ""
            doing = f", at {self._counter.operation}" if self._counter.operation else ""
            raise CannotTrace(
                f"model {self._name}: it does not run on tensors without memory{where}{doing}: {_why(error)}"
            ) from error


def _why(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
