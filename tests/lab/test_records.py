"""A study's record gives what its directory gave, and says in one line what is wrong with it."""

import json
from pathlib import Path

import pytest

from lowp.lab.records import read_record, record_of
from lowp.lab.results import study_results
from lowp.lab.study import StudyError
from lowp.lab.study_directory import PLAN

SETTINGS = ("fp32", "e5m2", "int8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two settings with three finished runs each, and one whose runs diverged, failed and were never begun."""
    runs = [(setting, seed) for seed in range(3) for setting in SETTINGS]
    plan = {
        "version": 1,
        "name": "small",
        "description": "a study",
        "source": "small.toml",
        "base": "fp32",
        "seeds": [0, 1, 2],
        "metric": "accuracy",
        "margin": 0.01,
        "baseline": "fp32",
        "axes": {},
        "settings": [{"name": name, "slug": name, "changes": [f"wire.format={name}"], "labels": {}} for name in SETTINGS],
        "runs": [{"name": f"{setting}-s{seed}", "setting": setting, "seed": seed} for setting, seed in runs],
    }
    (tmp_path / PLAN).write_text(json.dumps(plan))
    for setting, seed in runs:
        if setting == "int8" and seed:
            continue
        run = tmp_path / "runs" / f"{setting}-s{seed}"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(f"seed = {seed}\n")
        (run / "environment.json").write_text(json.dumps({"cpu": "x", "torch": "2", "time": f"2026-01-0{seed + 1}T00:00:00"}))
        state = "diverged" if setting == "int8" else "finished"
        (run / "status.json").write_text(json.dumps({"state": state, "message": "NaN" * (state == "diverged")}))
        accuracy = 0.9 + 0.003 * seed + 1 / 3 * 1e-9 - 0.002 * (setting == "e5m2")
        figures = {"step": 9, "epoch": 1.0, "accuracy": accuracy, "loss": 0.3, "bytes_sent": 100, "bytes_of_fp32": 400}
        end = [] if state == "diverged" else [{"kind": "end", **figures}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in end))
    failed = {"kind": "end", "run": "int8-s1", "setting": "int8", "seed": 1, "state": "failed", "reason": "no room"}
    (tmp_path / "study.jsonl").write_text(json.dumps(failed) + "\n")
    return tmp_path


def test_a_record_gives_what_the_directory_gave(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text(record_of(directory))
    recorded, direct = read_record(path), study_results(directory)
    for one, other in zip(recorded.results.records(), direct.records(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == (pytest.approx(other[key], rel=1e-6, abs=1e-7) if isinstance(value, float) else other[key]), key
    assert recorded.results.setting("int8").failures == {1: "no room"}
    assert recorded.results.setting("int8").runs[0].state == "diverged"
    assert recorded.results.comparisons["int8"].verdict == "worse"
    assert len(recorded.environments) == 1  # times of runs are no part of it
    assert recorded.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "cannot be read"),
        ('{"kind": "run"}\n', "is no record of a study"),
        ('{"kind": "study", "version": 9}\n', "of another version"),
        ('{"kind": "study", "version": 1}\n', "not as it was written"),
        ("[1]\n", "not JSON lines"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(StudyError, match=said) as caught:
        read_record(tmp_path / "x.jsonl")
    assert "\n" not in str(caught.value)


def test_a_run_of_an_unknown_setting_is_damage(directory: Path, tmp_path: Path) -> None:
    lines = record_of(directory).splitlines()
    lines[1] = lines[1].replace('"setting":"fp32"', '"setting":"fp23"')
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(StudyError, match="KeyError: 'fp23'"):
        read_record(tmp_path / "x.jsonl")
