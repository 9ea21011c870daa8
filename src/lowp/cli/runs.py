"""`lowp runs`: the runs with their key figures, one in full, or several compared."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowp.cli import completion
from lowp.cli.columns import fitting, print_columns, terminal_width
from lowp.cli.output import JSON_HELP, console, examples, print_json
from lowp.cli.runs_table import columns_of_runs, comparison, format_of, recipe_differences
from lowp.invocation import command
from lowp.training.runs import Run, differences, find_run, runs_under

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = examples(
    ("lowp runs", "all runs under ./runs"),
    ("lowp runs aps8-001", "one in full"),
    ("lowp runs fp32-001 aps8-001", "two compared, recipes included"),
    ("lowp runs --root /data/runs --json", "for a program"),
    ("lowp runs fp32-001 aps8-001 --plot p.png", "their curves, as a picture"),
)


def show_runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUNS",
            help="Directories, or names under --root. Without any: all are listed.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a picture (png, svg or pdf) instead: test accuracy and loss, against steps and bytes sent.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """List runs with their key figures, or compare them: the first is what the others are compared with."""
    if plot is not None and json:
        raise ValueError("--plot writes a picture: it does not go with --json")
    if not names and not root.is_dir():
        raise ValueError(f"there is no directory {root}; {command('train', 'aps8')} makes one, or say --root DIR")
    paths = [find_run(name, root) for name in names] if names else runs_under(root)
    runs = [Run.read(path, briefly=plot is None) for path in paths]
    if plot is not None:
        from lowp.cli.runs_plot import plot_runs

        plot_runs(runs, plot)
        typer.echo(f"wrote {plot}")
    elif json:
        print_json(_documents(runs, named=bool(names)))
    elif names:
        _compare(runs)
    else:
        _list(runs, root)
    if not json:
        _say_damage(runs)


def _list(runs: list[Run], root: Path) -> None:
    studies = [path.parent for path in sorted(root.glob("*/plan.json"))]
    if runs:
        names = [str(run.path.relative_to(root)) for run in runs]
        width = terminal_width()
        shown, left = fitting(columns_of_runs(runs, names, sys.stdout.isatty() and "NO_COLOR" not in os.environ), width)
        print_columns(shown, width)
        same = [f"{column.heading} {column.common}" for column in left if column.common is not None]
        hidden = [column.heading for column in left if column.common is None]
        notes = [
            f"all of them: {', '.join(same)}." if same else "",
            f"a wider terminal has also: {', '.join(hidden)}." if hidden else "",
            "sent, of fp32: by a rank.",
            "format: of the model | of the wire." if any("|" in format_of(run) for run in runs) else "",
            f"{command('runs')} NAME NAME compares.",
        ]
        typer.echo(fill(" ".join(filter(None, notes)), width))
    elif not studies:
        typer.echo(f"no runs under {root}")
    for study in studies:
        typer.echo(f"study {study.name}: {command('runs', '--root', study / 'runs')}")


def _compare(runs: list[Run]) -> None:
    out = console()
    _print_groups(len(runs), out.width, lambda places, narrow: comparison([runs[place] for place in places], narrow))
    for run in runs:
        if run.message:
            out.print(f"\n{run.name}: {run.message}", markup=False)
    if len(runs) == 1:
        return
    different = differences(run.recipe for run in runs)
    if different:
        out.print()
        names = [run.name for run in runs]
        _print_groups(len(runs), out.width, lambda places, narrow: recipe_differences(different, names, places, narrow))
    else:
        out.print("\ntheir recipes are the same")


def _print_groups(count: int, width: int, tables: "Callable[[list[int], bool], Table]") -> None:
    """As many runs side by side as there is room for; the others below, each group again with the first. Where not even two
    fit, the narrow form of the table is taken."""
    out = console()
    unlimited = out.options.update(width=1 << 20)
    places = list(range(1, count))

    def groups_of(others: int) -> list[list[int]]:
        return [[0, *places[start : start + others]] for start in range(0, max(1, len(places)), others)]

    for others in range(max(1, len(places)), 0, -1):
        made = [tables(group, False) for group in groups_of(others)]
        if all(out.measure(each, options=unlimited).maximum <= width for each in made):
            break
    else:  # not even two; with the names of runs folded they may fit
        made = [tables(group, False) for group in groups_of(1)]
        if any(sum((column.min_width or 0) + 2 for column in each.columns) - 2 > width for each in made):
            made = [tables(group, True) for group in groups_of(1)]
    for number, each in enumerate(made):
        if number:
            out.print()
        out.print(each)


def _say_damage(runs: list[Run]) -> None:
    for run in runs:
        for line in run.damage:
            typer.echo(f"lowp: {line}", err=True)


def _documents(runs: list[Run], named: bool) -> Any:
    documents = [_document(run) for run in runs]
    if not named:
        return documents
    if len(runs) == 1:
        return documents[0]
    return {"runs": documents, "recipe_differences": differences(run.recipe for run in runs)}


def _document(run: Run) -> dict[str, Any]:
    """All that a run says, but its records: those are JSON already, in metrics.jsonl."""
    figures = {field.name: getattr(run, field.name) for field in fields(run) if field.name != "records"}
    started = run.started.isoformat(timespec="seconds") if run.started else None
    return {"name": run.name} | figures | {"share_of_fp32": run.share_of_fp32, "path": str(run.path), "started": started}
