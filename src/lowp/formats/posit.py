"""Posits: tapered precision, most of it around 1 (Posit Standard 2022; es = 2 there, other es for the older papers)."""

import math
from dataclasses import dataclass

from lowp.formats.base import Format

MAX_POSIT_BITS = 16
MAX_POSIT_EXPONENT = 896  # of max: every value stays a normal float64
MAX_EXPONENT_SIZE = 9  # with more, even the narrowest posit exceeds that


@dataclass(frozen=True)
class PositFormat(Format):
    """An n-bit posit: sign, a run of equal bits (the regime), `exponent_size` exponent bits, fraction.

    There is one zero and one NaR (here: NaN), no infinity. Rounding follows the standard: a number other than zero never
    becomes zero or NaR when rounded to nearest, and "nearest" is decided on the bit string, by the (n+1)-bit posit between.
    """

    width: int
    exponent_size: int = 2

    def __post_init__(self) -> None:
        possible = 3 <= self.width <= MAX_POSIT_BITS and 0 <= self.exponent_size <= MAX_EXPONENT_SIZE
        if not possible or self.max_exponent > MAX_POSIT_EXPONENT:
            raise ValueError(
                f"impossible {self}: posit<n> and posit<n>_<es> take n from 3 to {MAX_POSIT_BITS} "
                f"and es so that (n - 2) * 2^es stays under {MAX_POSIT_EXPONENT}"
            )

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value; its negative is the smallest one's."""
        return (self.width - 2) << self.exponent_size

    @property
    def scaled_max(self) -> float:
        """Where the shortest regime ends: up to there posits have all their fraction bits, and down to its inverse."""
        return 2.0 ** (1 << self.exponent_size)

    @property
    def family(self) -> str:
        return "posit"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def max_code(self) -> int:
        """The code, and rank, of the largest value."""
        return (1 << (self.width - 1)) - 1

    def value(self, code: int) -> float:
        if code == self.nan_code:
            return math.nan
        if code == 0:
            return 0.0
        if code > self.max_code:  # negative numbers are the two's complement of positive ones
            return -self.value((1 << self.width) - code)
        return self.decode_body(code, self.width - 1)

    def decode_body(self, body: int, length: int) -> float:
        """The positive posit with `length` bits `body` after the sign (one more than ours, for midpoints, will do too)."""
        string = f"{body:0{length}b}"
        run = len(string) - len(string.lstrip(string[0]))
        regime = run - 1 if string[0] == "1" else -run
        rest = string[run + 1 :]
        exponent_bits = rest[: self.exponent_size].ljust(self.exponent_size, "0")  # bits cut off are zeros
        exponent = int(exponent_bits, 2) if exponent_bits else 0
        fraction = rest[self.exponent_size :]
        significand = int("1" + fraction, 2)
        return math.ldexp(significand, (regime << self.exponent_size) + exponent - len(fraction))

    @property
    def max(self) -> float:
        return math.ldexp(1.0, self.max_exponent)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def smallest(self) -> float:
        return math.ldexp(1.0, -self.max_exponent)

    @property
    def count(self) -> int:
        return 2 * self.max_code + 1

    @property
    def nan_code(self) -> int:
        return 1 << (self.width - 1)

    @property
    def overflow(self) -> float:
        return self.max  # posits saturate; only an infinity itself becomes NaR

    def __str__(self) -> str:
        return f"posit{self.width}" if self.exponent_size == 2 else f"posit{self.width}_{self.exponent_size}"
