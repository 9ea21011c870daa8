"""Every number of a report, as one document of plain lists, dictionaries, text and numbers."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from lowp.lab.report.explorer import explorer_formats
from lowp.lab.report.health import HealthRoom, health_of
from lowp.lab.report.predicted import predicted_steps
from lowp.lab.results import SettingRuns, StudyResults
from lowp.training.runs import Run, differences
from lowp.training.step_clock import PHASES
from lowp.version import __version__

VERSION = 1  # of the document
CURVES = {"test accuracy": ("test", "accuracy"), "test loss": ("test", "loss"), "training loss": ("train", "loss")}
MOST_POINTS = 60  # of a curve
_RECIPE_NOISE = ("name", "seed", "description", "threads", "log.", "checkpoints.")
_DIGITS = 6  # of every number


def report_document(studies: Sequence[StudyResults], command: str, cluster: str = "", stamp: str = "") -> dict[str, Any]:
    """`cluster` is what steps are predicted for; "": none are. With a `stamp` the page asks its server for a newer one."""
    room = HealthRoom()
    found = [_study(results, cluster, room) for results in studies]
    document = {
        "version": VERSION,
        "lowp": __version__,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "stamp": stamp,
        "studies": found,
        "formats": explorer_formats(_formats_of(studies)),
    }
    return rounded(document)


def _study(results: StudyResults, cluster: str, room: HealthRoom) -> dict[str, Any]:
    rows = results.records()
    states: dict[str, int] = {}
    for row in (run_rows := results.run_records()):
        states[row["state"]] = states.get(row["state"], 0) + 1
    predictions, not_predicted = predicted_steps(results, cluster)
    health, left_out, damage = health_of(results, room)
    return {
        "name": results.name,
        "description": results.description,
        "path": str(results.path),
        "metric": results.metric,
        "higher_is_better": results.higher_is_better,
        "baseline": results.baseline,
        "planned": sum(setting.planned for setting in results.settings),
        "states": states,
        "settings": rows,
        "runs": run_rows,
        "pareto": pareto(rows, results.higher_is_better),
        "curves": {name: _curves(results.settings, *what) for name, what in CURVES.items()},
        "recipes": _recipes(results.settings),
        "times": [_times(setting, predictions.get(setting.name)) for setting in results.settings],
        "cluster": cluster,
        "not_predicted": not_predicted,
        "memory": [_memory(setting) for setting in results.settings],
        "trouble": [found for run in results.runs if (found := _trouble(run)) is not None],
        "health": health,
        "health_left_out": left_out,
        "damage": [*results.damage, *damage],
    }


def pareto(rows: Sequence[Mapping[str, Any]], higher_is_better: bool) -> list[str]:
    """Settings that no other one beats in both: a better mean for as many bytes or fewer. By bytes, ascending."""
    known = [row for row in rows if row["mean"] is not None and row["bytes_sent"] is not None]
    known.sort(key=lambda row: (row["bytes_sent"], -row["mean"] if higher_is_better else row["mean"]))
    front: list[str] = []
    best: float | None = None
    for row in known:
        if best is None or ((row["mean"] > best) == higher_is_better and row["mean"] != best):
            front.append(row["setting"])
            best = row["mean"]
    return front


def _curves(settings: Iterable[SettingRuns], kind: str, figure: str) -> list[dict[str, Any]]:
    """Means over seeds by step, with the lowest and the highest seed. Runs that diverged count as far as they came."""
    found = []
    for setting in settings:
        at: dict[int, list[float]] = {}
        for run in setting.runs.values():
            for record in run.of_kind(kind):
                value = record.get(figure)
                if isinstance(value, int | float) and math.isfinite(value):
                    at.setdefault(record["step"], []).append(float(value))
        if at:
            steps = _some(sorted(at))
            lists = {name: [take(at[step]) for step in steps] for name, take in _OVER_SEEDS.items()}
            found.append({"setting": setting.name, "step": steps, **lists})
    return found


_OVER_SEEDS: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "low": min, "high": max, "n": len}


def _some(steps: list[int]) -> list[int]:
    """At most `MOST_POINTS` of them, the last one included."""
    every = -(-len(steps) // MOST_POINTS)
    return [step for place, step in enumerate(reversed(steps)) if place % every == 0][::-1]


def _recipes(settings: Sequence[SettingRuns]) -> dict[str, Any]:
    """Only what differs between the recipes of settings."""
    first = {each.name: next(iter(each.runs.values())).recipe for each in settings if each.runs}
    different = differences(first.values())
    kept = {key: values for key, values in different.items() if not key.startswith(_RECIPE_NOISE)}
    return {"settings": list(first), "keys": {key: [_as_text(value) for value in values] for key, values in kept.items()}}


def _as_text(value: Any) -> str:
    return "" if value is None else str(value)


def _ends(setting: SettingRuns) -> list[Mapping[str, Any]]:
    return [end for run in setting.runs.values() if run.state == "finished" for end in run.of_kind("end")[-1:]]


def _times(setting: SettingRuns, predicted: Mapping[str, float] | None) -> dict[str, Any]:
    """Milliseconds of a step by phase: medians over runs."""
    measured = [end["times_ms"] for end in _ends(setting) if isinstance(end.get("times_ms"), dict) and end["times_ms"]]
    phases = {phase: statistics.median(each.get(phase, 0.0) for each in measured) for phase in PHASES} if measured else {}
    return {"setting": setting.name, "n": len(measured), "measured_ms": phases, "predicted_ms": dict(predicted or {})}


def _memory(setting: SettingRuns) -> dict[str, Any]:
    """Bytes by role, of the last run: they are the same in all."""
    found = next((end["memory"] for end in reversed(_ends(setting)) if isinstance(end.get("memory"), dict)), {})
    return {"setting": setting.name, "bytes": {role: count for role, count in found.items() if count}}


def _trouble(run: Run) -> dict[str, Any] | None:
    """Where a run went wrong: layer, step, rank."""
    if run.state not in ("diverged", "failed", "killed"):
        return None
    event = next((record for record in reversed(run.of_kind("event")) if "layer" in record), {})
    where = {key: event.get(key) for key in ("step", "layer", "rank")}
    return {"run": run.name, "state": run.state, "message": run.message or event.get("message", "")} | where


def _formats_of(studies: Iterable[StudyResults]) -> list[str]:
    """Formats that the recipes name, on the wire or for a role."""
    found: dict[str, None] = {}
    for results in studies:
        for setting in results.settings:
            recipe = next(iter(setting.runs.values())).recipe if setting.runs else {}
            precision = recipe.get("precision", {})
            roles = [precision.get(role) for role in ("weights", "activations", "errors", "gradients")]
            for name in (recipe.get("wire", {}).get("format"), *roles):
                if isinstance(name, str) and name:
                    found[name] = None
    return list(found)


def rounded(value: Any) -> Any:
    """The same with `_DIGITS` significant digits; what JSON cannot write (NaN, infinity) is None."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value
