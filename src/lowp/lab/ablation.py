"""A study, run to its end: what is done, what is under way, what is still to be made.

1. Look at every run's directory: what is finished, or has diverged, is done. Everything else is to be made, from its last
   checkpoint where it has one.
2. As long as there is room, begin the next run; as soon as one ends, write down how, and go on.
3. A run that failed or diverged is recorded with its reason, and stops nothing.
4. Asked to stop (SIGINT, SIGTERM): no run is begun any more, those under way finish their step and save. Asked twice: at once.
   The end of the time that the study was given counts as asked. No run is begun that would probably not end before it.

Killed at any moment, the study is what its runs' directories say: step 1 of the next time finds it there. A worker of a study
that was killed may still be saving its run; the run's lock tells, and the run is left for later.
"""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from lowp.lab.estimate import total_seconds
from lowp.lab.execution import Job, Outcome
from lowp.lab.pool import Executor
from lowp.lab.settings import StudyPlan, StudyRun
from lowp.lab.study_directory import DONE, StudyDirectory
from lowp.machine import try_lock, usable_cores
from lowp.training.reading import with_changes
from lowp.training.rundir import LOCK

LOOK = 0.25  # seconds between two looks at runs that are under way
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TIME = "the end of its time"  # in place of a signal's name


@dataclass
class StudyState:
    """What a screen shows: runs by what became of them."""

    total: int
    estimates: Mapping[str, float]  # seconds of a run, by setting
    done: dict[str, str] = field(default_factory=dict)  # runs that have ended, this time or before: their states
    made: dict[str, float] = field(default_factory=dict)  # seconds of those that were made this time
    under_way: dict[str, tuple[StudyRun, float]] = field(default_factory=dict)  # and since when
    waiting: int = 0
    stopped_by: str = ""

    def count(self, *states: str) -> int:
        return sum(state in states for state in self.done.values())

    def seconds_left(self, runs: Iterable[StudyRun], jobs: int) -> float:
        """By the estimates, corrected by what the runs made so far took; a run under way counts as half done."""
        runs = list(runs)
        told = sum(self.estimates[run.setting.name] for run in runs if run.name in self.made)
        correction = sum(self.made.values()) / told if told else 1.0
        waiting = total_seconds([run for run in runs if run.name not in self.done], self.estimates, jobs)
        half = total_seconds([run for run, _ in self.under_way.values()], self.estimates, jobs) / 2
        return correction * (waiting - half)


@dataclass
class _Stopping:
    """How often the study has been asked to stop, and by what."""

    times: int = 0
    by: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.by = signal.Signals(number)


