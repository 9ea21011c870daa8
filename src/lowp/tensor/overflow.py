"""Which numbers overflow a format: the one definition, for `lowp quantize`, health, simulate, policies and the wire.

A finite number overflows if rounding it would give more than the largest value, in a format with the same steps and no end.
That is IEEE 754's definition (section 7.4), and what formats with an infinity do: they round first and look at the result. So
450 in e4m3fn does not overflow: it becomes 448, an error of half a step at most, like any other number. 465 does: it would
become 480, which is not there, and becomes NaN, or 448 where rounding saturates.

To nearest, the border lies half a step beyond the largest value. A number on the border itself goes to the even neighbour:
464 in e4m3fn stays (448 has an even code), 61440 in e5m2 overflows. Tables and posits have no next step: half their last one
counts, though they always saturate. An element of a block is compared with the largest element times its block's scale.

The simpler definition "larger than the largest value" was rejected. It would count numbers to which nothing happens that does
not happen to all others, and policies would give their layers a wider format.
"""

import math
from functools import cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat, CodebookFormat, FloatFormat, Format
from lowp.tensor.carrier import exponent_below, last_step
from lowp.tensor.ops import decode, encode


def overflows(x: Tensor, fmt: AnyFormat, rounded: Tensor | None = None) -> Tensor:
    """A mask of the finite numbers of x that overflow.

    Without `rounded`, when rounded to nearest. With it, in the rounding whose result that is, without saturation: there,
    stochastic rounding may take 460 in e4m3fn to NaN and 470 to 448. (If the format has neither infinity nor NaN, the result
    does not tell, and the border to nearest decides.)
    """
    x = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if isinstance(fmt, BlockFormat):
        return _in_blocks(x, fmt)
    if rounded is not None and not math.isfinite(fmt.overflow):
        beyond = (x > fmt.max) | (x < fmt.min) if fmt.signed else x > fmt.max
        return beyond & x.isfinite() & ~rounded.isfinite()
    over = _reaches(x, *border(fmt, negative=False))
    if fmt.signed:
        over = over | _reaches(-x, *border(fmt, negative=True))
    return over & x.isfinite()


def _reaches(x: Tensor, limit: float | Tensor, inclusive: bool) -> Tensor:
    return x >= limit if inclusive else x > limit


@cache
def border(fmt: Format, negative: bool) -> tuple[float, bool]:
    """The magnitude half a step beyond the format's end, and whether it overflows itself: it does if the end's code is odd.

    A border that float32 does not have rounds to one of the numbers beside it. Formats with so long a mantissa end just below
    a power of two: that is the number, it overflows, and it is the first float32 number that does.
    """
    end = abs(fmt.min if negative else fmt.max)
    return end + _next_step(fmt) / 2, _ends_odd(fmt)


def _next_step(fmt: Format) -> float:
    """From the largest value to the next, if there was one. (That may be a wider step than the last.)"""
    if isinstance(fmt, FloatFormat):
        return math.ldexp(1.0, max(exponent_below(fmt.max), fmt.min_exponent) - fmt.mantissa_bits)
    return last_step(fmt)


def _ends_odd(fmt: Format) -> bool:
    if isinstance(fmt, CodebookFormat):
        return True  # its numbers have no next step to tie with
    return fmt.max_code % 2 == 1  # type: ignore[attr-defined]  # all others have one


def _in_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """An element that became the largest one though it lies beyond the border, in units of its block's scale."""
    if x.dim() == 0:
        return _in_blocks(x[None], fmt)[0]
    codes = encode(x, fmt, saturate=True, nan="zero")
    element = fmt.element
    at_the_end = decode(codes.elements, element, dtype=torch.float64).abs() >= element.max
    unit = decode(codes.scales, fmt.scale, dtype=torch.float64)
    if codes.tensor_scale is not None:
        unit = unit * codes.tensor_scale.to(torch.float64)  # exact: at most 28 bits
    unit = unit.repeat_interleave(fmt.size, -1)[..., : x.shape[-1]]
    limit, inclusive = border(element, negative=False)
    beyond = _reaches(x.abs().to(torch.float64), unit * limit, inclusive)
    return at_the_end & beyond & x.isfinite()
