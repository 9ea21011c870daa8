"""Results as tables on the terminal, and as JSON and Markdown files named after the machine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import facts_of, heading, machine_name, table, write
from benchmarks.harness import in_a_line as in_a_line
from rich.console import Console
from rich.table import Table

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
        return machine_name(self.device)

    def facts(self) -> dict[str, Any]:
        return facts_of(self.device, self.threads)

    def show(self, console: Console) -> None:
        for title, headings, lines in self._tables(COLOURS):
            shown = Table(*headings, title=title, title_justify="left")
            for line in lines:
                shown.add_row(*line)
            console.print(shown)
        for remark in self._remarks():
            console.print(remark, highlight=False)

    def write(self, folder: Path) -> list[Path]:
        rows = [vars(row) | {"passed": row.passed} for row in self.rows]
        whole = {"first_calls": self.first_calls, "not_available": self.missing, "notes": self.notes, "failed": self.failures}
        return write(folder, "", self.facts(), whole | {"rows": rows}, self.markdown().splitlines())

    def markdown(self) -> str:
        lines = heading("operations on numbers", self.facts())
        for title, headings, body in self._tables(MARKDOWN):
            lines += ["", f"## {title}", "", *table(headings, body)]
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
