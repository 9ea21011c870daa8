"""The gaps between neighbouring values of a format, and how wrong rounding to nearest can be in each."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import frexp
from typing import NamedTuple

from lowp.formats.base import Format
from lowp.formats.binades import binades, positive_codes
from lowp.formats.posit import PositFormat

SAMPLES = 64  # of a binade of a format that is too wide to list


class Gap(NamedTuple):
    """Two neighbouring positive values, and the point between them at which rounding to nearest changes over."""

    low: float
    high: float
    tie: float

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def worst_relative_error(self) -> float:
        """Of the numbers in the gap, the one at the tie is rounded worst."""
        return max(self.tie - self.low, self.high - self.tie) / self.tie


def gaps(fmt: Format) -> Iterator[Gap]:
    """The gaps between all positive neighbours, ascending; of formats above 16 bits, some in each binade."""
    codes = positive_codes(fmt)
    for index in range(len(codes) - 1) if fmt.bits <= 16 else _sampled(fmt):
        low, high = fmt.value(codes[index]), fmt.value(codes[index + 1])
        # A posit's tie is the posit with one bit more between the two, which is not the middle where exponents are cut off.
        tie = fmt.decode_body(2 * codes[index] + 1, fmt.width) if isinstance(fmt, PositFormat) else (low + high) / 2
        yield Gap(low, high, tie)


def error_steps(between: Iterable[Gap], every_gap: bool) -> list[tuple[float, float]]:
    """(start, worst relative error) of every gap, or of every binade."""
    if every_gap:
        return [(gap.low, gap.worst_relative_error) for gap in between]
    grouped = (list(group) for _, group in groupby(between, key=lambda gap: frexp(gap.low)[1]))
    return [(group[0].low, max(gap.worst_relative_error for gap in group)) for group in grouped]


def _sampled(fmt: Format) -> Iterator[int]:
    start, last = 0, len(positive_codes(fmt)) - 1
    for group in binades(fmt):
        yield from range(start, min(start + len(group.codes), last), max(1, len(group.codes) // SAMPLES))
        start += len(group.codes)
