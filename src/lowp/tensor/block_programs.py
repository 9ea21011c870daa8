"""The arithmetic of block formats on float32 numbers, in few operations: what kernels are printed from.

`block.py` has the same results for every dtype, mode and format, in integers of 64 bits. Here are the formats and the mode
that are used most (`block_program` says which), in floats. One block takes five steps:

1. `scale`: the code of its scale, from its largest finite magnitude.
2. `unit`, `inverse`: what its elements count in, and one divided by that.
3. `code`: x * inverse, rounded to an element, as a code. Or `rounded`: as a number, times the unit again.
4. `value`: the number that a code stands for, times the unit.
5. `is_poisoned`: must the whole block be NaN, because only the scale can say so?

All functions work on each number for itself, on tensors of any shape (those of blocks broadcast). They are plain torch
operations that lists/tracing.py can record.

**Why floats are exact here.** With a scale that is a power of two, unit and inverse are float32 numbers (2^-127 is a subnormal
one), and x * inverse is exact unless it is below 2^-126. There its bits may be lost, but not that it is less than half of the
smallest element, which is all that rounding to nearest has to know. An element times the unit is a float32 number again, or
beyond its range, where the product is the infinity that conversion would give.

Any other unit u has up to 28 significant bits and is a float64 number, and its inverse is rounded, so that x * inverse has a
relative error of up to 2^-52. Rounding to nearest must know on which side of a midpoint m between elements x / u lies, or
whether it is m. x and m * u are numbers of at most B bits, B being the bits of m and of u together: they are equal, or x / u is
at least 2^-B * m away from m. So x * inverse is first rounded to a multiple of a step so small that every m is one, and that
2^-B * m exceeds the step; and so large that the error of x * inverse is less than half of it. Then m becomes m, and other
numbers stay on their side. `_snap_step` finds such a step, or that there is none.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lowp.formats import BlockFormat
from lowp.formats.base import Rounding
from lowp.formats.block import TENSOR_SCALE_BITS, significant_bits
from lowp.formats.floats import FloatFormat
from lowp.tensor import grid as grids
from lowp.tensor.carrier import CARRIERS, F32, F64, Carrier, exponent_below, grid_fits, is_grid
from lowp.tensor.lists import byte_codes
from lowp.tensor.lists.four_bits import TOLERANCE
from lowp.tensor.table import bits_of_number


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """The functions of one format, to nearest. `saturate` and `nan` are those of `encode`."""

    fmt: BlockFormat
    saturate: bool
    nan: str  # "raise", "zero", "saturate", or "any": it does not matter what becomes of a block that is not finite

    @cached_property
    def element_grid(self) -> grids.Grid:
        """Of codes, on float32 bits."""
        return grids.grid(self.fmt.element, F32, Rounding.NEAREST, self.saturate)  # type: ignore[arg-type]  # a grid

    @cached_property
    def saturating_grid(self) -> grids.Grid:
        """The same, where what is beyond the largest element is the largest element."""
        return grids.grid(self.fmt.element, F32, Rounding.NEAREST, True)  # type: ignore[arg-type]  # a grid

    @cached_property
    def number_grid(self) -> grids.Grid:
        """Of numbers; what is beyond the largest element is the largest element."""
        if self.fmt.power_of_two_scale:
            return self.saturating_grid
        return grids.grid(self.fmt.element, F64, Rounding.NEAREST, True)  # type: ignore[arg-type]  # a grid

    @property
    def can_poison(self) -> bool:
        """Does a block exist that only its scale can say of that it has NaN in it?"""
        return self.fmt.scale.has_nan and not self.fmt.element.has_nan

    @property
    def _loses_infinity(self) -> bool:
        return not (self.fmt.element.has_inf or self.fmt.element.has_nan or self.saturate)

    def tensor_scale(self, largest: Tensor) -> Tensor:
        """float32 -> float32: the scale of a tensor with this largest finite magnitude, for formats that have one."""
        scale = largest / (self.fmt.element.max * self.fmt.scale.max)
        return torch.where(scale > 0, scale, torch.ones_like(scale))

    def scale(self, largest: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
        """float32 -> int32: the code of the scale of a block with this largest finite magnitude."""
        if self.fmt.power_of_two_scale:
            return self._power_of_two_scale(largest)
        most = self.fmt.element.max
        unit = most if tensor_scale is None else tensor_scale.to(torch.float64) * most  # exact: 24 bits and few
        quotient = largest.to(torch.float64) / unit
        rounded = grids.nearest_in_floats(quotient, grids.grid(self.fmt.scale, F64, Rounding.NEAREST, True))
        bits = rounded.clamp(min=self.fmt.scale.smallest).to(torch.float32).view(torch.int32)
        return grids.encode(bits, self.scale_grid, None, "zero")

    def _power_of_two_scale(self, largest: Tensor) -> Tensor:
        """The exponent of the largest less that of the element format's maximum; see BlockFormat for `rceil`.

        A subnormal number's exponent is that of 2^24 times the number, less 24.
        """
        fmt, bits = self.fmt, largest.view(torch.int32)
        lifted = (largest * 2.0**24).view(torch.int32) - (24 << F32.fraction_bits)
        bits = torch.where(bits < 1 << F32.fraction_bits, lifted, bits)
        exponent = (bits >> F32.fraction_bits) - (F32.bias + fmt.max_exponent)
        if fmt.rceil:
            fraction = (1 << F32.fraction_bits) - 1
            beyond = (bits & fraction) > (bits_of_number(fmt.element.max, F32) & fraction)
            exponent = exponent + beyond.to(torch.int32)
        return exponent.clamp(*_exponents(fmt.scale)) + fmt.scale.bias  # type: ignore[operator]

    @property
    def suits_about(self) -> bool:
        """Are there `scale_about` and `inverse_about`?"""
        return self.fmt.tensor_scale and self.saturate and self.nan == "any" and self.scale_grid.suits_addition

    @cached_property
    def scale_grid(self) -> grids.Grid:
        """Of codes of scales that are no powers of two, on float32 bits."""
        return grids.grid(self.fmt.scale, F32, Rounding.NEAREST, True)  # type: ignore[arg-type]  # a grid

    def scale_about(self, largest: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
        """`scale` in float32, and where that leaves the code in doubt. For tensor scales near 1.

        The quotient has a relative error of up to 2^-22: two products, and a reciprocal that is off by 2^-23.
        """
        quotient = largest * torch.reciprocal(tensor_scale * self.fmt.element.max)
        if byte_codes.suits(self.fmt.scale, quotient):
            code, unsure = byte_codes.e4m3_about(quotient)
        else:
            code, unsure = grids.encode_about(quotient.view(torch.int32), self.scale_grid, TOLERANCE)
        return code.clamp(min=1), unsure

    def inverse_about(self, code: Tensor, tensor_scale: Tensor) -> Tensor:
        """`inverse` in float32, with a relative error of up to 1.5 * 2^-23: a product, and a reciprocal."""
        return torch.reciprocal(self.scale_value(code) * tensor_scale)

    def is_poisoned(self, largest: Tensor) -> Tensor:
        """int32 -> bool: is a block NaN whose largest magnitude, NaN and infinities among them, has these float32 bits?"""
        return largest > F32.infinity if self.fmt.element.has_inf or self.saturate else largest >= F32.infinity

    def poisoned_code(self, code: Tensor, poisoned: Tensor) -> Tensor:
        """The code of a block's scale, or that of NaN where `nan="raise"` asks for it."""
        if not self.can_poison or self.nan != "raise":
            return code
        return torch.where(poisoned, torch.full_like(code, self.fmt.scale.nan_code), code)  # type: ignore[arg-type]

    def unit(self, code: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
        """int32 -> float32 for power-of-two scales, else float64: what the elements of a block count in."""
        scale = self.scale_value(code)
        if self.fmt.power_of_two_scale:
            return scale
        unit = scale.to(torch.float64)
        return unit if tensor_scale is None else unit * tensor_scale.to(torch.float64)

    def scale_value(self, code: Tensor) -> Tensor:
        """int32 -> float32: what any code of the scale's format stands for."""
        fmt = self.fmt.scale
        if is_grid(fmt):
            bits = grids.decode(code, grids.grid(fmt, F32, Rounding.NEAREST, False), finite=self.nan == "any")
            return bits.view(torch.float32) if self.nan == "any" else _canonical(bits.view(torch.float32))
        code = code & ((1 << fmt.bits) - 1)
        power = _power_of_two(code - fmt.bias)  # type: ignore[operator]
        if fmt.nan_code is None or self.nan == "any":
            return power
        return torch.where(code == fmt.nan_code, torch.full_like(power, math.nan), power)

    def inverse(self, code: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
        """One divided by `unit`, for codes that `scale` returned."""
        if self.fmt.power_of_two_scale:
            return _power_of_two(self.fmt.scale.bias - code)  # type: ignore[operator]
        unit = self.unit(code, tensor_scale)
        return torch.ones_like(unit) / unit

    def code(self, x: Tensor, inverse: Tensor) -> Tensor:
        """float32, float16 or bfloat16 -> int32: the codes of elements (of `element.bits` bits)."""
        if self.fmt.power_of_two_scale and self.nan != "any" and byte_codes.suits(self.fmt.element, x):
            bits = _bits(x)
            code = byte_codes.codes(self.fmt.element, x.to(torch.float32), inverse, bits, self.saturate).to(torch.int32)
            if self.fmt.element.has_nan or self.nan == "saturate":
                return code
            return torch.where(self._is_lost(bits & CARRIERS[x.dtype].magnitude, x.dtype), torch.zeros_like(code), code)
        number = self._nearest(x, inverse) if self._rounds_numbers else x.to(torch.float32) * inverse
        if not self._rounds_numbers and not self.saturate:
            number = number.clamp(self.fmt.element.min, self.fmt.element.max)
        return self.code_of(x, number)

    def code_of(self, x: Tensor, number: Tensor) -> Tensor:
        """The codes of x, given its finite elements as float32 numbers (which are rounded to nearest here)."""
        if self.nan == "any" and self.saturate:
            return grids.encode(number.view(torch.int32), self.element_grid, None, "any")
        own, bits = CARRIERS[x.dtype], _bits(x)
        magnitude, sign = bits & own.magnitude, bits & _SIGN
        # What is not finite comes from x's own bits: a GPU's product or conversion would lose NaN's sign.
        nan = self._is_lost(magnitude, x.dtype)
        saturating = self.saturating_grid
        if grids.converts(number, saturating):  # such a format has NaN; a code has its sign in its first bit
            code, sign = grids.encode(number.view(torch.int32), saturating, None, "any"), (bits >> 31) & 0x80
            if not self.saturate:
                code = torch.where(magnitude == own.infinity, sign | self.element_grid.infinity_code, code)
            return torch.where(nan, sign | saturating.nan_code, code)
        number = torch.where(nan, sign | _NAN, number.view(torch.int32))
        if not self.saturate and not self._loses_infinity:
            number = torch.where(magnitude == own.infinity, sign | F32.infinity, number)
        return grids.encode(number, self.element_grid, None, "zero" if self.nan == "raise" else self.nan)

    def _is_lost(self, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
        """Which numbers count as NaN, by the bits of their magnitudes."""
        infinity = CARRIERS[dtype].infinity
        return magnitude >= infinity if self._loses_infinity else magnitude > infinity

    @property
    def _rounds_numbers(self) -> bool:
        """Are codes made from elements that are rounded as numbers? Else their rounding is part of making codes."""
        return not self.fmt.power_of_two_scale

    def _nearest(self, x: Tensor, inverse: Tensor) -> Tensor:
        """Numbers -> float32: in units, rounded to elements, with the sign of x; infinities to the largest element."""
        x = x.to(torch.float32)
        if self.fmt.power_of_two_scale and self.number_grid.suits_addition:
            return grids.nearest_in_floats(x * inverse, self.number_grid)
        if self.fmt.power_of_two_scale:
            code = grids.encode((x * inverse).view(torch.int32), self.number_grid, None, "zero")
            return grids.decode(code, self.number_grid).view(torch.float32)
        anchor = math.ldexp(1.5, F64.fraction_bits + _snap_step(self.fmt))  # type: ignore[operator]  # it has one
        snapped = (x.abs().to(torch.float64) * inverse + anchor) - anchor
        return self.signed(grids.nearest_in_floats(snapped, self.number_grid).to(torch.float32), x)

    def signed(self, magnitude: Tensor, x: Tensor) -> Tensor:
        """Magnitudes of elements with the signs of x (float32 both)."""
        sign = x.view(torch.int32) & F32.sign
        if not self.fmt.element.has_negative_zero:
            sign = torch.where(magnitude == 0, torch.zeros_like(sign), sign)
        return (magnitude.view(torch.int32) | sign).view(torch.float32)

    def rounded(self, x: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
        """float32, float16 or bfloat16 -> the same: what `quantize` returns, in a block that is not poisoned."""
        return self.value_of(x, self._nearest(x, inverse), unit)

    def value_of(self, x: Tensor, element: Tensor, unit: Tensor) -> Tensor:
        """`rounded`, given the finite elements as float32 numbers with the sign of x."""
        own, bits = CARRIERS[x.dtype], _bits(x)
        if x.dtype == torch.bfloat16 and self.fmt.power_of_two_scale and significant_bits(self.fmt.element) <= 8:
            # A number of bfloat16: it has few bits, and where the grid is finer than bfloat16's smallest number it is x.
            value = (element * unit).view(torch.int32) >> 16
        else:
            value = _bits(self._product(element, unit, x.dtype))
        magnitude, sign = bits & own.magnitude, bits & own.sign
        special = sign | own.nan
        if self.fmt.element.has_inf and not self.saturate:
            special = torch.where(magnitude == own.infinity, bits, special)
        finite = magnitude <= own.infinity if self.saturate else magnitude < own.infinity
        return _stored(torch.where(finite, value, special), own)

    @property
    def exact_in_float32(self) -> bool:
        """Is an element times any scale a float32 number? Then a tensor's scale may be multiplied last, in float32."""
        element, scale = self.fmt.element, self.fmt.scale
        bits = significant_bits(element) + significant_bits(scale)
        last = exponent_below(element.smallest) + exponent_below(scale.smallest)
        small = element.max * scale.max < 2.0**F32.max_exponent
        return bits <= F32.fraction_bits and last >= F32.min_exponent and small and not (element.has_nan or element.has_inf)

    def value(
        self, code: Tensor, unit: Tensor, dtype: torch.dtype = torch.float32, tensor_scale: Tensor | None = None
    ) -> Tensor:
        """int32 -> `dtype`: the numbers that codes of elements stand for. Bits above the format's are ignored.

        With `tensor_scale`, where `exact_in_float32`, `unit` is the block's `scale_value` alone, and `dtype` is float32.
        """
        grid = grids.grid(self.fmt.element, F32, Rounding.NEAREST, False)  # type: ignore[arg-type]  # a grid
        number = grids.decode(code, grid, finite=self.nan == "any").view(torch.float32)
        if self.nan == "any" and dtype == torch.float32:
            return self.product(number, unit, tensor_scale)
        if tensor_scale is not None:
            return _canonical(number * unit * tensor_scale)
        target, value = CARRIERS[dtype], self._product(number, unit, dtype)
        nan = torch.full_like(code, target.nan)
        if self.fmt.element.has_nan and self.fmt.power_of_two_scale and dtype == torch.float32:
            nan = torch.where(unit == unit, number.view(torch.int32), nan)  # that of the element has a sign
        elif self.fmt.element.has_nan:  # it has a sign; NaN that a strange scale makes has none
            size = unit.abs()
            negative = (number.view(torch.int32) < 0) ^ (unit < 0)
            signed = (number != number) & (size > 0) & (size < math.inf) & negative
            nan = torch.where(signed, nan | target.sign, nan)
        is_nan = (_bits(value) & target.magnitude) > target.infinity
        return _stored(torch.where(is_nan, nan, _bits(value)), target)

    def product(self, number: Tensor, unit: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
        """`value` of elements that are known, in float32, where NaN does not matter."""
        return self._product(number, unit, torch.float32) if tensor_scale is None else number * unit * tensor_scale

    def _product(self, number: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
        """Elements times their unit in `dtype`, rounded once."""
        if self.fmt.power_of_two_scale:
            return (number * unit).to(dtype)  # the product is exact
        exact = number.to(torch.float64) * unit
        near = exact.to(torch.float32)
        if dtype == torch.float32:
            return near
        # To odd: toward zero, and the last bit says that something was cut off. float32 has so many bits more than the dtype,
        # among subnormal numbers too, that rounding to nearest then sees what the exact product would show it.
        size, wide = exact.abs(), near.abs().to(torch.float64)
        cut = near.view(torch.int32) - (wide > size).to(torch.int32)
        return (cut | (wide != size).to(torch.int32)).view(torch.float32).to(dtype)


_NAN = F32.nan
_SIGN = F32.sign


def _bits(x: Tensor) -> Tensor:
    """The bits of float32, float16 or bfloat16 numbers in int32; the sign bit is spread upwards."""
    own = CARRIERS[x.dtype]
    return own.bits(x.view(own.storage))


def _stored(bits: Tensor, carrier: Carrier) -> Tensor:
    return carrier.store(bits).view(carrier.dtype)


def _canonical(x: Tensor) -> Tensor:
    """float32 with one NaN, whichever chip computed it."""
    return torch.where(x == x, x, torch.full_like(x, math.nan))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, for int32 numbers from -127, which gives a subnormal number, to 127."""
    bits = (exponent + F32.bias) << F32.fraction_bits
    return torch.where(bits > 0, bits, torch.full_like(bits, F32.power_of_two(-127))).view(torch.float32)


def _exponents(scale: FloatFormat) -> tuple[int, int]:
    """The lowest and the highest exponent of scales that are powers of two."""
    return exponent_below(scale.smallest), exponent_below(scale.max)


def _snap_step(fmt: BlockFormat) -> int | None:
    """The exponent of the step that a quotient is rounded to before it is rounded to an element; None: no step will do.

    2^s with 2^(s - 1) <= 2^-B * smallest / 2, and max * 2 * 2^-52 < 2^(s - 1); see the text above. (Numbers beyond 2 * max are
    rounded more coarsely: they saturate in any case.)
    """
    bits = significant_bits(fmt.element) + 1 + significant_bits(fmt.scale) + TENSOR_SCALE_BITS * fmt.tensor_scale
    step = exponent_below(fmt.element.smallest) - 1 - max(bits, 24)
    return step if exponent_below(fmt.element.max) + 2 - F64.fraction_bits < step - 1 else None


@lru_cache(maxsize=1024)
def block_program(fmt: BlockFormat, rounding: str = "nearest", saturate: bool = True, nan: str = "zero") -> BlockProgram | None:
    """The program of a format, the same object for the same arguments; None where block.py's integers are the only one.

    It needs rounding to nearest and elements that are a symmetric grid in float32 (floats and fixed point). With power-of-two
    scales: scales from 2^-127 to 2^127, the largest at least 1 (so that no quotient overflows), and products that float32 has
    bits for. With others: a scale that is a grid in float32, and a step to snap quotients to.
    """
    element, scale = fmt.element, fmt.scale
    if rounding != "nearest" or not is_grid(element) or not grid_fits(element, F32) or element.min != -element.max:
        return None
    if fmt.power_of_two_scale:
        lowest, highest = _exponents(scale)
        known = (is_grid(scale) and grid_fits(scale, F32)) or (not scale.signed and not scale.subnormals and not scale.zero)
        exact = exponent_below(element.smallest) + lowest >= -149 and element.smallest > 2.0**-100
        suits = known and lowest >= -127 and 0 <= highest <= 127 and exact and fmt.max_exponent >= -20
    else:
        on_float64 = (grids.grid(f, F64, Rounding.NEAREST, True) for f in (element, scale) if is_grid(f))
        suits = is_grid(scale) and grid_fits(scale, F32) and all(g.suits_addition for g in on_float64)
        bits = significant_bits(element) + significant_bits(scale) + TENSOR_SCALE_BITS * fmt.tensor_scale + 1
        suits = suits and _snap_step(fmt) is not None and bits <= F64.fraction_bits
    return BlockProgram(fmt, saturate, nan) if suits else None
