"""Arithmetic inside a layer: where a module multiplies matrices, sums and products are rounded as `lowp.Arithmetic` says.

A layer with accumulators of its own runs its forward pass inside a torch function mode, which sees every torch function that
the module calls, whoever wrote the module:

1. Those that multiply and add (`F.linear`, convolutions, products of matrices) are `lowp.matmul` and its kin; gradients follow.
2. Those that do so inside (attention, recurrent layers) are taken apart into the first kind (attention.py, recurrent.py).
3. Those that do so and have no narrow counterpart are refused by name: their sums would silently stay wide.
4. All others are what they were.

Sums that are no products (a mean, a norm's statistics) are not accumulators of a multiplier and stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowp.compat import RECURRENT
from lowp.simulation.attention import multi_head_attention, scaled_dot_product_attention
from lowp.simulation.recurrent import gru, gru_cell, lstm, lstm_cell, rnn_relu, rnn_relu_cell, rnn_tanh, rnn_tanh_cell
from lowp.tensor.matmul import Arithmetic, conv2d, linear, matmul
from lowp.tensor.noise import Domain, KeySource, Noise


class NarrowSums(TorchFunctionMode):
    """For one forward pass of a layer. Its `number`, `seed` and `step` key stochastic rounding; each product has its own."""

    def __init__(self, arithmetic: Arithmetic, layer: str, number: int, seed: int, step: "int | Tensor | KeySource") -> None:
        super().__init__()
        self._options = arithmetic.options
        self._layer = layer
        self._number, self._seed, self._step = number, seed, step
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return _PRODUCTS[func](self._arguments(), *args, **kwargs)
        if func in _TAKEN_APART:
            with self:
                return _TAKEN_APART[func](*args, **kwargs)
        if func in _REFUSED:
            name = getattr(func, "__name__", str(func))
            raise ValueError(
                f"layer {self._layer!r} sums products in {name}, which has no narrow accumulators; leave it out: "
                f"layers={{{self._layer!r}: {{'accumulate': None}}}}"
            )
        return func(*args, **kwargs)

    def _arguments(self) -> dict[str, Any]:
        """For the next product."""
        noise = Noise.of(Domain.SIMULATED_SUMS, self._seed, self._step, self._number, self._calls)
        self._calls += 1
        return {**self._options, "seed": noise}


Options = dict[str, Any]


def _linear(options: Options, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight, bias, **options)


def _conv2d(options: Options, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return conv2d(input, *args, **kwargs, **options)


def _conv1d(
    options: Options,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution of images one pixel high."""
    pads = padding if isinstance(padding, str) else (0, _single(padding))
    geometry = (1, _single(stride)), pads, (1, _single(dilation)), groups
    result = conv2d(input.unsqueeze(-2), weight.unsqueeze(-2), bias, *geometry, **options)
    return result.squeeze(-2)


def _single(number: Any) -> int:
    return number if isinstance(number, int) else number[0]


def _matmul(options: Options, input: Tensor, other: Tensor) -> Tensor:
    return matmul(input, other, **options)


def _reversed_matmul(options: Options, input: Tensor, other: Tensor) -> Tensor:
    return matmul(other, input, **options)


def _addmm(options: Options, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A bias along the columns is one more addend of the sums; anything else is added to their result."""
    if beta == 1 and alpha == 1 and input.dim() == 1 and mat1.dim() == 2:
        return linear(mat1, mat2.t(), input, **options)
    return beta * input + alpha * matmul(mat1, mat2, **options)


def _both(*names: str) -> list[Any]:
    """A function of torch and the method of a tensor."""
    return [getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)]


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.conv1d: _conv1d,
    torch.conv2d: _conv2d,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _reversed_matmul,
    **dict.fromkeys([*_both("matmul", "mm", "bmm", "mv", "dot"), torch.linalg.matmul], _matmul),
    **dict.fromkeys(_both("addmm", "baddbmm", "addmv"), _addmm),
}

_TAKEN_APART: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    RECURRENT.lstm: lstm,
    RECURRENT.gru: gru,
    RECURRENT.rnn_tanh: rnn_tanh,
    RECURRENT.rnn_relu: rnn_relu,
    RECURRENT.lstm_cell: lstm_cell,
    RECURRENT.gru_cell: gru_cell,
    RECURRENT.rnn_tanh_cell: rnn_tanh_cell,
    RECURRENT.rnn_relu_cell: rnn_relu_cell,
}

_REFUSED = {
    torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, torch.einsum, torch.tensordot,
    torch.bilinear, F.bilinear, torch.cdist, torch.chain_matmul, torch.linalg.multi_dot,
    *_both("addbmm", "inner"),
}  # fmt: skip

MULTIPLIES = frozenset({*_PRODUCTS, *_TAKEN_APART, *_REFUSED})  # every function that sums products
