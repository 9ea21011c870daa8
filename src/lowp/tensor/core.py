"""The three operations on bits: quantize, encode, decode. Each is a frozen description of one kernel.

A description says everything that is known before the data: format, dtypes, mode. There is one object of each (the factories at
the end keep them), so that finding its kernel costs nothing. Called with the stored bits of a tensor
(an integer tensor of any shape) it gives the stored bits of the result, in plain torch operations: the single source of
the eager, the precompiled and the inlined path. What is data, but not the user's, comes as arguments: the key of the noise
and the tensors of `operation.tables`.
"""

import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lowp.formats import reference
from lowp.formats.base import Format, Rounding
from lowp.formats.posit import PositFormat
from lowp.tensor import grid as grids
from lowp.tensor import grid_words
from lowp.tensor import posit as posits
from lowp.tensor.backend import backend_of
from lowp.tensor.carrier import CARRIERS, F32, FORMAT_OF_DTYPE, Carrier, carrier_for, grid_fits, is_grid
from lowp.tensor.memory import storage_of
from lowp.tensor.noise import Noise, blocks, draw, key_tensor
from lowp.tensor.table import Staircase, Table, bits_of_number, gap_tables, goes_up, number_of_bits, staircase

Tables = tuple[Tensor, ...]


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of a format's codes."""
    return torch.uint8 if fmt.bits <= 8 else (torch.int16 if fmt.bits <= 16 else torch.int32)


def code_storage(fmt: Format) -> torch.dtype:
    """The dtype of codes inside kernels."""
    return storage_of(code_dtype(fmt))


# Dtypes are formats like any other: the constants for reading one in a wider carrier, and for rounding a wider one to it.
_WIDEN = {
    (narrow, wide): grids.grid(FORMAT_OF_DTYPE[narrow], CARRIERS[wide], Rounding.NEAREST, False)
    for narrow in FORMAT_OF_DTYPE
    for wide in (torch.float32, torch.float64)
    if narrow != wide
}


def convert(bits: Tensor, source: Carrier, target: Carrier) -> Tensor:
    """The same numbers in another carrier, rounded to nearest where it is narrower."""
    if source.dtype == target.dtype:
        return bits
    if source.dtype == torch.bfloat16 and target is F32:
        return bits << 16  # the upper half of a float32
    if (source.dtype, target.dtype) in _WIDEN:
        return grids.decode(bits.to(target.compute), _WIDEN[source.dtype, target.dtype])
    if (target.dtype, source.dtype) in _WIDEN:
        return grids.encode(bits, _WIDEN[target.dtype, source.dtype], None, "raise").to(target.compute)
    return convert(convert(bits, source, F32), F32, target)  # float16 and bfloat16: neither holds the other


@lru_cache(maxsize=256)
def _code_table(fmt: Format, dtype: torch.dtype) -> Table:
    """The stored bits, in `dtype`, of the value of every code."""
    carrier = CARRIERS[dtype]
    return Table([_stored_bits(value, carrier) for value in fmt.table], carrier.storage)


def _stored_bits(value: float, carrier: Carrier) -> int:
    """A number's bits in a carrier, as a signed integer, rounded to nearest if need be: a dtype's bits are its codes."""
    if carrier.dtype == torch.float64:
        return bits_of_number(value, carrier)
    if 2.0**-24 <= abs(value) < 65504:  # the quick ways, for the many values of posits
        if carrier.dtype == torch.float16:
            return struct.unpack("<h", struct.pack("<e", value))[0]
        bits = bits_of_number(value, F32)
        if number_of_bits(bits & F32.magnitude, F32) == abs(value):
            return bits if carrier.dtype == torch.float32 else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # bfloat16
    width = carrier.storage.itemsize * 8
    code = reference.encode(value, FORMAT_OF_DTYPE[carrier.dtype])
    return code - (code >> (width - 1) << width)


