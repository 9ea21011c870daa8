"""`lowp ablate`: many runs that differ a little, and what they say together."""

import math
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.output import console, examples
from lowp.invocation import command

if TYPE_CHECKING:
    from lowp.lab.pool import Executor
    from lowp.lab.settings import StudyPlan, StudyRun
    from lowp.lab.study_directory import StudyDirectory

EXAMPLES = examples(
    ("lowp ablate wires.toml --plan", "what would be run, and how long that takes"),
    ("lowp ablate wires.toml --jobs 2", "run it, two runs at a time, into runs/wires"),
    ("lowp ablate wires.toml --minutes 25", "as much of it as half an hour on a rented GPU has room for"),
    ("lowp ablate wires.toml --resume", "go on with what was stopped; failed runs are tried again"),
    ("lowp ablate wires.toml --on ray --jobs 64", "on the cluster that RAY_ADDRESS names"),
    ("lowp report runs/wires", "the results as a page"),
)
FAILED = 1  # the exit code where a run failed
TIME_OVER = 124  # as that of timeout(1)


class Place(StrEnum):
    LOCAL = "local"
    RAY = "ray"


def ablate(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study: docs/LAB.md says what it may hold.")],
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at once. Default: 1; on Ray: as many as there is room for.", show_default=False),
    ] = None,
    on: Annotated[Place, typer.Option(help="This machine, or a Ray cluster.")] = Place.LOCAL,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The study's directory. Default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: finished runs are kept, all others are completed.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print the plan and the estimated time, and end.")] = False,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results here: .csv or .parquet.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where data sets lie. Default: $LOWP_DATA or the cache.")
    ] = None,
    mps: Annotated[
        bool, typer.Option("--mps", help="On one GPU: kernels of several runs at the same time, by NVIDIA's MPS.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="End within so many minutes: begin no run that would not, stop what is under way then."),
    ] = None,
    estimate: Annotated[bool, typer.Option(help="Time a few steps first, to say how long the study will take.")] = True,
) -> None:
    """Run every setting of a study with every seed, and compare them with the baseline.

    Ctrl-C lets the runs under way save and ends; --resume completes the study. A run that fails or diverges is recorded.

    Exit codes: 0, all runs were made (diverged ones are results too); 1, a run failed; 2, a mistake; 124, no minutes
    were left; 130 or 143, stopped.
    """
    began = time.perf_counter()
    from lowp.lab.ablation import recorded_threads, threads_for
    from lowp.lab.results import check_table
    from lowp.lab.settings import plan_of_study
    from lowp.lab.study import read_study
    from lowp.lab.study_directory import StudyDirectory

    if table is not None:
        check_table(table)
    if mps and on is Place.RAY:
        raise ValueError("--mps is for runs on this machine: it does not go with --on ray")
    plan = plan_of_study(read_study(study))
    folder = out or Path("runs") / plan.study.name
    if plan_only:
        _print_plan(plan, plan.runs, {}, jobs or 1, threads_for(plan, jobs or 1, None), data, estimate)
        return
    with StudyDirectory.open(folder, plan, resume=resume) as directory:
        # A task of Ray's asks for as many processors as it has threads: with one, it fits everywhere.
        recorded = recorded_threads(directory) or (1 if on is Place.RAY else None)
        threads = threads_for(plan, jobs or 1, recorded)
        end = math.inf if minutes is None else began + 60 * minutes
        _make_runs(directory, jobs, on, threads, table, data, mps, estimate, end)


