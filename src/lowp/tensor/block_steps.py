"""Few elements, as in mxfp4 and nvfp4: a number is compared with every step between two of them, in its own stored integers.

A block computes its steps and the multiples of its unit once, in float32. An element then takes two operations for each step
and no float: on a CPU half of what a quotient in float64 takes. (On a GPU every thread would compute steps for few elements.)

**Exactness.** A midpoint between elements, or an element, times a scale is a float32 number c of few bits. c * whole, `whole`
being the tensor's scale where there is one, is rounded to the float32 number next to it, and the error of that is computed
exactly: `whole` is cut into two halves of 12 bits, whose products with c are float32 numbers, down to a `lowest_whole`.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lowp.formats import BlockFormat
from lowp.formats.block import significant_bits
from lowp.formats.floats import FloatFormat
from lowp.tensor.block_programs import BlockProgram
from lowp.tensor.carrier import CARRIERS, F32, exponent_below
from lowp.tensor.table import bits_of_number

_HALF = 12  # bits of float32's 24


def few_elements(fmt: BlockFormat) -> bool:
    """At most eight magnitudes, signs and no special value; products of few bits."""
    element = fmt.element
    plain = isinstance(element, FloatFormat) and element.has_negative_zero and not element.has_inf and not element.has_nan
    few_bits = significant_bits(element) + 1 + significant_bits(fmt.scale) <= _HALF
    return plain and element.bits <= 4 and few_bits and not fmt.scale.has_inf


def suits(fmt: BlockFormat) -> bool:
    """Few elements, and scales that are powers of two, or a scale for the tensor beside them."""
    return few_elements(fmt) and (fmt.tensor_scale or fmt.power_of_two_scale)


def lowest_whole(fmt: BlockFormat) -> float:
    """The least scale of a tensor for which steps are exact: the last bit of every product is a float32 number."""
    last = exponent_below(fmt.element.smallest) - 1 + exponent_below(fmt.scale.smallest) - F32.fraction_bits
    return 2.0 ** (F32.min_exponent - F32.fraction_bits - last)


def _magnitudes(fmt: BlockFormat) -> list[float]:
    """Of the elements, from zero up."""
    return [value for value in fmt.element.values if value >= 0]


def product(number: float | Tensor, scale: Tensor, whole: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """number * scale * whole, rounded to float32, and by how much the exact product exceeds that (None: it is exact)."""
    exact = scale * number
    if not whole:
        return exact, None
    near = exact * whole[0]
    high = (whole[0].view(torch.int32) >> _HALF << _HALF).view(torch.float32)
    return near, (exact * high - near) + exact * (whole[0] - high)


def steps(fmt: BlockFormat, scale: Tensor, whole: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """float32 -> `dtype`'s integers: the bits that a magnitude must exceed to be rounded up to each element.

    The float32 number next to a midpoint is one bit too large where it exceeds the midpoint, or is the midpoint and that is
    rounded up (to an even rank). What is true of float32 numbers is true of those of a narrower dtype: the largest of them that
    does not exceed the float32 one is their step.
    """
    found, own = [], CARRIERS[dtype]
    for rank, (low, high) in enumerate(pairwise(_magnitudes(fmt)), 1):
        near, error = product((low + high) / 2, scale, whole)
        even = rank % 2 == 0
        over = int(even) if error is None else (error <= 0 if even else error < 0).to(torch.int32)
        step = near.view(torch.int32) - over
        if dtype == torch.bfloat16:
            step = step >> 16  # its upper half
        elif dtype == torch.float16:
            narrow = step.view(torch.float32).to(dtype)
            step = own.bits(narrow.view(own.storage)) - (narrow.to(torch.float32) > step.view(torch.float32)).to(torch.int32)
        found.append(own.store(step))
    return found


def multiples(fmt: BlockFormat, scale: Tensor, whole: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """float32 -> `dtype`'s integers: each magnitude above zero times the unit.

    For 16 bits rounded to odd first: toward zero, and the last bit says that something was cut off. Rounding to nearest then
    sees what the exact product would show it.
    """
    found, own = [], CARRIERS[dtype]
    for number in _magnitudes(fmt)[1:]:
        near, error = product(number, scale, whole)
        near = near if dtype == torch.float32 else to_odd(near, error)
        found.append(near.to(dtype).view(own.storage))
    return found


def to_odd(near: Tensor, error: Tensor | None) -> Tensor:
    """Positive products rounded to odd, from what `product` gives."""
    if error is None:
        return near
    over = (error < 0).to(torch.int32)
    inexact = over | (error > 0).to(torch.int32)  # not where the product is infinite, and its error NaN
    return (near.view(torch.int32) - over | inexact).view(torch.float32)


def foreign_multiples(fmt: BlockFormat, scale: Tensor, whole: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The same for any scale, that other programs wrote, and zero's multiple first: NaN has no sign, and zero may be NaN."""
    own = CARRIERS[dtype]
    size, negative = scale.abs(), scale.view(torch.int32) < 0
    zero = product(0.0, size, whole)[0]
    products = [zero.to(dtype).view(own.storage), *multiples(fmt, size, whole, dtype)]
    found = []
    for bits in products:
        signed = torch.where(negative, bits ^ own.sign, bits)
        found.append(torch.where((bits & own.magnitude) > own.infinity, torch.full_like(bits, own.nan), signed))
    return found


