"""`lowp memory`: what a recipe needs, before anything is trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.output import JSON_HELP, console, examples, print_json, table

if TYPE_CHECKING:
    from lowp.training.footprint import Footprint
    from lowp.training.recipe import Recipe

EXAMPLES = examples(
    ("lowp memory pure16", "bytes a parameter, by role, beside FP32's"),
    ("lowp memory davidnet --set precision.weights=bf16 --shape 3,32,32 --classes 10", "without the data set"),
)


def show_memory(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name of `lowp recipes`, a TOML file or module:function.")],
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data sets lie.")] = None,
    shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Of a sample, instead of looking at the data.")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Instead of looking at the data.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Bytes a parameter by role (weights, gradients, optimizer state, buffers), and what a step sends."""
    from lowp.training.check import check
    from lowp.training.footprint import footprint
    from lowp.training.reading import read_recipe

    chosen = read_recipe(recipe, changes or [])
    check(chosen)
    sample, count = _sample(chosen, data, shape, classes)
    found = footprint(chosen, sample, count)
    if json:
        print_json(_document(found))
        return
    _print(found)


def _print(found: "Footprint") -> None:
    from lowp.training.units import bytes_text

    counted = found.memory
    result = table()
    for heading in ("role", "dtype"):
        result.add_column(heading)
    for heading in ("bytes", "bytes a parameter"):
        result.add_column(heading, justify="right")
    for part in counted.parts:
        share = part.bytes / max(1, counted.parameters)
        result.add_row(part.role, str(part.dtype).removeprefix("torch."), bytes_text(part.bytes), f"{share:.3f}")
    result.add_row("total", "", bytes_text(counted.total), f"{counted.bytes_per_parameter:.3f}")
    out = console()
    out.print(result)
    out.print(
        f"\n{counted.parameters:,} parameters. A rank's gradients are {bytes_text(found.wire_bytes)} on the wire, "
        f"{100 * found.wire_bytes / found.fp32_bytes:.4g} % of fp32's;\nwith {found.ranks} ranks rank 0 sends "
        f"{bytes_text(found.sent)} a step. Activations are not counted: they depend on the batch."
    )


def _sample(recipe: "Recipe", data: Path | None, shape: str | None, classes: int | None) -> tuple[tuple[int, ...], int]:
    """The shape of a sample and the number of classes, from the options or from the data set."""
    if shape is not None and classes is not None:
        try:
            return tuple(int(side) for side in shape.split(",")), classes
        except ValueError:
            raise ValueError(f"--shape {shape!r} must be whole numbers with commas: 3,32,32") from None
    import torch

    from lowp.training.data import open_data

    opened = open_data(recipe.data, device=torch.device("cpu"), dtype=torch.float32, directory=data)
    return opened.shape, opened.classes


def _document(found: "Footprint") -> dict[str, object]:
    counted = found.memory
    return {
        "parameters": counted.parameters,
        "bytes": {role: counted.bytes_of(role) for role in ("weights", "gradients", "state", "buffers")},
        "bytes_per_parameter": counted.bytes_per_parameter,
        "wire_bytes": found.wire_bytes,
        "fp32_bytes": found.fp32_bytes,
        "sent_per_step": found.sent,
    }
