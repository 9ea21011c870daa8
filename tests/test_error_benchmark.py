"""`python -m benchmarks errors`: what it counts, and that the table in docs/WIRE.md is the one of the results."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("gradients", "measure", "report", "__main__")
    return SimpleNamespace(**{name.strip("_"): importlib.import_module(f"benchmarks.errors.{name}") for name in names})


def snapshot_of(*sizes: int) -> SimpleNamespace:
    parameters = {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    recipe = SimpleNamespace(wire=SimpleNamespace(bucket_mb=25))
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    return SimpleNamespace(shapes=shapes, trainer=SimpleNamespace(parameters=parameters, recipe=recipe))


def test_the_table_in_the_docs_is_that_of_the_results(parts):
    page = parts.report.DOCS.read_text()
    results = parts.report.cited_results(page)
    assert page == parts.report.rewritten(page, results), f"python -m benchmarks errors --docs {results.relative_to(ROOT)}"
    assert {row["model"] for row in json.loads(results.read_text())["rows"]} == set(parts.gradients.TASKS)


def test_float32_has_no_error_and_32_bits(parts):
    rows = torch.randint(-8, 8, (4, 4096 + 40)).float()  # sums are exact
    wire = parts.measure.Wire.of("fp32 none")
    row = parts.measure.measured(wire, rows, parts.measure.exact_mean(rows), snapshot_of(4096, 40))
    assert row["vnmse"] == 0
    assert row["bits"] == pytest.approx(32, rel=0.01)


def test_an_error_that_can_be_computed_by_hand(parts):
    """int8 without a scale rounds 1.25 to 1, on each rank; the mean of whole numbers is exact."""
    rows = torch.full((4, 1024), 1.25)
    row = parts.measure.measured(
        parts.measure.Wire.of("int8 none"), rows, parts.measure.exact_mean(rows), snapshot_of(1000, 24)
    )
    assert row["vnmse"] == pytest.approx((0.25 / 1.25) ** 2)
    assert 8 < row["bits"] < 8.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e4m3fm", "unknown format 'e4m3fm'"),
        ("e4m3fn blok:32", "scale"),
        ("e4m3fn local block:32", "two words for its scale: 'local' and 'block:32'"),
    ],
)
def test_a_codec_that_is_none_is_refused(parts, text, said):
    with pytest.raises(ValueError, match=said):
        parts.measure.Wire.of(text)


def test_words_of_a_codec(parts):
    settings = parts.measure.Wire.of("int4 stochastic block:32").settings
    assert (str(settings.scale), settings.rounding) == ("block:32", "stochastic")


def test_ranks_have_other_gradients_and_the_same_ones_again(parts, tmp_path):
    task = parts.gradients.QUICK["mlp"]
    for snapshot in parts.gradients.snapshots("mlp", task, (0, 2), tmp_path, None):
        again = snapshot.gradient(1)
        with parts.gradients.rows_of_gradients(snapshot, 2, tmp_path) as rows:
            assert torch.equal(rows[1], again)
            assert not torch.equal(rows[0], rows[1])
            last = rows.clone()
    # Stored weights give the same gradients without training
    (snapshot,) = parts.gradients.snapshots("mlp", task, (2,), tmp_path, None)
    assert torch.equal(snapshot.gradient(0), last[0])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pt", ".pt"]


def test_rows_that_are_measured_again_replace_the_old_ones(parts):
    key = {"model": "gpt", "step": 20, "ranks": 8}
    old = [key | {"codec": "a", "vnmse": 1.0}, key | {"codec": "b", "vnmse": 2.0}]
    new = [key | {"codec": "b", "vnmse": 3.0}, key | {"codec": "c", "vnmse": 4.0}]
    assert [(row["codec"], row["vnmse"]) for row in parts.main.merged(old, new)] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]


def test_figures_are_short(parts):
    texts = {0.00094: ".00094", 2.2: "2.2", 0.27: ".27", 3.21e-6: "3.2e-06", 12.3: "12", 0.0: "0"}
    assert {value: parts.report.figure_text(value) for value in texts} == texts
    assert parts.report.span([4.51, 4.52]) == "4.5"
    assert parts.report.span([4.9, 4.51]) == "4.5 to 4.9"


def test_moments_are_told_by_ranks_where_they_differ(parts):
    rows = [{"ranks": 8, "step": 200}, {"ranks": 8, "step": 20}, {"ranks": 64, "step": 200}]
    assert parts.report._moments(rows) == "20, 200 (8 ranks), 200 (64 ranks)"
    assert parts.report._moments(rows[:2]) == "20, 200"


def test_a_quick_run_writes_a_table_and_a_figure(parts, tmp_path, monkeypatch, capsys):
    words = ["--quick", "--out", str(tmp_path), "--codecs", "e5m2 aps", "int8"]
    monkeypatch.setattr(sys, "argv", ["benchmarks errors", *words])
    parts.main.main()
    assert "| e5m2 aps | 8.0" in capsys.readouterr().out
    (results,) = tmp_path.glob("*-errors-smoke.json")
    assert len(json.loads(results.read_text())["rows"]) == 2
    assert results.with_suffix(".png").stat().st_size > 1000


def test_an_unknown_codec_ends_the_run_in_one_line(parts, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks errors", "--codecs", "e4m3fm"])
    with pytest.raises(SystemExit, match=r"^--codecs: unknown format 'e4m3fm'; did you mean"):
        parts.main.main()
