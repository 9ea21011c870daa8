"""Tables in plain text, of many rows and few words: as many columns as the terminal has room for.

rich measures and wraps every cell, which takes a second for a thousand rows. Here a cell is one line, except in the first
column, whose long names go on in the next line: a name is what one copies.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer

GAP = "  "  # between two columns
COMMON = 6  # by how much a column comes later whose cells all say the same
NARROWEST = 16  # characters that the first column is folded to at least


@dataclass(frozen=True)
class Column:
    heading: str
    cells: Sequence[str]
    right: bool = False  # how it is aligned
    keep: int = 0  # of two columns the one with the smaller number is shown rather
    colours: Sequence[str | None] | None = None  # of the cells

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells)))

    @property
    def common(self) -> str | None:
        """What all cells say, where they say the same; None otherwise, and of a single row."""
        first = self.cells[0] if len(self.cells) > 1 else None
        return first if all(cell == first for cell in self.cells) else None

    @property
    def rank(self) -> int:
        """A column that says the same everywhere can be said in a line instead."""
        return self.keep + (COMMON if self.common is not None else 0)


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """The columns that there is room for, and those that there is not. The first may be folded to `NARROWEST`."""
    kept = {0}
    free = width - min(columns[0].width, NARROWEST)
    for place in sorted(range(1, len(columns)), key=lambda place: columns[place].rank):
        needed = len(GAP) + columns[place].width
        if needed <= free:
            kept.add(place)
            free -= needed
    return [c for i, c in enumerate(columns) if i in kept], [c for i, c in enumerate(columns) if i not in kept]


def print_columns(columns: Sequence[Column], width: int) -> None:
    """Heading, a line, the rows. `columns` fit into `width`, the first folded where it must be."""
    rest = sum(len(GAP) + column.width for column in columns[1:])
    first = max(1, min(columns[0].width, max(width - rest, NARROWEST)))
    widths = [first, *(column.width for column in columns[1:])]
    lines = [_line([c.heading for c in columns], columns, widths), "─" * min(width, first + rest)]
    for number in range(len(columns[0].cells)):
        name = columns[0].cells[number]
        cells = [name[:first], *(column.cells[number] for column in columns[1:])]
        lines.append(_line(cells, columns, widths, [c.colours[number] if c.colours else None for c in columns]))
        lines += [name[at : at + first] for at in range(first, len(name), first)]
    typer.echo("\n".join(lines))


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Iterable[int], colours: Sequence[str | None] = ()) -> str:
    parts = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    if any(colours):
        parts = [typer.style(part, fg=colour) if colour else part for part, colour in zip(parts, colours, strict=True)]
    return GAP.join(parts).rstrip()


def terminal_width() -> int:
    """COLUMNS, or the terminal's; 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns
