"""What lies in this folder: for each study a `page.toml` with its claims, parts (`PART.toml`) and their records (`PART.jsonl`).

    studies/aps/page.toml          the paper, its claims, what a part needs, where it differs from the paper
                davidnet.toml      a part: a study of `lowp ablate`
                davidnet.jsonl     its record (lowp.lab.records); not there: it has not been run

A claim is judged by numbers alone. `advantage` is the paired difference to the baseline (or to `than`), by seed, counted so
that more is better, with Student's 95 % interval:

    kind = "no_worse"    holds: the interval lies above -margin. Does not hold: below it, or runs diverged.
    kind = "worse"       holds: the interval lies below 0, or runs diverged. Does not hold: above -margin.
    kind = "better"      holds: the interval lies above 0. Does not hold: below +margin.

Everything else is open, with the number of seeds that would decide it by the same rule, if the effect is as it looks.
Intervals are not corrected for the number of claims; the tables of all settings, on the same pages, are.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lowp.lab.comparison import LEVEL, Summary, seeds_needed
from lowp.lab.records import RecordedStudy, read_record
from lowp.lab.study import Study, read_study

FOLDER = Path(__file__).parent
KINDS = ("no_worse", "worse", "better")
_PAGE_KEYS = {"title", "paper", "order", "about", "claim", "part", "differs", "also"}
_CLAIM_KEYS = {"says", "part", "setting", "than", "kind", "margin", "readme"}
_FEW = 4  # seeds, of which no plan for more is made
_PART_KEYS = {"gpu_minutes", "data", "jobs", "machine"}


@dataclass(frozen=True)
class Part:
    """One `lowp ablate` study of a page."""

    name: str
    path: Path  # of its TOML
    gpu_minutes: float
    data: str  # what it needs beside the embedded set
    jobs: int

    @cached_property
    def study(self) -> Study:
        return read_study(self.path)

    @property
    def record_path(self) -> Path:
        return self.path.with_suffix(".jsonl")

    @cached_property
    def record(self) -> RecordedStudy | None:
        return read_record(self.record_path) if self.record_path.exists() else None

    @property
    def command(self) -> str:
        data = " --data DIR" * bool(self.data)
        mps = " --mps" * bool(self.gpu_minutes)
        return f"lowp ablate {self.path.relative_to(FOLDER.parent)} --jobs {self.jobs}{mps}{data}"


@dataclass(frozen=True)
class Claim:
    says: str
    part: Part
    setting: str
    kind: str
    margin: float
    than: str  # the setting to compare with; "": the baseline
    readme: bool  # does README's table have it?

    @cached_property
    def judged(self) -> "Judgement":
        record = self.part.record
        if record is None:
            return Judgement("not run", 0, math.nan, math.nan, None)
        results = record.results
        other = self.than or results.baseline
        own, base = results.setting(self.setting), results.setting(other)
        mine, theirs = own.figures(results.metric), base.figures(results.metric)
        sign = 1 if results.higher_is_better else -1
        pairs = [sign * (mine[seed] - theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]
        lost = sum(seed in theirs for seed in own.lost(results.metric))
        return _judge(self.kind, self.margin, Summary.of(pairs), lost)


@dataclass(frozen=True)
class Judgement:
    verdict: str  # holds, does not hold, open, not run
    n: int
    advantage: float
    half: float
    seeds: int | None  # that would decide it, where it is open
    diverged: int = 0


def _judge(kind: str, margin: float, found: Summary, lost: int) -> Judgement:
    low, high = found.interval
    holds, fails = {
        "no_worse": (low > -margin, high < -margin),
        "worse": (high < 0, low > -margin),
        "better": (low > 0, high < margin),
    }[kind]
    if lost:
        holds, fails = kind == "worse", kind != "worse"
    verdict = "holds" if holds else "does not hold" if fails else "open"
    needed = _seeds(kind, margin, found) if verdict == "open" and found.n >= _FEW else None
    return Judgement(verdict, found.n + lost, found.mean, found.half, needed, lost)


def _seeds(kind: str, margin: float, found: Summary) -> int | None:
    """So many would keep the interval, with a chance of 80 %, on the mean's side of the limit that the rule names, the farther
    one where it names two."""
    mean = found.mean
    distance = {
        "no_worse": abs(mean + margin),
        "worse": max(-mean, mean + margin),
        "better": max(mean, margin - mean),
    }[kind]
    return seeds_needed(replace(found, mean=distance), math.nan, LEVEL)


@dataclass(frozen=True)
class Page:
    """One study's folder."""

    name: str
    title: str
    paper: str
    order: int
    about: str
    claims: tuple[Claim, ...]
    parts: tuple[Part, ...]
    differs: tuple[str, ...]
    also: tuple[str, ...]


class PageError(ValueError):
    """A mistake in a page.toml, in one line."""


def pages(folder: Path = FOLDER) -> list[Page]:
    """All studies, in the order that their files say."""
    found = [read_page(path) for path in folder.glob("*/page.toml")]
    return sorted(found, key=lambda page: (page.order, page.name))


def read_page(path: Path) -> Page:
    told = tomllib.loads(path.read_text())
    _known(told, _PAGE_KEYS, path)
    parts = {name: _part(name, entry, path) for name, entry in told["part"].items()}
    return Page(
        path.parent.name,
        told["title"],
        told["paper"],
        told["order"],
        told["about"],
        tuple(_claim(entry, parts, path) for entry in told.get("claim", [])),
        tuple(parts.values()),
        tuple(told.get("differs", [])),
        tuple(told.get("also", [])),
    )


def _part(name: str, told: dict[str, Any], path: Path) -> Part:
    _known(told, _PART_KEYS, path)
    file = path.parent / f"{name}.toml"
    if not file.exists():
        raise PageError(f"{path}: part {name!r} has no {file.name}")
    return Part(name, file, told["gpu_minutes"], told.get("data", ""), told.get("jobs", 1))


def _claim(told: dict[str, Any], parts: dict[str, Part], path: Path) -> Claim:
    _known(told, _CLAIM_KEYS, path)
    if told["part"] not in parts or told["kind"] not in KINDS:
        raise PageError(
            f"{path}: claim {told['says']!r} names no part of the page, or a kind that is none of {', '.join(KINDS)}"
        )
    part = parts[told["part"]]
    names = {choice.label for choice in part.study.changes}
    for setting in filter(None, (told["setting"], told.get("than", ""))):
        if part.study.changes and not part.study.axes and setting not in names:
            raise PageError(f"{path}: claim {told['says']!r} is about {setting!r}, which {part.path.name} does not have")
    return Claim(
        told["says"],
        part,
        told["setting"],
        told["kind"],
        told.get("margin", 0.0),
        told.get("than", ""),
        told.get("readme", False),
    )


def _known(told: dict[str, Any], keys: set[str], path: Path) -> None:
    if unknown := sorted(told.keys() - keys):
        raise PageError(f"{path}: unknown key {unknown[0]!r}; there are {', '.join(sorted(keys))}")
