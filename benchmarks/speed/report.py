"""Results as tables on the terminal, and as JSON and Markdown files named after the machine."""

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

PEERS = ("torch", "triton", "numpy", "ml_dtypes", "gfloat", "qtorch", "lowp")
COLOURS = {True: "[green]{}[/]", False: "[red]{} x[/]", None: "{}"}
MARKDOWN = {True: "{}", False: "**{}** x", None: "{}"}


@dataclass(frozen=True)
class Row:
    """One figure. `bar` is a floor for ratios, where more is better, and a ceiling for costs."""

    section: str
    library: str
    format: str
    operation: str
    value: float
    bar: float | None = None
    less_is_better: bool = False
    elements: int | None = None
    elements_per_second: float | None = None
    rounds: tuple[float, ...] = ()
    host_seconds: float | None = None

    @property
    def passed(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.less_is_better else self.value >= self.bar


@dataclass
class Report:
    device: str
    threads: int
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # peers, with the reason
    failures: dict[str, str] = field(default_factory=dict)  # our own
    notes: list[str] = field(default_factory=list)
    first_calls: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else _cpu_model()

    def facts(self) -> dict[str, str | int]:
        versions = {name: _version(name) for name in PEERS}
        return {
            "machine": self.machine,
            "device": self.device,
            "threads": self.threads,
            "processors": os.cpu_count() or 1,
            "python": platform.python_version(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        } | {name: version for name, version in versions.items() if version}

    def show(self, console: Console) -> None:
        for title, headings, lines in self._tables(COLOURS):
            table = Table(*headings, title=title, title_justify="left")
            for line in lines:
                table.add_row(*line)
            console.print(table)
        for remark in self._remarks():
            console.print(remark, highlight=False)

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / re.sub(r"[^a-z0-9]+", "-", self.machine.lower().replace("(r)", "")).strip("-")
        rows = [vars(row) | {"passed": row.passed} for row in self.rows]
        whole = {"facts": self.facts(), "first_calls": self.first_calls, "not_available": self.missing, "notes": self.notes}
        whole["failed"] = self.failures
        paths = [stem.with_suffix(".json"), stem.with_suffix(".md")]
        paths[0].write_text(json.dumps(whole | {"rows": rows}, indent=1) + "\n")
        paths[1].write_text(self.markdown())
        return paths

    def markdown(self) -> str:
        lines = [f"# {self.machine}", "", "Written by `benchmarks/numbers.py`.", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts().items()]
        for title, headings, body in self._tables(MARKDOWN):
            lines += ["", f"## {title}", "", _line(headings), _line("---" for _ in headings)]
            lines += [_line(cells) for cells in body]
        return "\n".join([*lines, "", *(f"- {remark}" for remark in self._remarks())]) + "\n"

    def _remarks(self) -> Iterator[str]:
        yield from (f"not available: {name}: {reason}" for name, reason in self.missing.items())
        yield from (f"FAILED: {name}: {reason}" for name, reason in self.failures.items())
        yield from self.notes
        judged = [row.passed for row in self.rows if row.passed is not None]
        yield f"{sum(judged)} of {len(judged)} bars reached; x marks the others"

    def _tables(self, marks: dict[bool | None, str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Title, headings and lines of each section: a line for each library and format, a column for each operation."""
        for title in dict.fromkeys(row.section for row in self.rows):
            rows = [row for row in self.rows if row.section == title]
            operations = list(dict.fromkeys(row.operation for row in rows))
            lines: dict[tuple, dict[str, str]] = {}
            for row in rows:
                key = (row.library, row.format) if row.rounds else (row.library, row.format, _size(row.elements))
                lines.setdefault(key, {})[row.operation] = marks[row.passed].format(_figures(row))
            headings = ["library", "format", *([] if all(row.rounds for row in rows) else ["size"])]
            body = [[*key, *(cells.get(operation, "") for operation in operations)] for key, cells in lines.items()]
            yield _with_bars(title, rows), headings + operations, body
        if self.first_calls:
            labels = list(self.first_calls)
            steps = [[step, *(f"{self.first_calls[x][step]:.2f}" for x in labels)] for step in self.first_calls[labels[0]]]
            yield "First calls in a new process, seconds, with the compiler's cache", ["step", *labels], steps


def _with_bars(title: str, rows: list[Row]) -> str:
    bars = {}
    for row in rows:
        if row.bar is not None:
            bars.setdefault(row.operation, set()).add(f"{'<=' if row.less_is_better else '>='} {row.bar:g}")
    if not bars:
        return title
    same = {tuple(sorted(limits)) for limits in bars.values()}
    if len(same) == 1:
        return f"{title} (wanted: {' or '.join(same.pop())})"
    return f"{title} (wanted: " + ", ".join(f"{name} {' or '.join(sorted(limits))}" for name, limits in bars.items()) + ")"


def _figures(row: Row) -> str:
    """The figure, and the elements a second behind a ratio."""
    speed = f" ({row.elements_per_second / 1e9:.3g} G/s)" if row.rounds and row.elements_per_second else ""
    return f"{row.value:.2f}{speed}" if row.value < 100 else f"{row.value:.0f}{speed}"


def _size(elements: int | None) -> str:
    return "" if elements is None else f"{elements:,}"


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
