"""What a study's directory says, whatever became of it."""

import csv
import json

import pytest
from made_studies import plan_of, pretend, pretend_run, write_study

from lowp.lab.results import check_table, results_of, study_results, write_table
from lowp.lab.study import StudyError

BODY = '[changes]\ngood = "batch=16"\nbad = "batch=8"\nlost = "batch=4"'
FIGURES = {"base": 0.80, "good": 0.90, "bad": 0.70}


def accuracy(setting, seed):
    if setting == "lost":
        return "diverged"
    return FIGURES[setting] + 0.001 * seed + (0.0003 if (seed + len(setting)) % 2 else 0.0)


@pytest.fixture
def folder(tmp_path):
    pretend(tmp_path / "s", plan_of(write_study(tmp_path, BODY, head="seeds = 4")), accuracy)
    return tmp_path / "s"


def test_a_row_for_every_setting(folder):
    rows = {row["setting"]: row for row in study_results(folder).records()}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "base": "baseline", "good": "better", "bad": "worse", "lost": "worse",
    }  # fmt: skip
    assert rows["good"]["difference"] == pytest.approx(0.1, abs=1e-3)
    assert (rows["good"]["n"], rows["lost"]["n"], rows["lost"]["diverged"]) == (4, 0, 4)
    assert rows["lost"]["note"] == "4 runs diverged"


def test_a_broken_line_is_said_and_the_rest_is_read(folder):
    path = next((folder / "runs").glob("good-*")) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], '{"kind": "test", "st', *lines[2:]]) + "\n")
    results = study_results(folder)
    assert ["skipped 1 damaged" in line for line in results.damage] == [True]
    assert results.setting("good").figures("accuracy").keys() == {0, 1, 2, 3}


def test_a_study_of_another_version_is_one_line(folder):
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"version": 99}))
    with pytest.raises(StudyError, match="is of version 99"):
        study_results(folder)


def test_a_run_without_its_recipe_is_still_reported(folder):
    (next((folder / "runs").glob("bad-*")) / "recipe.toml").unlink()
    assert study_results(folder).setting("bad").figures("accuracy")


def test_runs_of_their_own_are_grouped_by_their_recipes(tmp_path):
    for name, wire, seed in (("a", "e5m2", 0), ("b", "e5m2", 1), ("c", "fp32", 0), ("d", "fp32", 1)):
        pretend_run(tmp_path / name, f'name = "{name}"\nseed = {seed}\n[wire]\nformat = "{wire}"\n', 0.5 + 0.1 * seed)
    (results,) = results_of([tmp_path / each for each in "cdab"])
    assert [sorted(setting.runs) for setting in results.settings] == [[0, 1], [0, 1]]
    assert results.baseline == results.settings[0].name


def test_a_seed_that_was_run_twice_counts_once(tmp_path):
    """Two runs of one seed and recipe differ by nothing: with both, an interval is zero, and any difference certain."""
    for name, wire, seed in (("a", "e5m2", 0), ("b", "e5m2", 0), ("c", "fp32", 0), ("d", "fp32", 0)):
        pretend_run(
            tmp_path / name, f'name = "{name}"\nseed = {seed}\n[wire]\nformat = "{wire}"\n', 0.8 if wire == "fp32" else 0.7
        )
    (results,) = results_of([tmp_path / name for name in "abcd"])
    assert {(row["n"], row["planned"], row["verdict"] == "baseline") for row in results.records()} == {
        (1, 1, True),
        (1, 1, False),
    }
    assert {row["verdict"] for row in results.records()} == {"baseline", "more seeds needed"}
    assert len(results.runs) == 4  # all are shown


def test_a_figure_that_is_not_finite_is_a_loss(tmp_path):
    def metric(setting, seed):
        return float("nan") if setting == "bad" else accuracy(setting, seed)

    pretend(tmp_path / "s", plan_of(write_study(tmp_path, BODY, head="seeds = 4")), metric)
    rows = {row["setting"]: row for row in study_results(tmp_path / "s").records()}
    assert (rows["bad"]["n"], rows["bad"]["verdict"]) == (0, "worse")


def test_what_is_neither_a_run_nor_a_study_is_named(tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor a study"):
        results_of([tmp_path])


def test_a_table_is_csv_or_parquet(folder, tmp_path):
    records = study_results(folder).records()
    write_table(records, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["setting"] for row in csv.DictReader(file)] == [row["setting"] for row in records]
    with pytest.raises(ValueError, match=r"tables are \.csv or \.parquet, not \.xlsx"):
        check_table(tmp_path / "t.xlsx")
