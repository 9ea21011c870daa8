"""What every number format has in common.

A format is a finite set of numbers and a code for each of them. It is data: frozen, hashable, comparable, printed as
the text that `lowp.format` parses. Everything that can be computed from its fields is a derived property, and every
value is an exact Python float (no format here reaches beyond float64).

Magnitudes are ordered by **rank**: zero has rank 0, the next larger magnitude rank 1, and so on. For floats and posits
the rank is the code without its sign. "Ties to even" means: to the neighbour of even rank, in every family.
"""

import enum
import math
from abc import ABC, abstractmethod
from functools import cached_property

from lowp.notebook import html_table


class Rounding(enum.StrEnum):
    """How a number between two neighbours of a format becomes one of them."""

    NEAREST = "nearest"  # the closer one, ties to even rank
    NEAREST_AWAY = "nearest_away"  # the closer one, ties away from zero
    TOWARD_ZERO = "toward_zero"
    UP = "up"  # toward plus infinity
    DOWN = "down"  # toward minus infinity
    TO_ODD = "to_odd"  # the one of odd rank, unless exact: rounding again later is then safe
    STOCHASTIC = "stochastic"  # up with a probability equal to the distance covered: right on average


class Format(ABC):
    """A set of numbers with codes. Subclasses are frozen dataclasses."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Width of one code."""

    @abstractmethod
    def value(self, code: int) -> float:
        """The exact number that a code stands for (infinities and NaN included)."""

    @property
    @abstractmethod
    def family(self) -> str:
        """Which kind of format this is, in one word."""

    def _repr_html_(self) -> str:
        epsilon = None if math.isnan(self.epsilon) else f"{self.epsilon:.6g}"
        special = ", ".join(name for name, there in (("inf", self.has_inf), ("NaN", self.has_nan)) if there) or "none"
        row = (self.bits, f"{self.max:.6g}", f"{self.smallest:.6g}", epsilon, f"{self.dynamic_range:.1f}", special)
        headings = ("bits", "max", "smallest", "epsilon", "binades", "special values")
        return html_table(f"{self} ({self.family})", headings, [row], right=range(5))

    @property
    def codes(self) -> range:
        return range(1 << self.bits)

    @cached_property
    def table(self) -> tuple[float, ...]:
        """The value of every code, in code order. For formats of up to 16 bits."""
        self._require_enumerable()
        return tuple(self.value(code) for code in self.codes)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """All distinct finite values, ascending. For formats of up to 16 bits."""
        return tuple(sorted({value + 0.0 for value in self.table if math.isfinite(value)}))

    def _require_enumerable(self) -> None:
        if self.bits > 16:
            raise ValueError(f"{self} has 2^{self.bits} codes; only formats of up to 16 bits are enumerated")

    # Derived figures. Families that are wider than 16 bits or can say it directly override these.

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.values[-1]

    @property
    def scaled_max(self) -> float:
        """Up to where numbers are brought that are scaled to fit: the largest value, unless a format is coarse there."""
        return self.max

    @cached_property
    def min(self) -> float:
        """The most negative finite value."""
        return self.values[0]

    @cached_property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return next(value for value in self.values if value > 0)

    @cached_property
    def epsilon(self) -> float:
        """The gap between 1 and the next larger value (for formats without 1, the largest relative gap is undefined: NaN)."""
        above = [value for value in self.values if value > 1.0]
        return above[0] - 1.0 if 1.0 in self.values and above else math.nan

    @property
    def dynamic_range(self) -> float:
        """Binades from the smallest value above zero to the largest: log2(max / smallest)."""
        return math.log2(self.max) - math.log2(self.smallest)

    @property
    def count(self) -> int:
        """How many distinct finite values there are."""
        return len(self.values)

    @cached_property
    def nan_code(self) -> int | None:
        """The canonical code of NaN, or None."""
        return next((code for code in self.codes if math.isnan(self.value(code))), None)

    @property
    def inf_code(self) -> int | None:
        """The code of plus infinity, or None."""
        return None

    @property
    def has_nan(self) -> bool:
        return self.nan_code is not None

    @property
    def has_inf(self) -> bool:
        return self.inf_code is not None

    @property
    def has_zero(self) -> bool:
        return True

    @property
    def has_negative_zero(self) -> bool:
        return False

    @property
    def signed(self) -> bool:
        return True

    @property
    def overflow(self) -> float:
        """What a positive number too large for the format becomes without `saturate`: inf, else NaN, else max."""
        if self.has_inf:
            return math.inf
        return math.nan if self.has_nan else self.max

    @property
    def special_codes(self) -> dict[str, int]:
        """The codes of zero, minus zero, the infinities and NaN, as far as the format has them."""
        found = {}
        if self.has_zero:
            found["zero"] = next(c for c in self.codes if self.value(c) == 0 and math.copysign(1, self.value(c)) > 0)
        if self.has_negative_zero:
            found["-zero"] = found["zero"] | 1 << (self.bits - 1)
        if self.inf_code is not None:
            found["inf"] = self.inf_code
            if self.signed:
                found["-inf"] = self.inf_code | 1 << (self.bits - 1)
        if self.nan_code is not None:
            found["nan"] = self.nan_code
        return found
