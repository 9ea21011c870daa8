"""Intervals, tests, corrections and verdicts, beside scipy and statsmodels and on simulated studies."""

import math

import numpy as np
import pytest

from lowp.lab.comparison import LEVEL, MOST_SEEDS, Summary, compare, holm, seeds_needed

stats = pytest.importorskip("scipy.stats")


def figures(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_an_interval_is_scipys(n):
    values = list(drawn(n, n))
    low, high = stats.t.interval(0.95, n - 1, np.mean(values), stats.sem(values))
    assert Summary.of(values).interval == pytest.approx((low, high), rel=1e-9)


def test_one_number_and_none_have_no_interval():
    assert Summary.of([3.0]).mean == 3.0
    assert math.isnan(Summary.of([3.0]).half)
    assert math.isnan(Summary.of([]).mean)


def test_holm_is_that_of_statsmodels(monkeypatch):
    multipletests = pytest.importorskip("statsmodels.stats.multitest").multipletests
    # It collects garbage in each call: 50 times a second, in a process in which all tests have left theirs.
    monkeypatch.setattr("gc.collect", lambda: 0)
    for seed in range(50):
        p = np.random.default_rng(seed).uniform(size=1 + seed % 12) ** 3
        assert holm(list(p)) == pytest.approx(list(multipletests(p, method="holm")[1]))


def test_what_cannot_be_tested_does_not_count_as_a_comparison():
    found = holm([0.01, math.nan, 0.5])
    assert found[0] == pytest.approx(0.02)
    assert math.isnan(found[1])


def test_p_values_are_those_of_scipy():
    """The paired t test; and two one-sided ones, as statsmodels has them."""
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    base, other = drawn(1, 8), drawn(2, 8) * 0.3 + drawn(1, 8) + 0.1
    found = compare({"base": figures(base), "other": figures(other)}, "base", higher_is_better=True, margin=0.4)["other"]
    assert found.p_difference == pytest.approx(stats.ttest_rel(other, base).pvalue, rel=1e-9)
    assert found.p_within == pytest.approx(weightstats.ttost_paired(other, base, -0.4, 0.4)[0], rel=1e-9)
    low, high = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert found.difference.interval == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize(("better", "shift"), [(True, 1.0), (True, -1.0), (False, 1.0), (False, -1.0)])
def test_a_clear_difference_is_better_or_worse(better, shift):
    base, noise = drawn(3, 5), drawn(4, 5)
    other = base + 5 * shift + 0.1 * noise
    found = compare({"base": figures(base), "other": figures(other)}, "base", higher_is_better=better)
    assert found["other"].verdict == ("better" if (shift > 0) == better else "worse")
    assert found["other"].seeds_needed is None
    assert found["base"].verdict == "baseline"


def test_a_small_difference_is_within_noise():
    base = drawn(5, 6)
    found = compare({"base": figures(base), "other": figures(base + 0.01 * drawn(6, 6))}, "base", higher_is_better=True)
    assert found["other"].verdict == "within noise"


def test_equal_figures_are_within_noise_and_a_constant_difference_is_none():
    base = drawn(7, 4)
    found = compare(
        {"base": figures(base), "same": figures(base), "all": figures(base + 64)}, "base", higher_is_better=True, margin=0.1
    )
    assert found["same"].verdict == "within noise"
    assert found["all"].verdict == "better"


def test_a_setting_whose_runs_diverged_is_worse():
    base = drawn(8, 4)
    found = compare({"base": figures(base), "lost": {}}, "base", higher_is_better=True, lost={"lost": 4})
    assert (found["lost"].verdict, found["lost"].note) == ("worse", "4 runs diverged")


def test_one_seed_decides_nothing():
    found = compare({"base": {0: 1.0}, "other": {0: 2.0}}, "base", higher_is_better=True)
    assert (found["other"].verdict, found["other"].seeds_needed) == ("more seeds needed", None)


def test_differences_are_paired_by_seed():
    """Figures that depend on the seed alone, in another order, and a seed that only one has."""
    found = compare(
        {"base": {0: 1.0, 1: 5.0, 2: 9.0}, "other": {2: 9.5, 1: 5.5, 0: 1.5, 7: 100.0}}, "base", higher_is_better=True
    )
    assert found["other"].difference.n == 3
    assert found["other"].difference.mean == pytest.approx(0.5)


def test_the_seeds_that_are_needed_are_enough():
    """Of studies with that many seeds, about 8 in 10 decide; with half as many, fewer."""
    pilot = Summary(5, 0.5, math.nan, 1.0)
    needed = seeds_needed(pilot, 0.25, LEVEL)
    assert needed is not None

    def decided(n: int) -> float:
        samples = np.random.default_rng(9).normal(0.5, 1.0, (4000, n))
        return float((stats.ttest_1samp(samples, 0.0, axis=1).pvalue <= LEVEL).mean())

    assert decided(needed) == pytest.approx(0.8, abs=0.03)
    assert decided(needed // 2) < 0.7


def test_a_difference_that_nobody_would_find_needs_no_number():
    assert seeds_needed(Summary(5, 1e-6, math.nan, 1.0), 1e-7, LEVEL) is None
    assert MOST_SEEDS >= 100


def test_intervals_cover_the_truth():
    """2,000 settings of 5 seeds: 95 % of the intervals hold the true mean; the standard error is half a percent."""
    inside = [low <= 0 <= high for low, high in (Summary.of(list(row)).interval for row in drawn(10, 2000, 5))]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def simulated(seed: int, settings: int, seeds: int, effect: float) -> dict[str, dict[int, float]]:
    """What a seed does to all settings is as large as what it does to one."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=seeds)
    own = rng.normal(size=(settings, seeds))
    return {f"{number}": figures(shared + own[number] + (effect if number else 0.0)) for number in range(settings)}


def test_false_findings_are_as_rare_as_is_promised():
    """400 studies of 10 settings without any difference: at most 5 % of the studies say better or worse of any setting.

    A standard error is 1.1 %. And of settings that differ by exactly the margin, at most 5 % of the studies call any alike.
    """
    wrong = alike = 0
    for seed in range(400):
        found = compare(simulated(seed, 10, 5, 0.0), "0", higher_is_better=True, margin=0.01)
        wrong += any(each.verdict in ("better", "worse") for each in found.values())
        found = compare(simulated(seed, 10, 5, 2.0), "0", higher_is_better=True, margin=2.0)
        alike += any(each.verdict == "within noise" for each in found.values())
    assert wrong / 400 <= 0.08
    assert alike / 400 <= 0.08


def test_true_differences_are_found():
    found = [compare(simulated(seed, 4, 8, 6.0), "0", higher_is_better=True)["1"].verdict for seed in range(50)]
    assert found.count("better") >= 45
