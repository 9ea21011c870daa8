"""The site: `make docs` (Sphinx, MyST, Furo). Nothing is fetched, neither by the build nor by the pages."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from lowp import __version__  # noqa: E402

project = "lowp"
author = "the authors of lowp"
copyright = "the authors of lowp, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",  # Markdown, and notebooks with the outputs that they were saved with
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google's style
    "sphinx_copybutton",
    "site_links",  # docs/site_links.py
]
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]  # a section may begin at the second level (CHANGELOG, generated pages)

# Markdown
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"  # tests/test_notebooks.py runs them
nb_merge_streams = True

# Python
default_role = "code"
smartquotes_action = "D"  # dashes only: "e5m2" is code
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_ivar = True
napoleon_use_rtype = False

# HTML
html_theme = "furo"
html_title = f"lowp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57a4", "color-brand-content": "#0b57a4"},
    "dark_css_variables": {"color-brand-primary": "#7ab7ff", "color-brand-content": "#7ab7ff"},
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def as_restructured_text(lines: list[str]) -> list[str]:
    """A docstring of this project as reStructuredText: its code is in single backquotes, its examples are indented.

    1. `x` becomes ``x``, and no star, bar or underscore outside of it is markup.
    2. What is indented after a blank line, and is no list and no section's body, is code.
    """
    result: list[str] = []
    section = literal = False
    for line in lines:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            section = bool(re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields|Note):", line))
            literal = False
        opens = indented and not section and not literal and bool(result) and not result[-1].strip()
        if opens:
            result += ["::", ""]
            literal = True
        result.append(line if literal or line.lstrip().startswith(">>>") else _text(line))
    return result


def _text(line: str) -> str:
    pieces = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{piece}`" if piece.startswith("`") else re.sub(r"([*|_])(?!:)", r"\\\1", piece) for piece in pieces)


def _docstring(app, what, name, obj, options, lines) -> None:
    lines[:] = as_restructured_text(lines)


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # before napoleon
