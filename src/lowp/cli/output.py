"""Where output goes: tables for people, JSON for programs, and how a number is written in each."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import typer

from lowp.invocation import program

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

JSON_HELP = 'Print JSON. Numbers that JSON cannot write are the strings "inf", "-inf", "nan"; null: there is no such thing.'


def console() -> "Console":
    """A console on the current stdout: 80 columns wide and without colour where that is no terminal."""
    from rich.console import Console

    return Console(highlight=False)


def table() -> "Table":
    """An empty table in the style that all commands share: a line under the header, nothing else."""
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def literal(text: str) -> str:
    """Text whose brackets are brackets, not rich's markup."""
    from rich.markup import escape

    return escape(text)


def survive_narrow_encodings() -> None:
    """A terminal that cannot show a character gets a question mark, not a UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def examples(*commands: tuple[str, str]) -> str:
    """The examples at the end of a help text, in rich's markup: each command with what it is for."""
    called = [(_as_called(command), why) for command, why in commands]
    width = max(len(command) for command, _ in called)
    lines = (
        f"  [cyan]{command.replace('[', chr(92) + '[')}[/]{' ' * (width - len(command))}  {why}" for command, why in called
    )
    return "\n".join(("[bold]Examples[/]", *lines))


def _as_called(text: str) -> str:
    """`lowp train ...` as it works in the user's shell."""
    first, space, rest = text.partition(" ")
    return f"{program()}{space}{rest}" if first == "lowp" else text


def print_json(document: object) -> None:
    typer.echo(json.dumps(plain(document), indent=2, allow_nan=False, ensure_ascii=False))


def plain(value: Any) -> Any:
    """The same document with every number that JSON cannot write as a string: "inf", "-inf", "nan"."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def short(value: float | None, digits: int = 3) -> str:
    """A number for a table: six digits where that needs no exponent (127.996), else `digits` (3.4e38, 0.00195)."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    digits = max(digits, 6) if 1 <= abs(value) < 1e6 else digits
    return tidy(f"{value:.{digits}g}")


def with_power(value: float) -> str:
    """A number, exactly where it is short, with the power of two that it is, where it is one: `2^-9 = 0.001953125`."""
    text = f"{value:.10g}" if len(f"{value:.10g}") <= 12 else short(value, 6)
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1} = {text}" if fraction == 0.5 and value != 1 else text


def hexadecimal(code: int, bits: int) -> str:
    """A code as wide as its format: 0x07, 0x7c00."""
    return f"0x{code:0{-(-bits // 4)}x}"


def percent(fraction: float | None) -> str:
    """A share or a relative error with three digits: 0, 1e-5 %, 3.21 %, 100 %."""
    return "-" if fraction is None else "0" if fraction == 0 else f"{tidy(f'{100 * fraction:.3g}')} %"


def tidy(text: str) -> str:
    """A number without what its exponent does not need: 3.4e38, not 3.4e+38; 6e-8, not 6e-08."""
    return text.replace("e+", "e").replace("e0", "e").replace("e-0", "e-")
