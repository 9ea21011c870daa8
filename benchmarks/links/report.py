"""Results of `python -m benchmarks links`: tables on the terminal, and JSON and Markdown files named after the machine."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import facts_of, heading, table, write
from benchmarks.links.bars import Verdict, bytes_over_expected, ratio, verdicts
from benchmarks.links.contenders import BASE, HALF
from benchmarks.links.ddp_step import BATCH, LAYERS, PARAMETERS, WIDTH
from benchmarks.links.namespaces import LOOPBACK, bits_per_second
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLLECTIVE = (
    *("contender", "ms", "n", "x fp32", "x fp16", "link, ms", "remains, ms", "processor, ms"),
    *("MB sent", "of expected", "error", "wanted"),
)
DDP = ("contender", "step, ms", "n", "x fp32", "x fp16", "compute", "communicate", "hidden", "MB sent", "wanted")
MODEL = f"a DDP step (forward and backward, {PARAMETERS / 1e6:.1f} M parameters in {LAYERS} layers of {WIDTH}, batch {BATCH})"
READING = (
    "ms: median over n rounds of the slowest rank; x: times faster, the median of the rounds' ratios",
    "MB sent: by the busiest node's interface, headers of TCP and two barriers included (loopback: by all ranks together)",
    "link: what the busiest node's bytes take at the link's rate; remains: the median time less that",
    "processor: of all threads of the busiest rank; ranks, gloo's threads and the kernel's network share the processors",
    "of expected: as lowp counts its bytes, for torch 2 (ranks - 1) shards; error: relative to the exact sum, root mean square",
    "hidden: compute + communicate - step, and its share of the smaller of the two (above 100 %: the computer was busy)",
)


@dataclass
class Report:
    rows: list[dict] = field(default_factory=list)  # with "link" and "rate" beside what the ranks measured
    rates: dict[str, float] = field(default_factory=dict)  # of each link, as measured, over what was asked
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, str | int]:
        return facts_of("cpu", threads=1) | {"backend": "gloo, one thread a rank"}

    def show(self, console: Console) -> None:
        for title, headings, lines in self._tables():
            shown = Table(*headings, title=escape(title), title_justify="left")
            for cells, judged in lines:
                colour = "" if not judged else "green" if all(v.met for v in judged) else "red"
                shown.add_row(*(escape(cell) for cell in cells), style=colour)
            console.print(shown)
        console.print(", ".join(f"{name} {value}" for name, value in self.facts().items()), highlight=False)
        for remark in self._remarks():
            console.print(escape(remark), highlight=False)

    def write(self, folder: Path) -> list[Path]:
        rows = [row | {"verdicts": [vars(v) for v in verdicts(row, self._rivals(row))]} for row in self.rows]
        whole = {"rates": self.rates, "notes": self.notes, "failed": self.failures, "rows": rows}
        return write(folder, "wire", self.facts(), whole, self.markdown().splitlines())

    def markdown(self) -> str:
        lines = heading("collectives on shaped links", self.facts())
        for title, headings, body in self._tables():
            lines += ["", f"## {title}", "", *table(headings, [cells for cells, _ in body])]
        return "\n".join([*lines, "", *(f"- {remark}" for remark in self._remarks())]) + "\n"

    def _rivals(self, row: dict) -> dict[str, dict]:
        same = ("link", "kind", "elements")
        return {other["contender"]: other for other in self.rows if all(other[key] == row[key] for key in same)}

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[list[str], list[Verdict]]]]]:
        """Title, headings and lines: one table for each link and size."""
        for link, kind, elements in dict.fromkeys((row["link"], row["kind"], row["elements"]) for row in self.rows):
            rows = [row for row in self.rows if (row["link"], row["kind"], row["elements"]) == (link, kind, elements)]
            what = MODEL if kind == "ddp" else f"all-reduce of {elements:,} float32"
            line = _ddp_line if kind == "ddp" else _collective_line
            lines = []
            for row in rows:
                rivals = self._rivals(row)
                judged = verdicts(row, rivals)
                lines.append(([*line(row, rivals), "; ".join(map(str, judged))], judged))
            yield f"{link}: {what}", DDP if kind == "ddp" else COLLECTIVE, lines

    def _remarks(self) -> Iterator[str]:
        yield from READING
        measured = ", ".join(f"{name}: {rate:.3f}" for name, rate in self.rates.items())
        if measured:
            yield f"what a plain TCP socket gets, over the rate asked for ({measured})"
        yield from self.notes
        for row in self.rows:
            if row.get("remarks"):
                yield f"{row['link']}, {row['contender']}: {row['remarks']}"
        yield from (f"FAILED: {name}: {reason}" for name, reason in self.failures.items())
        judged = [v.met for row in self.rows for v in verdicts(row, self._rivals(row))]
        yield f"{sum(judged)} of {len(judged)} bars met"


def _collective_line(row: dict, rivals: dict[str, dict]) -> list[str]:
    expected = f"{bytes_over_expected(row):.4f}" if row.get("expected_bytes") else ""
    processor = f"{1e3 * statistics.median(row['processor']):.0f}"
    return [*_speed(row, rivals), *_link_times(row), processor, _megabytes(row), expected, f"{row['error']:.2g}"]


def _link_times(row: dict) -> list[str]:
    """What the link takes for the bytes, and what remains."""
    if row["rate"] == LOOPBACK:
        return ["", ""]
    link = statistics.median(row["bytes"]) * 8 / bits_per_second(row["rate"])
    return [f"{1e3 * link:.1f}", f"{1e3 * (statistics.median(row['seconds']) - link):.1f}"]


def _ddp_line(row: dict, rivals: dict[str, dict]) -> list[str]:
    rounds = zip(row["compute"], row["communicate"], row["seconds"], strict=True)
    hidden = statistics.median(compute + communicate - step for compute, communicate, step in rounds)
    smaller = min(statistics.median(row["compute"]), statistics.median(row["communicate"]))
    parts = [f"{1e3 * statistics.median(row[key]):.0f}" for key in ("compute", "communicate")]
    return [*_speed(row, rivals), *parts, f"{1e3 * hidden:.0f} ({hidden / smaller:.0%})", _megabytes(row)]


def _speed(row: dict, rivals: dict[str, dict]) -> list[str]:
    ratios = [f"{ratio(row, rivals[name]):.2f}" if name in rivals else "" for name in (BASE, HALF)]
    return [row["contender"], f"{1e3 * statistics.median(row['seconds']):.1f}", str(len(row["seconds"])), *ratios]


def _megabytes(row: dict) -> str:
    return f"{statistics.median(row['bytes']) / 1e6:.2f}"
