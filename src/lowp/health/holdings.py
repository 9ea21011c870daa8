"""What modules and optimizers hold, whether an operation touches it or not: parameters, their gradients, buffers, states.

`p.data = wide`, a layer that is never called, a state that was loaded: no operation need ever show these to a dispatch mode.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lowp.compat import is_traceable_wrapper_subclass


class Holding(NamedTuple):
    what: str  # "parameter weight", "gradient of weight", "buffer running_mean", "state momentum_buffer"
    owner: nn.Module | Optimizer
    tensor: Tensor


def of_module(module: nn.Module) -> Iterator[Holding]:
    """Of a module and all that are in it."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield from _unwrapped(f"parameter {name}", part, parameter)
                if parameter.grad is not None:
                    yield from _unwrapped(f"gradient of {name}", part, parameter.grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield from _unwrapped(f"buffer {name}", part, buffer)


def of_optimizer(optimizer: Optimizer) -> Iterator[Holding]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _unwrapped("parameter", optimizer, parameter)
            if parameter.grad is not None:
                yield from _unwrapped("gradient", optimizer, parameter.grad)
    for state in optimizer.state.values():
        for name, tensor in _named_tensors(state, ""):
            yield from _unwrapped(f"state {name}", optimizer, tensor)


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _named_tensors(item, name)


def _unwrapped(what: str, owner: nn.Module | Optimizer, tensor: Tensor) -> Iterator[Holding]:
    """A tensor, or the tensors inside of a wrapper: the wrapper's own dtype need not be that of any memory."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        yield Holding(what, owner, tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _unwrapped(what, owner, getattr(tensor, name))
    else:
        for value in vars(tensor).values():
            if isinstance(value, Tensor):
                yield from _unwrapped(what, owner, value)
