"""What a run's directory says: its key figures, for `lowp runs` and for the lab.

A run is read while it is running, after it was killed, or half copied from another machine: everything but the directory may
be missing, and a line of metrics.jsonl may be torn. What can be read is read; what cannot is said, in `Run.damage`.

Where the run has ended, its `end` record is the last word; before that, the last `train` and `test` records are. A run that was
killed still calls itself running. Its lock tells: it dies with the process.
"""

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowp.former_names import recipe_of_today
from lowp.machine import HAS_LOCKS, try_lock
from lowp.names import did_you_mean
from lowp.notebook import html_table
from lowp.training.rundir import ENVIRONMENT, LOCK, RECIPE, STATUS
from lowp.training.units import bytes_text, duration_text, number_text, share_of_fp32, share_text

METRICS = "metrics.jsonl"

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The key figures of a run. None: not known, or not yet."""

    path: Path
    state: str  # running, finished, stopped, diverged, failed; or killed, or unknown
    message: str
    recipe: dict[str, Any]
    started: datetime | None
    step: int | None
    epoch: float | None
    loss: float | None  # of the last test
    accuracy: float | None  # of the last test, a fraction
    best_accuracy: float | None
    train_loss: float | None
    bytes_sent: int | None
    bytes_of_fp32: int | None
    samples_per_second: float | None
    step_ms: float | None
    seconds: float | None
    memory_bytes: int | None
    bytes_per_parameter: float | None
    parameters: int | None
    ranks: int | None
    virtual_ranks: int | None
    device: str | None
    records: tuple[Record, ...]
    damage: tuple[str, ...]  # a line for each thing that could not be read

    @classmethod
    def read(cls, path: Path, *, briefly: bool = False) -> "Run":
        """The run in directory `path`; ValueError where there is none. `briefly`: `records` are only those that the figures
        are taken from, and lines that no figure needs are not parsed: enough for a list of many runs."""
        if not is_run(path):
            raise ValueError(f"{path} is no run: it has neither {RECIPE} nor {METRICS}")
        damage: list[str] = []
        recipe = _recipe(path / RECIPE, damage)
        status = _object(path / STATUS, damage)
        records = read_records(path / METRICS, damage, briefly=briefly)
        state = status.get("state", "unknown")
        return cls(
            path=path,
            state="killed" if state == "running" and _abandoned(path / LOCK) else state,
            message=status.get("message") or "",
            recipe=recipe,
            started=_start(_object(path / ENVIRONMENT, damage)),
            records=tuple(records),
            damage=tuple(damage),
            **_figures(records, status, recipe),
        )

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def share_of_fp32(self) -> float | None:
        return share_of_fp32(self.bytes_sent, self.bytes_of_fp32)

    def _repr_html_(self) -> str:
        """In a notebook: the key figures."""
        figures = (
            ("state", self.state),
            ("epoch", number_text(self.epoch)),
            ("accuracy", share_text(self.accuracy)),
            ("loss", number_text(self.loss)),
            ("sent by a rank", bytes_text(self.bytes_sent)),
            ("of fp32", share_text(self.share_of_fp32)),
            ("ms a step", number_text(self.step_ms)),
            ("time", duration_text(self.seconds)),
        )
        return html_table(f"{self.name} {self.message}".strip(), [name for name, _ in figures], [[text for _, text in figures]])

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def is_run(path: Path) -> bool:
    return (path / RECIPE).is_file() or (path / METRICS).is_file()


def runs_under(root: Path) -> list[Path]:
    """The directories of the runs under `root`, by name: directly, or in a directory of several, as `lowp demo` makes them."""
    if not root.is_dir():
        return []
    found: list[Path] = []
    for path in sorted(root.iterdir()):
        if is_run(path):
            found.append(path)
        elif path.is_dir():
            found += sorted(inner for inner in path.iterdir() if is_run(inner))
    return found


def find_run(name: str, root: Path) -> Path:
    """The run at the path `name`, or of that name under `root`; ValueError with the nearest names where there is neither."""
    for path in (Path(name), root / name):
        if is_run(path):
            return path
    names = [str(path.relative_to(root)) for path in runs_under(root)]
    if not names:
        raise ValueError(f"unknown run {name!r}: it is no run's directory, and there are no runs under {root}")
    raise ValueError(
        f"unknown run {name!r}; {did_you_mean(Path(name).name, names, f'the runs under {root} are {_some(names)}')}"
    )


def flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's keys by their paths: {"wire": {"format": "e5m2"}} has wire.format."""
    result: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def differences(recipes: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """The keys in which recipes differ, each with every recipe's value; None where a recipe has no such key."""
    flattened = [flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for recipe in flattened for key in recipe)
    values = {key: [recipe.get(key) for recipe in flattened] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def read_records(path: Path, damage: list[str], *, briefly: bool = False) -> list[Record]:
    """The whole lines of a metrics.jsonl; what is wrong with the others goes to `damage`, in one line."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = {number: line for number, line in enumerate(text.splitlines(), 1) if line and not line.isspace()}
    needed = _needed(lines) if briefly else lines
    records, torn = [], []
    for number, line in lines.items():
        if number in needed or not (line[0] == "{" and line[-1] == "}"):
            record = _parsed(line)
            if record is None:
                torn.append(str(number))
            else:
                records.append(record)
    if torn:
        damage.append(f"{path}: skipped {len(torn)} damaged of {len(lines)} lines (line {_some(torn)})")
    return records


def _needed(lines: dict[int, str]) -> set[int]:
    """The lines that `_figures` reads: the last of each kind, and all tests of a run that has not ended."""
    found: dict[str, int] = {}
    tests, last = [], ""
    for number, line in reversed(lines.items()):
        begin = _KIND.match(line)
        kind = begin[1] if begin and line[-1] == "}" else str((_parsed(line) or {}).get("kind", ""))
        if kind:
            found.setdefault(kind, number)
        if kind == "test":
            tests.append(number)
        last = last or (kind if kind != "event" else "")
        if last == "end" and len(found.keys() & {"train", "test"}) == 2:
            break
    return {*found.values(), *(tests if last != "end" else ())}


_KIND = re.compile(r'\{"kind": "(\w+)"')  # as our own lines begin


def _parsed(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or not isinstance(record.get("step"), int):
        return None
    return record


def _figures(records: list[Record], status: Record, recipe: dict[str, Any]) -> dict[str, Any]:
    """Every figure from the latest record that may know it.

    An `end` record that others follow belongs to a run that was stopped and has been resumed since: it knows the machine, but
    nothing of the progress.
    """
    train, test, end = (next((r for r in reversed(records) if r["kind"] == kind), {}) for kind in ("train", "test", "end"))
    last = next((r for r in reversed(records) if r["kind"] != "event"), {})
    final = end if end is last else {}

    def first(key: str, *sources: Record) -> Any:
        return next((source[key] for source in sources if source.get(key) is not None), None)

    accuracies = [r["accuracy"] for r in records if r["kind"] == "test" and r.get("accuracy") is not None]
    progress = {key: first(key, final, train) for key in ("bytes_sent", "bytes_of_fp32", "samples_per_second", "seconds")}
    constants = ("step_ms", "memory_bytes", "bytes_per_parameter", "parameters", "device")
    return {
        "step": first("step", final, last, status),
        "epoch": first("epoch", final, train if train.get("step", -1) >= test.get("step", -1) else test, test, status),
        "loss": first("loss", final, test),
        "accuracy": first("accuracy", final, test),
        "best_accuracy": first("best_accuracy", final) if final else max(accuracies, default=None),
        "train_loss": first("loss", train),
        **progress,
        **{key: first(key, end) for key in constants},
        **{key: first(key, end, recipe) for key in ("ranks", "virtual_ranks")},
    }


def _recipe(path: Path, damage: list[str]) -> dict[str, Any]:
    try:
        own, rest = _taken_apart(path.read_bytes().decode())
        return own | _toml(rest)
    except FileNotFoundError:
        damage.append(f"{path} is missing")
    except ValueError as error:  # no TOML, or no text
        damage.append(f"{path}: {error}")
    return {}


_OF_ONE_RUN = re.compile(r'^(?:name = "([\w.-]+)"|seed = (\d+))(?: *#.*)?$', re.MULTILINE)


def _taken_apart(text: str) -> tuple[dict[str, Any], str]:
    """The values that differ from run to run of one setting, and the rest. To parse TOML takes most of the time of reading a
    run, and of the runs of a study it is the same text again and again."""
    head, bracket, tables = text.partition("\n[")
    own = {"seed" if seed else "name": int(seed) if seed else name for name, seed in _OF_ONE_RUN.findall(head)}
    return own, _OF_ONE_RUN.sub("", head) + bracket + tables


@lru_cache(maxsize=4096)
def _toml(text: str) -> dict[str, Any]:
    return recipe_of_today(tomllib.loads(text))


def _object(path: Path, damage: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        damage.append(f"{path}: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _abandoned(lock: Path) -> bool:
    """Whether nobody holds the lock. To ask is to take it, for a moment, beside others who ask."""
    try:
        with lock.open() as file:
            try_lock(file, shared=True)
    except OSError:  # held; or there is no lock to ask
        return False
    return HAS_LOCKS


def _start(environment: dict[str, Any]) -> datetime | None:
    """When the run first began: a resumed one keeps the places and times before."""
    first = next(iter(environment.get("earlier", [])), environment)
    try:
        return datetime.fromisoformat(first["time"])
    except (KeyError, TypeError, ValueError):
        return None


def _some(names: list[str]) -> str:
    """The first few of a list that may be long."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
