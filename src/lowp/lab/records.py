"""What a study came to, in one small file that a repository can keep: JSON lines.

    {"kind": "study", ...}      the plan (name, settings, metric, margin, baseline), when it was recorded, where it ran
    {"kind": "run", ...}        setting, seed, how it ended, and its figures; one line for each run that was begun

The directories of runs hold recipes, curves, checkpoints and logs, and take megabytes. The record holds what statistics need:
`read_record` gives the same `StudyResults` as `study_results` gave of the directory, without curves and numeric health.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lowp.lab.results import SettingRuns, StudyResults, study_results
from lowp.lab.study import StudyError
from lowp.lab.study_directory import PLAN
from lowp.training.rundir import ENVIRONMENT
from lowp.training.runs import Run

VERSION = 1
FIGURES = (
    "step",
    "epoch",
    "loss",
    "accuracy",
    "best_accuracy",
    "train_loss",
    "bytes_sent",
    "bytes_of_fp32",
    "samples_per_second",
    "step_ms",
    "seconds",
    "memory_bytes",
    "bytes_per_parameter",
    "parameters",
    "ranks",
    "virtual_ranks",
    "device",
)
_ENVIRONMENT = ("cpu", "cores", "gpu", "os", "python", "torch", "cuda", "lowp", "git_commit")
_DIGITS = 8  # significant ones: an accuracy has 5, a loss is float32's


@dataclass(frozen=True)
class RecordedStudy:
    """A study read from its record."""

    results: StudyResults
    seeds: tuple[int, ...]
    base: str
    recorded: str
    environments: tuple[dict[str, Any], ...]  # those that its runs were made in, without repetition


def record_of(path: Path) -> str:
    """The record of the study in a directory."""
    results = study_results(path)
    plan = json.loads((path / PLAN).read_text(encoding="utf-8"))
    head = {key: plan[key] for key in ("name", "description", "base", "seeds", "metric", "margin", "baseline", "settings")}
    head["settings"] = [{key: each[key] for key in ("name", "changes", "labels")} for each in head["settings"]]
    facts = {"recorded": datetime.now(UTC).strftime("%Y-%m-%d"), "environments": _environments(results)}
    lines: list[dict[str, Any]] = [{"kind": "study", "version": VERSION, **head, **facts}]
    for setting in results.settings:
        for seed in sorted({*setting.runs, *setting.failures}):
            run, failure = setting.runs.get(seed), setting.failures.get(seed)
            state = "failed" if run is None or failure is not None else run.state
            reason = failure or ("" if run is None else run.message)
            figures = {} if run is None else {key: _short(getattr(run, key)) for key in FIGURES}
            lines.append({"kind": "run", "setting": setting.name, "seed": seed, "state": state, "reason": reason, **figures})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _environments(results: StudyResults) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run in results.runs:
        try:
            told = json.loads((run.path / ENVIRONMENT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        own = {key: told.get(key) for key in _ENVIRONMENT}
        if own not in found:
            found.append(own)
    return found


def read_record(path: Path) -> RecordedStudy:
    """The study that a record tells of; StudyError, in one line, where it cannot be read."""
    head, *runs = _lines(path)
    if head.get("kind") != "study" or head.get("version") != VERSION:
        raise StudyError(f"{path}: is no record of a study, or one of another version than {VERSION}")
    try:
        by_setting: dict[str, dict[int, Mapping[str, Any]]] = {each["name"]: {} for each in head["settings"]}
        for run in runs:
            by_setting[run["setting"]][run["seed"]] = run
        settings = tuple(_setting(each, by_setting[each["name"]], len(head["seeds"])) for each in head["settings"])
        whole = head["name"], head["description"], path, head["metric"], head["margin"], head["baseline"]
        return RecordedStudy(
            StudyResults(*whole, settings, ()),
            tuple(head["seeds"]),
            head["base"],
            head["recorded"],
            tuple(head["environments"]),
        )
    except (KeyError, TypeError) as error:
        raise StudyError(f"{path}: a line of the record is not as it was written ({type(error).__name__}: {error})") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({type(error).__name__})") from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise StudyError(f"{path}: is empty, or not JSON lines")
    return lines


def _setting(told: Mapping[str, Any], runs: Mapping[int, Mapping[str, Any]], planned: int) -> SettingRuns:
    failures = {seed: run["reason"] for seed, run in runs.items() if run["state"] == "failed"}
    made = {seed: _run(run) for seed, run in runs.items() if run["state"] != "failed"}
    return SettingRuns(told["name"], tuple(told["changes"]), told["labels"], made, planned, failures)


def _run(told: Mapping[str, Any]) -> Run:
    figures = {key: told.get(key) for key in FIGURES}
    name = Path(f"{told['setting']}-s{told['seed']}")
    return Run(
        path=name, state=told["state"], message=told["reason"], recipe={}, started=None, records=(), damage=(), **figures
    )
