"""One tensor rounded on its way: forward to one format, its gradient to another, each as its `Target` says.

The gradient passes straight through the rounding of the value. With `scaled`, numbers are multiplied by a power of two before
they are rounded and divided by it afterwards. Neither multiplication rounds, so the format's grid is moved to where the numbers
are: the largest finite one lands in the format's top binade, as high as it can without leaving the range.

1. The largest magnitude is found among the bits, as integers: no logarithm, no rounding, and nobody waits for the device.
2. With max = 2^e * 1.f, and the format's own maximum 2^E * 1.F, the exponent of the power is E - e, or one less if f > F.
   It ends at +-126 (float64: 1022), so that the power and its inverse are normal numbers.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.tensor.carrier import CARRIERS, F32, F64, Carrier, exponent_below, last_step
from lowp.tensor.core import quantize_operation
from lowp.tensor.dynamo import in_graph, teach_dynamo
from lowp.tensor.noise import KEY_SIZE, Noise, key_tensor
from lowp.tensor.ops import quantize

_ONE_KEY = 1 << 30  # elements


@dataclass(frozen=True)
class Target:
    """What becomes of a tensor: its format, and how it gets there."""

    format: str
    rounding: str
    scaled: bool
    noise: Noise | None = None  # for stochastic rounding
    overflows: Tensor | None = None  # where finite numbers that leave the format's range are counted, if they are

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling() and teach_dynamo():
            key = () if self.noise is None else (self.noise.seed, self.noise.step, self.noise.stream)
            rounded = _round_in_graph(x, self.format, self.rounding, self.scaled, *key)
        else:
            rounded = _round(x, self.format, self.rounding, self.scaled, self.noise)
        if self.overflows is not None:
            self.overflows.add_(count_overflows(x.detach(), rounded.detach(), self.format))
        return rounded


def passed(x: Tensor, ahead: Target | None, behind: Target | None) -> Tensor:
    """`x`, rounded to `ahead`, whose gradient is rounded to `behind`. None leaves either alone."""
    return x if ahead is None and behind is None else _Passage.apply(x, ahead, behind)  # type: ignore[return-value]


class _Passage(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, ahead: Target | None, behind: Target | None) -> Tensor:
        # Not a view (which block formats return): autograd refuses to change one of ours in place, as `nn.ReLU(inplace=True)`
        # does. A compiler knows no in-place operations, and has no views to ask for.
        rounded = x if ahead is None else ahead(x)
        is_own = ahead is not None and (torch.compiler.is_compiling() or rounded._base is None)
        return rounded if is_own else rounded.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.behind = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # Straight through once more: second derivatives exist, and are rounded as the gradient is.
        return passed(gradient, ctx.behind, None), None, None


def count_overflows(x: Tensor, rounded: Tensor, format: str) -> Tensor:
    """How many finite numbers left the format's range when they were rounded."""
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        return _overflows_in_graph(x, rounded, format)
    left = ~rounded.isfinite()
    if (limit := _limit(parse_format(format))) is not None:
        left = left | (_wide(x).abs() >= limit)
    return (left & x.isfinite()).sum()


@cache
def _limit(fmt: AnyFormat) -> float | None:
    """Where a format overflows that has no value for it: half a step beyond its largest. (Blocks have their scales.)"""
    if isinstance(fmt, BlockFormat) or not math.isfinite(fmt.overflow):
        return None
    return fmt.max + last_step(fmt) / 2


@in_graph
def _overflows_in_graph(x: Tensor, rounded: Tensor, format: str) -> Tensor:
    return count_overflows(x, rounded, format)


def _round(x: Tensor, format: str, rounding: str, scaled: bool, noise: Noise | None) -> Tensor:
    """`x` rounded to the format's grid, or to that grid where a power of two moves it."""
    if not scaled or x.numel() == 0:
        return _round_as_it_is(x, format, rounding, noise)
    wide, carrier = _wide(x), F64 if x.dtype == torch.float64 else F32
    shift = _fitting_shift(wide, carrier, parse_format(format))
    rounded = _round_as_it_is(wide * _power_of_two(shift, carrier), format, rounding, noise)
    return (rounded * _power_of_two(-shift, carrier)).to(x.dtype)


def _round_as_it_is(x: Tensor, format: str, rounding: str, noise: Noise | None) -> Tensor:
    """`quantize`, whose noise in compiled code would be a hundred small operations: here it is one call, `_key_at`."""
    fmt = parse_format(format)
    if noise is None or not isinstance(noise.step, Tensor) or isinstance(fmt, BlockFormat) or x.numel() > _ONE_KEY:
        return quantize(x, fmt, rounding, seed=noise)
    operation = quantize_operation(fmt, x.dtype, rounding, False, x.dtype)
    tables = tuple(table.tensor(x.device) for table in operation.tables)
    key = _key_at(noise.step, noise.seed, noise.stream, x.device)  # type: ignore[arg-type]  # the seed is an integer
    return operation(x.detach().view(CARRIERS[x.dtype].storage), tables, key).view(x.dtype)


@in_graph
def _round_in_graph(x: Tensor, format: str, rounding: str, scaled: bool, *key: Any) -> Tensor:
    return _round(x, format, rounding, scaled, Noise(*key) if key else None)


@torch.library.custom_op("lowp::noise_key_at", mutates_args=())
def _key_at(step: Tensor, seed: int, stream: int, device: torch.device) -> Tensor:
    """The key for a step that is a tensor, on the host: reading it there waits for nobody."""
    return key_tensor(Noise(seed, int(step), stream), 0, device)


@_key_at.register_fake
def _(step: Tensor, seed: int, stream: int, device: torch.device) -> Tensor:
    return torch.empty(KEY_SIZE, dtype=torch.int32, device=device)


def _wide(x: Tensor) -> Tensor:
    """In float32 or float64, which have the exponents that scaling needs."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _fitting_shift(wide: Tensor, carrier: Carrier, fmt: AnyFormat) -> Tensor:
    """The exponent of the power of two that puts the largest finite magnitude just below the format's `scaled_max`."""
    magnitude = wide.detach().view(carrier.storage) & carrier.magnitude
    largest = torch.where(magnitude < carrier.infinity, magnitude, torch.zeros_like(magnitude)).amax()
    top = exponent_below(fmt.scaled_max)
    fraction = math.floor((fmt.scaled_max / 2.0**top - 1) * (1 << carrier.fraction_bits))
    exponent = (largest >> carrier.fraction_bits) - carrier.bias
    beyond = (largest & ((1 << carrier.fraction_bits) - 1)) > fraction
    return (top - exponent - beyond.to(carrier.storage)).clamp(1 - carrier.bias, carrier.bias - 1)


def _power_of_two(exponent: Tensor, carrier: Carrier) -> Tensor:
    return ((exponent + carrier.bias) << carrier.fraction_bits).view(carrier.dtype)
