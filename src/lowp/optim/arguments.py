"""What optimizers are given: hyper-parameters, names, gradients and their scale. Mistakes are refused here, in plain words."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowp.optim.sharding import is_sharded
from lowp.tensor.carrier import FORMAT_OF_DTYPE

GradientScale = float | Mapping[Tensor, float]


def options_of(
    update: str,
    state: Any,
    state_scale: str | None,
    state_rounding: str | None,
    seed: int,
    nonfinite: str,
    maximize: bool,
) -> dict[str, Any]:
    """The arguments that all optimizers share, as they are kept in groups."""
    return {
        "update": update, "state": state, "state_scale": state_scale, "state_rounding": state_rounding, "seed": seed,
        "nonfinite": nonfinite, "maximize": maximize,
    }  # fmt: skip


def at_least(name: str, value: float, least: float = 0.0, below: float | None = None) -> None:
    """A clear error for a hyper-parameter out of range (or NaN)."""
    if not value >= least or (below is not None and not value < below):
        limit = f"at least {least:g}" + ("" if below is None else f" and below {below:g}")
        raise ValueError(f"{name} must be {limit}, not {value}")


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
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def scale_of(gradient_scale: GradientScale, parameter: Tensor) -> float:
    """What a parameter's gradient was multiplied by."""
    scale = gradient_scale[parameter] if isinstance(gradient_scale, Mapping) else gradient_scale
    if not scale > 0:
        raise ValueError(f"gradient_scale must be positive, not {scale}")
    return float(scale)


def check_gradient(parameter: Tensor) -> None:
    """A parameter's gradient is dense, of the same shape and spread over the ranks in the same way."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise TypeError("sparse gradients are not supported: use Embedding(sparse=False)")
    if gradient.shape != parameter.shape or gradient.dtype not in FORMAT_OF_DTYPE:
        raise TypeError(f"a gradient of {gradient.dtype} and shape {tuple(gradient.shape)} does not fit its parameter")
    if is_sharded(parameter) != is_sharded(gradient):
        raise TypeError("a sharded parameter needs a sharded gradient")
    if is_sharded(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        raise TypeError(f"the gradient is placed as {gradient.placements}, its parameter not")  # type: ignore[attr-defined]
