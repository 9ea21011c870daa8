"""What the format explorer has to know of each format: its values, and how wrong rounding is across its range.

Formats of up to 8 bits come with all their positive values. Of wider ones the number line shows the binades. Block formats are
shown by their elements, whose values move with each block's scale; codecs that are no format (top-k, adaptive) are left out.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from lowp.formats import FORMATS, BlockFormat, Format
from lowp.formats import format as parse_format
from lowp.formats.binades import binades, positive_codes
from lowp.formats.gaps import error_steps, gaps

_MOST_LISTED = 8  # bits of a format whose values are all listed


def explorer_formats(used: Iterable[str]) -> list[dict[str, Any]]:
    """All registered formats, and those that are used."""
    names = {str(fmt): fmt for fmt in FORMATS}
    for name in used:
        try:
            fmt = parse_format(name)
        except ValueError:
            continue
        names.setdefault(str(fmt), fmt)
    shown = (_format(name, fmt) for name, fmt in names.items())
    return [each for each in shown if each is not None]


@cache
def _format(name: str, fmt: Any) -> dict[str, Any] | None:
    """None: it has a single positive value, and there is nothing to see."""
    element: Format = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if len(positive_codes(element)) < 2:
        return None
    listed = element.bits <= _MOST_LISTED
    values = [element.value(code) for code in positive_codes(element)] if listed else []
    steps = error_steps(gaps(element), every_gap=False)
    return {
        "name": name,
        "bits": fmt.bits,
        "max": element.max,
        "smallest": element.smallest,
        "block": isinstance(fmt, BlockFormat),
        "values": values,
        "binades": [each.exponent for each in binades(element)],
        "error_from": [low for low, _ in steps],
        "error": [error for _, error in steps],
    }
