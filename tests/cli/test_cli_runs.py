"""`lowp runs`: listed, compared, plotted; and a run is read whatever became of its files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowp.cli.runs_plot import bytes_at
from lowp.training.rundir import JsonLines, RunDirectory
from lowp.training.runs import Run, differences, find_run, flat

EPOCHS, STEPS = 3, 60  # and steps an epoch


def make_run(path: Path, wire: str, accuracy: float, share: float, state: str = "finished") -> Path:
    """A run as `lowp train` leaves it."""
    scale = "none" if wire == "fp32" else "aps"
    recipe = f'name = "{wire}"\nranks = 2\nvirtual_ranks = 1\n\n[wire]\nformat = "{wire}"\nscale = "{scale}"\n'
    with RunDirectory.create(path, recipe, {"time": "2026-11-15T17:00:00+00:00"}, resume=False) as directory:
        lines = JsonLines(directory.metrics)
        for record in records(wire, accuracy, share, ended=state == "finished"):
            lines.write(record)
        lines.close()
        directory.set_status(state=state, step=EPOCHS * STEPS, epoch=float(EPOCHS))
    return path


def records(wire: str, accuracy: float, share: float, ended: bool) -> list[dict[str, Any]]:
    result = []
    for epoch in range(1, EPOCHS + 1):
        step = epoch * STEPS
        sent = {"bytes_sent": int(400_000 * share) * step, "bytes_of_fp32": 400_000 * step}
        speed = {"samples_per_second": 12345.6, "seconds": 0.02 * step}
        loss = {"epoch": float(epoch), "loss": 1 / epoch}
        result += [
            {"kind": "train", "step": step, "lr": 0.1, "accuracy": 0.5, "wire": wire} | loss | sent | speed,
            {"kind": "test", "step": step, "accuracy": accuracy - 0.1 * abs(epoch - 2)} | loss,  # the best in the middle
        ]
    if ended:
        machine = {"ranks": 2, "virtual_ranks": 1, "device": "cpu", "parameters": 266_610}
        figures = {"step_ms": 18.3, "memory_bytes": 3_200_000, "bytes_per_parameter": 12.0, "best_accuracy": accuracy}
        result.append(result[-1] | {"kind": "end"} | sent | speed | machine | figures)
    return result


@pytest.fixture
def root(tmp_path) -> Path:
    make_run(tmp_path / "fp32-001", "fp32", 0.9, 1.0)
    make_run(tmp_path / "e5m2-001", "e5m2", 0.88, 0.25)
    make_run(tmp_path / "e4m3-001", "e4m3", 0.5, 0.25, state="diverged")
    (tmp_path / "notes").mkdir()
    return tmp_path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_list(stdout, root):
    lines = stdout("runs", "--root", root).splitlines()
    assert lines[0].split() == ["run", "state", "epoch", "accuracy", "sent", "of", "fp32", "samples/s", "time"]
    assert [line.split() for line in lines[2:5]] == [
        ["e4m3-001", "diverged", "3", "40.00", "%", "18", "MB", "25.00", "%", "12,346", "3.6", "s"],
        ["e5m2-001", "finished", "3", "78.00", "%", "18", "MB", "25.00", "%", "12,346", "3.6", "s"],
        ["fp32-001", "finished", "3", "80.00", "%", "72", "MB", "100.00", "%", "12,346", "3.6", "s"],
    ]


def test_a_wide_list_has_recipe_step_best_accuracy_and_start(stdout, root):
    lines = stdout("runs", "--root", root, columns=130).splitlines()
    assert lines[0].split()[2:6] == ["recipe", "step", "epoch", "accuracy"]
    assert lines[4].split()[:9] == ["fp32-001", "finished", "fp32", "180", "3", "80.00", "%", "90.00", "%"]
    assert lines[4].endswith("2026-11-15 17:00")


def test_a_long_name_is_folded_not_cut(stdout, tmp_path):
    name = "fashion-mnist-e4m3-without-scaling-seed-12345-001"
    make_run(tmp_path / name, "e4m3", 0.5, 0.25)
    lines = stdout("runs", "--root", tmp_path).splitlines()
    assert "".join(line.split()[0] for line in lines[2:-1]) == name
    assert lines[2].endswith("3.6 s")


def test_runs_are_looked_for_in_runs(stdout, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    root.rename(root.parent / "runs")
    assert "e5m2-001" in stdout("runs")
    assert "e5m2-001" in stdout("runs", "e5m2-001")
    assert "e5m2-001" in stdout("runs", "runs/e5m2-001/")


def test_compare_two(stdout, root):
    text = stdout("runs", "fp32-001", "e5m2-001", "--root", root)
    figures, recipe = text.split("\n\n")
    rows = {line[:18].strip(): line[18:].split() for line in figures.splitlines()}
    assert rows["test accuracy"] == ["80.00", "%", "78.00", "%", "-2.00", "points"]
    assert rows["sent by a rank"] == ["72", "MB", "18", "MB", "x", "0.25"]
    assert rows["step (ms)"] == ["18.3", "18.3", "x", "1"]
    assert rows["test loss"] == ["0.3333", "0.3333", "+0"]
    assert [line.split() for line in recipe.splitlines()[2:]] == [
        ["name", '"fp32"', '"e5m2"'],
        ["wire.format", '"fp32"', '"e5m2"'],
        ["wire.scale", '"none"', '"aps"'],
    ]


def test_compare_more_and_one_with_itself(stdout, root):
    text = stdout("runs", "fp32-001", "e5m2-001", root / "e4m3-001", "--root", root)
    accuracy = next(line for line in text.splitlines() if line.startswith("test accuracy"))
    assert accuracy.split()[2:] == ["80.00", "%", "78.00", "%", "-2.00", "points", "40.00", "%", "-40.00", "points"]
    assert "their recipes are the same" in stdout("runs", "fp32-001", "fp32-001", "--root", root)


def test_json(from_json, root):
    listed = from_json("runs", "--root", root)
    assert [run["name"] for run in listed] == ["e4m3-001", "e5m2-001", "fp32-001"]
    one = from_json("runs", "e5m2-001", "--root", root)
    assert one == listed[1]
    assert one["share_of_fp32"] == 0.25
    assert one["recipe"]["wire"]["format"] == "e5m2"
    assert one["started"] == "2026-11-15T17:00:00+00:00"
    assert "records" not in one
    both = from_json("runs", "fp32-001", "e5m2-001", "--root", root)
    assert both["recipe_differences"]["wire.scale"] == ["none", "aps"]


def test_a_loss_that_is_nan_is_json(from_json, root):
    append(root / "e4m3-001" / "metrics.jsonl", '{"kind": "test", "step": 181, "epoch": 3.0, "loss": NaN, "accuracy": 0.1}\n')
    assert from_json("runs", "e4m3-001", "--root", root)["loss"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("e5m2-01",), "unknown run 'e5m2-01'; did you mean 'e5m2-001'"),
        (("zzz",), "the runs under {root} are e4m3-001, e5m2-001, fp32-001"),
        (("notes",), "unknown run 'notes'"),
        (("--plot", "x.gif"), "pictures are .png, .svg, .pdf, not .gif"),
        (("--plot", "x.png", "--json"), "does not go with --json"),
    ],
)
def test_mistakes(mistake, root, arguments, said):
    assert said.format(root=root) in mistake("runs", *arguments, "--root", root)


def test_without_runs(stdout, mistake, tmp_path):
    assert stdout("runs", "--root", tmp_path).startswith("no runs under ")
    assert "there are no runs under" in mistake("runs", "x", "--root", tmp_path)
    assert "there is no directory" in mistake("runs", "--root", tmp_path / "nowhere")


def test_damaged_lines_are_said_and_passed_over(run, root):
    metrics = root / "fp32-001" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(f'{whole}{{"kind": "tr\n[1]\n{{"kind": "test"}}\n{{"kind": "end", "st')
    result = run("runs", "fp32-001", "--root", root)
    assert result.exit_code == 0
    assert result.stderr == f"lowp: {metrics}: skipped 4 damaged of 11 lines (line 8, 9, 10, 11)\n"
    assert Run.read(root / "fp32-001").accuracy == pytest.approx(0.8)


def test_damaged_files_are_said(run, root):
    path = root / "fp32-001"
    (path / "status.json").write_text("{")
    (path / "environment.json").write_text("[]")
    (path / "recipe.toml").write_bytes(b"name = \xff")
    result = run("runs", "--root", root)
    assert result.exit_code == 0
    assert result.stderr.count("\n") == 2
    assert "unknown" in result.stdout
    read = Run.read(path)
    assert (read.recipe, read.started, read.ranks) == ({}, None, 2)


def test_a_run_that_has_only_begun(tmp_path):
    with RunDirectory.create(tmp_path / "new", 'name = "fp32"\nranks = 2', {}, resume=False):
        run = Run.read(tmp_path / "new")
        assert (run.state, run.step, run.ranks, run.accuracy, run.share_of_fp32) == ("running", 0, 2, None, None)
        assert run.damage == ()


def test_a_killed_run_calls_itself_running_but_holds_no_lock(tmp_path):
    with RunDirectory.create(tmp_path / "new", "", {}, resume=False):
        assert Run.read(tmp_path / "new").state == "running"
    assert Run.read(tmp_path / "new").state == "killed"


def test_a_run_that_was_stopped_and_resumed_has_the_figures_of_now(root):
    append(root / "fp32-001" / "metrics.jsonl", json.dumps(records("fp32", 0.5, 1.0, ended=False)[0] | {"step": 240}) + "\n")
    run = Run.read(root / "fp32-001")
    assert run.step == 240
    assert run.bytes_sent == 24_000_000  # of the last train record, not of the end that was none
    assert run.best_accuracy == pytest.approx(0.9)
    assert run.device == "cpu"


def test_an_event_after_the_end_changes_nothing(root):
    before = Run.read(root / "fp32-001")
    append(root / "fp32-001" / "metrics.jsonl", '{"kind": "event", "step": 180, "message": "done"}\n')
    after = Run.read(root / "fp32-001")
    assert (after.step_ms, after.step, after.best_accuracy) == (before.step_ms, 180, before.best_accuracy)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is no run: it has neither"):
        Run.read(tmp_path)
    with pytest.raises(ValueError, match="unknown run"):
        find_run("x", tmp_path / "nowhere")


def test_recipes_are_compared_key_by_key():
    assert flat({"a": 1, "b": {"c": {"d": 2}, "e": {}}}) == {"a": 1, "b.c.d": 2, "b.e": {}}
    one, other = {"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [2]}, "d": 3}
    assert differences([one, other]) == {"b.c": [[1], [2]], "d": [None, 3]}


def test_plot(stdout, root):
    target = root / "runs.svg"
    assert stdout("runs", "--root", root, "--plot", target) == f"wrote {target}\n"
    assert "<svg" in target.read_text()


def test_plot_of_a_run_that_sent_nothing_and_diverged(stdout, tmp_path):
    path = make_run(tmp_path / "alone", "fp32", math.nan, 0.0)
    stdout("runs", path, "--plot", tmp_path / "p.svg")


def test_nothing_to_plot(mistake, tmp_path):
    RunDirectory.create(tmp_path / "new", "", {}, resume=False).close()
    assert "none of the runs has been tested yet" in mistake("runs", "--root", tmp_path, "--plot", tmp_path / "p.png")


def test_bytes_at_a_test_lie_between_the_records_that_know(root):
    run = Run.read(root / "e5m2-001")  # 100,000 bytes a step
    assert bytes_at(run, [0, 30, 60, 90, 180, 999]) == [0, 3e6, 6e6, 9e6, 18e6, 18e6]
