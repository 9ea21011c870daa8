"""How a weight takes its update, written once for all optimizers; and how states are stored.

    exact = weight + update                                        (float32, in registers)
    nearest     weight = round(exact)                              small updates vanish: below half a unit in the last place
    stochastic  weight = round(exact), up or down at random        so that the mean is exact: small updates survive on average
    kahan       weight = round(exact + lost), lost = what rounding took away    kept in a second number of 16 bits

What is infinite to nearest is infinite in all three ways, and nothing else is: noise alone makes no weight infinite.
Decay is part of the update, so it is not lost either. What Kahan's compensation `lost` has to hold is at most half a unit in
the last place of the weight: it is stored multiplied by 2^(mantissa bits + 1), which brings it to the weight's own range, so
that FP16 can hold it.

A state is stored in a format, multiplied by a power of two of its own: one for the tensor, or one for each block of a row.
Numbers that sit under a square root never become zero: they keep at least the format's smallest number, or a weight whose
gradients are small beside its neighbours' would be moved by m / eps.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowp.formats.base import Format
from lowp.formats.floats import FP32
from lowp.formats.posit import PositFormat
from lowp.tensor.carrier import DTYPE_OF_FORMAT, F32, FORMAT_OF_DTYPE, exponent_below
from lowp.tensor.core import Decode, Encode, code_dtype, decode_operation, encode_operation
from lowp.tensor.lists.tracing import shortcut
from lowp.tensor.memory import storage_of
from lowp.tensor.noise import Draw
from lowp.tensor.table import Table, bits_of_number

UPDATES = ("stochastic", "kahan", "nearest")


def numbers_of(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored bits as float32 numbers."""
    return stored.view(dtype).to(torch.float32)


def stored_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers as stored bits, rounded to nearest."""
    return numbers.to(dtype).view(storage_of(dtype))


def stochastic_half(numbers: Tensor, noise: Draw, positive: bool) -> Tensor:
    """Float32 numbers as stored float16 bits, rounded stochastically: the bits of `encode`, in half as many operations.

    1. What float16 has no place for is 13 bits of a normal number, and one more for each binade below its smallest normal one.
    2. Noise of as many bits is added, and they are cut off. A carry into the exponent gives the next power of two: rightly.
    3. Below the smallest subnormal number (2^-24) it is that or zero, by the share of it that is covered.
    4. The chip's own conversion is exact now, or infinite.

    `positive`: numbers are at least 2^-24, and finite; then there is no sign and no third step.
    Numbers in the range of float16's normal ones, which are most, take a short way: 13 bits, sign and all.
    """
    bits = numbers.view(torch.int32)

    def of_any() -> Tensor:
        magnitude = bits if positive else (_held(bits, torch.float16) & 0x7FFFFFFF).clamp(max=0x7FC00000)
        field = magnitude >> 23
        dropped = (126 - field).clamp(13, 23)
        cut = (magnitude + (noise.number >> (30 - dropped))) & (torch.full_like(dropped, -1) << dropped)
        if positive:
            return cut
        covered = (magnitude.view(torch.float32) * 2.0**54).to(torch.int32)
        smallest = torch.where(noise.number > ((1 << 30) - 1) - covered, torch.full_like(cut, 103 << 23), torch.zeros_like(cut))
        return torch.where(field < 103, smallest, cut) | (bits & ~0x7FFFFFFF)

    def of_normal() -> Tensor:
        return (bits + noise.top13) & ~0x1FFF

    def is_unusual() -> Tensor:
        least, most = (bits_of_number(x, F32) for x in (torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max))
        return bits < least if positive else ((bits - least) & 0x7FFFFFFF) > most - least  # what is below wraps around

    return stored_of(shortcut(of_normal, of_any, is_unusual, numbers).view(torch.float32), torch.float16)


def stochastic_bfloat(numbers: Tensor, noise: Draw, saturate: bool) -> Tensor:
    """Float32 numbers as stored bfloat16 bits, rounded stochastically: the bits of `encode`, in fewer operations.

    bfloat16 is the upper half of float32, its subnormal numbers included: 16 bits of noise are added to the bits, sign and all,
    and 16 bits are cut off. Only NaN, and what is beyond the largest number, needs more. `saturate`: nothing is infinite.
    """
    bits = numbers.view(torch.int32)
    largest = torch.finfo(torch.bfloat16).max

    def of_finite() -> Tensor:
        return bits + noise.upper

    def of_any() -> Tensor:
        if saturate:
            rounded = numbers.clamp(-largest, largest).view(torch.int32) + noise.upper
        else:  # what becomes the largest number to nearest is that without noise, and more with some (`_held`)
            above = (bits & 0x7FFFFFFF) - bits_of_number(largest, F32)
            rounded = bits + torch.where((above >= 0) & (above < 1 << 15), torch.zeros_like(bits), noise.upper)
        return torch.where(numbers != numbers, bits & ~0x7FFFFFFF | 0x7FC00000, rounded)

    def is_unusual() -> Tensor:
        return (bits & 0x7FFFFFFF) > bits_of_number(largest, F32)

    return (shortcut(of_finite, of_any, is_unusual, numbers) >> 16).to(torch.int16)


def _held(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of float32 numbers, those just above the dtype's largest number brought down to it.

    To nearest they become that number, and only half a unit above it infinity. Noise would make some of them infinite: a weight
    that has lost nothing but luck.
    """
    largest = bits_of_number(torch.finfo(dtype).max, F32)
    half_a_unit = 1 << (F32.fraction_bits - FORMAT_OF_DTYPE[dtype].mantissa_bits - 1)
    magnitude = bits & 0x7FFFFFFF
    held = torch.where(magnitude < largest + half_a_unit, magnitude.clamp(max=largest), magnitude)
    return held | (bits & ~0x7FFFFFFF)


