"""`lowp ablate` from the plan to the table: runs made by workers, stopped, killed, resumed; and runs that go wrong."""

import csv
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from made_studies import finish, plan_of, start, write_study

from lowp.lab.ablation import TIME, Ablation
from lowp.lab.estimate import estimated_seconds
from lowp.lab.execution import Outcome
from lowp.lab.results import study_results
from lowp.lab.study_directory import DONE, StudyDirectory, read_log, state_of_run
from lowp.training.world import World

BATCHES = "[axes]\nbatch = [8, 16, 64]"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_is_run_and_what_goes_wrong_stops_nothing(tmp_path):
    """A run that cannot be built, one that diverges and one whose process dies, beside two that are good, two at a time."""
    pytest.importorskip("pyarrow")
    bad = (
        '[changes]\nbroken = ["model.name=models_of_a_study:broken", "model.options={}"]\n'
        'deadly = ["model.name=models_of_a_study:deadly", "model.options={}"]\n'
        'diverging = ["model.name=models_of_a_study:exploding", "model.options={}"]\n'
        '"<script>alert(1)</script>" = "batch=16"'
    )
    study = write_study(tmp_path, bad, head="seeds = 1")
    code, out, err = finish(start("ablate", study, "--jobs", 2, "--table", "t.parquet", cwd=tmp_path))
    assert code == 1, out + err
    assert "5 settings x 1 seeds = 5 runs" in out
    assert "2 runs failed" in err
    found = {row["setting"]: row for row in rows(tmp_path / "runs/tiny/runs.csv")}
    assert found["base"]["state"] == found["<script>alert(1)</script>"]["state"] == "finished"
    assert found["diverging"]["state"] == "diverged"
    assert "diverged in step 0" in found["diverging"]["reason"]
    reasons = {row["run"]: row for row in read_log(tmp_path / "runs/tiny") if row["kind"] == "end"}
    assert "this model cannot be built" in reasons["broken-s0"]["reason"]
    assert reasons["deadly-s0"]["reason"] == found["deadly"]["reason"] == "its process was killed (SIGKILL)"
    assert found["broken"]["state"] == found["deadly"]["state"] == "failed"
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["setting"] for row in table] == [row["setting"] for row in rows(tmp_path / "runs/tiny/results.csv")]
    assert next(row["verdict"] for row in table if row["setting"] == "diverging") == "worse"


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Runs that are finished, with what they hold and when that was written."""
    done = [path for path in (folder / "runs").glob("*") if state_of_run(path) in DONE]
    return {path.name: ((path / "metrics.jsonl").stat().st_mtime_ns, (path / "metrics.jsonl").read_bytes()) for path in done}


def check_complete(folder: Path, plan) -> None:
    """Every run is there, ended once, with every step once."""
    assert {path.name for path in (folder / "runs").glob("*")} == {run.name for run in plan.runs}
    for run in plan.runs:
        records = [json.loads(line) for line in (folder / "runs" / run.name / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records if record["kind"] == "train"]
        assert steps == sorted(set(steps)), run.name
        assert sum(record["kind"] == "end" for record in records) == 1, run.name


def kill_and_resume(tmp_path: Path, body: str, seeds: int, kills: int, within: tuple[float, float], jobs: int) -> None:
    """Kill the study, or a worker, or ask it to stop, at random moments; then let it end. None lost, none repeated."""
    study = write_study(tmp_path, body, head=f"seeds = {seeds}")
    folder, plan, chance = tmp_path / "runs/tiny", plan_of(study), random.Random(17)
    kept: dict[str, tuple[int, bytes]] = {}
    for turn in range(kills):
        process = start("ablate", study, "--jobs", jobs, *["--resume"] * bool(turn), cwd=tmp_path)
        deadline = time.monotonic() + 120
        while (
            time.monotonic() < deadline
            and process.poll() is None
            and len(snapshot(folder)) < min(len(kept) + 1, len(plan.runs))
        ):
            time.sleep(0.05)
        time.sleep(chance.uniform(*within))
        how = (signal.SIGKILL, signal.SIGINT)[turn % 2]
        if process.poll() is None:
            os.kill(process.pid, how)
        code, out, err = finish(process)
        assert code in (0, -signal.SIGKILL, 128 + signal.SIGINT), out + err
        found = snapshot(folder)
        assert kept.items() <= found.items()
        kept = found
    code, out, err = finish(start("ablate", study, "--jobs", jobs, "--resume", cwd=tmp_path), 3000)
    assert code == 0, out + err
    assert kept.items() <= snapshot(folder).items()
    check_complete(folder, plan)
    assert {row.n for row in (study_results(folder).comparisons[s.name].difference for s in plan.settings)} == {seeds}


def test_a_study_that_is_killed_is_completed(tmp_path):
    kill_and_resume(tmp_path, BATCHES, seeds=3, kills=1, within=(0.0, 0.5), jobs=1)


class PatientExecutor:
    """Two runs at once, which end when they are asked to stop."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked: list[str] = []

    def has_room(self, job) -> bool:
        return len(self.started) < 2

    def start(self, job) -> None:
        self.started.append(job.name)

    def wait(self, seconds: float) -> list[Outcome]:
        if "kill" in self.asked:
            return [Outcome(name, "stopped", "by SIGINT", 1.0) for name in self.started]
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, and once more
        return []

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self) -> None:
        self.asked.append("kill")

    def close(self) -> None:
        self.asked.append("close")


