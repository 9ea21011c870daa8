"""A study: a base recipe, settings that each change it a little, and seeds. What a STUDY.toml says, checked key by key.

    name = "wires"
    base = "fp32"                       # a recipe: a name, a file beside this one, or module:function
    seeds = 5                           # 0 to 4; or a list of seeds
    metric = "accuracy"                 # what counts
    margin = 0.005                      # a difference that is smaller does not matter

    [set]                               # changes for all runs
    epochs = 3
    "optimizer.lr" = 0.05

    [axes]                              # crossed: every combination is a setting
    "wire.format" = ["e5m2", "e4m3fn"]
    "wire.scale" = ["none", "aps"]
    [axes.ranks]                        # choices with names of their own: each is one change or several
    "2 real" = "ranks=2"
    "8 virtual" = "virtual_ranks=8"

    [[skip]]                            # combinations to leave out
    "wire.format" = "e5m2"
    "wire.scale" = "none"

    [changes]                           # single settings, beside the axes or instead of them
    "pure FP16" = ["precision.weights=fp16", "wire.format=fp16"]

`changes` may also be a list: `changes = ["wire.format=e5m2", "wire.format=e4m3fn"]`. A change is what `lowp train --set` takes.

The recipes themselves are made and checked in settings.py.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lowp.names import did_you_mean
from lowp.predict.toml_keys import ClusterError, TomlKeys
from lowp.training.keys import kind_at, section_of
from lowp.training.recipe import LONGEST_NAME
from lowp.training.regular_file import read_regular
from lowp.training.toml import value_text

METRICS = {"accuracy": True, "best_accuracy": True, "loss": False}  # of the last test; whether more is better
MOST_RUNS = 100_000
_LARGEST_FILE = 1 << 20  # bytes


class StudyError(ValueError):
    """A study that cannot be run, in one line with the file and the key."""


@dataclass(frozen=True)
class AxisChoice:
    """One place of an axis, or one entry of `changes`: how it is called, and what it changes."""

    label: str
    changes: tuple[str, ...]  # KEY=VALUE


@dataclass(frozen=True)
class Axis:
    name: str
    choices: tuple[AxisChoice, ...]


@dataclass(frozen=True)
class Study:
    """What was asked for."""

    name: str
    description: str
    source: str  # the file, for messages
    base: str
    seeds: tuple[int, ...]
    metric: str
    margin: float | None
    baseline: str  # the name of a setting; "": the base recipe
    health: int  # steps between samples of numeric health in the runs of the first seed; 0: as the recipe says
    set: Mapping[str, Any]
    axes: tuple[Axis, ...]
    skip: tuple[Mapping[str, tuple[str, ...]], ...]  # labels, by the axis
    changes: tuple[AxisChoice, ...]

    @property
    def higher_is_better(self) -> bool:
        return METRICS[self.metric]

    def combinations(self) -> Iterator[tuple[AxisChoice, ...]]:
        """A choice of every axis, the last axis fastest, without those to skip."""
        for chosen in product(*(axis.choices for axis in self.axes)) if self.axes else ():
            labels = {axis.name: choice.label for axis, choice in zip(self.axes, chosen, strict=True)}
            if not any(all(labels[name] in wanted for name, wanted in each.items()) for each in self.skip):
                yield chosen


def read_study(path: Path) -> Study:
    """The study in a TOML file; StudyError, in one line, if there is a mistake in it."""
    try:
        return _study(TomlKeys(_document(path), str(path)), path)
    except ClusterError as error:  # a mistake of a key, whatever the file is about
        raise StudyError(str(error)) from None


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, _LARGEST_FILE).decode())
    except UnicodeDecodeError:
        raise StudyError(f"{path}: this is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).removesuffix(")").partition(" (at ")
        raise StudyError(f"{path}: {where}: {what[0].lower()}{what[1:]}") from None
    except RecursionError:
        raise StudyError(f"{path}: tables and lists are nested too deep") from None
    except ValueError as error:
        raise StudyError(str(error)) from None


def _study(keys: TomlKeys, path: Path) -> Study:
    name = keys.text("name", re.sub(r"[^\w.-]", "-", path.stem))
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith(".") or len(name) > LONGEST_NAME:
        raise keys.wrong("name", f"{name!r} must consist of letters, digits, '_', '.' and '-': it names a directory")
    metric = keys.text("metric", "accuracy")
    if metric not in METRICS:
        hint = did_you_mean(metric, METRICS, f"it is one of {', '.join(METRICS)}")
        raise keys.wrong("metric", f"unknown metric {metric!r}; {hint}")
    margin = keys.number("margin", 0.0, least=0) if "margin" in keys.names() else None
    axes = _axes(keys)
    study = Study(
        name,
        keys.text("description", ""),
        str(path),
        _base(keys.text("base"), path),
        _seeds(keys),
        metric,
        margin,
        keys.text("baseline", ""),
        keys.whole("health", 0),
        dict(keys.mapping("set")),
        axes,
        tuple(_skip(keys, axes)),
        tuple(_changes(keys)),
    )
    keys.end()
    if not study.axes and not study.changes:
        raise keys.wrong("axes", "there is nothing to compare: say [axes] or [changes]")
    return study


def _base(text: str, path: Path) -> str:
    """A file is looked for beside the study's."""
    return str(path.parent / text) if text.endswith(".toml") else text


