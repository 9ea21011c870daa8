"""What a resume may change, what becomes of it, and what is refused: then nothing is changed."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

import lowp
from lowp.training.launch import RanksFailed
from lowp.training.trainer import Trainer
from train.training import assert_same, status

FOUR_STEPS = {
    "data.limit": 64,
    "batch": 16,
    "epochs": 1,
    "model.options.hidden": [8],
    "learning_rate.kind": "constant",
    "log.every": 1,
    "threads": 1,
    "device": "cpu",
}


def train(out, changes=None, **options):
    return lowp.train("fp32", FOUR_STEPS | (changes or {}), out=out, quiet=True, **options)


@pytest.fixture
def stopped(monkeypatch):
    """A resume that is asked to stop after a step."""
    taken = Trainer.train_step

    def until(last: int, run: Path, changes: dict) -> None:
        def step(trainer: Trainer) -> None:
            taken(trainer)
            if trainer.step == last:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", step)
            assert lowp.train(run, changes, resume=True, quiet=True).state == "stopped"

    return until


def content(run: Path) -> dict[Path, bytes]:
    """Of all files, but who had the lock last."""
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.lock"}


def test_a_prolonged_run_that_was_stopped_goes_on_as_prolonged(stopped, tmp_path):
    """By the command that it prints, which says no epochs."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, {"epochs": 3})
    train(run)
    stopped(6, run, {"epochs": 3})
    assert tomllib.loads((run / "recipe.toml").read_text())["epochs"] == 3
    assert lowp.train(run, resume=True, quiet=True).metrics["step"] == 12
    assert_same_ends(run, whole)


def assert_same_ends(run: Path, whole: Path) -> None:
    """A run that was prolonged has the end record of before besides."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    ends = [line for line in lines if json.loads(line)["kind"] == "end"]
    assert [json.loads(line)["step"] for line in ends] == [4, 12]
    (run / "metrics.jsonl").write_text("".join(line for line in lines if line != ends[0]))
    assert_same(run, whole)


def test_what_a_resume_changes_stays_changed(stopped, tmp_path):
    run = tmp_path / "run"
    train(run)
    stopped(5, run, {"epochs": 2, "test_flip": True, "log.every": 3})
    stopped(6, run, {})
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    assert (recipe["epochs"], recipe["test_flip"], recipe["log"]["every"]) == (2, True, 3)


def test_a_run_cannot_end_before_what_it_has_done(stopped, tmp_path):
    run = tmp_path / "run"
    train(run)
    stopped(9, run, {"epochs": 3})
    before = content(run)
    with pytest.raises(
        ValueError, match=r"epochs: 2 would end the run after step 8, and it has done 9 .* --set epochs=3 or more"
    ):
        lowp.train(run, {"epochs": 2}, resume=True, quiet=True)
    assert content(run) == before


def test_a_prolonged_run_that_lost_its_end_record_writes_it(tmp_path):
    """Killed between the last checkpoint and the record: the one of before it was prolonged is not its own."""
    run = tmp_path / "run"
    train(run)
    train(run, {"epochs": 2}, resume=True)
    metrics = run / "metrics.jsonl"
    *others, last = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(others))
    train(run, {"epochs": 2}, resume=True)
    ends = [json.loads(line) for line in metrics.read_text().splitlines() if '"kind": "end"' in line]
    assert [record["step"] for record in ends] == [4, 8]
    assert ends[-1]["accuracy"] == json.loads(last)["accuracy"]


@pytest.mark.parametrize("state", ["finished", "diverged", "stopped"])
def test_a_refused_resume_leaves_a_run_as_it_was(state, tmp_path):
    run = tmp_path / "run"
    train(run)
    (run / "status.json").write_text(json.dumps({"state": state, "step": 4, "epoch": 1.0, "message": "as before"}))
    before = content(run)
    with pytest.raises(OSError, match="another run's"):
        train(run, {"optimizer.lr": 0.3}, resume=True)
    assert content(run) == before


def test_ranks_that_are_refused_leave_a_run_as_it_was(tmp_path):
    run = tmp_path / "run"
    train(run, virtual_ranks=2)
    (run / "status.json").write_text(json.dumps({"state": "stopped", "step": 4, "epoch": 1.0, "message": "as before"}))
    before = content(run)
    with pytest.raises(RanksFailed, match="exit code 2: what it said is above"):
        train(run, {"optimizer.lr": 0.3}, resume=True, ranks=2)
    assert content(run) == before
    assert status(run)["state"] == "stopped"
