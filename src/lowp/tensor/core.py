"""The three operations on bits: quantize, encode, decode. Each is a frozen description of one kernel.

A description says everything that is known before the data: format, dtypes, mode. Called with the stored bits of a tensor
(an integer tensor of any shape) it gives the stored bits of the result, in plain torch operations: the single source of
the eager, the precompiled and the inlined path. What is data, but not the user's, comes as arguments: the key of the noise
and the tensors of `tables(device)`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import reference
from lowp.formats.base import Format, Rounding
from lowp.formats.posit import PositFormat
from lowp.tensor import grid, posit
from lowp.tensor.carrier import CARRIERS, F32, FORMAT_OF_DTYPE, Carrier, carrier_for, is_grid
from lowp.tensor.noise import draw
from lowp.tensor.table import Staircase, bits_of_number, goes_up, staircase, to_float64

Tables = tuple[Tensor, ...]


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of a format's codes."""
    return torch.uint8 if fmt.bits <= 8 else (torch.int16 if fmt.bits <= 16 else torch.int32)


def code_storage(fmt: Format) -> torch.dtype:
    """The dtype of codes inside kernels: inductor narrows 32-bit integers to int8 with one instruction, to uint8 with many."""
    return torch.int8 if fmt.bits <= 8 else code_dtype(fmt)


def convert(bits: Tensor, source: Carrier, target: Carrier) -> Tensor:
    """The same numbers in another carrier, rounded to nearest where it is narrower: a dtype is a format like any other."""
    if source is target:
        return bits
    if source.fraction_bits < target.fraction_bits and source.bias <= target.bias:
        return grid.decode(bits.to(target.compute), FORMAT_OF_DTYPE[source.dtype], target)
    if source.bias < target.bias:  # float16 to bfloat16: neither holds the other
        return convert(convert(bits, source, F32), F32, target)
    constants = grid.grid(FORMAT_OF_DTYPE[target.dtype], source, Rounding.NEAREST, False)
    return grid.encode(bits, constants, None, "raise").to(target.compute)