def _ranks(fmt: BlockFormat) -> range:
    return range(len(_magnitudes(fmt)))


def code(program: BlockProgram, x: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """The codes of elements, in x's integers. (NaN exceeds every step.)"""
    stored, magnitude = x.view(CARRIERS[x.dtype].storage), _magnitude(x)
    rank = _chosen(magnitude, steps, [torch.full_like(stored, rank) for rank in _ranks(program.fmt)[1:]])
    return signed_code(program, x, rank)


def signed_code(program: BlockProgram, x: Tensor, rank: Tensor) -> Tensor:
    """The codes of x, given those of its magnitudes: for NaN, of the largest."""
    own, stored = CARRIERS[x.dtype], x.view(CARRIERS[x.dtype].storage)
    code = rank | ((stored >> (own.storage.itemsize * 8 - 1)) & (1 << program.fmt.element.bits - 1))
    return code_without_nan(program, x, code)


def code_without_nan(program: BlockProgram, x: Tensor, code: Tensor) -> Tensor:
    """The codes of x, in x's integers; for NaN as `program.nan` says, given the largest one's."""
    if program.nan == "saturate":
        return code
    own, magnitude = CARRIERS[x.dtype], _magnitude(x)
    nan = magnitude > own.infinity if program.saturate else magnitude >= own.infinity
    return torch.where(nan, torch.zeros_like(code), code)


def rounded(program: BlockProgram, x: Tensor, steps: Sequence[Tensor], multiples: Sequence[Tensor]) -> Tensor:
    """What `quantize` returns, in a block that is not poisoned."""
    return with_sign(program, x, _chosen(_magnitude(x), steps, multiples))


def value_of(program: BlockProgram, x: Tensor, element: Tensor, multiples: Sequence[Tensor]) -> Tensor:
    """The same, given the finite elements as float32 numbers with the sign of x: their magnitudes select a multiple."""
    size = element.view(torch.int32) & F32.magnitude
    rank = [torch.full_like(size, bits_of_number(number, F32) - 1) for number in _magnitudes(program.fmt)[1:]]
    return with_sign(program, x, _chosen(size, rank, multiples))


def _magnitude(x: Tensor) -> Tensor:
    own = CARRIERS[x.dtype]
    return x.view(own.storage) & own.magnitude


def with_sign(program: BlockProgram, x: Tensor, value: Tensor) -> Tensor:
    own, stored, magnitude = CARRIERS[x.dtype], x.view(CARRIERS[x.dtype].storage), _magnitude(x)
    nan = magnitude > own.infinity if program.saturate else magnitude >= own.infinity
    return (torch.where(nan, torch.full_like(stored, own.nan), value) | (stored & own.sign)).view(x.dtype)


def _chosen(magnitude: Tensor, steps: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """The result of the last step that a magnitude exceeds; zero if none."""
    chosen = torch.zeros_like(results[0])
    for step, result in zip(steps, results, strict=True):
        chosen = torch.where(magnitude > step, result, chosen)
    return chosen


def value(program: BlockProgram, code: Tensor, multiples: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers that codes, in `dtype`'s integers, stand for, from `foreign_multiples`."""
    own, sign_bit = CARRIERS[dtype], 1 << program.fmt.element.bits - 1
    rank, value = code & (sign_bit - 1), multiples[0]
    for number, multiple in enumerate(multiples[1:], 1):
        value = torch.where(rank == number, multiple, value)
    flipped = value ^ torch.where((code & sign_bit) != 0, torch.full_like(code, own.sign), torch.zeros_like(code))
    return torch.where((value & own.magnitude) > own.infinity, value, flipped).view(dtype)  # NaN has no sign
