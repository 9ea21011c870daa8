"""Student's t distribution: its tails, its quantiles, and how likely a test with it decides.

Written here, since scipy is large and nothing else of lowp needs it. Tests compare with scipy and statsmodels.

- The tail is a regularized incomplete beta function: P(T > t) = I_x(df / 2, 1 / 2) / 2 with x = df / (df + t^2). It is computed
  by Lentz's evaluation of its continued fraction (Numerical Recipes, 6.4), which converges in some tens of terms.
- A quantile is found by bisection of the tail: 80 halvings, no starting value that could fail.
- The power of a test is a mean over what the standard deviation may come out as: given that, the mean of the differences is
  normal, and everything is a difference of two normal probabilities. The integral over the deviation is a sum over `_NODES`
  points (Simpson's rule).
"""

import math
from collections.abc import Iterator
from functools import lru_cache

_TERMS = 300
_TINY = 1e-300
_NODES = 201  # points of the integral over the deviation: an odd number


def upper_tail(t: float, df: float) -> float:
    """P(T > t)."""
    half = two_sided(t, df) / 2
    return half if t >= 0 else 1 - half


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|): the p-value of a two-sided test."""
    return 1.0 if t == 0 else _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


@lru_cache(maxsize=4096)
def critical(df: int, level: float) -> float:
    """The t with P(|T| > t) = level: 2.776 for four degrees of freedom and 0.05."""
    if not 0 < level < 1:
        raise ValueError(f"level: {level:g} must be above 0 and below 1")
    low, high = 0.0, 1.0
    while two_sided(high, df) > level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > level else (low, middle)
    return (low + high) / 2


def power_of_difference(n: int, effect: float, level: float) -> float:
    """How likely n differences with a true mean of `effect` standard deviations are found to differ from 0."""
    reach = critical(n - 1, level)
    shift = effect * math.sqrt(n)
    return math.fsum(
        weight * (_normal(shift - reach * spread) + _normal(-shift - reach * spread)) for spread, weight in _spreads(n - 1)
    )


def power_of_equivalence(n: int, effect: float, margin: float, level: float) -> float:
    """How likely n differences with a true mean of `effect` are found to lie within +-margin (both in standard deviations).

    Two one-sided tests, each at `level`: the interval of 1 - 2 level lies within the margin.
    """
    reach = critical(n - 1, min(0.999, 2 * level))
    root = math.sqrt(n)
    total = []
    for spread, weight in _spreads(n - 1):
        room = margin * root - reach * spread
        if room > 0:
            total.append(weight * (_normal(room - effect * root) - _normal(-room - effect * root)))
    return math.fsum(total)


@lru_cache(maxsize=4096)
def _spreads(df: int) -> tuple[tuple[float, float], ...]:
    """Points of (sample deviation / true deviation), with weights that add up to 1.

    The ratio u is sqrt(chi-squared / df), with a density in proportion to u^(df - 1) exp(-df u^2 / 2). Points are the
    squares of evenly spaced numbers: closer to each other near 0, where with few degrees of freedom much happens.
    """
    reach = 9 / math.sqrt(2 * df)
    begin, end = math.sqrt(max(0.0, 1 - reach)), math.sqrt(1 + reach)
    roots = [begin + (end - begin) * node / (_NODES - 1) for node in range(_NODES)]
    logs = [(2 * df - 1) * math.log(root or _TINY) - df * root**4 / 2 for root in roots]
    simpson = [1 if node in (0, _NODES - 1) else 4 if node % 2 else 2 for node in range(_NODES)]
    weights = [factor * math.exp(each - max(logs)) for factor, each in zip(simpson, logs, strict=True)]
    total = math.fsum(weights)
    return tuple((root * root, weight / total) for root, weight in zip(roots, weights, strict=True))


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b), regularized; `rest` is 1 - x, which the caller knows to more digits."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x > (a + 1) / (a + b + 2):  # the fraction of the other side converges faster
        return 1 - front * _lentz(_beta_terms(b, a, rest)) / b
    return front * _lentz(_beta_terms(a, b, x)) / a


def _beta_terms(a: float, b: float, x: float) -> Iterator[tuple[float, float]]:
    """The numerators and denominators of the continued fraction."""
    yield 1.0, 1.0
    for m in range(_TERMS):
        yield -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)), 1.0
        m += 1
        yield m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), 1.0


def _lentz(terms: Iterator[tuple[float, float]]) -> float:
    """a1 / (b1 + a2 / (b2 + ...)), from left to right."""
    value, c, d = _TINY, _TINY, 0.0
    for numerator, denominator in terms:
        d = denominator + numerator * d
        c = denominator + numerator / c
        d = 1 / (d or _TINY)
        c = c or _TINY
        value *= c * d  # a numerator of 0 ends the fraction: then this is 1
        if abs(c * d - 1) < 1e-15:
            break
    return value