def _seeds(keys: TomlKeys) -> tuple[int, ...]:
    given = keys.take("seeds", 5)
    found = list(range(given)) if isinstance(given, int) and not isinstance(given, bool) and given <= MOST_RUNS else given
    if not isinstance(found, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
        raise keys.wrong("seeds", f"{given!r} is neither a number of seeds nor a list of whole numbers")
    if not found or min(found) < 0 or max(found) >= 1 << 63:
        raise keys.wrong("seeds", "at least one seed is wanted, and a seed is at least 0 and below 2^63")
    if len(set(found)) < len(found):
        raise keys.wrong("seeds", "a seed is named twice")
    return tuple(found)


def _axes(keys: TomlKeys) -> tuple[Axis, ...]:
    found = []
    for name, value in _flattened(keys.mapping("axes")):
        if isinstance(value, dict):
            choices = [_choice(keys, f"axes.{name}", label, change) for label, change in value.items()]
        elif isinstance(value, list):
            choices = [AxisChoice(_label(each), (f"{name}={value_text(each)}",)) for each in value]
        else:
            raise keys.wrong(f"axes.{name}", f"{value!r} is neither a list of values nor a table of named changes")
        if not choices:
            raise keys.wrong(f"axes.{name}", "at least one value is wanted")
        labels = [choice.label for choice in choices]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise keys.wrong(f"axes.{name}", f"{twice!r} is there twice")
        found.append(Axis(name, tuple(choices)))
    return tuple(found)


def _flattened(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Without quotes, `wire.format = [...]` is a table in a table. Sections of a recipe are taken apart, others are not."""
    for name, value in table.items():
        section = section_of(kind_at((name,))) if "." not in name else None
        if section is not None and isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _label(value: Any) -> str:
    return value if isinstance(value, str) else value_text(value)


def _choice(keys: TomlKeys, where: str, label: str, change: Any) -> AxisChoice:
    """A change or several, as text: `KEY=VALUE`."""
    changes = [change] if isinstance(change, str) else change
    if not isinstance(changes, list) or not all(isinstance(each, str) for each in changes):
        raise keys.wrong(where, f"{change!r} is neither a change, such as 'wire.format=e5m2', nor a list of changes")
    if bad := next((each for each in changes if "=" not in each), None):
        raise keys.wrong(where, f"{bad!r} is no change: it is written KEY=VALUE")
    return AxisChoice(label, tuple(changes))


def _changes(keys: TomlKeys) -> Iterator[AxisChoice]:
    given = keys.take("changes", [])
    if isinstance(given, dict):
        yield from (_choice(keys, f"changes.{label}", label, change) for label, change in given.items())
    elif isinstance(given, list):
        for number, change in enumerate(given):
            label = change if isinstance(change, str) else " ".join(map(str, change)) if isinstance(change, list) else ""
            yield _choice(keys, f"changes[{number}]", label, change)
    else:
        raise keys.wrong("changes", f"{given!r} is neither a list nor a table of changes")


def _skip(keys: TomlKeys, axes: Sequence[Axis]) -> Iterator[dict[str, tuple[str, ...]]]:
    if "skip" not in keys.names():
        keys.take("skip", [])
        return
    known = {axis.name: [choice.label for choice in axis.choices] for axis in axes}
    for number, table in enumerate(keys.take("skip") if isinstance(keys.take("skip"), list) else [None]):
        where = f"skip[{number}]"
        if not isinstance(table, dict) or not table:
            raise keys.wrong(where, "a combination is a table: the value, or several, of one axis or more; write [[skip]]")
        found = {}
        for name, value in _flattened(table):
            if name not in known:
                raise keys.wrong(f"{where}.{name}", f"no such axis; {did_you_mean(name, known, _there_are(known))}")
            found[name] = tuple(_label(each) for each in (value if isinstance(value, list) else [value]))
            for label in found[name]:
                if label not in known[name]:
                    hint = did_you_mean(label, known[name], _there_are(known[name]))
                    raise keys.wrong(f"{where}.{name}", f"the axis has no {label!r}; {hint}")
        yield found


def _there_are(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f"there are {', '.join(names)}" if names else "there are none"
