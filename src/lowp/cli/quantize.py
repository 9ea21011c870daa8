"""`lowp quantize`: what a format does to numbers, or to the tensors of a file."""

import re
from pathlib import Path
from typing import Annotated

import typer

import lowp.formats
from lowp.cli.output import JSON_HELP, examples
from lowp.formats import Rounding

EXAMPLES = examples(
    ("lowp quantize e4m3fn 0.3 -500 1e-4", "numbers, negative ones too"),
    ("lowp quantize e4m3fn 500 --saturate", "clamp instead of overflowing"),
    ("lowp quantize bf16 0.3 0.3 --rounding stochastic", "each draws its own noise"),
    ("lowp quantize e5m2,posit8,mxfp4 0.3 40", "several formats side by side"),
    ("lowp quantize mxfp4 --file model.safetensors", "every tensor of a file"),
)


def try_formats(
    formats: Annotated[
        str,
        typer.Argument(metavar="FORMATS", help="What to round to: a format, or several between commas.", show_default=False),
    ],
    numbers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NUMBERS",
            help="Numbers, taken as float64 so that the error is the format's own: 0.1 -3 1e-4 inf nan 0x1.8p-3.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A .npy or .safetensors file instead of numbers.", show_default=False),
    ] = None,
    rounding: Annotated[Rounding, typer.Option(metavar="MODE", help=f"One of {', '.join(Rounding)}.")] = Rounding.NEAREST,
    saturate: Annotated[bool, typer.Option("--saturate", help="Too large becomes the largest value, not inf or NaN.")] = False,
    seed: Annotated[int, typer.Option(help="For stochastic rounding: the same seed, the same noise.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N numbers or tensors.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Round numbers or whole files to a format and see what is left of them."""
    from lowp.cli.quantize_file import try_file
    from lowp.cli.quantize_numbers import try_numbers
    from lowp.cli.rounder import FormatRounder

    rounders = [FormatRounder(fmt, rounding, saturate, seed) for fmt in parse_formats(formats)]
    if numbers and file is not None:
        raise ValueError("numbers or --file, not both")
    if file is not None:
        try_file(file, rounders, limit, json)
    elif numbers:
        try_numbers([parse_number(text) for text in numbers], rounders, limit, json)
    else:
        raise ValueError("nothing to quantize: give numbers, or a file with --file")


def parse_formats(text: str) -> list[lowp.formats.AnyFormat]:
    """Formats between commas; commas in parentheses belong to a block format."""
    return [lowp.formats.format(name.strip()) for name in re.split(r",(?![^(]*\))", text)]


def parse_number(text: str) -> float:
    """A float as Python writes it, or in hexadecimal."""
    try:
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except ValueError:
        raise ValueError(f"no such option: {text}" if text.startswith("--") else f"{text!r} is not a number") from None