def threads_for(plan: StudyPlan, jobs: int, recorded: int | None) -> int:
    """CPU threads of every rank of every run: the cores divided by what runs at once. They decide the last bits of sums, so all
    runs of a study have as many, and a study that goes on has those that it began with."""
    if recorded:
        return recorded
    ranks = max(setting.recipe.ranks for setting in plan.settings)
    return max(1, usable_cores() // max(jobs, ranks))


def recorded_threads(directory: StudyDirectory) -> int | None:
    return next((record["threads"] for record in reversed(directory.records()) if record.get("kind") == "study"), None)


def known_seconds(directory: StudyDirectory) -> dict[str, float]:
    """Means of what finished runs took, by setting, where they were made in one go."""
    taken: dict[str, list[float]] = {}
    begins: dict[str, int] = {}
    for record in directory.records():
        if record.get("kind") == "begin":
            begins[record["run"]] = begins.get(record["run"], 0) + 1
        if record.get("kind") == "end" and record["state"] == "finished" and begins.get(record["run"]) == 1:
            taken.setdefault(record["setting"], []).append(record["seconds"])
    return {setting: sum(each) / len(each) for setting, each in taken.items()}


class Ablation:
    def __init__(
        self,
        directory: StudyDirectory,
        executor: Executor,
        estimates: Mapping[str, float],
        threads: int,
        data: Path | None = None,
        end: float = math.inf,
    ) -> None:
        """`end`: when it must be over, by `time.perf_counter`."""
        self._directory, self._executor, self._threads, self._data = directory, executor, threads, data
        self._end_of_time = end
        self._runs = {run.name: run for run in directory.plan.runs}
        self.state = StudyState(len(self._runs), estimates)
        self._queue: deque[StudyRun] = deque()
        for run in directory.plan.runs:
            state = directory.state(run)
            if state in DONE:
                self.state.done[run.name] = state
            else:
                self._queue.append(run)
        self.state.waiting = len(self._queue)

    def run(self, show: Callable[[StudyState], None], ended: Callable[[StudyRun, Outcome], None]) -> StudyState:
        """Make all runs. `show` is called a few times a second, `ended` when a run has ended."""
        self._note("study", threads=self._threads, runs=len(self._queue), pid=os.getpid())
        asked = _Stopping()
        before = {each: signal.signal(each, asked) for each in SIGNALS}
        try:
            told = 0
            while self._queue or self.state.under_way:
                told = self._obey(asked, told)
                self._begin_what_fits()
                for outcome in self._executor.wait(LOOK):
                    self._end(outcome, ended)
                show(self.state)
                if not self.state.under_way and self._is_over():
                    break
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            self._executor.close()
        return self.state

    def _is_over(self) -> bool:
        """Has the study been stopped, or is there no time for the next run?"""
        if not self.state.stopped_by and self._queue and not self._ends_in_time(self._queue[0]):
            self.state.stopped_by = TIME
        return bool(self.state.stopped_by)

    def _ends_in_time(self, run: StudyRun) -> bool:
        """If it takes as long as the longest run of the same setting that was made this time, else of any."""
        mine = [each for name, each in self.state.made.items() if self._runs[name].setting is run.setting]
        return time.perf_counter() + max(mine or self.state.made.values(), default=0.0) <= self._end_of_time

    def _obey(self, asked: _Stopping, told: int) -> int:
        if not self.state.stopped_by and time.perf_counter() > self._end_of_time:
            self.state.stopped_by = TIME
            self._executor.stop()
        if asked.times > told:
            assert asked.by is not None
            self.state.stopped_by = asked.by.name
            if asked.times == 1:
                self._executor.stop()
            else:
                self._executor.kill()
        return asked.times

    def _begin_what_fits(self) -> None:
        """In order; a run that somebody else is still at goes to the end of the queue."""
        for _ in range(len(self._queue)):
            run = self._queue[0]
            job = self._job(run)
            if not self._executor.has_room(job) or not self._ends_in_time(run):
                break
            self._queue.popleft()
            if _in_use(self._directory.of(run)):
                self._queue.append(run)
                continue
            self._note("begin", run=run.name)
            self.state.under_way[run.name] = run, time.perf_counter()
            self._executor.start(job)
        self.state.waiting = len(self._queue)

    def _job(self, run: StudyRun) -> Job:
        recipe = run.recipe if run.recipe.threads else with_changes(run.recipe, threads=self._threads)
        return Job(run.name, recipe, self._directory.of(run), self._data)

    def _end(self, outcome: Outcome, ended: Callable[[StudyRun, Outcome], None]) -> None:
        run, _ = self.state.under_way.pop(outcome.name)
        self.state.done[run.name] = outcome.state
        self.state.made[run.name] = outcome.seconds
        figures = {"state": outcome.state, "reason": outcome.reason, "seconds": outcome.seconds}
        self._note("end", run=run.name, setting=run.setting.name, seed=run.seed, **figures)
        ended(run, outcome)

    def _note(self, kind: str, **figures: Any) -> None:
        self._directory.write({"kind": kind, "time": datetime.now().astimezone().isoformat(timespec="seconds"), **figures})


def _in_use(path: Path) -> bool:
    """Does a process hold the run's lock?"""
    try:
        with (path / LOCK).open() as file:
            try_lock(file, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