def test_ctrl_c_lets_runs_save_and_a_second_one_ends_them(tmp_path, plan):
    executor = PatientExecutor()
    with StudyDirectory.open(tmp_path / "s", plan, resume=False) as directory:
        ablation = Ablation(directory, executor, {setting.name: 1.0 for setting in plan.settings}, threads=1)
        state = ablation.run(lambda state: None, lambda run, outcome: None)
    assert executor.asked == ["stop", "kill", "close"]
    assert (state.stopped_by, len(executor.started), state.waiting) == ("SIGINT", 2, len(plan.runs) - 2)
    assert [record["state"] for record in read_log(tmp_path / "s") if record["kind"] == "end"] == ["stopped"] * 2


class OneAtATime:
    """Runs of two seconds, by a clock that the test turns; asked to stop, a run stops."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.started, self.under_way, self.asked = clock, [], None, []

    def has_room(self, job) -> bool:
        return self.under_way is None

    def start(self, job) -> None:
        self.started.append(job.name)
        self.under_way, self.ends = job.name, self.clock[0] + 2.0

    def wait(self, seconds: float) -> list[Outcome]:
        self.clock[0] += 0.25
        stopped = "stop" in self.asked
        if self.under_way is None or not (stopped or self.clock[0] >= self.ends):
            return []
        name, self.under_way = self.under_way, None
        return [Outcome(name, "stopped" if stopped else "finished", "", 2.0)]

    def stop(self) -> None:
        self.asked.append("stop")

    def close(self) -> None:
        self.asked.append("close")


@pytest.mark.parametrize(
    ("seconds", "begun", "asked"),
    [
        (1.0, 1, ["stop", "close"]),  # how long a run takes is not known yet: one is begun, and stopped
        (5.0, 2, ["close"]),  # a third one would end after 6 seconds
    ],
)
def test_a_study_ends_in_its_time(tmp_path, plan, monkeypatch, seconds, begun, asked):
    clock = [100.0]
    monkeypatch.setattr("lowp.lab.ablation.time.perf_counter", lambda: clock[0])
    executor = OneAtATime(clock)
    with StudyDirectory.open(tmp_path / "s", plan, resume=False) as directory:
        seconds_of = {setting.name: 1.0 for setting in plan.settings}
        ablation = Ablation(directory, executor, seconds_of, threads=1, end=clock[0] + seconds)
        state = ablation.run(lambda state: None, lambda run, outcome: None)
    assert (state.stopped_by, len(executor.started), executor.asked) == (TIME, begun, asked)
    assert clock[0] - 100.0 <= seconds + 0.5


def test_minutes_on_the_command_line(tmp_path):
    study = write_study(tmp_path, BATCHES, head="seeds = 2")
    code, out, err = finish(start("ablate", study, "--no-estimate", "--minutes", "0.02", cwd=tmp_path))
    assert code == 124, out + err
    assert "stopped by the end of its time" in err
    assert "--resume" in err


def test_the_plan_times_runs_with_the_threads_that_they_will_have(tmp_path, monkeypatch):
    plan, joined = plan_of(write_study(tmp_path, BATCHES)), []

    def joins(device, threads, **more):
        joined.append(threads)
        return join(device, threads, **more)

    join = World.join
    monkeypatch.setattr(World, "join", joins)
    estimated_seconds(plan, {}, threads=7, data=None)
    assert set(joined) == {1}  # the study's own

    code, out, err = finish(start("ablate", tmp_path / "tiny.toml", "--plan", cwd=tmp_path))
    assert code == 0, out + err
    assert "8 runs, 1 at a time, 1 thread a rank: about" in out


@pytest.mark.slow
def test_two_hundred_runs_killed_and_resumed_at_random(tmp_path):
    batches = ", ".join(str(8 * number) for number in range(1, 21) if 8 * number != 32)
    kill_and_resume(tmp_path, f"[axes]\nbatch = [{batches}]", seeds=10, kills=25, within=(0.0, 3.0), jobs=2)


@pytest.fixture
def plan(tmp_path):
    return plan_of(write_study(tmp_path, BATCHES))


def test_a_directory_that_is_taken_is_refused(tmp_path, plan):
    from lowp.training.rundir import RunError

    with StudyDirectory.open(tmp_path / "s", plan, resume=False):
        pass
    with pytest.raises(RunError, match="holds a study already: go on with it by --resume"):
        StudyDirectory.open(tmp_path / "s", plan, resume=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"is not a study, and not empty: it holds thesis\.tex"):
        StudyDirectory.open(other, plan, resume=True)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_a_study_that_changed_is_not_mixed_with_its_old_runs(tmp_path):
    from made_studies import pretend

    from lowp.training.rundir import RunError

    pretend(tmp_path / "s", plan_of(write_study(tmp_path, BATCHES)), lambda setting, seed: 0.5)
    changed = write_study(tmp_path, BATCHES)
    changed.write_text(changed.read_text().replace("epochs = 1", "epochs = 2"))
    with pytest.raises(RunError, match=r"was made with epochs = 1, and the study now says 2"):
        StudyDirectory.open(tmp_path / "s", plan_of(changed), resume=True)


def test_the_screen_shows_the_whole_and_each_run(tmp_path, plan):
    """On a terminal; with a run that has written something, and one that has not begun to."""
    import io

    from made_studies import pretend_run
    from rich.console import Console

    from lowp.cli.ablate_screen import StudyScreen
    from lowp.lab.ablation import StudyState

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, highlight=False, no_color=True, _environ={})
    with StudyDirectory.open(tmp_path / "s", plan, resume=False) as directory:
        first, second, third = plan.runs[:3]
        pretend_run(directory.of(second), 'name = "x"\n', 0.5)
        state = StudyState(len(plan.runs), {setting.name: 10.0 for setting in plan.settings})
        state.done, state.made = {first.name: "diverged"}, {first.name: 20.0}
        state.under_way = {run.name: (run, time.perf_counter()) for run in (second, third)}
        with StudyScreen(directory, 2, console) as screen:
            screen.show(state)
            screen.ended(first, Outcome(first.name, "failed", "no [bold]memory[/]", 20.0))
    text = out.getvalue()
    # 7 runs of 10 s, two of them half done, two at a time, and the first one took twice as long as estimated
    assert "1 of 8 runs done (1 diverged), about 1:00 to go" in text
    assert second.name in text
    assert third.name in text
    assert "50.00 %" in text
    assert "no [bold]memory[/]" in text
