"""Student's distribution and what is computed with it, beside scipy and statsmodels."""

import math

import pytest

from lowp.lab.student import critical, power_of_difference, power_of_equivalence, two_sided, upper_tail

stats = pytest.importorskip("scipy.stats")
TS = (0.0, 1e-8, 0.01, 0.5, 1.0, 2.776, 7.0, 40.0, 1e4)
DFS = (2, 3, 4, 9, 30, 199, 5000)


@pytest.mark.parametrize("df", DFS)
def test_tails_are_those_of_scipy(df):
    for t in TS:
        assert upper_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-9, abs=1e-300)
        assert upper_tail(-t, df) == pytest.approx(stats.t.sf(-t, df), rel=1e-9)
        assert two_sided(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-9, abs=1e-300)


def test_one_degree_of_freedom_is_cauchys_distribution():
    """By its closed form; scipy's tail is wrong near 0 there."""
    for t in TS[:6]:
        assert upper_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-12)
    assert critical(1, 0.05) == pytest.approx(stats.t.isf(0.025, 1), rel=1e-9)


@pytest.mark.parametrize("df", DFS)
def test_quantiles_are_those_of_scipy(df):
    for level in (0.2, 0.05, 0.01, 0.05 / 24, 1e-6):
        assert critical(df, level) == pytest.approx(stats.t.isf(level / 2, df), rel=1e-9)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(ValueError, match="must be above 0 and below 1"):
        critical(3, level)


@pytest.mark.parametrize("n", [3, 5, 10, 40])  # where scipy's non-central t, behind statsmodels, gives no NaN
@pytest.mark.parametrize("effect", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("level", [0.05, 0.05 / 24])
def test_power_is_that_of_statsmodels(n, effect, level):
    power = pytest.importorskip("statsmodels.stats.power").TTestPower()
    expected = power.power(effect, n, level) if effect else level
    assert power_of_difference(n, effect, level) == pytest.approx(expected, rel=2e-4, abs=1e-7)


@pytest.mark.parametrize(("n", "effect", "margin"), [(5, 0.0, 1.5), (10, 0.3, 1.0), (30, 0.2, 0.6), (5, 0.0, 0.5)])
def test_power_of_equivalence_is_what_a_simulation_finds(n, effect, margin):
    """There is no such function in scipy or statsmodels. 40,000 samples: a standard error of at most 0.0025."""
    import numpy as np

    drawn = np.random.default_rng(0).normal(effect, 1.0, (40_000, n))
    mean, error = drawn.mean(1), drawn.std(1, ddof=1) / math.sqrt(n)
    p = stats.t.sf((margin - np.abs(mean)) / error, n - 1)
    assert power_of_equivalence(n, effect, margin, 0.05) == pytest.approx((p <= 0.05).mean(), abs=0.01)
