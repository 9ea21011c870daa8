"""What several seeds say about a setting, beside the baseline: means, intervals, paired differences, and a verdict.

A seed decides initial weights and the order of samples, and is the same in all settings. So a setting is compared with the
baseline seed by seed: what a seed does to both of them cancels. With n differences of mean d and deviation s, t = d / (s /
sqrt(n)) follows Student's distribution with n - 1 degrees of freedom where the true difference is 0.

**Verdicts.** A difference below the margin does not matter: the margin is the study's, or else the deviation of the baseline
between seeds, since a change that is smaller than what another seed does is noise. In this order:

1. `worse`: runs of the setting diverged, or failed to give a finite number, where the baseline's did not. A rule, not a test.
2. `within noise`: the difference is shown to be smaller than the margin (two one-sided t tests).
3. `better` or `worse`: the difference is shown not to be 0 (a two-sided t test).
4. `more seeds needed`: neither. How many in all (`seeds_needed`): with so many, one of the two tests decides in 8 of 10
   studies, if the true difference is the one that was seen and the true deviation too.

**Many comparisons.** With 24 settings at a level of 5 %, one false "better" or "worse" is to be expected. Holm's method
corrects for that: the smallest p-value is multiplied by the number of comparisons m, the next one by m - 1, and so on, and
none may be below the one before it. Then the chance that any "better" or "worse" of a study is wrong is at most 5 %, however
the comparisons depend on each other (they share a baseline); the same holds for all its "within noise". Bonferroni's method
promises the same and finds less; Benjamini and Hochberg's finds more, but promises only that few of the findings are wrong.
Intervals in tables are of 95 % each, not corrected: they say how large a difference is, the verdict whether there is one.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lowp.lab.student import critical, power_of_difference, power_of_equivalence, two_sided, upper_tail

LEVEL = 0.05  # of all verdicts of a study together; intervals are of 1 - LEVEL
POWER = 0.8
MOST_SEEDS = 1000  # beyond: the difference is hardly there, and nobody would run them

Verdict = Literal["baseline", "better", "worse", "within noise", "more seeds needed"]


@dataclass(frozen=True)
class Summary:
    """A mean with half the width of its 95 % interval (Student's). NaN: there are too few numbers."""

    n: int
    mean: float
    half: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        n = len(values)
        if n < 2:
            return cls(n, values[0] if values else math.nan, math.nan, math.nan)
        deviation = statistics.stdev(values)
        return cls(n, statistics.fmean(values), critical(n - 1, LEVEL) * deviation / math.sqrt(n), deviation)

    @property
    def interval(self) -> tuple[float, float]:
        return self.mean - self.half, self.mean + self.half


@dataclass(frozen=True)
class Comparison:
    """A setting beside the baseline. Differences are setting minus baseline, of the seeds that both have."""

    difference: Summary
    margin: float
    p_difference: float  # that it is not 0; corrected for the number of comparisons. NaN: too few seeds
    p_within: float  # that it is within the margin; corrected
    verdict: Verdict
    level: float = LEVEL  # what the correction leaves to one more comparison
    note: str = ""

    @cached_property
    def seeds_needed(self) -> int | None:
        """In all, where more are needed; None: it cannot be said, or none are."""
        return seeds_needed(self.difference, self.margin, self.level) if self.verdict == "more seeds needed" else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given; NaN stays NaN and does not count as a comparison."""
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = list(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = largest
    return adjusted


def compare(
    settings: Mapping[str, Mapping[int, float]],
    baseline: str,
    *,
    higher_is_better: bool,
    margin: float | None = None,
    lost: Mapping[str, int] | None = None,
) -> dict[str, Comparison]:
    """Every setting beside the baseline. `settings` has a figure by seed, of runs that ended with a finite one.

    `lost` counts the runs of a setting that diverged where the baseline, with the same seed, did not.
    """
    base = settings[baseline]
    noise = Summary.of(list(base.values())).deviation
    margin = noise if margin is None else margin
    differences = {name: Summary.of(_paired(own, base)) for name, own in settings.items() if name != baseline}
    unequal = dict(zip(differences, holm([_p_difference(each) for each in differences.values()]), strict=True))
    alike = dict(zip(differences, holm([_p_within(each, margin) for each in differences.values()]), strict=True))
    found = {baseline: Comparison(Summary.of([0.0] * len(base)), margin, math.nan, math.nan, "baseline")}
    still_open = sum(not (unequal[name] <= LEVEL or alike[name] <= LEVEL) for name in differences)
    for name, difference in differences.items():
        gone = (lost or {}).get(name, 0)
        verdict = _verdict(difference, unequal[name], alike[name], gone, higher_is_better)
        note = f"{gone} run{'s' * (gone != 1)} diverged" if gone else ""
        found[name] = Comparison(difference, margin, unequal[name], alike[name], verdict, LEVEL / max(1, still_open), note)
    return found


def _paired(own: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]


def _verdict(difference: Summary, unequal: float, alike: float, gone: int, higher_is_better: bool) -> Verdict:
    if gone:
        return "worse"
    if alike <= LEVEL:  # NaN is not
        return "within noise"
    if unequal <= LEVEL:
        return "better" if (difference.mean > 0) == higher_is_better else "worse"
    return "more seeds needed"


def _p_difference(difference: Summary) -> float:
    """Of a two-sided test that the mean is 0. Differences that are all the same leave nothing to chance."""
    if difference.n < 2:
        return math.nan
    if difference.deviation == 0:
        return float(difference.mean == 0)
    return two_sided(difference.mean / _error(difference), difference.n - 1)


def _p_within(difference: Summary, margin: float) -> float:
    """Of two one-sided tests that the mean lies outside of +-margin."""
    if difference.n < 2 or math.isnan(margin):
        return math.nan
    if difference.deviation == 0:
        return float(abs(difference.mean) >= margin and difference.mean != 0)
    return upper_tail((margin - abs(difference.mean)) / _error(difference), difference.n - 1)


def _error(difference: Summary) -> float:
    return difference.deviation / math.sqrt(difference.n)


def seeds_needed(difference: Summary, margin: float, level: float) -> int | None:
    """The smallest number of seeds in all, more than there are, with which either test decides with a chance of `POWER`.

    `level` is what the correction leaves to one comparison. None: one seed says nothing about deviations, or it would take
    more than `MOST_SEEDS`.
    """
    if difference.n < 2 or difference.deviation == 0:
        return None
    effect, room = abs(difference.mean) / difference.deviation, margin / difference.deviation

    def decides(n: int) -> bool:
        if power_of_difference(n, effect, level) >= POWER:
            return True
        return not math.isnan(room) and power_of_equivalence(n, effect, room, level) >= POWER

    low, high = difference.n, difference.n + 1
    while not decides(high):
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:  # power grows with n
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
