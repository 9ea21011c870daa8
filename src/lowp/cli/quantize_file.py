"""`lowp quantize FORMAT --file FILE`: what is left of each tensor of a file."""

from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowp.cli.fidelity import Fidelity, measure
from lowp.cli.output import console, percent, print_json, short, table
from lowp.cli.rounder import FormatRounder
from lowp.cli.tensor_files import StoredTensor, open_tensors

SKIPPED = "skipped"
WIDE = 120  # columns of terminal from which a tensor and its figures fit on one line
HEADINGS = {"SQNR dB": 7, "max error": 9, "mean rel.": 9, "underflow": 9, "overflow": 8, "NaN": 4, "inf": 4}  # and their widths
LEGEND = (
    "SQNR, max error, mean relative error: of finite numbers; one that becomes inf\n"
    "or NaN makes them infinite.  underflow: share of non-zero numbers that become\n"
    "0.  overflow: share that rounds beyond the largest value.  NaN, inf: counts."
)


@dataclass(frozen=True)
class TensorRow:
    tensor: StoredTensor
    format: str
    fidelity: Fidelity | None  # None: skipped


def try_file(path: Path, rounders: list[FormatRounder], limit: int | None, json: bool) -> None:
    rows: list[TensorRow] = []
    with open_tensors(path) as stored, Console(stderr=True).status(escape(str(path))) as status:  # seen in terminals only
        for tensor in stored[:limit]:
            status.update(escape(tensor.name))
            rows += _try_tensor(tensor, rounders)
        left_out = len(stored) - len(stored[:limit])
    totals = _totals(rows, rounders)
    if json:
        documents = {"tensors": [_document(row) for row in rows], "all": [_document(row) for row in totals]}
        print_json({"file": str(path), "left_out": left_out} | documents)
    else:
        _print(rows + totals, left_out)


def _try_tensor(stored: StoredTensor, rounders: list[FormatRounder]) -> list[TensorRow]:
    """Loaded once for all formats, and let go of before the next one is loaded."""
    if stored.load is None:
        return [TensorRow(stored, "", None)]
    tensor = stored.load()
    return [TensorRow(stored, str(rounder.fmt), measure(tensor, rounder)) for rounder in rounders]


def _totals(rows: list[TensorRow], rounders: list[FormatRounder]) -> list[TensorRow]:
    """One row a format for all tensors together, where there are several."""
    measured = [row for row in rows if row.fidelity is not None]
    if len(measured) <= len(rounders):
        return []
    sums = [
        sum((row.fidelity for row in measured[i :: len(rounders)] if row.fidelity), Fidelity()) for i in range(len(rounders))
    ]
    everything = StoredTensor(f"all {len(measured) // len(rounders)} tensors", "", (sums[0].elements,), None)
    return [TensorRow(everything, str(rounder.fmt), total) for rounder, total in zip(rounders, sums, strict=True)]


def _document(row: TensorRow) -> dict[str, Any]:
    tensor, fidelity = row.tensor, row.fidelity
    known: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape}
    if fidelity is None:
        return known | {"skipped": "not floating point"}
    return known | {
        "format": row.format,
        "sqnr_db": fidelity.sqnr_db,
        "max_error": fidelity.max_error,
        "mean_relative_error": fidelity.mean_relative_error,
        "underflow": fidelity.underflow,
        "overflow": fidelity.overflow,
        "nan": fidelity.nan,
        "inf": fidelity.inf,
    }


def _print(rows: list[TensorRow], left_out: int) -> None:
    out = console()
    if out.width >= WIDE:
        out.print(_one_line_each(rows))
    else:
        _print_narrow(rows, out)
    out.print(f"[dim]{LEGEND}[/]")
    if left_out:
        out.print(f"[dim]Left out by --limit: {left_out} more tensors.[/]")


def _one_line_each(rows: list[TensorRow]) -> Table:
    result = table()
    for heading in ("tensor", "shape", "dtype", "format"):
        result.add_column(heading, overflow="fold")
    for heading in HEADINGS:
        result.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        tensor = row.tensor
        about = ("", "", "") if tensor is previous else (escape(tensor.name), _shape(tensor), tensor.dtype)
        result.add_row(*about, row.format or SKIPPED, *_cells(row))
        previous = tensor
    return result


def _print_narrow(rows: list[TensorRow], out: Console) -> None:
    """A line for the tensor, however long its name, and under it a line for each format."""
    out.print(_numbers_table([], header=True))
    for tensor, group in groupby(rows, key=lambda row: row.tensor):
        measured = [row for row in group if row.fidelity is not None]
        about = f"  {_shape(tensor)} {tensor.dtype}" + ("" if measured else f"  {SKIPPED}: not floating point")
        out.print(Text.assemble((tensor.name, "bold cyan"), about), soft_wrap=True)
        if measured:
            out.print(_numbers_table(measured, header=False))


def _numbers_table(rows: list[TensorRow], header: bool) -> Table:
    result = table()
    result.show_header = header
    result.add_column("format", width=14, overflow="fold")
    for heading, width in HEADINGS.items():
        result.add_column(heading, justify="right", width=width, no_wrap=True)
    for row in rows:
        result.add_row(f"  {row.format}", *_cells(row))
    return result


def _shape(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _cells(row: TensorRow) -> list[str]:
    f = row.fidelity
    if f is None:
        return []
    counts = (f"{f.nan}", f"{f.inf}")
    return [
        decibels(f.sqnr_db),
        short(f.max_error),
        percent(f.mean_relative_error),
        percent(f.underflow),
        percent(f.overflow),
        *counts,
    ]


def decibels(sqnr: float | None) -> str:
    return "-" if sqnr is None else "exact" if sqnr == inf else f"{sqnr:.1f}"
