"""What came of a study, or of runs that were made one by one: a row for each setting, with statistics over its seeds.

Runs that belong together differ in their seed alone. In a study the plan says so; of other runs, those whose recipes are equal
but for the seed are one setting. The baseline is the study's, or the setting of the run that was named first.

A run counts with the figure of its last test if it is finished. Runs that diverged, failed or are not finished do not count,
and are counted.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lowp.lab.comparison import Comparison, Summary, compare
from lowp.lab.study import METRICS, StudyError
from lowp.lab.study_directory import DONE, PLAN, VERSION, is_study, read_log
from lowp.notebook import html_table
from lowp.training.runs import Run, flat, is_run

RunReader = Callable[[Path], Run]
_NOT_COMPARED = ("seed", "name", "description", "threads", "log.", "checkpoints.")  # of recipes of one setting


@dataclass(frozen=True)
class SettingRuns:
    """The runs of one setting, by seed."""

    name: str
    changes: tuple[str, ...]
    labels: Mapping[str, str]
    runs: Mapping[int, Run]
    planned: int  # how many there are to be
    failures: Mapping[int, str] = field(default_factory=dict)  # by seed, the reasons of runs that failed

    def figures(self, metric: str) -> dict[int, float]:
        """By seed, of runs that are finished, as far as they are finite. What was run twice with a seed counts once."""
        return {seed: value for seed, value in self._measured(metric).items() if seed >= 0 and math.isfinite(value)}

    def _measured(self, metric: str) -> dict[int, float]:
        found = {seed: getattr(run, metric) for seed, run in self.runs.items() if run.state == "finished"}
        return {seed: value for seed, value in found.items() if value is not None}

    def seeds_in(self, *states: str) -> list[int]:
        return [seed for seed, run in self.runs.items() if run.state in states]

    def lost(self, metric: str) -> list[int]:
        """The seeds of runs that diverged, or that ended with a figure that is not finite."""
        return self.seeds_in("diverged") + [s for s, value in self._measured(metric).items() if not math.isfinite(value)]

    def mean(self, figure: str) -> float | None:
        """Of any figure of finished runs, for tables; None where none has it."""
        values = [getattr(run, figure) for run in self.runs.values() if run.state == "finished"]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class StudyResults:
    """Settings with their runs, and what can be said about them."""

    name: str
    description: str
    path: Path
    metric: str
    margin: float | None
    baseline: str
    settings: tuple[SettingRuns, ...]
    damage: tuple[str, ...]  # a line for each thing that could not be read

    @property
    def higher_is_better(self) -> bool:
        return METRICS[self.metric]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        figures = {setting.name: setting.figures(self.metric) for setting in self.settings}
        base = figures[self.baseline]
        lost = {each.name: sum(seed in base for seed in each.lost(self.metric)) for each in self.settings}
        return compare(figures, self.baseline, higher_is_better=self.higher_is_better, margin=self.margin, lost=lost)

    def setting(self, name: str) -> SettingRuns:
        return next(each for each in self.settings if each.name == name)

    @property
    def runs(self) -> list[Run]:
        return [run for setting in self.settings for run in setting.runs.values()]

    def records(self) -> list[dict[str, Any]]:
        """A row for each setting: `pandas.DataFrame(results.records())`. None: there is no such number."""
        return [self._record(setting) for setting in self.settings]

    def _record(self, setting: SettingRuns) -> dict[str, Any]:
        found = self.comparisons[setting.name]
        own = Summary.of(list(setting.figures(self.metric).values()))
        low, high = own.interval
        difference_low, difference_high = found.difference.interval
        is_baseline = found.verdict == "baseline"
        row: dict[str, Any] = {"setting": setting.name, **{f"axis.{axis}": label for axis, label in setting.labels.items()}}
        row |= {"changes": " ".join(setting.changes), "metric": self.metric, "n": own.n, "planned": setting.planned}
        row |= {"diverged": len(setting.seeds_in("diverged")), "failed": len(setting.failures)}
        row |= {"mean": own.mean, "low": low, "high": high, "deviation": own.deviation}
        row |= {"difference": None, "difference_low": None, "difference_high": None, "pairs": None}
        if not is_baseline:
            row |= {"difference": found.difference.mean, "pairs": found.difference.n}
            row |= {"difference_low": difference_low, "difference_high": difference_high}
        row |= {"p_difference": found.p_difference, "p_within": found.p_within, "margin": found.margin}
        row |= {"verdict": found.verdict, "seeds_needed": found.seeds_needed, "note": found.note}
        means = ("bytes_sent", "share_of_fp32", "step_ms", "seconds", "memory_bytes")
        row |= {figure: setting.mean(figure) for figure in means}
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}

    def _repr_html_(self) -> str:
        """In a notebook: a row for each setting."""
        columns = ("setting", "n", "mean", "low", "high", "difference", "difference_low", "difference_high", "verdict")
        rows = [[_cell(row[column]) for column in columns] for row in self.records()]
        return html_table(f"{self.name}: {self.metric}, baseline {self.baseline}", columns, rows, right=range(1, 8))

    def run_records(self) -> list[dict[str, Any]]:
        """A row for each run."""
        figures = ("accuracy", "best_accuracy", "loss", "train_loss", "bytes_sent", "bytes_of_fp32", "step_ms", "seconds")
        rows = []
        for setting in self.settings:
            for seed in sorted({*setting.runs, *setting.failures}):
                run, failure = setting.runs.get(seed), setting.failures.get(seed)
                state = "failed" if failure is not None or run is None else run.state
                head = {"setting": setting.name, "seed": seed, "run": None if run is None else run.name, "state": state}
                reason = {"reason": failure or ("" if run is None else run.message)}
                rows.append(head | reason | {figure: getattr(run, figure, None) for figure in figures})
        return rows


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def paths_under(folder: Path) -> list[Path]:
    """What a folder holds: itself, where it is a study or a run, or else the studies and runs directly under it."""
    if is_study(folder) or is_run(folder):
        return [folder]
    found = sorted(path for path in folder.iterdir() if is_study(path) or is_run(path)) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder} is neither a run nor a study, and holds none")
    return found


def results_of(paths: Sequence[Path], read: RunReader = Run.read) -> list[StudyResults]:
    """Studies one by one, in their order; all runs that belong to none together, first."""
    loose = [path for path in paths if not is_study(path)]
    for path in loose:
        if not is_run(path):
            raise ValueError(f"{path} is neither a run nor a study")
    found = [runs_results(loose, read=read)] if loose else []
    return found + [study_results(path, read) for path in paths if is_study(path)]


def readable_results(paths: Sequence[Path], read: RunReader = Run.read) -> tuple[list[StudyResults], list[str]]:
    """As `results_of`. What cannot be read is left out, with a line for each; ValueError if nothing is left."""
    found: list[StudyResults] = []
    unreadable: list[str] = []
    loose = [path for path in paths if is_run(path) and not is_study(path)]
    if loose:
        found.append(runs_results(loose, read=read))
    for path in paths:
        if path in loose:
            continue
        try:
            found += results_of([path], read)
        except ValueError as error:
            unreadable.append(str(error))
    if not found:
        raise ValueError("; ".join(unreadable) or "there is nothing to report")
    return found, unreadable


def study_results(path: Path, read: RunReader = Run.read) -> StudyResults:
    """What a study's directory holds, whatever became of it. `read` reads one run."""
    plan = _plan(path)
    damage: list[str] = []
    log = read_log(path)
    ends = {record["run"]: record for record in log if record.get("kind") == "end" and "run" in record}
    failures: dict[str, dict[int, str]] = {}
    runs: dict[str, dict[int, Run]] = {}
    planned: dict[str, int] = {}
    for entry in plan["runs"]:
        planned[entry["setting"]] = planned.get(entry["setting"], 0) + 1
        directory = path / "runs" / entry["name"]
        run = read(directory) if is_run(directory) else None
        if run is not None:
            damage += run.damage
            runs.setdefault(entry["setting"], {})[entry["seed"]] = run
        end = ends.get(entry["name"], {})
        if end.get("state") == "failed" and (run is None or run.state not in DONE):
            failures.setdefault(entry["setting"], {})[entry["seed"]] = str(end.get("reason", ""))
    settings = tuple(
        SettingRuns(
            each["name"],
            tuple(each["changes"]),
            each["labels"],
            runs.get(each["name"], {}),
            planned[each["name"]],
            failures.get(each["name"], {}),
        )
        for each in plan["settings"]
    )
    return StudyResults(
        plan["name"],
        plan["description"],
        path,
        plan["metric"],
        plan["margin"],
        plan["baseline"],
        settings,
        tuple(damage),
    )


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads((path / PLAN).read_text(encoding="utf-8"))
        version = plan["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path / PLAN}: cannot be read ({type(error).__name__})") from None
    if version != VERSION:
        raise StudyError(f"{path / PLAN}: is of version {version}, and this lowp reads version {VERSION}")
    return plan


