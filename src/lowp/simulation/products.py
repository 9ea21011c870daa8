"""The operands of a layer's matrix products in a narrow format, as hardware with such products takes them.

A linear layer has three products, and each sums over another dimension. Hardware for block formats (MXFP8, MXFP4, NVFP4) wants
the blocks of both operands to lie along that dimension, so the same tensor is rounded twice, along different dimensions:

    forward            Y  = X W'      sums over inputs
    to the layer below dX = dY W      sums over outputs
    for the weights    dW = dY' X     sums over samples

`simulate`'s roles round a tensor once, where it comes into being; they cannot say this. Sums are the model's own dtype: the
hardware sums in FP32. What each option is for (the recipes of MXFP4 and NVFP4 training, arXiv 2502.20586 and 2509.25149):

- `stochastic`: dY is rounded stochastically. Rounding to nearest has a bias, which adds up over the steps. (A part of it stays:
  the largest number of a block saturates where its scale is rounded down. 2502.20586 takes 3/4 of dY against that; here not.)
- `square`: weights have blocks of n x n numbers instead of n, so that forward and backward see the same rounded weight.
- `hadamard n`: before the third product, both operands are multiplied by a random orthogonal matrix along the samples, n at a
  time: signs, then Hadamard's matrix over sqrt(n). It cancels in the product, and spreads an outlier over its block. n is 4,
  16, 64 or 256, so that sqrt(n) is a power of two.
- `errors FORMAT`: another format for dY (MXFP8 takes e5m2 there).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowp.compat import dispatch_mode_count
from lowp.formats import BlockFormat
from lowp.formats import format as parse_format
from lowp.names import did_you_mean
from lowp.simulation.accumulate import MULTIPLIES
from lowp.tensor.noise import Domain, KeySource, Noise
from lowp.tensor.ops import quantize

HADAMARD_SIZES = (4, 16, 64, 256)
_WORDS = ("stochastic", "square", "hadamard", "errors")


@dataclass(frozen=True)
class Products:
    """How the operands of a linear layer's products are rounded. Formats are block formats, or their names.

    Args:
        format: of inputs and weights, and of errors unless they have their own.
        errors: of the gradients that flow back.
        stochastic: round these stochastically.
        square: blocks of weights are n x n.
        hadamard: how many samples a random rotation mixes before the product for the weights; 0: none.
    """

    format: "BlockFormat | str"
    errors: "BlockFormat | str | None" = None
    stochastic: bool = False
    square: bool = False
    hadamard: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_format(self.format))
        object.__setattr__(self, "errors", parse_format(self.format if self.errors is None else self.errors))
        for fmt in (self.format, self.errors):
            if not isinstance(fmt, BlockFormat):
                raise ValueError(
                    f"operands are rounded in blocks, and {fmt} has none; block({fmt}, 32, e8m0fnu) is such a format"
                )
        if self.hadamard not in (0, *HADAMARD_SIZES):
            raise ValueError(f"hadamard mixes {', '.join(map(str, HADAMARD_SIZES))} samples (0: none), not {self.hadamard!r}")

    @classmethod
    def parse(cls, text: str) -> "Products":
        """From `str(products)`: a format, then words: "nvfp4, stochastic, square, hadamard 16"."""
        first, *words = _split(text)
        options: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition(" ")
            if name in ("stochastic", "square") and not value:
                options[name] = True
            elif name == "hadamard" and value.strip().isdecimal():
                options[name] = int(value)
            elif name == "errors" and value:
                options[name] = value.strip()
            else:
                hint = did_you_mean(name, _WORDS, f"there are {', '.join(_WORDS)}")
                raise ValueError(f"{word!r} says nothing of products; {hint}")
        return cls(first, **options)

    def __str__(self) -> str:
        words = [str(self.format)]
        words += [f"errors {self.errors}"] if self.errors != self.format else []
        words += [word for word in ("stochastic", "square") if getattr(self, word)]
        words += [f"hadamard {self.hadamard}"] if self.hadamard else []
        return ", ".join(words)

    @cached_property
    def _tiles(self) -> BlockFormat:
        return replace(self.format, size=self.format.size**2)  # type: ignore[arg-type,union-attr]

    def operand(self, x: Tensor, axis: int) -> Tensor:
        """An input or a weight, for a product that sums over `axis`."""
        return quantize(x, self.format, axis=axis)

    def weight(self, weight: Tensor, axis: int) -> Tensor:
        return _in_tiles(weight, self._tiles) if self.square else self.operand(weight, axis)

    def error(self, x: Tensor, axis: int, noise: Noise) -> Tensor:
        rounding = {"rounding": "stochastic", "seed": noise} if self.stochastic else {}
        return quantize(x, self.errors, axis=axis, **rounding)  # type: ignore[arg-type]


def _split(text: str) -> list[str]:
    """At commas that are not in brackets: `block(e2m1fn, 16, e4m3fn), square` are two parts."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _in_tiles(weight: Tensor, fmt: BlockFormat) -> Tensor:
    """A matrix rounded in squares: each is laid out as one row of a block. Zeros fill up what the edges lack."""
    side = math.isqrt(fmt.size)
    rows, columns = weight.shape
    filled = F.pad(weight, (0, -columns % side, 0, -rows % side))
    high, wide = filled.shape[0] // side, filled.shape[1] // side
    tiles = filled.view(high, side, wide, side).transpose(1, 2).reshape(high * wide, fmt.size)
    back = quantize(tiles, fmt).view(high, wide, side, side).transpose(1, 2).reshape(filled.shape)
    return back[:rows, :columns]


