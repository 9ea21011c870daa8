"""The README's table of formats, written by the code: `python -m lowp.cli.readme README.md`, and `--check` in the tests."""

import argparse
import sys
from pathlib import Path

from lowp.cli.figures import Figures, by_family
from lowp.cli.output import short

BEGIN = "<!-- formats:begin -->"
END = "<!-- formats:end -->"
HEADER = ("format", "bits", "max", "smallest", "epsilon", "special values")


def format_table_markdown() -> str:
    """One row a registered format, grouped by family, in columns that also read well as text."""
    rows: list[tuple[str, ...]] = [HEADER]
    for family, members in by_family():
        rows.append((f"**{family}**", *[""] * (len(HEADER) - 1)))
        rows += [_cells(member) for member in members]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    numeric = range(1, len(HEADER) - 1)
    rule = tuple(("-" * (width - 1) + ":" if column in numeric else "-" * width) for column, width in enumerate(widths))
    lines = [_line(row, widths, numeric) for row in (rows[0], rule, *rows[1:])]
    return "\n".join(lines)


def _cells(member: Figures) -> tuple[str, ...]:
    numbers = (f"{member.bits:g}", short(member.max), short(member.smallest), short(member.epsilon))
    return (f"`{member.name}`", *numbers, ", ".join(member.specials) or "none")


def _line(row: tuple[str, ...], widths: list[int], numeric: range) -> str:
    cells = (
        cell.rjust(width) if column in numeric else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return f"| {' | '.join(cells)} |"


def rewritten(readme: str) -> str:
    """The text with the table between the marks replaced by today's."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"the table goes between one {BEGIN} and, after it, one {END}")
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{format_table_markdown()}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowp.cli.readme", description=__doc__)
    parser.add_argument("readme", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    options = parser.parse_args(arguments)
    try:
        old = options.readme.read_text(encoding="utf-8")
        new = rewritten(old)
    except (OSError, ValueError) as error:
        print(f"{options.readme}: {error}", file=sys.stderr)
        return 2
    if old == new:
        return 0
    if options.check:
        print(f"{options.readme}: the table of formats is out of date; `make readme` rewrites it", file=sys.stderr)
        return 1
    options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
