"""The tables of `lowp runs`."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lowp.cli.columns import Column
from lowp.cli.output import literal, table
from lowp.training.runs import Run
from lowp.training.units import UNKNOWN, bytes_text, count_text, duration_text, loss_text, number_text, share_text, signed_text

if TYPE_CHECKING:
    from rich.table import Table

COLOURS_OF_STATES = {
    "finished": "green",
    "running": "cyan",
    "stopped": "yellow",
    "killed": "red",
    "diverged": "red",
    "failed": "red",
}


def columns_of_runs(runs: list[Run], names: list[str], coloured: bool) -> list[Column]:
    """One row a run. Of two columns the one with the smaller number stays longer where there is little room."""

    def column(heading: str, keep: int, text: Callable[[Run], str], right: bool = True) -> Column:
        return Column(heading, [text(run) for run in runs], right, keep)

    states = [COLOURS_OF_STATES.get(run.state) for run in runs] if coloured else None
    return [
        Column("run", names),
        Column("state", [run.state for run in runs], keep=2, colours=states),
        column("format", 3, format_of, right=False),
        column("ranks", 6, ranks_of),
        column("model", 7, lambda run: str(run.recipe.get("model", {}).get("name", UNKNOWN)), right=False),
        column("seed", 8, lambda run: str(run.recipe.get("seed", UNKNOWN))),
        column("epoch", 11, lambda run: number_text(run.epoch)),
        column("accuracy", 1, lambda run: share_text(run.accuracy)),
        column("best", 13, lambda run: share_text(run.best_accuracy)),
        column("sent", 10, lambda run: bytes_text(run.bytes_sent)),
        column("of fp32", 4, lambda run: share_text(run.share_of_fp32)),
        column("samples/s", 12, lambda run: count_text(run.samples_per_second)),
        column("time", 9, lambda run: duration_text(run.seconds)),
        column("started", 5, lambda run: f"{run.started:%Y-%m-%d %H:%M}" if run.started else UNKNOWN, right=False),
    ]


def format_of(run: Run) -> str:
    """The formats of weights, activations and errors; behind a bar, where ranks exchange gradients, the wire's."""
    precision, wire = run.recipe.get("precision", {}), run.recipe.get("wire", {})
    roles = dict.fromkeys(precision.get(role) for role in ("weights", "activations", "errors"))
    inside = "/".join(str(name) for name in roles if name) or "fp32"
    outside = f"{wire.get('format', 'fp32')} {wire.get('scale') or ''}".removesuffix(" none").strip()
    if (run.ranks or 1) == (run.virtual_ranks or 1) == 1 or inside == outside:
        return inside
    return outside if inside == "fp32" else f"{inside} | {outside}"


def ranks_of(run: Run) -> str:
    virtual = run.virtual_ranks or 1
    return f"{virtual} virtual" if virtual > 1 else _whole(run.ranks)


def _whole(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value}"


class ComparedFigure(NamedTuple):
    """A figure in the comparison: how it is taken, written, and set against the first run's."""

    name: str
    of: Callable[[Run], Any]
    text: Callable[[Any], str]
    against: Callable[[float, float], str] | None


def _points(value: float, first: float) -> str:
    """Accuracies differ by points: of 90 % and 91 % the ratio says nothing."""
    return f"{signed_text(100 * (value - first), 2)} points"


def _difference(value: float, first: float) -> str:
    return f"{value - first:+.3g}"


def _ratio(value: float, first: float) -> str:
    return f"x {value / first:.3g}" if first else ""


ROWS = (
    ComparedFigure("state", lambda run: run.state, str, None),
    ComparedFigure("device", lambda run: run.device, lambda device: device or UNKNOWN, None),
    ComparedFigure("ranks", lambda run: run.ranks, _whole, None),
    ComparedFigure("virtual ranks", lambda run: run.virtual_ranks, _whole, None),
    ComparedFigure("step", lambda run: run.step, _whole, None),
    ComparedFigure("epoch", lambda run: run.epoch, number_text, None),
    ComparedFigure("test accuracy", lambda run: run.accuracy, share_text, _points),
    ComparedFigure("best accuracy", lambda run: run.best_accuracy, share_text, _points),
    ComparedFigure("test loss", lambda run: run.loss, loss_text, _difference),
    ComparedFigure("train loss", lambda run: run.train_loss, loss_text, _difference),
    ComparedFigure("sent by a rank", lambda run: run.bytes_sent, bytes_text, _ratio),
    ComparedFigure("of fp32", lambda run: run.share_of_fp32, share_text, None),
    ComparedFigure("samples/s", lambda run: run.samples_per_second, count_text, _ratio),
    ComparedFigure("step (ms)", lambda run: run.step_ms, number_text, _ratio),
    ComparedFigure("time", lambda run: run.seconds, duration_text, _ratio),
    ComparedFigure("memory", lambda run: run.memory_bytes, bytes_text, _ratio),
    ComparedFigure("bytes a parameter", lambda run: run.bytes_per_parameter, number_text, _ratio),
    ComparedFigure("parameters", lambda run: run.parameters, count_text, _ratio),
)


def comparison(runs: list[Run], narrow: bool = False) -> "Table":
    """One row a figure; for each run its value, and from the second on how it compares with the first's.

    `narrow`: that stands below the value, instead of beside it. Long names of runs are folded, values never.
    """
    found = {row.name: [row.of(run) for run in runs] for row in ROWS}
    lines = [[row.name, *_compared(row, found[row.name])] for row in ROWS if any(v is not None for v in found[row.name])]
    if narrow:
        lines = [_below(line) for line in lines]
    widths = [max(len(part) for line in lines for part in line[place].split("\n")) for place in range(len(lines[0]))]
    result = table()
    result.add_column("", no_wrap=True, min_width=widths[0])
    for place, width in enumerate(widths[1:]):
        if narrow or place == 0 or place % 2:  # behind every value but the first stands how it compares
            name = runs[place if narrow else (place + 1) // 2].name
            result.add_column(literal(name), justify="right", overflow="fold", min_width=width)
        else:
            result.add_column("", no_wrap=True, style="dim", min_width=width)
    for line in lines:
        result.add_row(*line)
    return result


def _below(line: list[str]) -> list[str]:
    name, first, *others = line
    pairs = zip(others[::2], others[1::2], strict=True)
    return [name, first, *("\n".join(filter(None, (value, against.removesuffix(" points")))) for value, against in pairs)]


def _compared(row: ComparedFigure, values: list[Any]) -> list[str]:
    cells = [literal(row.text(values[0]))]
    for value in values[1:]:
        known = row.against is not None and value is not None and values[0] is not None
        cells += [literal(row.text(value)), row.against(value, values[0]) if row.against and known else ""]
    return cells


def recipe_differences(different: dict[str, list[Any]], names: list[str], places: list[int], narrow: bool = False) -> "Table":
    """One row for each key of the recipe that is not the same in all; a column for some of the runs."""
    result = table()
    result.add_column("recipe", no_wrap=not narrow, overflow="fold")
    for place in places:
        result.add_column(literal(names[place]), overflow="fold")
    for key, values in different.items():
        chosen = (values[place] for place in places)
        result.add_row(literal(key), *(UNKNOWN if value is None else literal(_as_toml(value)) for value in chosen))
    return result


def _as_toml(value: Any) -> str:
    """As the recipe has it; what TOML knows and JSON does not (a date), as it prints."""
    return json.dumps(value, ensure_ascii=False, default=str)
