"""`lowp quantize FORMAT NUMBERS`: each number beside what it becomes."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch
from rich.table import Table

from lowp.cli.output import console, hexadecimal, percent, print_json, short, table, tidy
from lowp.cli.rounder import FormatRounder, plain_operations
from lowp.formats import BlockFormat


@dataclass(frozen=True)
class Rounded:
    """One number in one format. `error` is value - number."""

    format: str
    number: float
    value: float
    code: str | None
    error: float | None  # None where one of the two is not finite
    relative_error: float | None
    note: str


def try_numbers(numbers: list[float], rounders: list[FormatRounder], limit: int | None, json: bool) -> None:
    with plain_operations():
        columns = [round_all(numbers[:limit], rounder) for rounder in rounders]
    rows = [row for of_one_number in zip(*columns, strict=True) for row in of_one_number]
    if json:
        print_json([asdict(row) for row in rows])
        return
    out = console()
    out.print(_table(rows, len(rounders)))
    for fmt in (rounder.fmt for rounder in rounders if isinstance(rounder.fmt, BlockFormat)):
        out.print(f"[dim]{fmt}: the numbers stand in one row, and each {fmt.size} neighbours share a scale.[/]")
    if limit is not None and limit < len(numbers):
        out.print(f"[dim]Left out by --limit: {len(numbers) - limit} more numbers.[/]")


def round_all(numbers: list[float], rounder: FormatRounder) -> list[Rounded]:
    x = torch.tensor(numbers, dtype=torch.float64)
    values = rounder.quantize(x)
    columns = (numbers, values.tolist(), rounder.codes(x), rounder.overflowed(x, values).tolist())
    return [_rounded(*row, rounder) for row in zip(*columns, strict=True)]


def _rounded(number: float, value: float, code: int | None, overflowed: bool, rounder: FormatRounder) -> Rounded:
    error = relative = None
    if math.isfinite(number) and math.isfinite(value):
        exact = Fraction(value) - Fraction(number)
        error = _nearest_float(exact)
        relative = _nearest_float(abs(exact / Fraction(number))) if number else None
    return Rounded(
        format=str(rounder.fmt),
        number=number,
        value=value,
        code=None if code is None else hexadecimal(code, math.ceil(rounder.fmt.bits)),
        error=error,
        relative_error=relative,
        note=note(number, value, overflowed, rounder.saturates),
    )


def _nearest_float(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def note(number: float, value: float, overflowed: bool, saturates: bool) -> str:
    """What happened, in a word or two."""
    if math.isnan(number):
        return "NaN"
    if number == value:
        return "-0 became 0" if math.copysign(1, number) != math.copysign(1, value) else "exact"
    if not math.isfinite(value):
        return "overflow" if overflowed else "became NaN"  # an infinity, or 0 and negative numbers where there are none
    if math.isinf(number) or (overflowed and saturates):
        return "saturated"
    return "underflow" if value == 0 else "rounded"


def _table(rows: list[Rounded], formats: int) -> Table:
    result = table()
    if formats > 1:
        result.add_column("format", no_wrap=True)
    for heading in ("number", "value", "code", "error", "relative"):
        result.add_column(heading, justify="right", overflow="fold")
    result.add_column("note", no_wrap=True)
    for index, row in enumerate(rows):
        named = [row.format] if formats > 1 else []
        exact = (_number(row.number), _number(row.value), row.code or "-")
        cells = (*exact, short(row.error), percent(row.relative_error), _coloured(row.note))
        result.add_row(*named, *cells, end_section=(index + 1) % formats == 0 and formats > 1)
    return result


def _number(value: float) -> str:
    return tidy(f"{value:.10g}")


def _coloured(text: str) -> str:
    colour = {"exact": "green", "rounded": "none"}.get(text, "yellow")
    return f"[{colour}]{text}[/]"
