"""The directory of a run: whose it is, who may write there, and files that a kill or a full disk does not spoil."""

import json
import math
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import lowp
from lowp.training import durable, rundir
from lowp.training.environment import environment
from lowp.training.json_lines import LogError
from lowp.training.rundir import JsonLines, RunDirectory, RunError, next_directory, read_lines


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)


def create(path, resume=False, recipe="seed = 1\n", place="here"):
    return RunDirectory.create(path, recipe, {"host": place}, resume=resume)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# Whose directory it is.


def test_a_new_run(tmp_path):
    with create(tmp_path / "runs" / "a") as run:
        assert not run.resumed
        assert names(run.path) == ["environment.json", "recipe.toml", "run.lock", "status.json"]
        assert (run.path / "recipe.toml").read_text() == "seed = 1\n"
        assert json.loads((run.path / "environment.json").read_text()) == {"host": "here"}
        assert run.status() == {"state": "running", "step": 0, "epoch": 0.0, "message": ""}
        files = [run.metrics, run.health, run.checkpoints]
        assert [file.name for file in files] == ["metrics.jsonl", "health.jsonl", "checkpoints"]
        assert {file.parent for file in files} == {tmp_path / "runs" / "a"}


def test_an_empty_directory_will_do_and_one_where_a_start_was_killed(tmp_path):
    (tmp_path / "run.lock").write_text("")
    (tmp_path / ".recipe.toml.partial").write_text("se")
    with create(tmp_path) as run:
        assert not run.resumed
    assert "recipe.toml" in names(tmp_path)
    assert ".recipe.toml.partial" not in names(tmp_path)


def test_a_run_is_not_overwritten(tmp_path):
    create(tmp_path / "a").close()
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(RunError, match=r"a holds a run already: go on with it by --resume, or choose another --out"):
        create(tmp_path / "a", recipe="seed = 2\n")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_run_is_resumed(tmp_path):
    with create(tmp_path / "a", place="first") as run:
        run.set_status(state="stopped", step=120, epoch=1.25, message="stopped by SIGTERM")
    for number, place in enumerate(("second", "third")):
        before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.name != "run.lock"}
        with create(tmp_path / "a", resume=True, recipe="seed = 2\n", place=place) as run:
            assert run.resumed
            assert {path: path.read_bytes() for path in run.path.iterdir() if path.name != "run.lock"} == before
            run.begin(f"seed = {number}\n", {"host": place})  # whoever has it knows now that it can go on
            assert run.status() == {"state": "running", "step": 120, "epoch": 1.25, "message": ""}
            assert (run.path / "recipe.toml").read_text() == f"seed = {number}\n"
            found = json.loads((run.path / "environment.json").read_text())
            assert found == {"host": place, "earlier": [{"host": "first"}, {"host": "second"}][: number + 1]}
    with create(tmp_path / "b", resume=True) as run:  # nothing to resume: begin
        assert not run.resumed


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_not_a_run_is_left_alone(resume, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"is not a run, and not empty: it holds thesis.tex and no recipe.toml"):
        create(tmp_path, resume)
    assert names(tmp_path) == ["thesis.tex"]
    with pytest.raises(RunError, match=r"thesis.tex is not a directory: choose another --out"):
        create(tmp_path / "thesis.tex", resume)
    with pytest.raises(RunError, match=r"cannot create .*thesis.tex/a \(.*thesis.tex\): Not a directory"):
        create(tmp_path / "thesis.tex" / "a", resume)
    with pytest.raises(RunError, match="cannot create /proc/a: No such file or directory"):
        create(Path("/proc/a"), resume)


def test_a_full_disk_says_so_and_lets_the_lock_go(tmp_path, monkeypatch, impatient):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_file", full)
        with pytest.raises(RunError, match=r"cannot write to .*a \(.*recipe.toml.*\): No space left on device"):
            create(tmp_path / "a")
    with create(tmp_path / "a") as run:
        run.set_status(step=3)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_file", full)
            with pytest.raises(RunError, match="No space left on device"):
                run.set_status(step=4)
        assert run.status()["step"] == 3


def test_next_directory(tmp_path):
    root = tmp_path / "runs"
    assert [next_directory(root, "aps8").name for _ in range(2)] == ["aps8-001", "aps8-002"]
    (root / "aps8-003").write_text("a file")
    assert next_directory(root, "aps8").name == "aps8-004"
    (root / "aps8-001").rmdir()
    assert next_directory(root, "aps8").name == "aps8-001"
    assert next_directory(root, "fp32") == root / "fp32-001"
    create(root / "fp32-001").close()  # what was made can be had
    for bad in ("", "../x", ".hidden"):
        with pytest.raises(ValueError, match="is no name for a run's directory"):
            next_directory(root, bad)


# Who may write.


def test_a_directory_in_use_is_refused_with_the_name_of_its_user(tmp_path, impatient):
    with create(tmp_path / "a"):
        message = f"output directory {tmp_path / 'a'} is in use by process {os.getpid()} on host {platform.node()}"
        with pytest.raises(RunError, match=re.escape(message)):
            create(tmp_path / "a", resume=True)
        (tmp_path / "a" / "run.lock").write_text("{")
        with pytest.raises(RunError, match="is in use by another process"):
            create(tmp_path / "a", resume=True)
    create(tmp_path / "a", resume=True).close()


