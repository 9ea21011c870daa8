"""Numeric health of runs: health.jsonl as tables by layer and step, and as histograms of exponents.

A page holds only so much: the baseline first, then runs that went wrong, then all others, until `HealthRoom` is used up. What
is left out is counted. Steps of one run are thinned to `MOST_STEPS`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowp.lab.results import StudyResults
from lowp.training.runs import Run

MOST_STEPS = 10
FIGURES = ("underflow", "overflow", "sqnr_db", "lost_updates")
HEALTH = "health.jsonl"
_DIGITS = 3


@dataclass
class HealthRoom:
    """Bytes of JSON that are left for the health of all runs of a report."""

    left: int = 2_400_000


def health_of(results: StudyResults, room: HealthRoom) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Of every run that has it, as far as there is room; how many were left out; what could not be read."""
    found: list[dict[str, Any]] = []
    damage: list[str] = []
    left_out = 0
    for run in sorted(_with_health(results), key=lambda run: run.state == "finished" and not _is_baseline(run, results)):
        if room.left <= 0:
            left_out += 1
            continue
        document = _run_health(run, damage)
        if not document["rows"]:
            continue
        size = len(json.dumps(document))
        if size > room.left:
            left_out += 1
            continue
        room.left -= size
        found.append(document)
    return found, left_out, damage


def _with_health(results: StudyResults) -> Iterable[Run]:
    return [run for run in results.runs if (run.path / HEALTH).is_file()]


def _is_baseline(run: Run, results: StudyResults) -> bool:
    return any(run is each for each in results.setting(results.baseline).runs.values())


def _run_health(run: Run, damage: list[str]) -> dict[str, Any]:
    """A row for each layer and role: the format, figures by step, and the histogram of exponents by step."""
    records = _records(run, damage)
    steps = sorted({record["step"] for record in records})
    every = -(-len(steps) // MOST_STEPS) if steps else 1
    steps = steps[::-1][::every][::-1]
    place = {step: index for index, step in enumerate(steps)}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        if (index := place.get(record["step"])) is None:
            continue
        key = str(record["role"]), str(record["layer"])
        if key not in rows:
            row: dict[str, Any] = {"role": key[0], "layer": key[1], "format": str(record.get("format"))}
            row |= {name: [None] * len(steps) for name in (*FIGURES, "exponents")}
            rows[key] = row
        row = rows[key]
        for figure in FIGURES:
            row[figure][index] = _short(record.get(figure))
        row["exponents"][index] = _histogram(record.get("exponents"))
    for row in rows.values():
        for figure in FIGURES:
            if not any(row[figure]):
                row[figure] = 0 if any(value == 0 for value in row[figure]) else None  # nothing happened, or nothing is known
    return {"run": run.name, "steps": steps, "rows": list(rows.values())}


def _records(run: Run, damage: list[str]) -> list[dict[str, Any]]:
    found, torn = [], 0
    for line in (run.path / HEALTH).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and "layer" in record and "role" in record:
            found.append(record)
        else:
            torn += 1
    if torn:
        damage.append(f"{run.path / HEALTH}: skipped {torn} damaged lines")
    return found


def _short(value: Any) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, int | float) else None


def _histogram(exponents: Any) -> list[int] | None:
    """The lowest exponent, then counts from there on."""
    if not isinstance(exponents, dict) or not exponents:
        return None
    counts = {int(exponent): int(count) for exponent, count in exponents.items()}
    low = min(counts)
    return [low, *(counts.get(exponent, 0) for exponent in range(low, max(counts) + 1))]
