"""Stochastic rounding to the codes of a grid with noise of 16 bits, as states of optimizers of less than 16 bits have it.

Of a step as long as theirs, the 2^-17 that such noise may be off is less than float32 resolves.
"""

import torch
from torch import Tensor

from lowp.tensor.backend import backend_of
from lowp.tensor.grid import Algorithm, Grid, encode, rounding_for
from lowp.tensor.lists.tracing import record


def encode_by_words(bits: Tensor, g: Grid, word: Tensor, nan_to: str) -> Tensor:
    """`encode`, stochastically, with noise of 16 bits: `number_of_word`, for floats that saturate.

    A kernel for a GPU adds 1 + u to the magnitude in steps, u being the noise as a share of a step, and rounds toward zero:
    what a float has no bits for is cut off, and never changes the whole part of a sum. A second such sum, to 2^23, leaves the
    whole part in the last bits. (Conversions between floats and integers would take eight times as long as sums.)
    """
    c, backend = g.carrier, backend_of(bits)
    in_floats = rounding_for(g, backend) is Algorithm.STEPS and not backend.vectors and not g.fixed
    if not in_floats or g.overflow_code != g.max_code:
        return encode(bits, g, number_of_word(word), nan_to)
    if backend.assembly and g.dropped > 16:
        rank = _record_stochastic_rank(bits, word, g)
    else:
        magnitude = (bits & c.magnitude).clamp(max=g.max_bits)
        binade = (magnitude & c.infinity).clamp(min=g.lowest_field << c.fraction_bits)
        inverse = (2 * c.bias + g.mantissa_bits << c.fraction_bits) - binade
        steps = magnitude.view(c.dtype) * inverse.view(c.dtype)
        whole = record_sum_cut(steps, one_and_share(word)).view(c.storage)
        rank = whole + ((binade >> g.dropped) - (0x4B000001 + (g.lowest_field << g.mantissa_bits)))
    nan_rank = g.nan_code if g.nan_code >= 0 else (0 if nan_to == "zero" else g.max_code)
    number = bits.view(c.dtype)
    is_nan = number != number
    rank = torch.where(is_nan, torch.full_like(rank, nan_rank), rank)
    sign = (bits >> 31) & (1 << (g.bits - 1))
    if not g.has_negative_zero or (g.nan_code < 0 and nan_to == "zero"):
        unsigned = (rank == 0) if not g.has_negative_zero else is_nan
        sign = torch.where(unsigned, torch.zeros_like(sign), sign)
    return rank | sign


def number_of_word(word: Tensor) -> Tensor:
    """Noise of 30 bits that stands for 16: the middle of those that begin with them, so that the mean is exact."""
    return (word << 14) + (1 << 13)


def one_and_share(word: Tensor) -> Tensor:
    """`number_of_word` as a share of one, and one more: float32, from its bits."""
    return ((word << 7) + 0x3F800040).view(torch.float32)


def record_sum_cut(a: Tensor, b: Tensor) -> Tensor:
    """2^23 + the whole part of a + b, of positive float32 numbers, for a function that is being printed for CUDA."""
    return record("sum_cut", torch.float32, a, b)


def _record_stochastic_rank(bits: Tensor, word: Tensor, g: Grid) -> Tensor:
    """The ranks of float32 magnitudes, rounded with noise of 16 bits, for a function that is being printed for CUDA.

    Times a power of two that makes the format's lowest binade float32's own, a magnitude's bits, cut at `dropped`, are the
    rank: subnormal numbers are those of float32. The product is cut off, not rounded: what it loses is less than the noise's
    last place.
    """
    c = g.carrier
    factor = c.bias + 1 - g.lowest_field << c.fraction_bits
    return record(f"stochastic_rank {g.max_bits} {factor} {g.dropped}", torch.int32, bits.view(c.dtype), word)


def stochastic_rank_in_assembly(operation: str) -> str:
    """PTX: the rank of the float32 number $1 with the noise $2, to $0."""
    largest, factor, dropped = map(int, operation.split()[1:])
    return (
        "{ .reg .f32 size; .reg .b32 rank; abs.f32 size, $1; "
        f"min.f32 size, size, 0f{largest:08X}; mul.rz.f32 size, size, 0f{factor:08X}; mov.b32 rank, size; "
        f"mad.lo.u32 rank, $2, {1 << dropped - 16}, rank; add.u32 rank, rank, {1 << dropped - 17}; "
        f"shr.u32 $0, rank, {dropped}; }}"
    )
