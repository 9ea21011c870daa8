"""Codebooks: eight (or four) bits that index a table of numbers.

`dynamic8 static8 mantissa8 linear8` are the four types of "8-bit approximations for parallelism in deep learning" (arXiv
1511.04561); `bnb_dynamic8` is the evenly spaced dynamic map of today's 8-bit optimizers; `nf4` has the quantiles of a
normal distribution. Dynamic, linear, bnb_dynamic8 and nf4 cover [-1, 1]: divide by the absolute maximum first.

Entries are float32 numbers, so that every tensor dtype from float32 up holds them exactly.
"""

import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from lowp.formats.base import Format

MAX_CODEBOOK_BITS = 16
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def _float32(value: Fraction | float) -> float:
    return struct.unpack("f", struct.pack("f", float(value)))[0]


@dataclass(frozen=True)
class CodebookFormat(Format):
    """A named table: entry `i` is the value of code `i`. Where a value stands twice, its lowest code is used."""

    name: str
    entries: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        count = len(self.entries)
        if not 2 <= count <= 1 << MAX_CODEBOOK_BITS or count & (count - 1):
            raise ValueError(f"codebook {self.name!r} has {count} entries; it takes 2, 4, 8 ... or {1 << MAX_CODEBOOK_BITS}")
        if strange := [value for value in self.entries if not abs(value) <= _FLOAT32_MAX or _float32(value) != value]:
            raise ValueError(f"codebook {self.name!r} holds {strange[0]!r}; entries are finite float32 numbers")
        if 0.0 in self.entries and all(math.copysign(1.0, value) < 0 for value in self.entries if value == 0):
            raise ValueError(f"codebook {self.name!r} holds -0.0 and not 0.0, which 0 becomes")

    def __eq__(self, other: object) -> bool:
        """The same entries, signs of zeros included: 0.0 == -0.0, but their codes are two."""
        if not isinstance(other, CodebookFormat):
            return NotImplemented
        return self.name == other.name and self._entry_bits == other._entry_bits

    def __hash__(self) -> int:
        return hash((self.name, self._entry_bits))

    @cached_property
    def _entry_bits(self) -> bytes:
        return struct.pack(f"{len(self.entries)}d", *self.entries)

    @property
    def family(self) -> str:
        return "codebook"

    @property
    def bits(self) -> int:
        return (len(self.entries) - 1).bit_length()

    def value(self, code: int) -> float:
        return self.entries[code]

    @property
    def nan_code(self) -> None:
        return None

    @cached_property
    def has_negative_zero(self) -> bool:
        return any(value == 0 and math.copysign(1, value) < 0 for value in self.entries)

    def __str__(self) -> str:
        return self.name


def _with_sign_bit(name: str, magnitudes: Iterable[Fraction]) -> CodebookFormat:
    """128 magnitudes; bit 7 is the sign."""
    positive = [_float32(value) for value in magnitudes]
    assert len(positive) == 128
    return CodebookFormat(name, tuple(positive + [-value for value in positive]))


def _midpoints(points: list[Fraction]) -> list[Fraction]:
    return [(a + b) / 2 for a, b in itertools.pairwise(points)]


def _dynamic() -> Iterator[Fraction]:
    """n leading zeros mean 10^-n, the first one is a flag, the bits after it walk down a bisection tree over [0.1, 1]."""
    points = [Fraction(1, 10), Fraction(45, 100), Fraction(1)]  # the first pivot is 0.45, not the middle
    for tree_bits in range(1, 7):
        yield from (value / 10 ** (6 - tree_bits) for value in _midpoints(points))
        points = sorted(points + _midpoints(points))
    yield Fraction(0)
    yield Fraction(1)


def _static() -> Iterator[Fraction]:
    """A 3-bit decimal exponent and a 4-bit tree over each decade; the very first entry is zero instead."""
    decade = [Fraction(1, 10) + Fraction(4375, 100_000) * i for i in range(8)]
    decade += [Fraction(45, 100) + Fraction(675, 10_000) * i for i in range(8)]
    values = [value * Fraction(10) ** (exponent - 5) for exponent in range(8) for value in decade]
    yield Fraction(0)
    yield from values[1:]


def _mantissa() -> Iterator[Fraction]:
    """A 3-bit decimal exponent and a 4-bit integer: 1e-6 to 150."""
    return (mantissa * Fraction(10) ** (exponent - 6) for exponent in range(8) for mantissa in range(16))


def _bnb_dynamic() -> Iterator[Fraction]:
    """For each decade, the midpoints of 2^i equal pieces of [0.1, 1], of both signs; and 0 and 1. Codes in ascending order."""
    for i in range(7):
        pieces = [Fraction(1, 10) + Fraction(9, 10) * j / 2**i for j in range(2**i + 1)]
        for value in _midpoints(pieces):
            yield value / 10 ** (6 - i)
            yield -value / 10 ** (6 - i)
    yield Fraction(0)
    yield Fraction(1)


DYNAMIC8 = _with_sign_bit("dynamic8", _dynamic())
STATIC8 = _with_sign_bit("static8", _static())
MANTISSA8 = _with_sign_bit("mantissa8", _mantissa())
LINEAR8 = _with_sign_bit("linear8", (Fraction(i, 127) for i in range(128)))
BNB_DYNAMIC8 = CodebookFormat("bnb_dynamic8", tuple(_float32(value) for value in sorted(_bnb_dynamic())))
NF4 = CodebookFormat(
    "nf4",
    tuple(
        _float32(value)
        for value in (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        )
    ),
)
