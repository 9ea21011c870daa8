"""The tables of `lowp ablate`: its plan before, its results after."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowp.cli.output import table
from lowp.training.units import UNKNOWN, bytes_text, loss_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lowp.lab.results import StudyResults
    from lowp.lab.settings import StudyPlan

MOST_ROWS = 60  # of a plan on the screen; all are in plan.json
COLOURS = {"better": "green", "worse": "red", "more seeds needed": "yellow"}


def plan_table(plan: "StudyPlan") -> "Table":
    """Axes first, then every setting. What a combination changes is what its axes say."""
    from rich.markup import escape

    result = table()
    result.add_column("setting", overflow="fold")
    result.add_column("changes", overflow="fold")
    for axis in plan.study.axes:
        result.add_row(f"[dim]axis {escape(axis.name)}[/]", f"[dim]{escape(', '.join(c.label for c in axis.choices))}[/]")
    for setting in plan.settings[:MOST_ROWS]:
        changes = "[dim]of the axes[/]" if setting.labels else escape(" ".join(setting.changes)) or "[dim]none[/]"
        result.add_row(escape(setting.name), changes)
    if len(plan.settings) > MOST_ROWS:
        result.add_row(f"and {len(plan.settings) - MOST_ROWS} more", "")
    return result


def print_results(results: "StudyResults", out: "Console") -> None:
    """A row for each setting: n, mean, interval, paired difference to the baseline, verdict."""
    from rich.markup import escape

    percent = results.metric != "loss"
    scale, unit = (100.0, " (%)") if percent else (1.0, "")

    def number(value: float | None, signed: bool = False) -> str:
        if value is None:
            return UNKNOWN
        return f"{scale * value:{'+' * signed}.2f}" if percent else f"{'+' * (signed and value >= 0)}{loss_text(value)}"

    result = table()
    result.add_column("setting", overflow="fold")
    for heading in ("n", f"{results.metric}{unit}", "difference", "sent"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("verdict")
    for row in results.records():
        verdict = row["verdict"] + (f" ({row['seeds_needed']} in all)" if row["seeds_needed"] else "")
        colour = COLOURS.get(row["verdict"], "default")
        result.add_row(
            escape(row["setting"]),
            f"{row['n']}/{row['planned']}",
            _with_half(number(row["mean"]), number(row["mean"] - row["low"] if row["low"] is not None else None)),
            _with_half(number(row["difference"], signed=True), number(_half_of_difference(row))),
            bytes_text(row["bytes_sent"]),
            f"[{colour}]{verdict}[/]" + (f" [dim]{escape(row['note'])}[/]" if row["note"] else ""),
        )
    out.print(result)
    out.print(
        "[dim]± half of a 95 % interval; differences are paired by seed; verdicts are corrected for their number (Holm)[/]"
    )
    for line in results.damage:
        out.print(f"lowp: {line}", markup=False, soft_wrap=True)


def _half_of_difference(row: Mapping[str, Any]) -> float | None:
    return None if row["difference_low"] is None else row["difference"] - row["difference_low"]


def _with_half(mean: str, half: str) -> str:
    """A mean with half the width of its 95 % interval."""
    return mean if UNKNOWN in (mean, half) else f"{mean} ± {half}"
