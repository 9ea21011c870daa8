"""`lowp demo`: its ranks train five times, its screen reads what they do, and what it says is what they measured.

Real ranks take seconds to start. One slow test starts them; the others run the rank's part in the test's own process.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from lowp.cli import demo
from lowp.cli.demo_recipes import Variant, variants
from lowp.cli.demo_screen import Screen
from lowp.cli.demo_text import print_results
from lowp.training.check import check
from lowp.training.recipes import changed
from lowp.training.rundir import RunDirectory
from lowp.training.runs import Run, differences

NAMES = ["fp32", "unscaled8", "aps8", "block4", "pure16"]
ACCURACIES = (0.84, 0.70, 0.837, 0.82, 0.835)


def make_run(path: Path, accuracy: float, sent: int, state: str = "finished") -> None:
    """A run's directory as the ranks leave it."""
    with RunDirectory.create(path, "epochs = 6\n", {}, resume=False) as run:
        figures = {"bytes_sent": sent, "bytes_of_fp32": 400_000}
        records = [
            {"kind": "train", "step": 40, "epoch": 3.0, "loss": 1.25, "samples_per_second": 4321.0, **figures},
            {"kind": "test", "step": 40, "epoch": 3.0, "loss": 1.5, "accuracy": accuracy - 0.1},
            {"kind": "test", "step": 78, "epoch": 6.0, "loss": 0.5, "accuracy": accuracy},
        ]
        end = {"kind": "end", "step": 78, "epoch": 6.0, "accuracy": accuracy, "loss": 0.5, "step_ms": 12.34}
        records += [end | figures | {"bytes_per_parameter": 12.0}] if state == "finished" else []
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        run.set_status(state=state, step=78, epoch=6.0, message="")


def make_runs(folder: Path) -> None:
    for name, accuracy, sent in zip(NAMES, ACCURACIES, (400_000, 100_000, 100_000, 50_000, 200_000), strict=True):
        make_run(folder / name, accuracy, sent)


def no_ranks(monkeypatch, code: int = 0) -> list[list[str]]:
    """The launcher notes what it was told, and puts runs where ranks would have put theirs."""
    told = []

    def launch(command, ranks, threads, max_restarts):
        told.append([*command, ranks, threads])
        make_runs(Path(command[2]))
        return code

    monkeypatch.setattr("lowp.training.launch.launch", launch)
    return told


def test_trainings_differ_in_their_numbers_alone():
    chosen = variants(ranks=2, seed=3, quick=False)
    assert [variant.recipe.name for variant in chosen] == NAMES
    for variant in chosen:
        check(variant.recipe)
        different = differences([chosen[0].recipe.model_dump(), variant.recipe.model_dump()])
        assert {key.split(".")[0] for key in different} <= {"name", "wire", "precision"}
        assert variant.recipe.seed == 3
        assert (variant.recipe.precision.weights == "fp16") == (variant.recipe.name == "pure16")


def test_ranks_do_all_trainings_in_one_world(tmp_path, monkeypatch, capfd):
    first = variants(ranks=1, seed=0, quick=True)[0]
    few = [first, Variant("again", changed(first.recipe, name="again"))]
    monkeypatch.setattr("lowp.cli.demo_recipes.variants", lambda *_: few)
    demo.train_all(tmp_path, 1, 0, quick=True)
    runs = [Run.read(tmp_path / name) for name in ("fp32", "again")]
    assert [run.state for run in runs] == ["finished"] * 2
    assert runs[0].loss == runs[1].loss  # nothing is left of the first in the second
    assert capfd.readouterr().out == ""  # ranks say nothing


def test_ranks_stop_between_two_trainings(tmp_path, monkeypatch):
    def stopped(recipe, out, **_):
        done.append(recipe.name)
        signal.raise_signal(signal.SIGINT)  # after the run's own Stop is gone
        return {"kind": "end"}

    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("lowp.training.run.run", stopped)
    demo.train_all(tmp_path, 1, 0, quick=True)
    assert done == ["fp32"]
    assert signal.getsignal(signal.SIGINT) is before


