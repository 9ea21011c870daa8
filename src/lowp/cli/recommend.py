"""`lowp recommend`: which formats hold for a model."""

import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.columns import Column, fitting, print_columns, terminal_width
from lowp.cli.output import JSON_HELP, examples, percent, print_json
from lowp.training.units import signed_text

if TYPE_CHECKING:
    from lowp.lab.recommend import Recommendation

EXAMPLES = examples(
    ("lowp recommend cnn", "a model of lowp's, on the embedded data"),
    ("lowp recommend my.toml --seeds 5 --steps 100", "a recipe of your own, looked at for longer"),
    ("lowp recommend mine:model --role weights --role wire", "a function that returns model, inputs, targets, loss"),
    ("lowp recommend cnn --format fp8 --format mxfp4", "will it survive FP8 or MXFP4?"),
)
COLOURS = {"holds": "green", "fails": "red", "more seeds needed": "yellow"}


def recommend_formats(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A recipe (name or file), a model of `lowp recipes --models`, module:function."),
    ],
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", metavar="ROLE", help="weights, activations, errors, gradients, state, wire. Default: all."),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="Formats to try. Default: what hardware has.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 20,
    seeds: Annotated[int, typer.Option(min=2, help="Trainings of each format.")] = 3,
    tolerance: Annotated[float, typer.Option(help="By what part of float32's loss a loss may be larger.")] = 0.02,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where data sets lie. Default: $LOWP_DATA or the cache.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Try formats on a model and its data for some steps beside FP32, and give a verdict for each role.

    One role at a time is in the format, all others in FP32. The difference of the losses is paired by seed.
    """
    from lowp.lab.recommend import ROLES, recommend

    found = recommend(
        model,
        roles=tuple(roles or ROLES),
        formats=formats,
        steps=steps,
        seeds=seeds,
        tolerance=tolerance,
        data=data,
        progress=_show if sys.stderr.isatty() else None,
    )
    if json:
        document = {key: value for key, value in vars(found).items() if key != "trials"}
        print_json(document | {"advice": found.advice, "trials": found.records()})
    else:
        _print(found)


def _show(done: int, total: int, what: str) -> None:
    sys.stderr.write(f"\r{done}/{total} trainings  {what:<30}" if done < total else f"\r{'':<60}\r")
    sys.stderr.flush()


def _print(found: "Recommendation") -> None:
    width = terminal_width()
    trials = found.trials
    half = [f"{signed_text(trial.difference, 4)} ± {trial.high - trial.difference:.4f}" for trial in trials]
    columns = [
        Column("role", [trial.role for trial in trials]),
        Column("format", [trial.format for trial in trials], keep=1),
        Column("verdict", [trial.verdict for trial in trials], keep=2, colours=_colours(trials)),
        Column("loss - fp32's", [text if "inf" not in text else "diverged" for text in half], True, keep=3),
        Column("SQNR dB", ["-" if t.sqnr_db is None else f"{t.sqnr_db:.1f}" for t in trials], True, keep=5),
        Column("to 0", [percent(trial.underflow) for trial in trials], True, keep=6),
        Column("too large", [percent(trial.overflow) for trial in trials], True, keep=7),
        Column("bytes", [percent(trial.share) for trial in trials], True, keep=4),
    ]
    typer.echo(
        f"{found.model}, {found.steps} steps, {found.seeds} seeds: "
        f"fp32's loss goes from {found.first_loss:.4f} to {found.loss:.4f}"
    )
    print_columns(fitting(columns, width)[0], width)
    advice = ", ".join(f"{role} {name}" for role, name in found.advice.items())
    notes = (
        f"the narrowest that holds: {advice}. holds: the upper end of the 95 % interval is within {found.tolerance:.4f}. "
        "bytes: of fp32's. Each role was tried alone; more steps and seeds say more."
    )
    if found.not_tried:
        notes += f" Not tried, since optimizer states need 8 to 16 bits without blocks: {', '.join(found.not_tried)}."
    typer.echo(fill(notes, width))


def _colours(trials: tuple) -> list[str | None] | None:
    return [COLOURS[trial.verdict] for trial in trials] if sys.stdout.isatty() else None
