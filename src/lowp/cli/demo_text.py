"""What `lowp demo` says before and after: the sentences hold the numbers that were just measured, whatever they are."""

from pathlib import Path

from rich.console import Console

import lowp
from lowp.cli.demo_recipes import EIGHT_BITS, FOUR_BITS, Variant
from lowp.cli.output import table
from lowp.formats import BlockFormat
from lowp.formats.binades import positive_codes
from lowp.invocation import command
from lowp.training.runs import Run
from lowp.training.units import UNKNOWN, bytes_text, share_text, signed_text

HEADINGS = ("test\naccuracy", "against\nfp32", "sent by\na rank", "of\nfp32", "ms a\nstep", "bytes a\nparameter")
NOISE = 1.5  # points of accuracy by which two trainings differ that differ in their seed alone


def print_introduction(variants: list[Variant], out: Console) -> None:
    recipe = variants[0].recipe
    hidden = recipe.model.options["hidden"]
    out.print(
        f"[bold]One network, trained {len(variants)} times by {recipe.ranks} processes that exchange their gradients[/]\n\n"
        f"An MLP with {len(hidden)} hidden layers of {hidden[0]} units learns to tell ten kinds of clothes\n"
        "apart (10,000 images of 14 x 14 pixels, which came with the package). All is as\n"
        "in the first training but the numbers: those on the wire, in the last one all.\n"
    )


def print_results(variants: list[Variant], runs: list[Run], out: Console) -> None:
    result = table()
    result.add_column("\ntraining", no_wrap=True)
    result.add_column("\nwire", no_wrap=True)
    for heading in HEADINGS:
        result.add_column(heading, justify="right", no_wrap=True)
    for variant, run in zip(variants, runs, strict=True):
        result.add_row(
            variant.label,
            variant.recipe.wire.format,
            share_text(run.accuracy) if run.state == "finished" else run.state,
            "" if run is runs[0] else _coloured_points(run, runs[0]),
            bytes_text(run.bytes_sent),
            UNKNOWN if run.share_of_fp32 is None else f"{100 * run.share_of_fp32:.3g} %",
            UNKNOWN if run.step_ms is None else f"{run.step_ms:.1f}",
            UNKNOWN if run.bytes_per_parameter is None else f"{run.bytes_per_parameter:.1f}",
        )
    out.print(result)
    _print_lessons(*runs, out=out)


def _points(run: Run, first: Run) -> float:
    """Accuracies differ by points: of 80 % and 81 % the ratio says nothing. A run that was never tested learned nothing."""
    return 100 * ((run.accuracy or 0.0) - (first.accuracy or 0.0))


def _coloured_points(run: Run, first: Run) -> str:
    points = _points(run, first)
    colour = "green" if points > -NOISE else "yellow" if points > -2 * NOISE else "red"
    return f"[{colour}]{signed_text(points, 1)}[/]"


def _print_lessons(fp32: Run, unscaled: Run, aps: Run, four: Run, pure: Run, *, out: Console) -> None:
    from rich.table import Table

    half = lowp.format(EIGHT_BITS).smallest / 2
    numbers = ", ".join(f"{value:g}" for value in _magnitudes(FOUR_BITS))
    lessons = (
        (unscaled, f"8 bits as they are: gradients below {half:g} become 0: nearly all of them at first, most of them later."),
        (
            aps,
            "The same 8 bits with Auto Precision Scaling: ranks agree on a power of two for each layer, which costs "
            "a byte, and send the layer multiplied by it.",
        ),
        (four, f"4 bits, every 32 numbers with a scale of their own. All that one can be then: ±{numbers}."),
        (
            pure,
            "FP16 in every role: weights, activations, gradients, momentum, wire. Updates are rounded stochastically: "
            "small ones would be lost.",
        ),
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for run, lesson in lessons:
        grid.add_row(_coloured_points(run, fp32), lesson)
    out.print("\n[bold]Points of accuracy against FP32, and why[/]\n")
    out.print(grid)
    out.print(
        f"\n[dim]One run each: differences of up to {NOISE:g} point{'s' * (NOISE != 1)} are luck. Processes on one machine "
        "exchange through memory, so fewer bytes save little time here; on a network they do. Most CPUs have no FP16 "
        "arithmetic and take long over it; GPUs are faster in it than in FP32.[/]"
    )


def _magnitudes(name: str) -> list[float]:
    fmt = lowp.format(name)
    assert not isinstance(fmt, BlockFormat)
    return [fmt.value(code) for code in (0, *positive_codes(fmt))]


def print_next(folder: Path, plot: Path, out: Console) -> None:
    from rich.markup import escape

    commands = (
        (command("runs", "--root", folder), "these runs again"),
        (command("runs", "--root", folder, "fp32", "aps8"), "two of them side by side"),
        (command("train", folder / "aps8" / "recipe.toml", "--ranks", 4), "by 4 processes"),
        (command("train", "aps8", "--virtual-ranks", 16), "16 ranks in one process"),
        (command("train", "pure16"), "FP16, and audited"),
        (command("recipes"), "what else can be trained"),
        (command("formats", "e4m3fn", "e5m2"), "the formats"),
        (command("tour"), "what they do to numbers"),
    )
    out.print(f"\nAs a picture: [bold]{escape(str(plot))}[/]\n\n[bold]What to try next[/]\n", soft_wrap=True)
    width = max(len(text) for text, _ in commands)
    for text, why in commands:
        out.print(f"  [cyan]{escape(text)}[/]{' ' * (width - len(text))}  {why}", soft_wrap=True)
