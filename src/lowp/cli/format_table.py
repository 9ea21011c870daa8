"""`lowp formats`: the table of all formats."""

from typing import TYPE_CHECKING

from lowp.cli.figures import Figures
from lowp.cli.output import short, table

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "smallest: above 0.  epsilon: from 1 to the next value.  range: in binades.\n"
    "bits: of blocks with the scale's share.  lowp formats NAME shows one in full."
)
WIDE = 120  # columns of terminal from which the layout of the bits has room too


def format_table(groups: list[tuple[str, list[Figures]]], width: int) -> "Table":
    """One row a format, one section a family."""
    wide = width >= WIDE
    result = table()
    result.add_column("format", no_wrap=True)
    for heading in ("bits", "max", "smallest", "epsilon", "range", "values"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("specials", no_wrap=True)
    if wide:
        result.add_column("layout", no_wrap=True, style="dim")
    for family, members in groups:
        result.add_row(f"[bold cyan]{family}[/]")
        for member in members:
            result.add_row(*_cells(member), *([member.layout] if wide else []))
        result.add_section()
    return result


def _cells(member: Figures) -> list[str]:
    return [
        f"  {member.name}",
        f"{member.bits:g}",
        short(member.max),
        short(member.smallest),
        short(member.epsilon),
        f"{member.dynamic_range:.1f}",
        short(member.count),
        ", ".join(member.specials) or "-",
    ]
