"""Fixed point and integers: a uniform grid, symmetric around zero, with a power of two as its scale."""

import math
from dataclasses import dataclass

from lowp.formats.base import Format

MAX_FIXED_BITS = 24


@dataclass(frozen=True)
class FixedFormat(Format):
    """A sign, `integer_bits` before the point and `fraction_bits` after it; `int8` is seven and none.

    Codes are two's complement. The range is symmetric, as quantizers of signed data want it: the code of
    -2^integer_bits decodes but is never produced.
    """

    integer_bits: int
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        if self.integer_bits < 0 or self.fraction_bits < 0 or not 2 <= self.bits <= MAX_FIXED_BITS:
            raise ValueError(
                f"impossible {self}: int<N> takes N from 2 to {MAX_FIXED_BITS} bits, fixed<I>.<F> takes I + F from 1 to "
                f"{MAX_FIXED_BITS - 1} (the sign is one bit more)"
            )

    @property
    def family(self) -> str:
        return "fixed"

    @property
    def bits(self) -> int:
        return 1 + self.integer_bits + self.fraction_bits

    @property
    def max_code(self) -> int:
        """The code, and rank, of the largest value."""
        return (1 << (self.bits - 1)) - 1

    def value(self, code: int) -> float:
        signed = code - (1 << self.bits) if code > self.max_code else code
        return math.ldexp(signed, -self.fraction_bits)

    @property
    def values(self) -> tuple[float, ...]:
        self._require_enumerable()
        return tuple(math.ldexp(n, -self.fraction_bits) for n in range(-self.max_code, self.max_code + 1))

    @property
    def max(self) -> float:
        return math.ldexp(self.max_code, -self.fraction_bits)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def smallest(self) -> float:
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def epsilon(self) -> float:
        return self.smallest if self.max > 1 else math.nan

    @property
    def count(self) -> int:
        return 2 * self.max_code + 1

    @property
    def nan_code(self) -> None:
        return None

    def __str__(self) -> str:
        if self.fraction_bits == 0:
            return f"int{self.bits}"
        return f"fixed{self.integer_bits}.{self.fraction_bits}"
