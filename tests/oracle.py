"""A vectorised oracle for the exhaustive tests, built from the reference's list of values.

Rounding is a staircase. `round_all` looks up the neighbours of every input in the format's values (exact in float64) and
applies the mode; `test_reference.py` proves it equal to the scalar reference at every step of the staircase and beside it.
"""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from lowp.formats import Format, PositFormat, Rounding, reference

DETERMINISTIC = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)


@lru_cache(maxsize=64)
def _ladder(fmt: Format, negative: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Magnitudes, the next larger of each (beyond the last: one step further), and the ties between the two. All exact."""
    magnitudes = sorted({abs(value) for value in fmt.values if value == 0 or (value < 0) == negative})
    if not magnitudes:
        return np.array([math.nan]), np.array([math.nan]), np.array([math.nan])
    last = reference.neighbours(Fraction(magnitudes[-1]), fmt, negative)
    highs = [*magnitudes[1:], float(last.high)]
    if isinstance(fmt, PositFormat):
        ties = [0.0] + [fmt.decode_body(2 * rank + 1, fmt.width) for rank in range(1, len(magnitudes))]
    else:
        ties = [(low + high) / 2 for low, high in zip(magnitudes, highs, strict=True)]
    return np.array(magnitudes), np.array(highs), np.array(ties)


def round_all(x: np.ndarray, fmt: Format, mode: Rounding, saturate: bool = False) -> np.ndarray:
    """Every element of a float64 array, rounded to the format."""
    result = np.empty_like(x)
    for negative in (False, True):
        side = np.signbit(x) == negative
        result[side] = _round_side(np.abs(x[side]), fmt, mode, saturate, negative)
    return np.where(np.isnan(x), x, result)


def _round_side(magnitude: np.ndarray, fmt: Format, mode: Rounding, saturate: bool, negative: bool) -> np.ndarray:
    sign = -1.0 if negative else 1.0
    values, highs, ties = _ladder(fmt, negative)
    rank = np.searchsorted(values, magnitude, side="right") - 1
    below_all = rank < 0  # only in formats without zero
    rank = rank.clip(0)
    low, tie, high = values[rank], ties[rank], highs[rank]
    odd = rank % 2 == 1
    inexact = (magnitude > low) & (high > low)
    up = (
        inexact
        & {
            Rounding.NEAREST: (magnitude > tie) | ((magnitude == tie) & odd),
            Rounding.NEAREST_AWAY: magnitude >= tie,
            Rounding.TOWARD_ZERO: np.zeros_like(odd),
            Rounding.UP: np.full_like(odd, not negative),
            Rounding.DOWN: np.full_like(odd, negative),
            Rounding.TO_ODD: ~odd,
        }[mode]
    )
    result = np.where(below_all, values[0], np.where(up, high, low))
    largest = values[-1]
    over = np.nan if math.isnan(fmt.overflow) else (np.inf if math.isinf(fmt.overflow) else largest)
    infinite = np.inf if fmt.has_inf else (np.nan if fmt.has_nan else largest)
    result = np.where(result > largest, largest if saturate else over, result)
    result = np.where(np.isinf(magnitude), largest if saturate else infinite, result)
    result = np.where((result == 0) & (not fmt.has_negative_zero), 0.0, sign * result)
    if not fmt.signed and negative:
        result = np.where(magnitude > 0, np.nan, result)
    if not fmt.has_zero:
        result = np.where(magnitude == 0, np.nan, result)
    return result + 0.0 if not fmt.has_negative_zero else result


def same(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Elementwise: the same number and sign of zero, or both NaN."""
    return ((got == want) & (np.signbit(got) == np.signbit(want))) | (np.isnan(got) & np.isnan(want))
