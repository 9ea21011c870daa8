"""The values of a format, in order and by binade, for formats of every width: wide ones are sampled, not listed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import frexp, isfinite, ldexp

from lowp.formats.base import Format
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import FloatFormat


@lru_cache(maxsize=32)
def positive_codes(fmt: Format) -> Sequence[int]:
    """The code of every value above zero, ascending by value; where a value has two codes, the lower one."""
    if fmt.bits > 16:  # too many to list; in both of these families, positive codes ascend with their values
        assert isinstance(fmt, (FloatFormat, FixedFormat))
        return range(1 if fmt.has_zero else 0, fmt.max_code + 1)
    lowest: dict[float, int] = {}
    for code, value in enumerate(fmt.table):
        if isfinite(value) and value > 0:
            lowest.setdefault(value, code)
    return tuple(lowest[value] for value in sorted(lowest))


def code_of(value: float, fmt: Format) -> int | None:
    """The code of a positive value that the format has."""
    codes = positive_codes(fmt)
    index = bisect_left(codes, value, key=fmt.value)
    return codes[index] if index < len(codes) and fmt.value(codes[index]) == value else None


@dataclass(frozen=True)
class Binade:
    """The values in [2^exponent, 2^(exponent+1))."""

    exponent: int
    codes: Sequence[int]  # ascending by value
    gap: float  # from the first value to the one after it, in this binade or the next; the largest value has none: 0


def binades(fmt: Format) -> list[Binade]:
    """All binades that hold a value."""
    codes = positive_codes(fmt)
    found = []
    start = 0
    while start < len(codes):
        first = fmt.value(codes[start])
        exponent = frexp(first)[1] - 1
        end = bisect_left(codes, ldexp(1.0, exponent + 1), lo=start, key=fmt.value)
        gap = fmt.value(codes[start + 1]) - first if start + 1 < len(codes) else 0.0
        found.append(Binade(exponent, codes[start:end], gap))
        start = end
    return found