def _rotation(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hadamard's matrix over sqrt(size), behind random signs. One for all layers and steps, as the signs cost nothing then."""
    # What is made in a mode (of fake tensors, say) is the mode's own.
    make = _rotation_now if dispatch_mode_count() or torch.compiler.is_compiling() else _rotation_kept
    return make(size, seed, dtype, device)


def _rotation_now(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (size,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * 2 - 1
    return (matrix * signs / math.isqrt(size)).to(device, dtype)


_rotation_kept = lru_cache(maxsize=32)(_rotation_now)


def _rotated(x: Tensor, size: int, seed: int) -> Tensor:
    """Each `size` rows of a matrix mixed; what is missing of the last ones is zeros."""
    filled = F.pad(x, (0, 0, 0, -len(x) % size))
    groups = filled.view(-1, size, x.shape[1])
    return (_rotation(size, seed, x.dtype, x.device) @ groups).reshape(filled.shape)


class _Linear(torch.autograd.Function):
    """The three products without a bias; `x` is a matrix, a row for each sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products, noise: Callable[[int], Noise], seed: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = products, noise, seed
        return products.operand(x, -1) @ products.weight(weight, -1).t()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        products, noise, seed = ctx.how
        down = of_weight = None
        if ctx.needs_input_grad[0]:
            down = products.error(error, -1, noise(0)) @ products.weight(weight, 0)
        if ctx.needs_input_grad[1]:
            if products.hadamard:
                error, x = (_rotated(each, products.hadamard, seed) for each in (error, x))
            of_weight = products.error(error, 0, noise(1)).t() @ products.operand(x, 0)
        return down, of_weight, None, None, None


class RoundedProducts(TorchFunctionMode):
    """For one forward pass of a layer. `number`, `seed` and `moment` key stochastic rounding; each product has its own."""

    def __init__(self, products: Products, layer: str, number: int, seed: int, moment: "int | Tensor | KeySource") -> None:
        super().__init__()
        self._products, self._layer, self._number, self._seed, self._moment = products, layer, number, seed, moment
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in MULTIPLIES:
            name = getattr(func, "__name__", str(func))
            raise ValueError(
                f"layer {self._layer!r} multiplies in {name}, whose operands cannot be rounded, only linear layers' can; leave "
                f"it out: layers={{{self._layer!r}: {{'products': None}}}}"
            )
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        first = 2 * self._calls
        self._calls += 1

        def noise(which: int) -> Noise:
            return Noise.of(Domain.SIMULATED_PRODUCTS, self._seed, self._moment, self._number, first + which)

        rows = input.reshape(-1, input.shape[-1])
        product = _Linear.apply(rows, weight, self._products, noise, self._seed).view(*input.shape[:-1], len(weight))  # type: ignore[union-attr]
        return product if bias is None else product + bias
