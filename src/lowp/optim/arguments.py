"""What optimizers are given: hyper-parameters, names, gradients and their scale. Mistakes are refused here, in plain words."""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp.names import SMALL, covers, matches_nothing, unmatched
from lowp.optim.sharding import is_sharded
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.noise import Domain, Noise

GradientScale = float | Mapping[Tensor, float]
LARGEST = torch.finfo(torch.float32).max  # of a hyper-parameter: kernels take them as float32


class Options(TypedDict, total=False):
    """The arguments that all optimizers share; `LowPrecisionOptimizer` describes them."""

    maximize: bool
    update: str | None
    state: Any
    state_scale: str | None
    state_rounding: str | None
    seed: int
    nonfinite: str
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


_DEFAULTS: Options = {
    "maximize": False, "update": None, "state": None, "state_scale": None, "state_rounding": None, "seed": 0,
    "nonfinite": "raise", "foreach": None, "fused": None,
}  # fmt: skip
# What torch's optimizers have and these have not. They are refused, and not kept in groups: what has `capturable` there, Dynamo
# takes for one of torch's own.
_REFUSED = {
    "capturable": "a step cannot be captured in a CUDA graph: the host reads the learning rate and counts the steps",
    "differentiable": "a step is a kernel that autograd does not see",
    "amsgrad": "there is no state for the largest second moment",
}


def options_of(given: Options) -> dict[str, Any]:
    """The shared arguments with their defaults, as they are kept in groups."""
    unknown = sorted(given.keys() - Options.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown argument {unknown[0]!r}; beside its own, an optimizer takes {', '.join(Options.__annotations__)}"
        )
    refuse(given)
    return {**_DEFAULTS, **{name: value for name, value in given.items() if name not in _REFUSED}}


def refuse(settings: Mapping[str, Any]) -> None:
    """An error for what torch's optimizers can do and these cannot."""
    for name, reason in _REFUSED.items():
        if settings.get(name):
            raise ValueError(f"{name}=True is not supported by lowp.optim: {reason}")


def check_options(group: Mapping[str, Any], updates: tuple[str, ...]) -> None:
    """An error for shared arguments of a group that cannot be."""
    refuse(group)
    if group["update"] is not None:
        one_of("update", group["update"], updates)
    one_of("nonfinite", group["nonfinite"], ("raise", "propagate"))
    for name in ("foreach", "fused"):
        if group[name] not in (None, True, False):
            raise ValueError(f"{name} is None, True or False, not {group[name]!r}")
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused cannot both be True")
    if isinstance(group["seed"], Tensor):
        raise TypeError("seed must be an integer, not a tensor")
    Noise.of(Domain.OPTIMIZER, group["seed"], 0, 0)  # refuses what is no seed


def update_of(group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """How weights of a dtype take their updates: as it was asked for, or else stochastically in 16 bits, as torch in 32."""
    return group["update"] or ("nearest" if dtype == torch.float32 else "stochastic")


def number_of(name: str, value: Any) -> float:
    """A hyper-parameter as a number. A tensor of one element is read (on CUDA, that waits for the device)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a number or a tensor of one element, not a tensor of shape {tuple(value.shape)}")
        return value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number or a tensor of one element, not {value!r}")
    return value


def with_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A group whose learning rate is a number, looked at once more: schedules and users change it at any time."""
    rate = number_of("lr", group["lr"])
    at_least("lr", rate)
    return group if rate is group["lr"] else {**group, "lr": rate}


def at_least(name: str, value: Any, least: float = 0.0, below: float | None = None) -> None:
    """A clear error for a hyper-parameter out of range (or NaN, or beyond float32)."""
    number = number_of(name, value)
    if not number >= least or (below is not None and not number < below):
        limit = f"at least {least:g}" + ("" if below is None else f" and below {below:g}")
        raise ValueError(f"{name} must be {limit}, not {number}")
    if number > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:.3g}, the largest float32, not {number:g}")


def betas_of(betas: Any) -> tuple[float, float]:
    """Adam's two decays, as numbers."""
    if not isinstance(betas, Iterable) or len(found := tuple(betas)) != 2:
        raise ValueError(f"betas are two numbers, not {betas!r}")
    for i, beta in enumerate(found):
        at_least(f"betas[{i}]", beta, 0.0, 1.0)
    return number_of("betas[0]", found[0]), number_of("betas[1]", found[1])


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {name}={value!r}; it is one of {', '.join(allowed)}")


def own_name(group: dict[str, Any], i: int) -> str | None:
    """The name that a group's parameter was given with, if it was (`model.named_parameters()`)."""
    return group["param_names"][i] if "param_names" in group else None


def excluded(parameter: Tensor, name: str | None, exclude: Any) -> bool:
    """Biases and norms (all of one dimension), unless told otherwise by a function of the parameter, or name patterns."""
    if exclude is None:
        return parameter.dim() <= 1
    if callable(exclude):
        return bool(exclude(parameter))
    if name is None:
        raise ValueError("exclude= by names needs names: give model.named_parameters() to the optimizer")
    return any(covers(pattern, name) or (pattern == SMALL and parameter.dim() <= 1) for pattern in exclude)


def check_exclude(exclude: Any, groups: Iterable[dict[str, Any]]) -> None:
    """Patterns (names.py) must match something. (Without names, `excluded` raises when it is first asked.)"""
    if exclude is None or callable(exclude):
        return
    if isinstance(exclude, str):
        raise TypeError(f"exclude takes a list of patterns: exclude=[{exclude!r}]")
    names = [name for group in groups for name in group.get("param_names", ())]
    for pattern in unmatched(exclude, names) if names else ():
        raise ValueError(f"exclude: {matches_nothing(pattern, names)}")


def gradient_scale_of(gradient_scale: GradientScale, parameter: Tensor) -> float:
    """What a parameter's gradient was multiplied by."""
    scale = gradient_scale[parameter] if isinstance(gradient_scale, Mapping) else gradient_scale
    if not scale > 0:
        raise ValueError(f"gradient_scale must be positive, not {scale}")
    return float(scale)


def check_gradient(parameter: Tensor) -> None:
    """A parameter's gradient is dense, of the same shape and spread over the ranks in the same way."""
    gradient = parameter.grad
    assert gradient is not None
    plain = type(gradient) is Tensor and type(parameter) in (Tensor, Parameter) and gradient.layout is torch.strided
    if plain and gradient.dtype is torch.float32 and gradient.shape == parameter.shape:
        return  # the usual, found out in few operations: small models take steps of a millisecond
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise TypeError("sparse gradients are not supported: use Embedding(sparse=False)")
    if gradient.shape != parameter.shape or gradient.dtype not in FORMAT_OF_DTYPE:
        raise TypeError(f"a gradient of {gradient.dtype} and shape {tuple(gradient.shape)} does not fit its parameter")
    if is_sharded(parameter) != is_sharded(gradient):
        raise TypeError("a sharded parameter needs a sharded gradient")
    if is_sharded(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        raise TypeError(f"the gradient is placed as {gradient.placements}, its parameter not")  # type: ignore[attr-defined]
