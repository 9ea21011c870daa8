"""A study is a directory: what was asked for, its runs, and what came of them.

    runs/wires/study.toml        what was asked for, as the user wrote it
               plan.json         its settings, worked out; with it the directory is a study
               study.jsonl       when runs began and how they ended, one record a line
               study.lock        who works on it
               runs/             ordinary runs, one directory for each setting and seed
               logs/             what worker processes said
               results.csv, runs.csv

Whether a run is done is asked of the run's own directory, and nowhere else: there is no second book that a kill could leave in
disagreement with it. `study.jsonl` is for people, for estimates, and for the reason of a failure that left no directory.
"""

import json
from pathlib import Path
from typing import Any, Self

from lowp.lab.settings import StudyPlan, StudyRun
from lowp.training.durable import explained, make_directory, replace_file
from lowp.training.json_lines import JsonLines
from lowp.training.mistakes import RecipeError
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe
from lowp.training.rundir import METRICS, RECIPE, STATUS, RunError, take_lock
from lowp.training.runs import differences, read_records
from lowp.training.toml import plain

STUDY, PLAN, LOG, STUDY_LOCK = "study.toml", "plan.json", "study.jsonl", "study.lock"
RESULTS, RUNS_TABLE = "results.csv", "runs.csv"
VERSION = 1  # of plan.json
DONE = ("finished", "diverged")  # states that a resumed study leaves alone

Record = dict[str, Any]


def is_study(path: Path) -> bool:
    return (path / PLAN).is_file()


class StudyDirectory:
    """The directory of a study that is being worked on, locked until `close`."""

    def __init__(self, path: Path, plan: StudyPlan, lock: Any, resumed: bool) -> None:
        self.path, self.plan, self.resumed, self._lock = path, plan, resumed, lock
        self.runs = path / "runs"
        self.logs = path / "logs"
        self._log = JsonLines(path / LOG)

    @classmethod
    def open(cls, path: Path, plan: StudyPlan, *, resume: bool) -> Self:
        """Make it, or with `resume` go on with the study that it holds. What is refused is left as it was."""
        _check(path, resume)
        with explained(RunError, f"create {path}"):
            make_directory(path / "runs")
            make_directory(path / "logs")
        lock = take_lock(path / STUDY_LOCK)
        try:
            resumed = is_study(path)
            _check(path, resume)  # two may have begun at once
            _check_runs(path / "runs", plan)
            with explained(RunError, f"write to {path}"):
                replace_file(path / STUDY, Path(plan.study.source).read_bytes())
                replace_file(path / PLAN, json.dumps(plan_document(plan), indent=1).encode() + b"\n")
            return cls(path, plan, lock, resumed)
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        self._log.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, run: StudyRun) -> Path:
        return self.runs / run.name

    def write(self, record: Record) -> None:
        self._log.write(record)

    def records(self) -> list[Record]:
        return read_log(self.path)

    def state(self, run: StudyRun) -> str:
        """`new`, or the state that the run's directory tells; a run that is `finished` has its last record."""
        return state_of_run(self.of(run))


def read_log(path: Path) -> list[Record]:
    """The whole lines of study.jsonl."""
    try:
        lines = (path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def state_of_run(path: Path) -> str:
    if not (path / RECIPE).is_file():
        return "new"
    try:
        state = json.loads((path / STATUS).read_bytes())["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return "killed"  # before it could say anything
    if state == "finished" and not _has_end(path):
        return "killed"  # the machine failed, and the last record did not reach the disk
    return state if isinstance(state, str) else "killed"


def _has_end(path: Path) -> bool:
    return any(record["kind"] == "end" for record in reversed(read_records(path / METRICS, [])))


def plan_document(plan: StudyPlan) -> Record:
    """What a report has to know of a study, as JSON."""
    study = plan.study
    return {
        "version": VERSION,
        "name": study.name,
        "description": study.description,
        "source": study.source,
        "base": study.base,
        "seeds": list(study.seeds),
        "metric": study.metric,
        "margin": study.margin,
        "baseline": plan.baseline,
        "axes": {axis.name: [choice.label for choice in axis.choices] for axis in study.axes},
        "settings": [
            {"name": each.name, "slug": each.slug, "changes": list(each.changes), "labels": dict(each.labels)}
            for each in plan.settings
        ],
        "runs": [{"name": run.name, "setting": run.setting.name, "seed": run.seed} for run in plan.runs],
    }


def _check(path: Path, resume: bool) -> None:
    """May a study have this directory?"""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} is not a directory: choose another --out")
    if is_study(path):
        if not resume:
            raise RunError(f"{path} holds a study already: go on with it by --resume, or choose another --out")
        return
    others = sorted({entry.name for entry in path.iterdir()} - {STUDY, STUDY_LOCK, LOG, "runs", "logs"})
    if others or any((path / "runs").glob("*")):
        what = ", ".join(others[:3]) or "runs"
        raise RunError(f"{path} is not a study, and not empty: it holds {what} and no {PLAN}; choose another --out")


def _check_runs(runs: Path, plan: StudyPlan) -> None:
    """A run that is there must be the one that the plan asks for; else it would be taken for something that it is not."""
    for run in plan.runs:
        path = runs / run.name
        if not (path / RECIPE).is_file():
            continue
        try:
            there = read_recipe(str(path / RECIPE))
        except RecipeError as error:
            raise RunError(
                f"{path} was made by another version of lowp, or is damaged ({error}); choose another --out"
            ) from None
        changed = differences([_compared(there), _compared(run.recipe)])
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise RunError(
                f"{path} was made with {key} = {old!r}, and the study now says {new!r}: choose another --out, or remove the run"
            )


def _compared(recipe: Recipe) -> dict[str, Any]:
    """Threads are those that a run began with. What is only written down may change."""
    same = with_changes(recipe, threads=0, description="", log={"every": 1, "health": 0, "sinks": []})
    return plain(same)
