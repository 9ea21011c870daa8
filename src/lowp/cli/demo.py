"""`lowp demo`: one small network, trained five times by real processes, each time with other numbers on the wire.

The command plays two parts. Started by a person, it makes a directory, starts the ranks and watches them; started by the
launcher, as one of those ranks, it trains. Ranks take their time to start, so the same ones do all five trainings.
"""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.errors import USER_ERRORS
from lowp.cli.format_plot import check_suffix
from lowp.cli.output import console, examples
from lowp.invocation import command

if TYPE_CHECKING:
    from lowp.training.runs import Run

EXAMPLES = examples(
    ("lowp demo", "under a minute and a half on two cores"),
    ("lowp demo --seed 1", "other weights, another order: is it luck?"),
    ("lowp demo --ranks 4", "the same batch, divided by four"),
)


def run_demo(
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes (png, svg or pdf).")] = Path(
        "lowp-demo.png"
    ),
    ranks: Annotated[int, typer.Option(min=2, help="Processes that train together.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the order of the images and the rounding.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of each, to see that it works.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The runs' directory. Default: runs/demo-001, -002 ...")
    ] = None,
) -> None:
    """Train a small network in FP32, in 8 bits with and without scaling, in 4 bits and in pure FP16, and compare.

    Nothing is downloaded: the images lie inside the package. What is sent is really sent, between processes on this machine.
    """
    from lowp.training.launch import is_rank

    if is_rank():
        assert out is not None
        train_all(out, ranks, seed, quick)
    else:
        _watch_all(plot, out, ranks, seed, quick)


def _watch_all(plot: Path, out: Path | None, ranks: int, seed: int, quick: bool) -> None:
    """The person's part: start the ranks, show what they do, and what came of it."""
    from rich.markup import escape

    from lowp.cli.demo_plot import plot_demo
    from lowp.cli.demo_recipes import variants
    from lowp.cli.demo_screen import Screen
    from lowp.cli.demo_text import print_introduction, print_next, print_results
    from lowp.training.check import check
    from lowp.training.launch import launch
    from lowp.training.rundir import next_directory
    from lowp.training.runs import Run

    check_suffix(plot)
    chosen = variants(ranks, seed, quick)
    for variant in chosen:
        check(variant.recipe)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already, and is no empty directory; choose another --out")
    folder = out or next_directory(Path("runs"), "demo")
    screen = console()
    print_introduction(chosen, screen)
    arguments = ["demo", "--out", str(folder), "--ranks", str(ranks), "--seed", str(seed), *["--quick"] * quick]
    with Screen(folder, chosen, screen):
        code = launch(arguments, ranks, threads=1, max_restarts=0)
    if code:
        typer.echo(f"lowp: the demo was ended; what it did until then: {command('runs', '--root', folder)}", err=True)
        raise typer.Exit(code)
    runs = [Run.read(folder / variant.recipe.name) for variant in chosen]
    print_results(chosen, runs, screen)
    plot_demo(chosen, runs, plot)
    print_next(folder, plot, screen)
    screen.print(f"\nAs a page: [bold]{escape(str(_write_report(runs, folder)))}[/]", soft_wrap=True)


def _write_report(runs: list["Run"], folder: Path) -> Path | str:
    """The page of all five; or what is missing for it."""
    from lowp.lab.report.document import report_document
    from lowp.lab.report.page import check_report_packages, page_of
    from lowp.lab.results import runs_results

    try:
        check_report_packages()
    except ValueError as error:
        return str(error)
    path = folder / "report.html"
    results = runs_results([run.path for run in runs])
    path.write_text(page_of(report_document([results], f"lowp report {folder}/*")), encoding="utf-8")
    return path


def train_all(folder: Path, ranks: int, seed: int, quick: bool) -> None:
    """A rank's part. It says nothing: the person's process reads what is happening from the runs' directories."""
    from lowp.cli.demo_recipes import variants
    from lowp.training.divergence import Diverged
    from lowp.training.run import run
    from lowp.training.stop import Stop
    from lowp.training.world import World

    chosen = variants(ranks, seed, quick)
    world = World.join("cpu", threads=1)
    try:
        with Stop(world.ranks) as stop, redirect_stdout(io.StringIO()):
            for variant in chosen:
                stop.ask()  # between two runs; in a run, it is the run's own Stop that hears
                if stop.agreed() is not None:
                    break
                try:
                    end = run(variant.recipe, folder / variant.recipe.name, quiet=True, world=world)
                except Diverged:
                    continue  # the table will say so
                if end["kind"] == "stopped":
                    break
    except USER_ERRORS:
        if world.first:
            raise
        sys.exit(2)
    finally:
        world.leave()
