"""What papers and benchmarks have published: reached, or the page says why not."""

from pathlib import Path

import pytest

from lowp.predict import page
from lowp.predict.published import (
    SPEEDUPS,
    eight_bit_corrected,
    eight_bit_figures,
    four_gpu_figures,
    hierarchical_steps,
    jia_figures,
    step_figures,
)
from lowp.predict.published_throughput import SERIES, median_error, solved, throughput_rows

PAGE = Path(__file__).parents[2] / "docs" / "prediction.md"


def test_all_24_speedups_of_eight_bits():
    """To within .1, in the digits that the paper prints."""
    figures = eight_bit_figures()
    assert len(figures) == 24 == 4 * len(SPEEDUPS)
    for figure in figures:
        digits = 2 if figure.published < 3 and round(figure.published, 1) != figure.published else 1
        assert abs(round(figure.predicted, digits) - figure.published) <= 0.1 + 1e-9, figure


def test_corrected_and_on_four_gpus():
    for figure in (*eight_bit_corrected(), *four_gpu_figures()):
        assert abs(figure.predicted - figure.published) <= 0.05, figure


def test_steps():
    assert [figure.predicted for figure in step_figures()] == [2046, 186]
    assert hierarchical_steps(1024, 16) == 186


def test_ratios_over_a_flat_ring_and_minutes():
    resnet, alexnet, minutes = jia_figures()
    assert resnet.predicted == pytest.approx(11, rel=0.1)
    assert alexnet.predicted == pytest.approx(3, rel=0.2)
    assert minutes.predicted == pytest.approx(6.6, rel=0.12)


@pytest.fixture(scope="module")
def rows():
    return throughput_rows()


def test_published_throughput(rows):
    assert len(rows) == 24
    assert median_error(rows) <= 0.05
    assert max(abs(row.error) for row in rows) < 0.3
    assert all(row.why for row in rows if abs(row.error) > 0.05), "every miss is explained"


def test_the_guide_has_the_same_median(rows):
    guide = (PAGE.parents[1] / "docs/PLAN.md").read_text()
    assert f"the median error of {len(rows)} figures is {100 * median_error(rows):.1f} %" in guide


def test_nothing_is_fitted_to_what_it_predicts(rows):
    """Other figures of the sizes that are predicted change no prediction."""
    series = SERIES[0]
    other = type(series)(**{**vars(series), "rates": {1: 219, 2: 422, 4: 1.0, 8: 2.0}})
    assert [row.predicted for row in other.rows()] == [row.predicted for row in series.rows()]
    fitted = type(series)(**{**vars(series), "rates": {1: 219, 2: 300, 4: 852, 8: 1734}})
    assert [row.predicted for row in fitted.rows()] != [row.predicted for row in series.rows()]


def test_bisection():
    assert solved(lambda x: x**2, 2.0, 0.1, 10) == pytest.approx(2**0.5)


def test_the_page_is_what_the_code_says(capsys):
    assert page.main([str(PAGE), "--check"]) == 0, capsys.readouterr().err


def test_an_old_page_is_noticed_and_rewritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "page", lambda: "new\n")
    path = tmp_path / "page.md"
    path.write_text("old\n")
    assert page.main([str(path), "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert path.read_text() == "old\n"
    assert page.main([str(path)]) == 0
    assert path.read_text() == "new\n"
