"""`lowp formats`: the number formats, as a table, one by one, as JSON, or as a picture."""

from pathlib import Path
from typing import Annotated

import typer

import lowp.formats
from lowp.cli import completion
from lowp.cli.figures import FAMILIES, by_family, of_family
from lowp.cli.format_page import document, print_page
from lowp.cli.format_plot import DEFAULT_PLOT, plot_formats
from lowp.cli.format_table import LEGEND, format_table
from lowp.cli.output import JSON_HELP, console, examples, print_json

EXAMPLES = examples(
    ("lowp formats", "all formats, by family"),
    ("lowp formats --family posit", "one family"),
    ("lowp formats e4m3fn mxfp4", "one or more in full"),
    ("lowp formats e6m9 'block(e2m1fn, 16, e4m3fn)'", "any other, by its fields"),
    ("lowp formats fp16 --json --values", "with all 63,487 values"),
    ("lowp formats e5m2 e4m3fn posit8 --plot p.png", "side by side, as a picture"),
)


def show_formats(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMES",
            help="Formats to show in full. Without names: the table of all.",
            show_default=False,
            autocompletion=completion.formats,
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="FAMILY", help=f"Only one family in the table: {', '.join(FAMILIES)}.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a picture (png, svg or pdf) instead: the gap between neighbours and the error of rounding, "
            f"against magnitude. Without names: {' '.join(DEFAULT_PLOT)}.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    values: Annotated[
        bool, typer.Option("--values", help="List every value of formats of up to 16 bits; else of up to 8 bits only.")
    ] = False,
) -> None:
    """Show number formats: bits, range, precision, special values, every value."""
    if family is not None and (names or plot):
        raise ValueError("--family chooses rows of the table: it goes with neither names nor --plot")
    if plot is not None:
        if json or values:
            raise ValueError("--plot writes a picture: it goes with neither --json nor --values")
        plot_formats([lowp.formats.format(name) for name in names or DEFAULT_PLOT], plot)
        typer.echo(f"wrote {plot}")
    elif names:
        _show_each([lowp.formats.format(name) for name in names], json, values)
    elif values:
        raise ValueError("--values lists the values of the formats that are named: lowp formats e5m2 --values")
    else:
        chosen = of_family(family) if family is not None else lowp.formats.FORMATS
        if json:
            print_json([document(entry, values=False) for entry in chosen])
        else:
            out = console()
            out.print(format_table(by_family(chosen), out.width))
            out.print(f"[dim]{LEGEND}[/]")


def _show_each(chosen: list[lowp.formats.AnyFormat], json: bool, values: bool) -> None:
    if json:
        numbers = [entry.element if isinstance(entry, lowp.formats.BlockFormat) else entry for entry in chosen]
        documents = [document(entry, values or number.bits <= 8) for entry, number in zip(chosen, numbers, strict=True)]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for entry in chosen:
            print_page(entry, every_value=values)