@lru_cache(maxsize=256)
def _posit_gaps(fmt: PositFormat, carrier: Carrier) -> tuple[Table, ...]:
    """Of every posit from zero up; above the largest there is nowhere to go."""
    values = [fmt.value(code) for code in range(fmt.max_code + 1)]
    return gap_tables([*pairwise(values), None], carrier)


@dataclass(frozen=True, eq=False)
class _Rounder:
    """What quantize and encode share: bits come in, are carried into a wide enough carrier and meet the noise."""

    fmt: Format
    dtype: torch.dtype
    mode: Rounding
    saturate: bool

    @cached_property
    def own(self) -> Carrier:
        return CARRIERS[self.dtype]

    @cached_property
    def carrier(self) -> Carrier:
        return carrier_for(self.fmt, self.dtype)

    @cached_property
    def grid(self) -> grids.Grid | None:
        return grids.grid(self.fmt, self.carrier, self.mode, self.saturate) if is_grid(self.fmt) else None

    @cached_property
    def posit(self) -> posits.Shape | None:
        return posits.Shape.of(self.fmt, self.carrier) if isinstance(self.fmt, PositFormat) else None

    @cached_property
    def stairs(self) -> Staircase | None:
        """For table formats. Stochastic and to odd start toward zero and may then go one entry up."""
        if self.grid is not None or self.posit is not None:
            return None
        walk = Rounding.TOWARD_ZERO if self.mode in (Rounding.STOCHASTIC, Rounding.TO_ODD) else self.mode
        return staircase(self.fmt, self.carrier, walk, self.saturate)

    @property
    def stochastic(self) -> bool:
        return self.mode is Rounding.STOCHASTIC

    @cached_property
    def wide_grid(self) -> grids.Grid | None:
        """For 16-bit numbers that are rounded as float32 in vectors, where that takes fewer instructions: the constants."""
        suits = self.dtype.itemsize == 2 and is_grid(self.fmt) and grid_fits(self.fmt, F32)
        if not suits or self.grid is None or self.grid.shares_lowest_binade:
            return None
        return grids.grid(self.fmt, F32, self.mode, self.saturate)  # type: ignore[arg-type]  # a grid

    def _widened(self, stored: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        bits = stored.view(self.dtype).to(torch.float32).view(torch.int32)
        return bits, draw(key, bits, F32.noise_bits) if key is not None else None

    def _enter(self, stored: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        bits = convert(self.own.bits(stored), self.own, self.carrier)
        return bits, draw(key, bits, self.carrier.noise_bits) if key is not None else None

    def _split(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude, NaN counted as infinity, and -1 where negative."""
        magnitude = (bits & self.carrier.magnitude).clamp(max=self.carrier.infinity)
        return magnitude, bits >> (bits.dtype.itemsize * 8 - 1)

    def _entry(self, bits: Tensor, noise: Tensor | None, tables: Tables) -> Tensor:
        """The entry of the staircase that each number is rounded to."""
        assert self.stairs is not None
        magnitude, negative = bits & self.carrier.magnitude, bits >> (bits.dtype.itemsize * 8 - 1)
        entry = self.stairs.find(magnitude, negative, tables)
        if noise is not None:
            magnitude = magnitude.clamp(max=self.carrier.infinity)
            up = goes_up(magnitude, [table[entry] for table in tables[3:]], noise, self.carrier)
        elif self.mode is Rounding.TO_ODD:
            up = (magnitude > (tables[1][entry] & self.carrier.magnitude)) & tables[3][entry]
        else:
            return entry
        return entry + up.to(entry.dtype)

    def _posit_code(self, bits: Tensor, noise: Tensor | None, tables: Tables) -> Tensor:
        assert self.posit is not None
        magnitude, negative = self._split(bits)
        rank = posits.rank(magnitude, negative, self.posit, Rounding.TOWARD_ZERO if self.stochastic else self.mode)
        if noise is not None:
            gap = [table[rank] for table in tables[-len(self._gaps) :]]
            rank = rank + goes_up(magnitude, gap, noise, self.carrier).to(rank.dtype)
        code = posits.code_of_rank(rank, negative, self.posit)
        lowest_nan = self.carrier.infinity + self.saturate  # an infinity is NaR, unless it saturates
        return torch.where((bits & self.carrier.magnitude) >= lowest_nan, torch.full_like(code, self.posit.nan_code), code)

    @cached_property
    def _gaps(self) -> tuple[Table, ...]:
        """For stochastic rounding between neighbours whose distance is no power of two."""
        if not self.stochastic or self.grid is not None:
            return ()
        return _posit_gaps(self.fmt, self.carrier) if isinstance(self.fmt, PositFormat) else self.stairs.gaps  # type: ignore[union-attr]

    @property
    def tables(self) -> tuple[Table, ...]:
        """None for a grid; a staircase, and what the mode needs besides."""
        if self.stairs is None:
            return self._gaps
        return (*self.stairs.tables, *self._gaps, *((self.stairs.even,) if self.mode is Rounding.TO_ODD else ()))


@dataclass(frozen=True, eq=False)
class Quantize(_Rounder):
    """Numbers in, numbers of the format out, in `out_dtype`."""

    out_dtype: torch.dtype

    @cached_property
    def target(self) -> Carrier:
        return CARRIERS[self.out_dtype]

    @cached_property
    def float_grid(self) -> grids.Grid | None:
        """Where floats can do the rounding in kernels: the constants for it."""
        if self.dtype == torch.float64 or not is_grid(self.fmt) or not grid_fits(self.fmt, F32):
            return None
        constants = grids.grid(self.fmt, F32, self.mode, self.saturate)
        return constants if constants.suits_addition else None

    @property
    def tables(self) -> tuple[Table, ...]:
        if self.posit is not None:
            return _code_table(self.fmt, self.carrier.dtype), *super().tables
        return super().tables

    def in_floats(self, stored: Tensor) -> Tensor:
        """The same, where there is a `float_grid`: the faster way in kernels. NaN's payload is lost."""
        assert self.float_grid is not None
        return self._narrow(grids.nearest_in_floats(stored.view(self.dtype).to(torch.float32), self.float_grid))

    def _narrow(self, numbers: Tensor) -> Tensor:
        """From float32 to the bits of `out_dtype`."""
        if self.out_dtype == torch.bfloat16 and is_grid(self.fmt) and grid_fits(self.fmt, self.target):
            return (numbers.view(torch.int32) >> 16).to(torch.int16)  # they are numbers of bfloat16
        return numbers.to(self.out_dtype).view(self.target.storage)

    def _in_vectors(self, stored: Tensor, key: Tensor | None, by_sum: bool) -> Tensor | None:
        """The same in fewer instructions, in C++ of our own; None: no such way."""
        if self.out_dtype != self.dtype:
            return None
        if by_sum:
            result = self.in_floats(stored)
        elif self.wide_grid is not None and key is not None:
            bits, noise = self._widened(stored, key)
            result = self._narrow(grids.quantize(bits, self.wide_grid, noise).view(torch.float32))
        else:
            return None
        # NaN passes with its payload, or as a conversion from a wider carrier leaves it.
        kept = stored if self.carrier is self.own else (stored & self.own.sign) | self.own.nan
        return torch.where((stored & self.own.magnitude) > self.own.infinity, kept, result)

    def _rounded_posit(self, bits: Tensor) -> Tensor:
        assert self.posit is not None
        c = self.carrier
        magnitude, negative = self._split(bits)
        result = posits.rounded(magnitude, negative, self.posit, self.mode)
        result = torch.where(result == 0, result, result | (bits & c.sign))
        return result if self.saturate else torch.where(magnitude == c.infinity, torch.full_like(result, c.nan), result)

    def __call__(self, stored: Tensor, tables: Tables, key: Tensor | None = None) -> Tensor:
        backend = backend_of(stored)
        by_sum = self.float_grid is not None and grids.rounding_for(self.float_grid, backend) is not grids.Algorithm.CUT
        if by_sum and not backend.vectors:
            return self.in_floats(stored)
        if backend.vectors and (result := self._in_vectors(stored, key, by_sum)) is not None:
            return result
        bits, noise = self._enter(stored, key)
        if self.grid is not None:
            result = grids.quantize(bits, self.grid, noise)
        else:
            if self.posit is not None and key is None and self.posit.is_normal and backend.vectors:
                result = self._rounded_posit(bits)
            elif self.posit is not None:
                result = tables[0][self._posit_code(bits, noise, tables)]
            else:
                result = tables[1][self._entry(bits, noise, tables)]
            result = torch.where((bits & self.carrier.magnitude) > self.carrier.infinity, bits, result)
        return self.target.store(convert(result, self.carrier, self.target))


@dataclass(frozen=True, eq=False)
class Encode(_Rounder):
    """Numbers in, codes out. `nan_to` is where NaN goes in a format that has none: "zero" or "saturate".

    "raise": the result does not matter, and whoever calls looks for NaN (`is_nan`). "any": it does not matter in any format.
    """

    nan_to: str
    by_words: bool = False  # is `codes` given noise of 16 bits?

    @cached_property
    def storage(self) -> torch.dtype:
        return code_storage(self.fmt)

    @cached_property
    def nan_codes(self) -> tuple[int, int]:
        return _nan_codes(self.fmt, "zero" if self.nan_to in ("raise", "any") else self.nan_to)

    @cached_property
    def _gaps(self) -> tuple[Table, ...]:
        """By words: the lengths of gaps, float32 by their bits; infinite where there is nowhere to go.

        Then, for GPUs, which find both by one read, the same before the bits of entries, as one number.
        """
        if not self.by_words or self.stairs is None:
            return super()._gaps
        lengths = [bits_of_number(length, F32) for length in self.stairs.gap_lengths]
        entries = map(int, self.stairs.tables[1].values)
        both = [gap << 32 | entry & 0xFFFFFFFF for gap, entry in zip(lengths, entries, strict=True)]
        return Table(lengths, torch.int32), Table(both, torch.int64)

    def _entry_by_words(self, bits: Tensor, word: Tensor | None, tables: Tables) -> Tensor:
        """`_entry`, stochastically, with noise of 16 bits.

        With u the noise as a share of one, the entry above is taken from low + gap * (1 - u) on, computed in float32: a product
        and a sum that are the same everywhere.
        """
        assert self.stairs is not None
        assert word is not None
        magnitude = bits & self.carrier.magnitude
        entry = self.stairs.find(magnitude, bits >> 31, tables)
        if backend_of(bits).assembly:
            both = tables[4][entry]
            low, gap = (half.to(torch.int32).view(torch.float32) for half in (both, both >> 32))
        else:
            low, gap = (tables[i][entry].view(torch.float32) for i in (1, 3))
        up = magnitude.view(torch.float32) > low.abs() + gap * (2.0 - grid_words.one_and_share(word))
        return entry + up.to(entry.dtype)

    @property
    def refuses_nan(self) -> bool:
        return self.nan_to == "raise" and not self.fmt.has_nan

    def is_nan(self, stored: Tensor) -> Tensor:
        """Which numbers are NaN, of stored bits."""
        return (self.own.bits(stored) & self.own.magnitude) > self.own.infinity

    def __call__(self, stored: Tensor, tables: Tables, key: Tensor | None = None) -> Tensor:
        if self.wide_grid is not None and backend_of(stored).vectors:
            bits, noise = self._widened(stored, key)
            return grids.encode(bits, self.wide_grid, noise, self.nan_to).to(self.storage)
        return self.codes(*self._enter(stored, key), tables)

    def codes(self, bits: Tensor, noise: Tensor | None, tables: Tables) -> Tensor:
        """The codes of numbers given as the carrier's bits, with noise already drawn."""
        if self.grid is not None and self.by_words:
            assert noise is not None
            code = grid_words.encode_by_words(bits, self.grid, noise, self.nan_to)
        elif self.grid is not None:
            code = grids.encode(bits, self.grid, noise, self.nan_to)
        elif self.posit is not None:
            noise = grid_words.number_of_word(noise) if self.by_words and noise is not None else noise
            code = self._posit_code(bits, noise, tables)
        elif self.by_words:
            code = tables[2][self._entry_by_words(bits, noise, tables)]
        else:
            code = tables[2][self._entry(bits, noise, tables)]
            positive, negative = (torch.full_like(bits, nan) for nan in self.nan_codes)
            nan = torch.where(bits < 0, negative, positive)
            code = torch.where((bits & self.carrier.magnitude) > self.carrier.infinity, nan, code)
        return code.to(self.storage)


def _nan_codes(fmt: Format, nan_to: str) -> tuple[int, int]:
    """The codes of a positive and of a negative NaN, or of what stands for them."""
    positive, negative = (reference.encode(math.copysign(math.nan, sign), fmt, nan=nan_to) for sign in (1, -1))
    return positive, negative


@dataclass(frozen=True, eq=False)
class Decode:
    """Codes in, numbers out, in `dtype` (rounded to nearest where it cannot hold them)."""

    fmt: Format
    dtype: torch.dtype
    finite: bool = False  # does it not matter what the codes of infinities and of NaN become?
    any_nan: bool = False  # does it not matter which NaN comes out?

    @property
    def stochastic(self) -> bool:
        return False

    @cached_property
    def carrier(self) -> Carrier:
        return carrier_for(self.fmt, self.dtype)

    @cached_property
    def target(self) -> Carrier:
        return CARRIERS[self.dtype]

    @cached_property
    def grid(self) -> grids.Grid | None:
        return grids.grid(self.fmt, self.carrier, Rounding.NEAREST, False) if is_grid(self.fmt) else None

    @property
    def tables(self) -> tuple[Table, ...]:
        return () if self.grid is not None else (_code_table(self.fmt, self.dtype),)

    def __call__(self, stored: Tensor, tables: Tables, key: Tensor | None = None) -> Tensor:
        if self.grid is None:
            return tables[0][stored.to(torch.int32) & ((1 << self.fmt.bits) - 1)]
        bits = grids.decode(stored.to(self.carrier.compute), self.grid, self.finite, self.any_nan)
        return self.target.store(convert(bits, self.carrier, self.target))


Operation = Quantize | Encode | Decode


def apply_inline(operation: Operation, stored: Tensor, noise: Noise | None) -> Tensor:
    """An operation as plain torch operations on a tensor of any shape: stored bits in, stored bits out.

    The operation's tables become constants of whatever is being traced.
    """
    tables = tuple(table.tensor(stored.device) for table in operation.tables)
    if noise is None:
        return operation(stored, tables)
    pieces = blocks(noise, stored.numel())
    if len(pieces) <= 1:
        return operation(stored, tables, key_tensor(noise, 0, stored.device))
    flat = stored.reshape(-1)
    results = [operation(flat[first:end], tables, key_tensor(noise, first, stored.device)) for first, end in pieces]
    return torch.cat(results).reshape(stored.shape)


@lru_cache(maxsize=1024)
def tables_on(operation: Operation, device: torch.device) -> Tables:
    """An operation's tables as tensors, kept for the next call (not to be used under a tracer, whose own they would be)."""
    return tuple(table.tensor(device) for table in operation.tables)


@lru_cache(maxsize=4096)
def quantize_operation(fmt: Format, dtype: torch.dtype, rounding: str, saturate: bool, out_dtype: torch.dtype) -> Quantize:
    return Quantize(fmt, dtype, Rounding(rounding), saturate, out_dtype)


@lru_cache(maxsize=4096)
def encode_operation(
    fmt: Format, dtype: torch.dtype, rounding: str, saturate: bool, nan_to: str, by_words: bool = False
) -> Encode:
    return Encode(fmt, dtype, Rounding(rounding), saturate, nan_to, by_words)


@lru_cache(maxsize=4096)
def decode_operation(fmt: Format, dtype: torch.dtype, finite: bool = False, any_nan: bool = False) -> Decode:
    return Decode(fmt, dtype, finite, any_nan)