@lru_cache(maxsize=256)
def _code_table(fmt: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The stored bits, in `dtype`, of the value of every code."""
    values = fmt.table
    if dtype in FORMAT_OF_DTYPE:
        values = tuple(reference.round(value, FORMAT_OF_DTYPE[dtype]) for value in values)
    carrier = CARRIERS[dtype]
    if carrier.storage == carrier.compute:
        return torch.tensor([bits_of_number(value, carrier) for value in values], dtype=carrier.storage, device=device)
    bits = torch.tensor([bits_of_number(value, F32) for value in values], dtype=torch.int32, device=device)
    return convert(bits, F32, carrier).to(carrier.storage)


@lru_cache(maxsize=256)
def _posit_gaps(fmt: PositFormat, device: torch.device) -> Tensor:
    """The posits from zero up, in float64, and one more: infinite, as the largest has nothing above it to go to."""
    values = [fmt.value(code) for code in range(fmt.max_code)] + [float("inf")] * 2
    return torch.tensor(values, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class _Rounder:
    """What quantize and encode share: bits come in, are carried into a wide enough carrier and meet the noise."""

    fmt: Format
    dtype: torch.dtype
    mode: Rounding
    saturate: bool

    @property
    def carrier(self) -> Carrier:
        return carrier_for(self.fmt, self.dtype)

    @property
    def stochastic(self) -> bool:
        return self.mode is Rounding.STOCHASTIC

    def _staircase(self, device: torch.device) -> Staircase:
        return staircase(self.fmt, self.carrier, self.mode, self.saturate, device)

    def _enter(self, stored: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        own = CARRIERS[self.dtype]
        bits = convert(own.bits(stored), own, self.carrier)
        return bits, draw(key, bits, self.carrier.noise_bits) if key is not None else None

    def _split(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude, and -1 where negative."""
        return bits & self.carrier.magnitude, bits >> (bits.dtype.itemsize * 8 - 1)

    def _entry(self, bits: Tensor, noise: Tensor | None, tables: Tables) -> Tensor:
        """The entry of the staircase that each number is rounded to."""
        stairs = self._staircase(bits.device).with_tensors(tables)
        magnitude, negative = self._split(bits)
        entry = stairs.find(magnitude, negative)
        if noise is not None:
            up = goes_up(magnitude, stairs.entry_low[entry], stairs.entry_high[entry], noise, self.carrier)
        elif self.mode is Rounding.TO_ODD:
            up = (to_float64(magnitude, self.carrier) > stairs.entry_low[entry]) & stairs.entry_even[entry]
        else:
            return entry
        return entry + up.to(entry.dtype)

    def _posit_code(self, bits: Tensor, noise: Tensor | None, tables: Tables) -> Tensor:
        assert isinstance(self.fmt, PositFormat)
        magnitude, negative = self._split(bits)
        walk = Rounding.TOWARD_ZERO if self.stochastic else self.mode
        rank = posit.rank(magnitude, negative, self.fmt, self.carrier, walk)
        if noise is not None:
            values = tables[-1]
            rank = rank + goes_up(magnitude, values[rank], values[rank + 1], noise, self.carrier).to(rank.dtype)
        code = posit.code_of_rank(rank, negative, self.fmt)
        lowest_nan = self.carrier.infinity + self.saturate  # an infinity is NaR, unless it saturates
        return torch.where(magnitude >= lowest_nan, torch.full_like(code, self.fmt.nan_code), code)

    def _posit_tables(self, device: torch.device) -> Tables:
        assert isinstance(self.fmt, PositFormat)
        return (_posit_gaps(self.fmt, device),) if self.stochastic else ()


@dataclass(frozen=True)
class Quantize(_Rounder):
    """Numbers in, numbers of the format out, in `out_dtype`."""

    out_dtype: torch.dtype

    def tables(self, device: torch.device) -> Tables:
        if is_grid(self.fmt):
            return ()
        if isinstance(self.fmt, PositFormat):
            return _code_table(self.fmt, self.carrier.dtype, device), *self._posit_tables(device)
        return self._staircase(device).tensors

    def __call__(self, stored: Tensor, tables: Tables = (), key: Tensor | None = None) -> Tensor:
        bits, noise = self._enter(stored, key)
        carrier, target = self.carrier, CARRIERS[self.out_dtype]
        if is_grid(self.fmt):
            constants = grid.grid(self.fmt, carrier, self.mode, self.saturate)  # type: ignore[arg-type]
            result = grid.quantize(bits, constants, noise)
        else:
            if isinstance(self.fmt, PositFormat):
                result = tables[0][self._posit_code(bits, noise, tables)]
            else:
                stairs = self._staircase(bits.device).with_tensors(tables)
                result = stairs.entry_bits[self._entry(bits, noise, tables)]
            result = torch.where((bits & carrier.magnitude) > carrier.infinity, bits, result)
        return target.store(convert(result, carrier, target))


@dataclass(frozen=True)
class Encode(_Rounder):
    """Numbers in, codes out. `nan_to` is where NaN goes in a format that has none: "zero" or "saturate"."""

    nan_to: str

    def tables(self, device: torch.device) -> Tables:
        if is_grid(self.fmt):
            return ()
        return self._posit_tables(device) if isinstance(self.fmt, PositFormat) else self._staircase(device).tensors

    def __call__(self, stored: Tensor, tables: Tables = (), key: Tensor | None = None) -> Tensor:
        bits, noise = self._enter(stored, key)
        if is_grid(self.fmt):
            constants = grid.grid(self.fmt, self.carrier, self.mode, self.saturate)  # type: ignore[arg-type]
            code = grid.encode(bits, constants, noise, self.nan_to)
        elif isinstance(self.fmt, PositFormat):
            code = self._posit_code(bits, noise, tables)
        else:
            stairs = self._staircase(bits.device).with_tensors(tables)
            code = stairs.entry_code[self._entry(bits, noise, tables)]
            code = torch.where((bits & self.carrier.magnitude) > self.carrier.infinity, self._nan_code(bits), code)
        return code.to(code_storage(self.fmt))

    def _nan_code(self, bits: Tensor) -> Tensor:
        """The code of NaN in a table format, or of what stands for it."""
        if self.fmt.nan_code is not None:
            positive, negative = (reference.encode(math.copysign(math.nan, sign), self.fmt) for sign in (1, -1))
            return torch.where(bits < 0, torch.full_like(bits, negative), torch.full_like(bits, positive))
        zero, largest, lowest = (reference.encode(value, self.fmt) for value in (0.0, self.fmt.max, self.fmt.min))
        if self.nan_to == "zero":
            return torch.full_like(bits, zero)
        return torch.where(bits < 0, torch.full_like(bits, lowest), torch.full_like(bits, largest))


@dataclass(frozen=True)
class Decode:
    """Codes in, numbers out, in `dtype` (rounded to nearest where it cannot hold them)."""

    fmt: Format
    dtype: torch.dtype

    @property
    def stochastic(self) -> bool:
        return False

    def tables(self, device: torch.device) -> Tables:
        return () if is_grid(self.fmt) else (_code_table(self.fmt, self.dtype, device),)

    def __call__(self, stored: Tensor, tables: Tables = (), key: Tensor | None = None) -> Tensor:
        target = CARRIERS[self.dtype]
        if is_grid(self.fmt):
            carrier = carrier_for(self.fmt, self.dtype)
            bits = grid.decode(stored.to(carrier.compute), self.fmt, carrier)  # type: ignore[arg-type]
            return target.store(convert(bits, carrier, target))
        return tables[0][stored.to(torch.int32) & ((1 << self.fmt.bits) - 1)]


