"""`lowp train`: one command for one process, many processes and many hosts."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli import completion
from lowp.cli.ablate import Place
from lowp.cli.errors import TRACEBACK, USER_ERRORS, one_line
from lowp.cli.output import examples
from lowp.invocation import command
from lowp.starting import INTERRUPTED

if TYPE_CHECKING:
    from lowp.training.recipe import Recipe

EXAMPLES = examples(
    ("lowp train aps8", "gradients in 8 bits, on the embedded data"),
    ("lowp train aps8 --ranks 2 --set wire.format=e4m3fn", "two processes, another format"),
    ("lowp train fp32 --virtual-ranks 256 --set batch=4096", "a cluster in one process"),
    ("lowp train aps8 --ranks 2 --set wire=plan", "measure the link, and take the fastest wire"),
    ("lowp train my.toml --out runs/mine", "a recipe of your own; lowp recipes NAME --toml prints one"),
    ("lowp train runs/mine --resume", "go on where it stopped"),
    ("lowp train aps8 --ranks 8 --on ray --out /disk/run", "on the cluster that RAY_ADDRESS names"),
)


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A name of `lowp recipes`, a TOML file, module:function, or a run's directory.",
            autocompletion=completion.recipes,
        ),
    ],
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes on this machine.")] = None,
    virtual_ranks: Annotated[int | None, typer.Option(min=1, help="Ranks that one process stands in for.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's directory. Default: runs/NAME-001, -002 ...")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where data sets lie. Default: $LOWP_DATA or the cache.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to start again when a rank dies.")] = 0,
    on: Annotated[Place, typer.Option(help="This machine, or a Ray cluster: ranks are workers of Ray Train.")] = Place.LOCAL,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the end.")] = False,
) -> None:
    """Train a model in a chosen precision, and show what it cost and what it lost.

    On many hosts: `torchrun --nnodes 2 --node-rank N --nproc-per-node 4 --master-addr HOST --master-port 29500 -m lowp train
    RECIPE --out DIR` on each, with N = 0 on HOST. Everybody who can reach these ports is trusted: docs/TRAIN.md. On a Ray
    cluster: `--on ray`, with --out on a disk that all nodes see.

    Exit codes: 0, done; 1, a rank died; 2, a mistake; 3, the run diverged; 130 or 143, stopped by SIGINT or SIGTERM, and saved.
    """
    from lowp.train_function import check_ranks_of_torchrun, chosen_recipe, planned
    from lowp.training.check import check
    from lowp.training.launch import FAILED, RanksFailed, follow_launcher, is_rank, is_restart, launch_run
    from lowp.training.rundir import RECIPE, next_directory

    chosen, out = chosen_recipe(recipe, changes or [], ranks, virtual_ranks, out)
    if on is Place.RAY:
        _check_ray(chosen)
    if is_rank():
        check_ranks_of_torchrun(ranks)
        if out is None:
            raise ValueError("under torchrun, say with --out where the run's directory is: a restart must find it")
        follow_launcher()
        resume = resume or is_restart()
        chosen = planned(chosen, out if resume else None, data, typer.echo)
        _run_here(chosen, out, resume=resume, data=data, quiet=quiet)
        return
    chosen = planned(chosen, out if resume else None, data, typer.echo)
    check(chosen)
    if out is None:
        if resume:
            raise ValueError("--resume needs the run's directory: lowp train runs/NAME-001 --resume")
        out = next_directory(Path("runs"), chosen.name)
    go_on = f"go on with: {command('train', out, *(['--on', 'ray'] if on is Place.RAY else []), '--resume')}"
    try:
        if on is Place.RAY:
            _run_on_ray(chosen, out, resume=resume, data=data, quiet=quiet, max_restarts=max_restarts)
            return
        if chosen.ranks == 1:
            _run_here(chosen, out, resume=resume, data=data, quiet=quiet)
            return
        code = launch_run(chosen, out, resume=resume, data=data, quiet=quiet, max_restarts=max_restarts)
    except RanksFailed as error:
        typer.echo(f"lowp: {error}; {go_on}", err=True)
        code = FAILED
    except KeyboardInterrupt:
        if not (out / RECIPE).exists():
            raise
        typer.echo(f"lowp: interrupted; {go_on}", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


def _check_ray(chosen: "Recipe") -> None:
    from lowp.lab.on_ray import import_ray
    from lowp.lab.train_on_ray import check_on_ray
    from lowp.training.launch import is_rank

    if is_rank():
        raise ValueError("--on ray: a launcher has started this process as one of several ranks; Ray starts its own")
    import_ray()
    check_on_ray(chosen)


def _run_on_ray(chosen: "Recipe", out: Path, *, resume: bool, data: Path | None, quiet: bool, max_restarts: int) -> None:
    from lowp.lab.train_on_ray import summary, train_on_ray
    from lowp.training.divergence import Diverged
    from lowp.training.launch import DIVERGED

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    try:
        end = train_on_ray(chosen, out, resume=resume, data=data, max_restarts=max_restarts, say=say)
    except Diverged as error:
        typer.echo(f"lowp: {one_line(error)}", err=True)
        sys.exit(DIVERGED)
    typer.echo(summary(end, out))


def _run_here(chosen: "Recipe", out: Path, *, resume: bool, data: Path | None, quiet: bool) -> None:
    """In this process, alone or as one of several ranks. Of several, rank 0 speaks for all."""
    from lowp import CollectiveError
    from lowp.training.divergence import Diverged
    from lowp.training.launch import DIVERGED, FAILED, MISTAKE
    from lowp.training.plugins import PluginError
    from lowp.training.run import run

    rank = int(os.environ.get("RANK", 0))
    try:
        end = run(chosen, out, resume=resume, data=data, quiet=quiet)
    except Diverged as error:
        if rank == 0:
            typer.echo(f"lowp: {one_line(error)}", err=True)
        sys.exit(DIVERGED)
    except CollectiveError as error:
        typer.echo(f"lowp: rank {rank}: {one_line(error)}", err=True)
        sys.exit(FAILED)
    except USER_ERRORS as error:
        if rank == 0 or TRACEBACK in os.environ:
            raise
        if isinstance(error, PluginError):  # it may be of this rank's samples alone
            typer.echo(f"lowp: rank {rank}: {one_line(error)}", err=True)
        sys.exit(MISTAKE)
    if end["kind"] == "stopped":
        sys.exit(128 + signal.Signals[end["signal"]])
