"""Carriers: the bits of torch's floating-point dtypes, seen as integers.

Every operation of this layer works on the *bits* of its input, in integer arithmetic. Integers round the same way on
every chip, are left alone by fast-math and by flush-to-zero, and compile to the shortest code: on CPU a kernel that takes
int32 and returns int32 runs at the speed of a copy, while one that goes back and forth between floats and their bits is
two to four times slower (inductor spills each reinterpretation to the stack).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import TypeIs

from lowp.formats.base import Format
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import BF16, FP16, FP32, FloatFormat
from lowp.formats.posit import PositFormat


@dataclass(frozen=True)
class Carrier:
    """A floating-point dtype: where its fields are, in which integers its bits are stored and computed with."""

    dtype: torch.dtype
    storage: torch.dtype  # the integer dtype of the same width
    compute: torch.dtype  # the integer dtype that arithmetic on its bits is done in
    fraction_bits: int
    bias: int

    @property
    def sign(self) -> int:
        """The sign bit and, in the computing integer, all bits above it."""
        return ~self.magnitude

    @property
    def magnitude(self) -> int:
        return (1 << (self.storage.itemsize * 8 - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of plus infinity; everything above is NaN."""
        return self.magnitude >> self.fraction_bits << self.fraction_bits

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.fraction_bits - 1)

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        return (self.magnitude >> self.fraction_bits) - 1 - self.bias

    @property
    def noise_bits(self) -> int:
        """How many random bits decide a stochastic rounding: two fewer than fit, so that adding them cannot overflow."""
        return self.compute.itemsize * 8 - 2

    def power_of_two(self, exponent: int) -> int:
        """The bits of 2^exponent, subnormal where it must be."""
        if exponent >= self.min_exponent:
            return (exponent + self.bias) << self.fraction_bits
        shift = exponent - (self.min_exponent - self.fraction_bits)
        assert shift >= 0, f"2^{exponent} is below {self.dtype}"
        return 1 << shift

    def bits(self, stored: Tensor) -> Tensor:
        """Stored bits as computing integers: the magnitude in place, the sign bit spread upwards."""
        return stored if self.storage == self.compute else stored.to(self.compute)

    def store(self, bits: Tensor) -> Tensor:
        """The inverse of `bits`: the low bits, as stored."""
        return bits if self.storage == self.compute else bits.to(self.storage)


CARRIERS = {
    torch.float16: Carrier(torch.float16, torch.int16, torch.int32, 10, 15),
    torch.bfloat16: Carrier(torch.bfloat16, torch.int16, torch.int32, 7, 127),
    torch.float32: Carrier(torch.float32, torch.int32, torch.int32, 23, 127),
    torch.float64: Carrier(torch.float64, torch.int64, torch.int64, 52, 1023),
}
F32, F64 = CARRIERS[torch.float32], CARRIERS[torch.float64]

# The dtypes as formats, for converting between carriers. (float64 is the widest carrier: never a target.)
FORMAT_OF_DTYPE = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}
DTYPE_OF_FORMAT: dict[Format, torch.dtype] = {fmt: dtype for dtype, fmt in FORMAT_OF_DTYPE.items()}


def bits_of_power(exponents: Tensor) -> Tensor:
    """The bits of 2^exponent in float32, for integers from -126 to 127."""
    return (exponents + F32.bias << F32.fraction_bits).to(torch.int32)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in float32, exactly, for integers from -126 to 127."""
    return bits_of_power(exponents).view(torch.float32)


def exponent_above(bits: Tensor) -> Tensor:
    """The least e that is sure to have x < 2^e, at least -126, for the bits of float32 numbers x that are not negative."""
    return (bits >> F32.fraction_bits) - (F32.bias - 1)


def exponent_below(number: float) -> int:
    """The exponent of the largest power of two that is not above a number."""
    return math.frexp(number)[1] - 1


def last_step(fmt: Format) -> float:
    """From the largest value but one to the largest."""
    if fmt.bits <= 16:
        return fmt.values[-1] - fmt.values[-2]
    if isinstance(fmt, FloatFormat):
        return math.ldexp(1.0, exponent_below(fmt.max) - fmt.mantissa_bits)
    return fmt.smallest


def is_grid(fmt: Format) -> TypeIs[FloatFormat | FixedFormat]:
    """Is the format a plain grid: a signed float with subnormals, or fixed point (which is all subnormals)?"""
    return isinstance(fmt, FixedFormat) or (isinstance(fmt, FloatFormat) and fmt.signed and fmt.subnormals)


def grid_shape(fmt: FloatFormat | FixedFormat) -> tuple[int, int]:
    """Mantissa bits and lowest exponent. Fixed point is a float that has only its lowest binade."""
    if isinstance(fmt, FixedFormat):
        return fmt.integer_bits + fmt.fraction_bits, fmt.integer_bits
    return fmt.mantissa_bits, fmt.min_exponent


def grid_fits(fmt: FloatFormat | FixedFormat, carrier: Carrier) -> bool:
    """Can the format's grid be rounded to in place, on the carrier's own bits?

    Its values must be numbers of the carrier, and unless both share their lowest binade, its smallest must be a normal one
    and at least one bit must always go (so that "half a step" exists).
    """
    mantissa_bits, min_exponent = grid_shape(fmt)
    if exponent_below(fmt.max) > carrier.max_exponent:
        return False
    if min_exponent == carrier.min_exponent:
        return mantissa_bits <= carrier.fraction_bits
    return mantissa_bits < carrier.fraction_bits and min_exponent - mantissa_bits >= carrier.min_exponent


def carrier_for(fmt: Format, dtype: torch.dtype) -> Carrier:
    """The carrier in which numbers of `dtype` are rounded to `fmt`: their own, if it will do, or a wider one."""
    own = CARRIERS[dtype]
    if is_grid(fmt):
        wider = [c for c in (own, F32, F64) if c.fraction_bits >= own.fraction_bits]
        return next(c for c in wider if grid_fits(fmt, c))
    if isinstance(fmt, PositFormat):
        fits = fmt.max <= 2.0**F32.max_exponent and fmt.exponent_size <= 6
    else:
        # Further down, neighbours lie so close among float32's subnormals that a table by leading bits would be too long.
        fits = fmt.max < 2.0 ** (F32.max_exponent + 1) and fmt.smallest >= 2.0**-133
    return F32 if fits and dtype != torch.float64 else F64
