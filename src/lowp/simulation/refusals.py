"""Modules and parameters that cannot be simulated, and why: numbers would escape the rounding without a word."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lowp.compat import is_compiled_module
from lowp.tensor.carrier import CARRIERS

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
_WRAPPERS = {  # by the module that defines them, which need not be imported to know that nobody uses them
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
    ): "has taken its weights apart (FSDP): simulate the model first",
}


def check_module(name: str, module: nn.Module) -> None:
    """A clear error for a module whose numbers would escape."""
    if (why := _why_not(module)) is not None:
        raise ValueError(f"{name or type(module).__name__!r} cannot be simulated: it {why}")
    for key, parameter in module._parameters.items():
        if parameter is not None:
            check_parameter(f"{name}.{key}" if name else key, parameter)


def _why_not(module: nn.Module) -> str | None:
    kind = type(module)
    if is_compiled_module(module):
        return "is compiled: simulate the model first, and compile it then"
    for (home, wrapper), why in _WRAPPERS.items():
        if home in sys.modules and isinstance(module, getattr(sys.modules[home], wrapper)):
            return why
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which has fixed what it computes"
    if isinstance(module, nn.DataParallel):
        return "copies its modules for every pass; take DistributedDataParallel"
    if any(base.__module__.startswith(_QUANTIZED) for base in kind.__mro__):
        return f"computes in integers already ({kind.__name__})"
    if parametrize.is_parametrized(module):
        return "is parametrized; torch.nn.utils.parametrize.remove_parametrizations makes it plain"
    if any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in module._forward_pre_hooks.values()):
        return "makes its weights anew for every pass (weight_norm or spectral_norm); remove that first"
    if "forward" in vars(module):
        return "has a forward of its own, not its class's, which would hide the simulated one"
    if any(isinstance(parameter, UninitializedParameter) for parameter in module._parameters.values()):
        return f"has no weights yet ({kind.__name__}): run the model once before"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return "has max_norm: its forward pass rewrites its weights, which a simulated one cannot"
    return None


def check_parameter(name: str, parameter: Tensor) -> None:
    if hasattr(parameter, "to_local"):
        raise ValueError(f"parameter {name!r} cannot be simulated: it is spread over ranks (DTensor)")
    if parameter.dtype not in CARRIERS:
        have = str(parameter.dtype).removeprefix("torch.")
        raise ValueError(f"parameter {name!r} cannot be simulated: it is {have}, not float64, float32, float16 or bfloat16")
