"""Messages in as few passes over the numbers as there can be, on a CPU above all.

The general way (payload.py) scales, encodes and packs one after the other. Where all of these hold, one pass does it:

- *encoding*, rounding to nearest, formats that do not reach below 2^-60, shifts of up to 60: the shift is added to the exponent
  bits. A subnormal float32 has no exponent to add to, but becomes zero in such a format whatever the shift, as it should. Codes
  of 4 bits are put together in the same pass, the first half of the numbers with the second (planes.py).
- *decoding* 8 or 4 bits: the unit goes into a table of 256 numbers, one for each byte; of 4 bits, one table for each half. What
  is read can be added to a sum in the same pass. (Arithmetic on exponent bits, which encoding uses, is slower here.)
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat, Format, PositFormat
from lowp.tensor.carrier import F32
from lowp.tensor.core import Encode, encode_operation, tables_on
from lowp.tensor.flat import FlatFunction
from lowp.tensor.ops import decode
from lowp.wire.planes import planar_bytes
from lowp.wire.scratch import scratch

LIMIT = 60
_CPU = torch.device("cpu")
_SMALLEST = 1 << F32.fraction_bits  # bits of the smallest normal float32


def can_encode(fmt: AnyFormat, rounding: str, shift: int) -> bool:
    if isinstance(fmt, PositFormat):  # which round no number to zero
        return False
    return rounding == "nearest" and can_decode(fmt) and fmt.smallest > 2.0**-LIMIT and abs(shift) <= LIMIT


def can_decode(fmt: AnyFormat) -> bool:
    return not isinstance(fmt, BlockFormat) and fmt.bits in (4, 8)


def encode_shifted(numbers: Tensor, fmt: Format, shift: int, out: Tensor) -> None:
    """The codes of `numbers * 2^shift` (float32, flat), packed, in `out`."""
    shifts = torch.tensor([shift << F32.fraction_bits], dtype=torch.int32)
    bits = numbers.view(torch.int32)
    tables = _tables(fmt)
    if fmt.bits == 8:
        _one_code_a_byte(fmt)([bits], [shifts, *tables], out.view(torch.int8))
        return
    half, odd = out.numel(), numbers.numel() % 2
    first, second = bits[:half], bits[half:]
    if odd:
        filled = scratch(half, torch.int32, 3)
        filled[-1] = 0
        filled[:-1].copy_(second)
        second = filled
    _two_codes_a_byte(fmt)([first, second], [shifts, *tables], out.view(torch.int8))
    if odd:
        out[-1:].bitwise_and_(0xF)


def decode_scaled(payload: Tensor, fmt: Format, unit: float, out: Tensor, add: bool = False) -> None:
    """The numbers that packed codes stand for, times `unit`; with `add`, added to what is in `out`."""
    table = _values(fmt) if unit == 1.0 else _values(fmt) * unit
    codes = payload.view(torch.int8)
    planes = [(codes, table, out)]
    if fmt.bits == 4:
        half = planar_bytes(out.numel(), 4)
        low, high = table.repeat(16), table.repeat_interleave(16)
        planes = [(codes, low, out[:half]), (codes[: out.numel() - half], high, out[half:])]
    for bytes_here, values, target in planes:
        if add:
            _LOOK_UP_AND_ADD([bytes_here, target], [values], target)
        else:
            _LOOK_UP([bytes_here], [values], target)


def pack_scaled(numbers: Tensor, fmt: Format, factor: Tensor, out: Tensor) -> None:
    """Codes of 4 bits of `numbers * factor` on a device, two to a byte, in one pass (rounding to nearest)."""
    half = out.numel()
    second = numbers[half:]
    if second.numel() < half:
        second = torch.nn.functional.pad(second, (0, 1))
    tables = tables_on(_codes_of(fmt), numbers.device)
    _two_scaled_codes_a_byte(fmt)([numbers[:half], second], [factor, *tables], out.view(torch.int8))
    if numbers.numel() % 2:
        out[-1:].bitwise_and_(0xF)


def unpack_scaled(payload: Tensor, fmt: Format, factor: Tensor, out: Tensor) -> None:
    """The reverse: two passes over the bytes, one for each half of the numbers."""
    half = payload.numel()
    table = _values(fmt, out.device) * factor
    low, high = table.repeat(16), table.repeat_interleave(16)
    codes = payload.view(torch.int8)
    _LOOK_UP([codes], [low], out[:half])
    _LOOK_UP([codes[: out.numel() - half]], [high], out[half:])


@lru_cache(maxsize=256)
def _two_scaled_codes_a_byte(fmt: Format) -> FlatFunction:
    operation = _codes_of(fmt)

    def codes(first: Tensor, second: Tensor, factor: Tensor, *tables: Tensor) -> Tensor:
        low, high = (operation((half * factor).view(torch.int32), tables).to(torch.int32) for half in (first, second))
        return ((low & 0xF) | ((high & 0xF) << 4)).to(torch.int8)

    small = ((torch.float32, 1), *((table.dtype, table.numel()) for table in _tables(fmt)))
    return FlatFunction(codes, (torch.float32,) * 2, small, torch.int8)


@lru_cache(maxsize=256)
def _values(fmt: Format, device: torch.device = _CPU) -> Tensor:
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8)
    return decode(codes, fmt).to(device)


_LOOK_UP = FlatFunction(
    lambda codes, table: table[codes.to(torch.int32) & 0xFF],
    (torch.int8,),
    ((torch.float32, 256),),
    torch.float32,
    looks_up=True,
)
_LOOK_UP_AND_ADD = FlatFunction(
    lambda codes, before, table: before + table[codes.to(torch.int32) & 0xFF],
    (torch.int8, torch.float32),
    ((torch.float32, 256),),
    torch.float32,
    looks_up=True,
)


def _shifted(bits: Tensor, shift: Tensor) -> Tensor:
    """float32 bits of x * 2^shift; zero, with its sign, where x or the result is not a normal number."""
    magnitude = bits & F32.magnitude
    normal = (magnitude >= _SMALLEST) & (magnitude + shift >= _SMALLEST)
    return torch.where(normal, bits + shift, bits & F32.sign)


def _tables(fmt: Format) -> tuple[Tensor, ...]:
    return tables_on(_codes_of(fmt), _CPU)


def _codes_of(fmt: Format) -> Encode:
    return encode_operation(fmt, torch.float32, "nearest", True, "zero")


def _function(fmt: Format, body: Callable[..., Tensor], count: int) -> FlatFunction:
    small = ((torch.int32, 1), *((table.dtype, table.numel()) for table in _tables(fmt)))
    looks_up = bool(_tables(fmt)) and _codes_of(fmt).stairs is not None
    return FlatFunction(body, (torch.int32,) * count, small, torch.int8, looks_up)


@lru_cache(maxsize=256)
def _one_code_a_byte(fmt: Format) -> FlatFunction:
    operation = _codes_of(fmt)

    def codes(bits: Tensor, shift: Tensor, *tables: Tensor) -> Tensor:
        return operation(_shifted(bits, shift), tables)

    return _function(fmt, codes, 1)


@lru_cache(maxsize=256)
def _two_codes_a_byte(fmt: Format) -> FlatFunction:
    operation = _codes_of(fmt)

    def codes(first: Tensor, second: Tensor, shift: Tensor, *tables: Tensor) -> Tensor:
        low = operation(_shifted(first, shift), tables).to(torch.int32)
        high = operation(_shifted(second, shift), tables).to(torch.int32)
        return ((low & 0xF) | ((high & 0xF) << 4)).to(torch.int8)

    return _function(fmt, codes, 2)