def test_of_two_that_begin_at_once_one_is_refused(tmp_path):
    outcomes = []

    def begin():
        try:
            outcomes.append(create(tmp_path / "a"))
        except RunError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while not any(isinstance(outcome, RunDirectory) for outcome in outcomes) and time.monotonic() < deadline:
        time.sleep(0.01)
    next(outcome for outcome in outcomes if isinstance(outcome, RunDirectory)).close()
    for thread in threads:
        thread.join(10)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["RunDirectory", "str"]
    assert "holds a run already" in next(outcome for outcome in outcomes if isinstance(outcome, str))


def test_a_restarted_process_waits_for_the_one_it_replaces(tmp_path):
    first = create(tmp_path / "a")
    leaving = threading.Timer(0.3, first.close)
    leaving.start()
    began = time.monotonic()
    create(tmp_path / "a", resume=True).close()
    leaving.join()
    assert time.monotonic() - began >= 0.25


def hold(path, ready):
    run = create(path)
    ready.set()
    time.sleep(60)
    run.close()


def test_the_lock_dies_with_its_process(tmp_path, impatient):
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "a", ready), daemon=True)
    process.start()
    assert ready.wait(60)
    with pytest.raises(RunError, match=f"in use by process {process.pid} on host"):
        create(tmp_path / "a", resume=True)
    process.kill()
    process.join()
    create(tmp_path / "a", resume=True).close()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path, impatient):
    run = create(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads; the child only sleeps
        child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
            create(tmp_path / "a", resume=True)
        run.close()
        create(tmp_path / "a", resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Status and environment.


def test_status(tmp_path):
    with create(tmp_path / "a") as run:
        run.set_status(step=10, epoch=0.5)
        run.set_status(state="diverged", message="NaN in fc1")
        assert run.status() == {"state": "diverged", "step": 10, "epoch": 0.5, "message": "NaN in fc1"}
        assert json.loads((run.path / "status.json").read_text()) == run.status()
        with pytest.raises(ValueError, match="unknown state 'done'; it is one of running, finished, stopped, diverged, failed"):
            run.set_status(state="done")
        (run.path / "status.json").write_text("{")
        assert run.status()["step"] == 0


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowp", "train", "my recipe"])
    monkeypatch.chdir(tmp_path)
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "lowp train 'my recipe'"
    assert (found["torch"], found["lowp"], found["python"]) == (torch.__version__, lowp.__version__, platform.python_version())
    assert found["git_commit"] is None
    assert found["cpu"]

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v1", "-m", "v1")
    assert environment()["git_commit"] == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert environment()["git_commit"] == git("rev-parse", "HEAD") + "-dirty"


# Lines.


def written(path, records):
    lines = JsonLines(path)
    for record in records:
        lines.write(record)
    return lines


def test_lines_are_there_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = written(path, [{"step": 1, "loss": 0.1}])
    assert path.read_text() == '{"step": 1, "loss": 0.1}\n'
    lines.write({"step": 2, "loss": math.inf, "layer": "a\nb\r\u2028"})
    assert read_lines(path) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": math.inf, "layer": "a\nb\r\u2028"}]
    lines.sync()
    lines.close()
    lines = written(path, [{"step": 3}])
    assert [record["step"] for record in read_lines(path)] == [1, 2, 3]
    lines.close()


def test_a_torn_last_line_is_passed_over_and_then_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [{"step": 1}, {"step": 2}]).close()
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        records = read_lines(path)
        assert len(records) == whole[:end].count(b"\n")
        written(path, [{"step": 9}]).close()
        assert read_lines(path) == [*records, {"step": 9}]
    path.write_bytes(whole + b"\0" * 100)  # what a machine that lost its power may leave
    assert len(read_lines(path)) == 2


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad in (b"{", b"[1]", b""):
        path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged"):
            read_lines(path)


def test_rewind_forgets_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = b'{"step":1}\n{"message": "no step"}\ndamaged\n{"step": 2.0}\n{"step": 2}\n'
    path.write_bytes(before + b'{"step": 3}\n{"step": 4}\n{"step": 5')
    lines = JsonLines(path)
    lines.rewind(2)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["metrics.jsonl"]
    lines.write({"step": 3})
    assert path.read_bytes() == before + b'{"step": 3}\n'
    lines.rewind(3)  # nothing to forget
    lines.rewind(0)
    assert path.read_bytes() == b'{"message": "no step"}\ndamaged\n'
    lines.close()


def test_a_rewind_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = written(path, [{"step": 1}, {"step": 2}])

    def fails(self, target):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with pytest.raises(LogError, match=r"cannot rewind .*metrics.jsonl: Input/output error"):
            lines.rewind(1)
    assert names(tmp_path) == ["metrics.jsonl"]
    lines.write({"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    lines.close()


class NearlyFull:
    """The file of a disk with room for some bytes: takes what fits, then fails, as the system does."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = written(path, [{"step": 1}])
    real = lines._file
    lines._file = NearlyFull(real, 5)
    with pytest.raises(LogError, match=r"cannot write .*metrics.jsonl: No space left on device"):
        lines.write({"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n'
    lines._file = real
    lines.write({"step": 2})
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    lines.close()


def test_lines_that_cannot_be_opened(tmp_path):
    with pytest.raises(LogError, match=r"cannot write .*nowhere/metrics.jsonl: No such file or directory"):
        JsonLines(tmp_path / "nowhere" / "metrics.jsonl")
