"""Which lanes give the exact result: float64 always does, float32 is two to four times as fast.

float64, rounding to odd: products of float32 numbers have 48 bits, formats 24, and no exponent comes near the end of the
range.

float32 needs proofs. Let p be the digits of `accumulate`, q those of an addend x, |x| <= 2^X, and let s, a number of the
format, be a multiple of 2^u. For float32 lanes at all:

- The product is exact: the operands' digits add up to 24 at most, its last bit is worth 2^-149 or more, X <= 126. (Or it is
  defined by float32: `integer_add`, and `multiply="fp32"`, whose rounding to nearest the chip's multiplication is.)
- Nothing overflows in float32 that would not in the format: the format ends below 2^127, or it has infinities and rounds to
  nearest, which then lets the same sums become infinite.

*To odd* needs p + 2 <= 24. *Plain* additions are right in three cases:

1. The format is float32 and rounds to nearest: the chip's rounding is R itself.
2. All sums are exact: everything is a multiple of 2^min(u, low) and less than 24 binades above it. Any mode.
3. To nearest, where p + max(p, q) + 2 <= 24 and X <= u + 23 (or q <= p, but not for posits). Proof: float32's rounding is
   monotonic, so harm is done only if an inexact sum z becomes a number D at which R changes its mind, a tie. Then |z - D|
   <= 2^(t - 24), t being z's exponent. Let z = L + S, |S| <= |L|. As z is inexact, S ends below 2^(t - 23): |S| < 2^(t - 24
   + its digits). D is a multiple of 2^(t - p - 1), L of 2^(t - its digits). Were D another number than L, they would be
   further apart than S can bridge: 2^(t - max(p + 1, digits of L)) against 2^(t - 24 + digits of S). So L = D is the tie
   itself, and |S| <= 2^(t - 24). If L = s, that is a number of the format and no tie. If L = x, S = s is at least 2^u, so t
   >= u + 24 > X; or x, with q <= p digits among numbers of that size, is a number of the format. (Posits have fewer digits
   far from 1.)

In directed modes a sum that float32 rounds to a number of the format has lost what should move it: case 3 is for nearest
alone. Stochastic rounding counts all bits of the exact sum, so it takes float64. Codebooks have ties of any number of
digits: float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.formats import FixedFormat, Format, PositFormat, Rounding
from lowp.formats.floats import FP32, FloatFormat
from lowp.tensor.carrier import F32, F64, carrier_for, exponent_below, is_grid
from lowp.tensor.matmul.arithmetic import Arithmetic
from lowp.tensor.matmul.facts import Facts
from lowp.tensor.matmul.quire import MOST_BINS, Quire, bin_width
from lowp.tensor.matmul.steps import GENERAL, Lanes, Steps


@dataclass(frozen=True)
class _LaneShape:
    """A format's digits p, and the exponents of what its numbers are multiples of and stay below."""

    digits: int
    unit: int
    top: int

    @staticmethod
    def of(fmt: Format) -> "_LaneShape | None":
        top = exponent_below(fmt.max) + 1
        match fmt:
            case FloatFormat():
                return _LaneShape(fmt.mantissa_bits + 1, fmt.min_exponent - fmt.mantissa_bits, top)
            case FixedFormat():
                return _LaneShape(fmt.bits - 1, -fmt.fraction_bits, top)
            case PositFormat():
                return _LaneShape(max(1, fmt.width - 2 - fmt.exponent_size), -fmt.max_exponent, top)
        return None


@dataclass(frozen=True)
class Operands:
    """The facts of both matrices and of the bias, and the number of addends."""

    a: Facts
    b: Facts
    bias: Facts
    addends: int


Condition = Callable[[Operands], Any]  # a truth value, or a tensor of one on CUDA


@dataclass(frozen=True)
class Choice:
    """Lanes, and when they are right; None: always."""

    lanes: Lanes
    condition: Condition | None


@dataclass(frozen=True)
class _Addend:
    """x: of how many digits, a multiple of 2^low, at most 2^reach; and whether float32 computes it rightly."""

    digits: Any
    low: Any
    reach: Any
    right: Any


def _product(arithmetic: Arithmetic, of: Operands) -> _Addend:
    digits, low, top = of.a.digits + of.b.digits, of.a.low + of.b.low, of.a.top + of.b.top
    right = (digits <= 24) & (low >= -149) & (top <= 126)
    if arithmetic.approximate:
        digits, right = _larger(of.a.digits, of.b.digits), top <= 126
    fmt = arithmetic.product_format
    if fmt is None:
        return _Addend(digits, low, top - 1, right)
    if fmt == FP32 and arithmetic.mode is Rounding.NEAREST:
        right = top <= 126
    shape = _LaneShape.of(fmt)
    if shape is None:  # a codebook's entries are float32 numbers of any kind
        return _Addend(24, -149, exponent_below(fmt.max) + 1, right)
    if is_grid(fmt):  # rounding leads to the next power of two at most, or to the smallest number
        return _Addend(shape.digits, shape.unit, _larger(_smaller(top, shape.top), shape.unit), right)
    return _Addend(shape.digits, shape.unit, shape.top, right)


