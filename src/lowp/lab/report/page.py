"""The page itself: a Jinja2 template around the document, with the styles, the script and Plotly inside.

Plotly's script takes 4.8 MB. It is embedded once, compressed (gzip, base64: 2 MB); the browser unpacks it.

Everything from runs is text: the template escapes it, the block of JSON has no `<` in it, and the script sets text, never HTML.
"""

import base64
import gzip
import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

_EXTRA = "a report needs the packages {}: pip install 'lowp[report]'"


def check_report_packages() -> None:
    """Before anything is read: can a page be made?"""
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(_EXTRA.format("jinja2 and plotly")) from None


def page_of(document: dict[str, Any]) -> str:
    """The whole page as text."""
    check_report_packages()
    import jinja2

    folder = files("lowp.lab.report") / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "report.html").read_text(encoding="utf-8"))
    return template.render(
        document=document,
        data=json_block(document),
        style=(folder / "report.css").read_text(encoding="utf-8"),
        scripts=[(folder / name).read_text(encoding="utf-8") for name in ("figures.js", "explorer.js", "report.js")],
        plotly=packed_plotly(),
    )


def json_block(document: dict[str, Any]) -> str:
    """JSON that may stand in a script element: no text can end the element or begin a comment."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache(maxsize=1)
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