def _make_runs(
    directory: "StudyDirectory",
    jobs: int | None,
    on: Place,
    threads: int,
    table: Path | None,
    data: Path | None,
    mps: bool,
    estimate: bool,
    end: float,
) -> None:
    """Plan, runs, results. `end`: when it must be over, by `time.perf_counter`."""
    from lowp.cli.ablate_screen import StudyScreen
    from lowp.cli.ablate_table import print_results
    from lowp.lab.ablation import TIME, Ablation, known_seconds
    from lowp.lab.mps import mps as service
    from lowp.lab.results import study_results, write_table
    from lowp.lab.study_directory import DONE, RESULTS, RUNS_TABLE

    screen, plan = console(), directory.plan
    open_runs = [run for run in plan.runs if directory.state(run) not in DONE]
    estimates = _print_plan(plan, open_runs, known_seconds(directory), jobs or 1, threads, data, estimate)
    with ExitStack() as stack:
        stack.enter_context(service() if mps else nullcontext())
        executor = _executor(directory, on, jobs, threads)
        ablation = Ablation(directory, executor, estimates, threads, data, end)
        shown = stack.enter_context(StudyScreen(directory, jobs or 1, screen))
        state = ablation.run(shown.show, shown.ended)
    results = study_results(directory.path)
    write_table(results.records(), directory.path / RESULTS)
    write_table(results.run_records(), directory.path / RUNS_TABLE)
    if table is not None:
        write_table(results.records(), table)
    print_results(results, screen)
    screen.print(
        f"\nwrote {directory.path / RESULTS}, {RUNS_TABLE}; as a page: {command('report', directory.path)}", markup=False
    )
    if state.stopped_by:
        open_now = state.total - state.count(*DONE)
        again = command("ablate", plan.study.source, "--out", directory.path, "--resume")
        typer.echo(f"lowp: stopped by {state.stopped_by}, {open_now} runs are not finished; go on with: {again}", err=True)
        raise typer.Exit(TIME_OVER if state.stopped_by == TIME else 128 + signal.Signals[state.stopped_by])
    if failed := state.count("failed"):
        typer.echo(f"lowp: {failed} run{'s' * (failed != 1)} failed; the reasons are in {RUNS_TABLE}", err=True)
        raise typer.Exit(FAILED)


def _executor(directory: "StudyDirectory", on: Place, jobs: int | None, threads: int) -> "Executor":
    import torch

    on_gpu = torch.cuda.is_available() and any(setting.recipe.device != "cpu" for setting in directory.plan.settings)
    if on is Place.RAY:
        from lowp.lab.on_ray import RayExecutor

        share = 1.0 / (jobs or 1) if on_gpu else 0.0
        return RayExecutor(directory.path, threads, jobs, share)
    from lowp.lab.pool import LocalPool

    return LocalPool(jobs or 1, threads, directory.logs, torch.cuda.device_count() if on_gpu else 0)


def _print_plan(
    plan: "StudyPlan",
    runs: "Sequence[StudyRun]",
    known: Mapping[str, float],
    jobs: int,
    threads: int,
    data: Path | None,
    estimate: bool,
) -> dict[str, float]:
    """What will be done; the seconds of a run of each setting."""
    from lowp.cli.ablate_table import plan_table
    from lowp.lab.estimate import estimated_seconds, total_seconds
    from lowp.training.units import duration_text

    out = console()
    study, count = plan.study, len(plan.settings)
    out.print(f"[bold]{study.name}[/]: {count} settings x {len(study.seeds)} seeds = {len(plan.runs)} runs", soft_wrap=True)
    out.print(f"metric {study.metric}, baseline {plan.baseline}, base recipe {study.base}\n", markup=False, soft_wrap=True)
    out.print(plan_table(plan))
    if not runs:
        out.print("\nall runs were made already")
    if not runs or not estimate:
        return {setting.name: known.get(setting.name, 0.0) for setting in plan.settings}
    out.print(f"\ntiming a few steps, on {platform.node()} ...", style="dim", markup=False)
    estimates = estimated_seconds(plan, known, threads, data)
    total = duration_text(total_seconds(runs, estimates, jobs))
    what = f"{len(runs)} of {len(plan.runs)} runs" if len(runs) < len(plan.runs) else f"{len(runs)} runs"
    found = sorted({setting.recipe.threads or threads for setting in plan.settings})
    each = "1 thread" if found == [1] else f"{' or '.join(map(str, found))} threads"
    out.print(f"{what}, {jobs} at a time, {each} a rank: about {total}\n")
    return estimates