def _larger(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.maximum(torch.as_tensor(x), torch.as_tensor(y)) if isinstance(y, Tensor) else x.clamp(min=y)
    return max(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return -_larger(-x, -y)


def _in_float32(arithmetic: Arithmetic, odd: bool) -> Condition | None:
    """When float32 lanes are right, to odd or plainly; None: never."""
    fmt, mode = arithmetic.sum_format, arithmetic.mode
    shape, product = _LaneShape.of(fmt), arithmetic.product_format
    nearest = mode in (Rounding.NEAREST, Rounding.NEAREST_AWAY)
    fit = all(carrier_for(f, torch.float32) is F32 for f in (fmt, product) if f is not None)
    if shape is None or not fit or arithmetic.stochastic or not (shape.top <= 127 or (nearest and fmt.has_inf)):
        return None
    p, is_lane = shape.digits, fmt == FP32 and mode is Rounding.NEAREST
    if odd and p + 2 > 24:
        return None

    def right(of: Operands) -> Any:
        x = _product(arithmetic, of)
        possible = x.right & (of.bias.top <= 126)
        if odd or is_lane:
            return possible
        exact = _larger(x.reach, shape.top) + 1 - _smaller(x.low, shape.unit) <= 24
        if p + 2 > 24:  # a bias is always added to odd
            exact = exact & (of.bias.digits == 0)
        if not nearest:
            return possible & exact
        few = (p + x.digits + 2 <= 24) & (2 * p + 2 <= 24)
        near = x.reach < shape.unit + 24
        if not isinstance(fmt, PositFormat):
            near = near | (x.digits <= p)
        return possible & (exact | (few & near))

    return right


@lru_cache(maxsize=256)
def choices(arithmetic: Arithmetic) -> tuple[Choice, ...]:
    """The lanes for an arithmetic, the fastest first; the last are always right."""
    if arithmetic.quire:
        return tuple(Choice(Lanes(F64, bins=n), None if n == MOST_BINS else _enough_bins(arithmetic, n)) for n in BINS)
    exact_product = arithmetic.multiply is None and not arithmetic.approximate
    if exact_product and arithmetic.sum_format == FP32 and arithmetic.mode is Rounding.NEAREST:
        return (Choice(Lanes(F32, odd=False), None),)  # the chip's fused multiply-add, whatever the data
    found = []
    for odd in (False, True):
        condition = _in_float32(arithmetic, odd)
        if condition is not None:
            found.append(Choice(Lanes(F32, odd, fused=arithmetic.product_format != FP32), condition))
    return (*found, Choice(GENERAL, None))


BINS = (1, 2, 4, 8, 16, MOST_BINS)


def _span(arithmetic: Arithmetic, of: Operands) -> tuple[Any, Any]:
    """All addends of a quire are multiples of 2^first and at most 2^second. (Without any, second is the smaller one.)"""
    x = _product(arithmetic, of)
    return _smaller(x.low, of.bias.low), _larger(x.reach + 1, of.bias.top)


def _enough_bins(arithmetic: Arithmetic, bins: int) -> Condition:
    def enough(of: Operands) -> Any:
        low, top = _span(arithmetic, of)
        return top - low <= bins * bin_width(of.addends)

    return enough


def cuts(arithmetic: Arithmetic, of: Operands, bins: int, device: torch.device) -> Tensor:
    """The numbers at which a quire's bins cut: 1.5 * 2^52 times the unit of each but the lowest."""
    low = torch.as_tensor(_span(arithmetic, of)[0], device=device).clamp(-400, 400)  # without addends, anywhere
    units = low + bin_width(of.addends) * torch.arange(1, bins, device=device)
    fields = (units + 52 + F64.bias).clamp(max=2 * F64.bias)  # those above the largest addend: nothing gets that high
    return ((fields << F64.fraction_bits) + (1 << (F64.fraction_bits - 1))).view(torch.float64)


@lru_cache(maxsize=256)
def steps_of(arithmetic: Arithmetic, lanes: Lanes) -> Steps:
    return Quire(arithmetic, lanes) if arithmetic.quire else Steps(arithmetic, lanes)
