"""A recipe as a TOML file: complete, in the schema's order, every key with its description beside it.

Sections are tables. What a section holds of its own comes first, then its lists and tables with headers of their own
(`[precision.layers.last]`, `[[precision.schedule]]`); where these are empty, an example stands there, commented out. What TOML
cannot say, None, is left out: it is the default wherever the schema allows it.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from lowp.formats import is_format, usual_name
from lowp.training.keys import BARE, Path, written
from lowp.training.mistakes import RecipeError
from lowp.training.recipe import LayerRoles, Phase, Promote, Recipe, Section, Switch

DEEPEST = 16  # tables and lists inside one another; the schema itself has 5
_MOST_BITS = 128  # of a whole number
_WIDTH = 116  # of lines, as far as values allow
_HEADING = (
    "A recipe is everything that decides what a run computes. Train it with `lowp train FILE.toml`. A key that is left out has "
    'its default; with `base = "NAME"`, that recipe\'s value.'
)
_EXAMPLES: dict[Path, Any] = {  # of what has a header of its own, and is empty by default
    ("precision", "layers"): {"last": LayerRoles(weights="fp16", activations="fp16", errors="fp16")},
    ("precision", "schedule"): (Phase(epoch=1, weights="posit16", activations="posit16"),),
    ("precision", "promote"): Promote(),
    ("precision", "switch"): Switch(),
    ("wire", "layers"): {"last": "fp16"},
}


def to_toml(recipe: Recipe, comments: bool = True) -> str:
    """The whole recipe; `read_recipe` of a file with this text gives an equal one."""
    return "\n".join(_TomlWriter(comments).document(recipe)) + "\n"


def plain(value: Any, path: Path = ()) -> Any:
    """Sections as dictionaries, tuples as lists: what JSON and TOML can say. Anything else is refused.

    Formats get the names that are usual here: of "bfloat16", and of torch.bfloat16, "bf16".
    """
    if path and path[0] in ("precision", "wire", "parallel") and (not isinstance(value, str) or _is_alias(value)):
        value = usual_name(value)
    if len(path) > DEEPEST:
        raise RecipeError(f"{written(path[:2])}: tables and lists are nested more than {DEEPEST} deep")
    if isinstance(value, Section):
        return {name: plain(getattr(value, name), (*path, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(f"{written(path)}: keys are strings, not {key!r}")
            if not _is_unicode(key):
                raise RecipeError(f"{written(path)}: the key {key!a:.60} is not text in UTF-8")
        return {key: plain(entry, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, (*path, index)) for index, entry in enumerate(value)]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise RecipeError(f"{written(path)}: whole numbers have at most {_MOST_BITS} bits, not {value.bit_length()}")
    if isinstance(value, str) and not _is_unicode(value):
        raise RecipeError(f"{written(path)}: {value!a:.60} is not text in UTF-8")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise RecipeError(
        f"{written(path)}: a recipe holds text, numbers, true and false, lists and tables, not {type(value).__name__}"
    )


def _is_alias(text: str) -> bool:
    """Is it another library's name of a format? Patterns and words that are none stay as they are."""
    return usual_name(text) != text and text.isascii() and is_format(text)


def _is_unicode(text: str) -> bool:
    """Is it text, or also half of a character? (What the shell passes on and is not UTF-8 becomes such halves.)"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _TomlWriter:
    def __init__(self, comments: bool) -> None:
        self._comments = comments

    def document(self, recipe: Recipe) -> Iterator[str]:
        if self._comments:
            yield from _comment(_HEADING)
            yield ""
        yield from self._section(recipe, ())

    def _section(self, section: Section, path: Path) -> Iterator[str]:
        """A section's own keys, then what has a header: its sections and what `_EXAMPLES` names."""
        fields = type(section).model_fields
        values = {name: getattr(section, name) for name in fields}
        headed = {name for name, value in values.items() if isinstance(value, Section) or (*path, name) in _EXAMPLES}
        own = {name: value for name, value in values.items() if name not in headed and value is not None}
        lines = {name: f"{_key(name)} = {value_text(value, (*path, name))}" for name, value in own.items()}
        column = max((len(line) for line in lines.values() if len(line) <= 48), default=0)
        for name, line in lines.items():
            yield from self._described(line, fields[name].description or "", column)
        for name in fields:
            if name in headed:
                yield from self._headed(values[name], (*path, name), fields[name].description or "")

    def _described(self, line: str, description: str, column: int) -> Iterator[str]:
        """A description stands beside its key, or above it where there is no room."""
        if not self._comments or not description:
            yield line
        elif max(len(line), column) + len(description) + 4 <= _WIDTH:
            yield f"{line:<{column}}  # {description}"
        else:
            yield from _comment(description)
            yield line

    def _headed(self, value: Any, path: Path, meaning: str) -> Iterator[str]:
        if value:
            yield from self._tables(value, path, meaning)
        elif self._comments:
            example = [line for line in self._tables(_EXAMPLES[path], path, meaning) if line]
            yield ""
            yield from (line if line.startswith("#") else f"# {line}" for line in example)

    def _tables(self, value: Any, path: Path, meaning: str) -> Iterator[str]:
        """A section, a list of sections, a table of sections, or a table of values, each under its header."""
        name = ".".join(_key(str(part)) for part in path)
        if isinstance(value, Section):
            yield from self._header(f"[{name}]", meaning or type(value).__doc__ or "")
            yield from self._section(value, path)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                yield from self._header(f"[[{name}]]", "" if index else meaning)
                yield from self._section(entry, path)
        elif all(isinstance(entry, Section) for entry in value.values()):
            for index, (key, entry) in enumerate(value.items()):
                yield from self._header(f"[{name}.{_key(key)}]", "" if index else meaning)
                yield from self._section(entry, (*path, key))
        else:
            yield from self._header(f"[{name}]", meaning)
            yield from (f"{_key(key)} = {value_text(entry, (*path, key))}" for key, entry in value.items())

    def _header(self, header: str, meaning: str) -> Iterator[str]:
        yield ""
        if self._comments and meaning:
            yield from _comment(meaning)
        yield header


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """JSON's strings are TOML's, but for one character that TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_text(value: Any, path: Path = ()) -> str:
    """One value, as TOML writes it."""
    plain(value, path)  # refuses what it cannot write
    return _text(value, path)


def _text(value: Any, path: Path) -> str:
    if isinstance(value, Section):
        value = {key: entry for key, entry in value if entry is not None}
    if value is None:
        raise RecipeError(f"{written(path)}: a recipe cannot say None; leave the key out")
    if isinstance(value, dict):
        entries = (f"{_key(key)} = {_text(entry, (*path, key))}" for key, entry in value.items())
        return "{ " + ", ".join(entries) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(entry, (*path, index)) for index, entry in enumerate(value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _string(value) if isinstance(value, str) else repr(value)