def runs_results(paths: Sequence[Path], metric: str = "accuracy", read: RunReader = Run.read) -> StudyResults:
    """Runs that were made one by one, grouped: those whose recipes are equal but for the seed are one setting."""
    runs = [read(path) for path in paths]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    names = _names_of(list(groups.values()))
    settings = tuple(
        SettingRuns(name, (), {}, own := _by_seed(group), sum(seed >= 0 for seed in own))
        for name, group in zip(names, groups.values(), strict=True)
    )
    damage = tuple(line for run in runs for line in run.damage)
    return StudyResults("runs", "", Path(), metric, None, settings[0].name, settings, damage)


def _identity(run: Run) -> str:
    recipe = {key: value for key, value in flat(run.recipe).items() if not key.startswith(_NOT_COMPARED)}
    return json.dumps(recipe, sort_keys=True, default=str) if recipe else str(run.path)


def _by_seed(group: Sequence[Run]) -> dict[int, Run]:
    """Two runs with one seed are the same run twice: the second is shown, under a number that no seed has."""
    found: dict[int, Run] = {}
    for run in sorted(group, key=lambda run: run.state != "finished"):
        seed = run.recipe.get("seed", 0)
        while seed in found:
            seed = min(-1, min(found) - 1)
        found[seed] = run
    return found


def _names_of(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A group is called after its recipe; where two recipes have one name, after its first run."""
    names = [str(group[0].recipe.get("name") or group[0].name) if len(group) > 1 else group[0].name for group in groups]
    return [name if names.count(name) == 1 else f"{name} ({group[0].path})" for name, group in zip(names, groups, strict=True)]


def write_table(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """As .csv or .parquet, by the path's ending."""
    rows = list(records)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        _write_parquet(rows, columns, path)
    else:
        raise ValueError(f"{path}: tables are .csv or .parquet, not {path.suffix or 'without a suffix'}")


def check_table(path: Path) -> None:
    """Before hours of runs: can a table be written there?"""
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{path}: tables are .csv or .parquet, not {path.suffix or 'without a suffix'}")
    if path.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError("a table in Parquet needs the package pyarrow: pip install 'lowp[parquet]'") from None
    return pyarrow


def _write_parquet(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    pyarrow = _pyarrow()
    table = pyarrow.table({column: [row.get(column) for row in rows] for column in columns})
    pyarrow.parquet.write_table(table, path)