def test_demo_prints_what_was_measured(stdout, tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    told = no_ranks(monkeypatch)
    plot = tmp_path / "p.png"
    text = stdout("demo", "--out", folder, "--plot", plot, "--seed", 7)
    assert told == [["demo", "--out", str(folder), "--ranks", "2", "--seed", "7", 2, 1]]
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if "12.3" in line}
    assert rows["8 bits, unscaled"][3:] == ["e4m3fn", "70.00", "%", "-14.0", "100", "kB", "25", "%", "12.3", "12.0"]
    assert rows["8 bits, APS"][3:] == ["e4m3fn", "83.70", "%", "-0.3", "100", "kB", "25", "%", "12.3", "12.0"]
    assert "8 bits, unscaled  epoch 6/6  test loss 0.5000, accuracy 70.00 %" in text
    assert "-14.0  8 bits as they are: gradients below 0.000976562 become 0" in text
    assert "±0, 0.5, 1, 1.5, 2, 3, 4, 6." in text
    assert f"lowp runs --root {folder} fp32 aps8" in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith(("  lowp", "As a ")))
    report = folder / "report.html"
    assert text.endswith(f"As a page: {report}\n")
    assert "unscaled8" in report.read_text()


def test_what_it_says_to_try_exists(stdout, tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    no_ranks(monkeypatch)
    text = stdout("demo", "--out", folder, "--plot", tmp_path / "p.png")
    commands = [re.split(r"\s{2,}", line.strip())[0].split()[1:] for line in text.splitlines() if line.startswith("  lowp ")]
    assert {command[0] for command in commands} == {"runs", "train", "recipes", "formats", "tour"}
    for command in commands:
        if command[0] in ("runs", "recipes", "formats"):  # the others take longer
            assert stdout(*command)
        else:
            assert stdout(command[0], "--help")


def test_demo_ends_with_its_ranks(run, tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    no_ranks(monkeypatch, code=130)
    result = run("demo", "--out", folder, "--plot", tmp_path / "p.png")
    assert result.exit_code == 130
    assert f"lowp runs --root {folder}" in result.stderr
    assert not (tmp_path / "p.png").exists()


def test_demo_checks_before_it_starts(mistake, tmp_path, monkeypatch):
    told = no_ranks(monkeypatch)
    (tmp_path / "something").touch()
    assert "choose another --out" in mistake("demo", "--out", tmp_path)
    assert "pictures are" in mistake("demo", "--plot", "demo.bmp")
    assert told == []


def test_a_training_that_diverged_is_named(tmp_path):
    make_runs(tmp_path)
    make_run(tmp_path / "other", 0.3, 100_000, state="diverged")
    chosen = variants(ranks=2, seed=0, quick=False)
    runs = [Run.read(tmp_path / name) for name in ("fp32", "other", "aps8", "block4", "pure16")]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  closed with the console
    with console.file:
        print_results(chosen, runs, console)
    assert "diverged" in console.export_text()


def test_screen_draws_over_itself_on_a_terminal(tmp_path, capsys):
    make_runs(tmp_path)
    console = Console(force_terminal=True, width=80, color_system=None)
    with Screen(tmp_path, variants(2, 0, False), console):
        time.sleep(0.05)
    drawn = capsys.readouterr().out
    assert "8 bits, APS" in drawn
    assert "━━━━━━━━━━━━━━" in drawn
    assert "\x1b[?25h" in drawn  # the cursor is back


def test_screen_waits_for_directories_that_are_not_there(tmp_path, capsys):
    with Screen(tmp_path, variants(2, 0, False), Console(force_terminal=True, width=80)):
        pass
    assert "starting ..." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_demo_with_real_ranks(tmp_path):
    command = [sys.executable, "-m", "lowp", "demo", "--quick", "--plot", "demo.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").is_file()
    runs = [Run.read(tmp_path / "runs" / "demo-001" / name) for name in NAMES]
    assert [run.state for run in runs] == ["finished"] * 5
    assert [round(run.share_of_fp32 or 0, 2) for run in runs] == [1.0, 0.25, 0.25, 0.13, 0.5]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_control_c_ends_it(tmp_path):
    command = [sys.executable, "-m", "lowp", "demo", "--plot", "demo.png"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    metrics = tmp_path / "runs" / "demo-001" / "fp32" / "metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as process:
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in errors
    assert b"lowp runs --root runs/demo-001" in errors
    assert Run.read(metrics.parent).state == "stopped"
