"""`lowp tour`: a tour of about a minute on any machine. Every number in it is computed while you watch."""

from pathlib import Path
from typing import Annotated

import typer

from lowp.cli.format_plot import check_suffix
from lowp.cli.output import console

NEXT = (
    ("lowp formats", "every format"),
    ("lowp formats e4m3fn posit8", "two of them in full"),
    ("lowp formats --plot formats.png", "where each is precise"),
    ("lowp quantize e4m3fn 0.3 -500 1e-4", "what your numbers become"),
    ("lowp quantize mxfp4,e5m2 --file model.safetensors", "what is left of your model"),
)


def run_tour(
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes (png, svg or pdf).")] = Path(
        "lowp-tour.png"
    ),
    seed: Annotated[int, typer.Option(help="Of the tensor and of the noise.")] = 0,
) -> None:
    """A tour of a minute: why gradients do not fit into 8 bits, what helps, and why rounding should be random."""
    from lowp.cli.tour_experiments import accumulate, gradients, survey
    from lowp.cli.tour_plot import plot_tour
    from lowp.cli.tour_text import print_accumulation, print_survey

    check_suffix(plot)
    out = console()
    surveyed = survey(gradients(seed))
    print_survey(surveyed, out)
    accumulated = accumulate(seed)
    print_accumulation(accumulated, out)
    plot_tour(surveyed, accumulated, plot)
    out.print("[bold]3. Look and try[/]\n")
    typer.echo(f"Both as a picture: {plot}. Next:\n")
    for command, why in NEXT:
        out.print(f"  [cyan]{command}[/]{' ' * (51 - len(command))}{why}", soft_wrap=True)
