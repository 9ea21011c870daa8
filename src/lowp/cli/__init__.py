"""The command line. One short file per command; what they share is in `figures`, `output` and `errors`."""

import os
from typing import Annotated

import typer

from lowp.cli import (
    ablate,
    calibrate,
    demo,
    doctor,
    formats,
    memory,
    plan,
    predict,
    quantize,
    recipes,
    recommend,
    report,
    runs,
    tour,
    train,
    view,
)
from lowp.cli.errors import TRACEBACK, OneLineErrors
from lowp.cli.output import examples, survive_narrow_encodings

EXAMPLES = examples(
    ("lowp demo", "five precisions, trained while you watch"),
    ("lowp recipes", "what can be trained"),
    ("lowp train aps8 --ranks 2", "gradients in 8 bits between two processes"),
    ("lowp runs", "what came of it"),
    ("lowp recommend cnn", "which formats a model holds in"),
    ("lowp predict --cluster ethernet-25g", "what a cluster would do"),
    ("lowp calibrate --ranks 2 --model cnn", "measure this machine"),
    ("lowp plan --model cnn --cluster cluster.toml --ranks 2", "which wire to take on it"),
    ("lowp formats e4m3fn", "one number format in full"),
    ("lowp tour", "what formats do to numbers"),
    ("lowp doctor", "what works on this machine"),
)

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback; a user's mistake shows one line
    rich_markup_mode="rich",
    epilog=EXAMPLES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import torch

        import lowp

        typer.echo(f"lowp {lowp.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions of lowp and torch.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar=TRACEBACK, help="Show where an error came from, for a bug report.")
    ] = False,
) -> None:
    """Train neural networks in low precision across many machines.

    Exit codes: 0, done; 1, a rank died or the reader of the output went away; 2, a mistake in the command or in a file.
    """
    survive_narrow_encodings()
    if traceback:
        os.environ[TRACEBACK] = "1"  # for the ranks that `lowp train --ranks` starts


app.command("formats", epilog=formats.EXAMPLES)(formats.show_formats)
# Negative numbers look like options: those that no option claims are passed on as numbers.
app.command("quantize", epilog=quantize.EXAMPLES, context_settings={"ignore_unknown_options": True})(quantize.try_formats)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("recipes", epilog=recipes.EXAMPLES)(recipes.show_recipes)
app.command("runs", epilog=runs.EXAMPLES)(runs.show_runs)
app.command("ablate", epilog=ablate.EXAMPLES)(ablate.ablate)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("view", epilog=view.EXAMPLES)(view.view)
app.command("recommend", epilog=recommend.EXAMPLES)(recommend.recommend_formats)
app.command("memory", epilog=memory.EXAMPLES)(memory.show_memory)
app.command("predict", epilog=predict.EXAMPLES)(predict.predict_steps)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_wire)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.diagnose)
app.command("demo", epilog=demo.EXAMPLES)(demo.run_demo)
app.command("tour")(tour.run_tour)
