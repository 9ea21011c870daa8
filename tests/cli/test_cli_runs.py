"""`lowp runs`: listed, compared, plotted; and a run is read whatever became of its files."""

import dataclasses
import json
import math
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowp.cli.columns import fitting, print_columns
from lowp.cli.runs_plot import bytes_at
from lowp.cli.runs_table import columns_of_runs, format_of
from lowp.training.rundir import JsonLines, RunDirectory
from lowp.training.runs import Run, differences, find_run, flat, runs_under

EPOCHS, STEPS = 3, 60  # and steps an epoch


def make_run(path: Path, wire: str, accuracy: float, share: float, state: str = "finished") -> Path:
    """A run as `lowp train` leaves it."""
    scale = "none" if wire == "fp32" else "aps"
    recipe = f'name = "{wire}"\nranks = 2\nvirtual_ranks = 1\nseed = 0\n[model]\nname = "mlp"\n'
    recipe += f'[wire]\nformat = "{wire}"\nscale = "{scale}"\n'
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
    assert [re.split(r"  +", line) for line in (lines[0], *lines[2:5])] == [
        ["run", "state", "format", "ranks", "accuracy", "sent", "of fp32", "started"],
        ["e4m3-001", "diverged", "e4m3 aps", "2", "40.00 %", "18 MB", "25.00 %", "2026-11-15 17:00"],
        ["e5m2-001", "finished", "e5m2 aps", "2", "78.00 %", "18 MB", "25.00 %", "2026-11-15 17:00"],
        ["fp32-001", "finished", "fp32", "2", "80.00 %", "72 MB", "100.00 %", "2026-11-15 17:00"],
    ]
    assert "all of them: model mlp, seed 0, epoch 3, samples/s 12,346, time 3.6 s." in " ".join(lines[5:])
    assert "a wider terminal has also: best." in " ".join(lines[5:])


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_columns_of_a_list_never_touch_and_never_pass_the_edge(stdout, root, columns):
    make_run(root / "demo-001" / "a-run-with-a-long-name", "e5m2", 0.7, 0.25)
    lines = stdout("runs", "--root", root, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    rows = [re.split(r"  +", line) for line in lines if line.startswith(("run ", "e4m3-001", "e5m2-001", "fp32-001"))]
    assert len({len(row) for row in rows}) == 1
    assert {"run", "state", "accuracy"} <= set(rows[0])
    assert columns < 200 or rows[0][1:6] == ["state", "format", "ranks", "model", "seed"]


def test_the_format_of_a_run_is_the_models_and_the_wires():
    def text(weights: str, wire: str, ranks: int = 2, virtual: int = 1, **more: str) -> str:
        recipe = {"precision": {"weights": weights, "errors": ""} | more, "wire": {"format": wire, "scale": "aps"}}
        return format_of(SimpleNamespace(recipe=recipe, ranks=ranks, virtual_ranks=virtual))  # type: ignore[arg-type]

    assert text("fp32", "e5m2") == text("fp32", "e5m2", ranks=1, virtual=4) == "e5m2 aps"
    assert text("bf16", "e5m2") == "bf16 | e5m2 aps"
    assert text("bf16", "e5m2", ranks=1) == "bf16"  # nothing travels
    assert text("e4m3fn", "fp32", ranks=1, errors="e5m2", activations="e4m3fn") == "e4m3fn/e5m2"


def test_runs_of_the_demo_are_listed_and_studies_named(stdout, root):
    make_run(root / "demo-001" / "aps8", "e5m2", 0.7, 0.25)
    (root / "wires" / "runs").mkdir(parents=True)
    (root / "wires" / "plan.json").write_text("{}")
    text = stdout("runs", "--root", root)
    assert "demo-001/aps8  finished" in text
    assert f"study wires: lowp runs --root {root}/wires/runs" in text.replace("\n", "")
    assert "70.00 %" in stdout("runs", "demo-001/aps8", "--root", root)


def test_a_thousand_runs_are_listed_in_a_second_of_processor_time(root):
    for number in range(1000):
        shutil.copytree(root / "e5m2-001", root / f"copy-{number}")
    start = time.process_time()
    found = [Run.read(path, briefly=True) for path in runs_under(root)]
    names = [run.name for run in found]
    print_columns(fitting(columns_of_runs(found, names, coloured=True), 80)[0], 80)
    assert time.process_time() - start < 1
    assert len(found) == 1003


def test_a_brief_look_finds_the_same_figures(root):
    torn = root / "e4m3-001" / "metrics.jsonl"
    torn.write_text(torn.read_text() + '{"step": 180, "kind": "test", "accuracy": 0.99}\n{"kind": "test", "st')
    for path in runs_under(root):
        whole, brief = Run.read(path), Run.read(path, briefly=True)
        assert dataclasses.replace(whole, records=()) == dataclasses.replace(brief, records=())
        assert len(brief.records) < len(whole.records) or whole.state == "diverged"
    assert Run.read(root / "e4m3-001", briefly=True).best_accuracy == 0.99


def test_a_long_name_is_folded_not_cut(stdout, tmp_path):
    name = "fashion-mnist-e4m3-without-scaling-seed-12345-001"
    make_run(tmp_path / name, "e4m3", 0.5, 0.25)
    lines = stdout("runs", "--root", tmp_path).splitlines()
    assert "".join(line.split()[0] for line in lines[2:6] if not line.startswith("sent")) == name
    assert lines[2].endswith("17:00")


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


@pytest.mark.parametrize("columns", [60, 80])
def test_five_runs_are_compared_on_narrow_terminals(stdout, root, columns):
    names = ["fp32-001", *(f"e5m2-with-a-name-{number}" for number in range(4))]
    for name in names[1:]:
        make_run(root / name, "e5m2", 0.88, 0.25)
    lines = stdout("runs", *names, "--root", root, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(line.startswith("test accuracy") for line in lines) > 1  # groups, each with the first
    assert sum(line.count("-2.00 points") for line in lines) == 8  # of the last and of the best accuracy
    assert all(any(name in line for line in lines) for name in names)


def test_two_runs_on_a_very_narrow_terminal(stdout, root):
    lines = stdout("runs", "fp32-001", "e5m2-001", "--root", root, columns=40).splitlines()
    assert max(map(len, lines)) <= 40
    row = next(number for number, line in enumerate(lines) if line.startswith("test accuracy"))
    assert lines[row].split() == ["test", "accuracy", "80.00", "%", "78.00", "%"]
    assert lines[row + 1].split() == ["-2.00"]
    assert any(line.split() == ["state", "finished", "finished"] for line in lines)


def test_a_difference_that_rounds_to_nothing(stdout, root):
    make_run(root / "nearly", "e5m2", 0.9 - 1e-7, 0.25)
    text = stdout("runs", "fp32-001", "nearly", "--root", root)
    assert "+0.00 points" in text
    assert "-0.00" not in text


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
