"""Tables as HTML, for notebooks: what `_repr_html_` of formats, runs, studies and descriptions return. All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """A table with a caption. Columns numbered in `right` hold numbers. None is a dash."""
    numbers = set(right)

    def cell(tag: str, place: int, value: object) -> str:
        style = ' style="text-align:right"' if place in numbers else ' style="text-align:left"'
        return f"<{tag}{style}>{escape('-' if value is None else str(value))}</{tag}>"

    head = "".join(cell("th", place, heading) for place, heading in enumerate(headings))
    body = "".join(f"<tr>{''.join(cell('td', place, value) for place, value in enumerate(row))}</tr>" for row in rows)
    title = f'<caption style="text-align:left">{escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
