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

LIMIT = 60
_CPU = torch.device("cpu")
_SMALLEST = 1 << F32.fraction_bits  # bits of the smallest normal float32


def can_encode(fmt: AnyFormat, rounding: str) -> bool:
    if isinstance(fmt, PositFormat):  # which round no number to zero
        return False
    return rounding == "nearest" and can_decode(fmt) and fmt.smallest > 2.0**-LIMIT


def can_decode(fmt: AnyFormat) -> bool:
    return not isinstance(fmt, BlockFormat) and fmt.bits in (4, 8)


def encode_shifted(numbers: Tensor, fmt: Format, shift: int, out: Tensor) -> None:
    """The codes of `numbers * 2^shift` (float32, flat; the shift is at most LIMIT either way), packed, in `out`."""
    shifts = torch.tensor([shift << F32.fraction_bits], dtype=torch.int32)
    bits = numbers.view(torch.int32)
    tables = _tables(fmt)
    if fmt.bits == 8:
        _one_code_a_byte(fmt)([bits], [shifts, *tables], out.view(torch.int8))
        return
    _put_halves(_two_codes_a_byte(fmt, _shifted, torch.int32), bits, [shifts, *tables], out)


def decode_scaled(payload: Tensor, fmt: Format, unit: "float | Tensor", out: Tensor, add: bool = False) -> None:
    """The numbers that packed codes stand for, times `unit`; with `add`, added to what is in `out`."""
    values = _values(fmt, out.device)
    table = values if isinstance(unit, float) and unit == 1.0 else values * unit
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
    tables = tables_on(_codes_of(fmt), numbers.device)
    _put_halves(_two_codes_a_byte(fmt, _times, torch.float32), numbers, [factor, *tables], out)


def _put_halves(function: FlatFunction, numbers: Tensor, small: list[Tensor], out: Tensor) -> None:
    """The first half of the numbers into the low bits of each byte, the second into the high ones."""
    half, odd = out.numel(), numbers.numel() % 2
    second = torch.nn.functional.pad(numbers[half:], (0, 1)) if odd else numbers[half:]
    function([numbers[:half], second], small, out.view(torch.int8))
    if odd:
        out[-1:].bitwise_and_(0xF)


@lru_cache(maxsize=256)
def _values(fmt: Format, device: torch.device = _CPU) -> Tensor:
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8)
    return decode(codes, fmt).to(device)


_LOOK_UP = FlatFunction(
    lambda codes, table: table[codes.to(torch.int32) & 0xFF],
    (torch.int8,),
    ((torch.float32, 256),),
    torch.float32,
)
_LOOK_UP_AND_ADD = FlatFunction(
    lambda codes, before, table: before + table[codes.to(torch.int32) & 0xFF],
    (torch.int8, torch.float32),
    ((torch.float32, 256),),
    torch.float32,
)


def _shifted(bits: Tensor, shift: Tensor) -> Tensor:
    """float32 bits of x * 2^shift; zero, with its sign, where x or the result is not a normal number."""
    magnitude = bits & F32.magnitude
    normal = (magnitude >= _SMALLEST) & (magnitude + shift >= _SMALLEST)
    return torch.where(normal, bits + shift, bits & F32.sign)


def _times(numbers: Tensor, factor: Tensor) -> Tensor:
    return (numbers * factor).view(torch.int32)


def _tables(fmt: Format) -> tuple[Tensor, ...]:
    return tables_on(_codes_of(fmt), _CPU)


def _codes_of(fmt: Format) -> Encode:
    return encode_operation(fmt, torch.float32, "nearest", True, "zero")


def _function(fmt: Format, body: Callable[..., Tensor], count: int, dtype: torch.dtype) -> FlatFunction:
    """Of `count` stretches of numbers, a shift or factor of their dtype, and the format's tables."""
    small = ((dtype, 1), *((table.dtype, table.numel()) for table in _tables(fmt)))
    return FlatFunction(body, (dtype,) * count, small, torch.int8)


@lru_cache(maxsize=256)
def _one_code_a_byte(fmt: Format) -> FlatFunction:
    operation = _codes_of(fmt)

    def codes(bits: Tensor, shift: Tensor, *tables: Tensor) -> Tensor:
        return operation(_shifted(bits, shift), tables)

    return _function(fmt, codes, 1, torch.int32)


@lru_cache(maxsize=256)
def _two_codes_a_byte(fmt: Format, scaled: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> FlatFunction:
    """`scaled` is `_shifted` on bits or `_times` on floats; both give bits."""
    operation = _codes_of(fmt)

    def codes(first: Tensor, second: Tensor, scale: Tensor, *tables: Tensor) -> Tensor:
        low = operation(scaled(first, scale), tables).to(torch.int32)
        high = operation(scaled(second, scale), tables).to(torch.int32)
        return ((low & 0xF) | ((high & 0xF) << 4)).to(torch.int8)

    return _function(fmt, codes, 2, dtype)