def scale_of_compensation(dtype: torch.dtype) -> float:
    return 2.0 ** (FORMAT_OF_DTYPE[dtype].mantissa_bits + 1)


@dataclass(frozen=True)
class Update:
    """One of the three ways, for weights of one dtype."""

    kind: str
    dtype: torch.dtype

    @property
    def stochastic(self) -> bool:
        return self.kind == "stochastic" and self.dtype != torch.float32

    @property
    def compensated(self) -> bool:
        return self.kind == "kahan"

    def apply(self, weight: Tensor, update: Tensor, lost: Tensor | None, noise: Draw | None) -> tuple[Tensor, ...]:
        """The stored weight and, for Kahan, the stored compensation. `lost` is the stored one before."""
        if self.stochastic:
            assert noise is not None
            exact = weight + update
            if self.dtype == torch.float16:
                return (stochastic_half(exact, noise, positive=False),)
            return (stochastic_bfloat(exact, noise, saturate=False),)
        if not self.compensated:
            return (stored_of(weight + update, self.dtype),)
        assert lost is not None
        scale = scale_of_compensation(self.dtype)
        due = update + numbers_of(lost, self.dtype) * (1.0 / scale)
        stored = stored_of(weight + due, self.dtype)
        taken = numbers_of(stored, self.dtype) - weight
        return stored, stored_of((due - taken) * scale, self.dtype)


@dataclass(frozen=True)
class Stored:
    """How one state is kept: a format, a rounding, and what shares a scale ("none", "tensor" or "block")."""

    format: Format
    rounding: str
    scale: str
    positive: bool  # under a square root

    @property
    def is_plain(self) -> bool:
        """Is the format one of torch's own, which the chip converts?"""
        return self.format in DTYPE_OF_FORMAT

    @property
    def dtype(self) -> torch.dtype:
        """Of the state's tensor."""
        return DTYPE_OF_FORMAT[self.format] if self.is_plain else code_dtype(self.format)

    @property
    def storage(self) -> torch.dtype:
        return storage_of(self.dtype)

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic" and self.format != FP32

    @property
    def by_words(self) -> bool:
        """Do 16 bits of noise decide? Of a step as long as those of 8 bits, their 2^-17 is less than float32 resolves."""
        return self.stochastic and self.format.bits < 16

    @property
    def top(self) -> int:
        """States are scaled to stay below 2^top. One binade is left, so that rounding up cannot leave the format."""
        if isinstance(self.format, PositFormat):
            return 0  # posits are finest around one
        return exponent_below(self.format.max) - 1

    @cached_property
    def _encode(self) -> Encode:
        return encode_operation(self.format, torch.float32, self.rounding, True, "zero", by_words=self.by_words)

    @cached_property
    def _decode(self) -> Decode:
        return decode_operation(self.format, torch.float32, any_nan=True)

    @property
    def tables(self) -> tuple[Table, ...]:
        return () if self.is_plain and not self.stochastic else (*self._encode.tables, *self._decode.tables)

    def read(self, stored: Tensor, unit: Tensor | None, tables: tuple[Tensor, ...]) -> Tensor:
        """The state's numbers: codes times what they count in."""
        if self.is_plain:
            numbers = numbers_of(stored, self.dtype)
        else:
            numbers = self._decode(stored, tables[len(self._encode.tables) :]).view(torch.float32)
        return numbers if unit is None else numbers * unit

    def write(self, numbers: Tensor, factor: Tensor | None, noise: Draw | None, tables: tuple[Tensor, ...]) -> Tensor:
        """Stored codes of numbers times `factor`."""
        if factor is not None:
            numbers = numbers * factor
        if self.positive and self.format != FP32:
            numbers = numbers.clamp(min=self.format.smallest)
        if self.is_plain and not self.stochastic:
            return stored_of(numbers, self.dtype)
        if self.dtype == torch.float16:
            assert noise is not None
            return stochastic_half(numbers, noise, self.positive)
        if self.dtype == torch.bfloat16:
            assert noise is not None
            return stochastic_bfloat(numbers, noise, saturate=True)
        drawn = None if noise is None else noise.word if self.by_words else noise.number
        return self._encode.codes(numbers.view(torch.int32), drawn, tables[: len(self._encode.tables)])
