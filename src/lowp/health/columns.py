"""Tables as plain text, for terminals and logs."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, cells under each other; the columns numbered in `right` end in line, as numbers should."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in rows]
