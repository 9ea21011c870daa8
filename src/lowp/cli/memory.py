"""`lowp memory`: what a recipe needs, before anything is trained."""

from collections.abc import Iterator
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
    """Bytes by role (weights, gradients, optimizer state, buffers, activations) beside FP32's, and what a step sends.

    Simulated formats live in float32. For them it also says what hardware would hold that stores them.
    """
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
    from lowp.training.footprint import HardwareRole
    from lowp.training.units import bytes_text

    counted, hardware = found.memory, dict(found.hardware)
    if hardware:
        kept = sum(part.bytes for role, part in hardware.items() if role != ACTIVATIONS)
        hardware[TOTAL] = HardwareRole(kept, ())
    result = table()
    result.add_column("role", no_wrap=True, min_width=len(ACTIVATIONS))
    result.add_column("dtype")
    for heading in ("bytes", "B/param", "in fp32", "ratio", *(["hardware"] if hardware else [])):
        result.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    if hardware:
        result.add_column("formats", overflow="fold", min_width=6)
    for role, dtypes, own, fp32 in _rows(found):
        each = f"{own / max(1, counted.parameters):.3f}" if own is not None and role != ACTIVATIONS else ""
        ratio = f"{own / fp32:.2f}" if own is not None and fp32 else ""
        cells = [_blank_or_bytes(own), each, _blank_or_bytes(fp32), ratio]
        if hardware:
            part = hardware[role]
            cells += [bytes_text(part.bytes), " ".join(part.formats)]
        result.add_row(role, dtypes, *cells)
    out = console()
    out.print(result)
    known = f"of a micro-batch of {found.samples:,}" if found.activations is not None else "(not known of a model of your own)"
    sends = "one rank sends none"
    if found.ranks > 1:
        sends = f"with {found.ranks} ranks, rank 0 sends {bytes_text(found.sent)} a step"
    out.print(
        f"\n{counted.parameters:,} parameters. Activations are what forward keeps for backward {known}; the total is without "
        f"them.\nA rank's gradients are {bytes_text(found.wire_bytes)} on the wire, "
        f"{100 * found.wire_bytes / found.fp32_bytes:.4g} % of fp32's; {sends}."
    )
    if hardware:
        out.print(
            "Formats are simulated: this run holds float32. `hardware` is a machine that stores them, with `master` weights "
            "for the updates."
        )


def _blank_or_bytes(count: float | None) -> str:
    from lowp.training.units import bytes_text

    return "" if count is None else bytes_text(count)


TOTAL, ACTIVATIONS, MASTER = "total", "activations", "master"


def _rows(found: "Footprint") -> Iterator[tuple[str, str, float | None, float | None]]:
    """Role, dtypes, bytes of this recipe and of FP32. Only hardware has master weights beside those that it multiplies."""
    counted = found.memory
    for role, own in counted.by_role.items():
        dtypes = dict.fromkeys(str(part.dtype).removeprefix("torch.") for part in counted.parts if part.role == role)
        yield role, " ".join(dtypes), own, found.fp32.bytes_of(role)
        if role == "weights" and MASTER in found.hardware:
            yield MASTER, "", None, None
    yield TOTAL, "", counted.total, found.fp32.total
    if found.activations is not None:
        yield ACTIVATIONS, "", found.activations, found.fp32_activations


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
        "bytes": counted.by_role,
        "bytes_per_parameter": counted.bytes_per_parameter,
        "bytes_of_fp32": found.fp32.by_role,
        "samples": found.samples,
        "activations": found.activations,
        "activations_of_fp32": found.fp32_activations,
        "hardware": {role: part.bytes for role, part in found.hardware.items()} or None,
        "wire_bytes": found.wire_bytes,
        "fp32_bytes": found.fp32_bytes,
        "sent_per_step": found.sent,
    }
