"""From a name, a TOML file or a Python function to a recipe, with changes on top.

Whatever a recipe comes from, it becomes a document (dictionaries, lists, text and numbers), changes are merged into it, and the
result is validated once, strictly: TOML has types, so "5" is not 5.

Merging goes key by key through sections and tables; lists are replaced, and an empty table empties one. `options` belong to the
`name` beside them: whoever names another model starts from no options.
"""

import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path as File
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from lowp import former_names
from lowp.training.keys import (
    Path,
    can_be_absent,
    choices,
    is_table,
    is_text,
    kind_at,
    kind_inside,
    section_of,
    written,
)
from lowp.training.mistakes import RecipeError, explain, nearest
from lowp.training.plugins import is_plugin, load_plugin
from lowp.training.recipe import LONGEST_NAME, PLAN, Recipe, Section, with_current_keys
from lowp.training.regular_file import read_regular
from lowp.training.toml import DEEPEST, plain

_PART = r"""\s*(?:"[^"]*"|'[^']*'|[^.="'\s]+)\s*"""
_OVERRIDE = re.compile(rf"({_PART}(?:\.{_PART})*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d+\.|\.\d+)(?:[eE][+-]?\d+)?")  # .5 and 5., which TOML does not take
_LARGEST_FILE = 1 << 20  # bytes
_MOST_DOTS = 5000  # of a key
_MOST_BASES = 32
_MOST_PARTS = 64  # of a key with dots; names of layers have some of their own
# The files and functions that are being read now, each of them the base of the one before.
_reading: ContextVar[tuple[str, ...]] = ContextVar("_reading", default=())


def read_recipe(text: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a text names, with some keys changed.

    Args:
        text: a name that `lowp recipes` lists, a path that ends in .toml, or module:function for a function that returns a
            Recipe or a dictionary. A file may say `base = "aps8"`: what it does not mention is then as in that recipe.
        overrides: `key.path=value`. The value is read as TOML, or else is text: `optimizer.lr=0.1`, `wire.format=e5m2`,
            `model.options.hidden=[64, 64]`, `wire.skip=1d,last`, `precision.layers.last.weights=fp16`. Nothing after the `=`
            empties a key; `none` removes an optional one.
    """
    document, source = _document(text)
    return _validated(_changed(document, [_override(each) for each in overrides]), source)


def with_changes(recipe: Recipe, /, **changes: Any) -> Recipe:
    """The same recipe with some keys changed: `with_changes(recipe, epochs=3, wire={"format": "e5m2"})`.

    A dictionary changes the keys that it names, a section (`Wire(...)`) replaces all of them. Keys may be written with dots:
    `with_changes(recipe, **{"optimizer.lr": 0.1})`.
    """
    document = plain(recipe)
    named = [(_regrouped(tuple(key.split("."))), value) for key, value in changes.items()]
    return _validated(_changed(document, named), f"recipe {recipe.name}")


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The same recipe with some keys changed, as `read_recipe` takes them: `with_overrides(recipe, ["wire.format=e5m2"])`."""
    return _validated(_changed(plain(recipe), [_override(each) for each in overrides]), f"recipe {recipe.name}")


def _document(text: str) -> tuple[Any, str]:
    """What the text names, and how an error calls it."""
    if text.endswith(".toml"):
        with _being_read(text if "\0" in text else os.path.realpath(text), text):  # links to one file are one file
            return _from_file(File(text)), text
    if is_plugin(text):
        with _being_read(text, text):
            return _from_function(text), text
    from lowp.training.recipes import RECIPES

    text = former_names.current(text, former_names.RECIPES, "recipe")
    if text not in RECIPES:
        if File(text).exists() or "/" in text:
            raise RecipeError(f"unknown recipe {text!r}; the name of a recipe's file ends in .toml")
        raise RecipeError(f"unknown recipe {text!r}{nearest(text, RECIPES) or ';'} `lowp recipes` lists them")
    return plain(RECIPES[text]()), f"recipe {text}"


@contextmanager
def _being_read(identity: str, text: str) -> Iterator[None]:
    """While a file or a function is being read, its bases are read too: none of them can be itself."""
    above = _reading.get()
    if identity in above:
        raise RecipeError(f"{text}: its base leads back to itself")
    if len(above) >= _MOST_BASES:
        raise RecipeError(f"{text}: this is the base of the base of ... more than {_MOST_BASES} recipes")
    token = _reading.set((*above, identity))
    try:
        yield
    finally:
        _reading.reset(token)


def _from_file(file: File) -> Any:
    try:
        content = read_regular(file, _LARGEST_FILE)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    try:
        text = content.decode("utf-8")
        if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines()):
            raise RecursionError  # Python's parser would get there, in a time that grows with the square of the key's length
        document = plain(tomllib.loads(text))
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: this is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).removesuffix(")").partition(" (at ")
        raise RecipeError(f"{file}: {where}: {what[0].lower()}{what[1:]}") from None
    except RecursionError:  # of Python's parser
        raise RecipeError(f"{file}: tables and lists are nested more than {DEEPEST} deep") from None
    except ValueError as error:  # from `plain`; and Python reads no number of thousands of digits
        raise RecipeError(f"{file}: {error}") from None
    document = _absences(with_current_keys({"name": _name_of(file)} | document, Recipe), Recipe)
    return _on_base(document, file) if "base" in document else document


def _name_of(file: File) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem)[:LONGEST_NAME]


def _on_base(document: dict[str, Any], file: File) -> Any:
    base = document.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"{file}: base: {base!r} is not the name of a recipe")
    if base.endswith(".toml"):
        base = str(file.parent / base)
    return _merged(plain(read_recipe(base)), document, Recipe)


def _from_function(text: str) -> Any:
    function = load_plugin(text, "recipe", passing=(RecipeError, ValidationError))
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise RecipeError(f"{text}: the function of a recipe is called without arguments: {error}") from None
    try:
        made = function()
    except ValidationError as error:
        raise explain(error, text) from None
    if not isinstance(made, (Recipe, dict)):
        raise RecipeError(f"{text}: returned {type(made).__name__}, not a Recipe or a dictionary")
    return with_current_keys(plain(made), Recipe)


def _validated(document: Any, source: str) -> Recipe:
    if isinstance(document, dict) and document.get("wire") == PLAN:  # in a word: everything of it is chosen
        document = document | {"wire": {"format": PLAN}}
    try:
        return Recipe.model_validate_json(json.dumps(plain(document)), strict=True)
    except ValidationError as error:
        raise explain(error, source) from None
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _changed(document: Any, changes: list[tuple[Path, Any]]) -> Any:
    """Names come first: a new one empties the options beside it, which another change may then fill."""
    for path, value in sorted(changes, key=lambda change: change[0][-1] != "name" and not _names(change[1])):
        for key in reversed(path):
            value = {key: value}
        document = _merged(document, with_current_keys(value, Recipe), Recipe)
    return document


def _names(value: Any) -> bool:
    return isinstance(value, Section) or (isinstance(value, dict) and "name" in value)


def _merged(base: Any, changes: Any, kind: Any) -> Any:
    if isinstance(changes, Section):
        return plain(changes)
    if not isinstance(base, dict) or not isinstance(changes, dict) or (is_table(kind) and not changes):
        return changes
    if "options" in base and changes.get("name", base.get("name")) != base.get("name"):
        base = base | {"options": {}}
    return base | {key: _merged(base.get(key), value, kind_inside(kind, key)) for key, value in changes.items()}


def _absences(value: Any, kind: Any) -> Any:
    """TOML has no None: where a key may be absent, "none" says that it is."""
    if value == "none" and can_be_absent(kind):
        return None
    if isinstance(value, dict):
        return {key: _absences(entry, kind_inside(kind, key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_absences(entry, kind_inside(kind, index)) for index, entry in enumerate(value)]
    return value


def _override(text: str) -> tuple[Path, Any]:
    found = _OVERRIDE.fullmatch(text)
    if not found:
        raise RecipeError(f"a change is written key=value, say optimizer.lr=0.1, not {text!r}")
    parts = [part.strip() for part in re.findall(_PART, found[1])]
    if len(parts) > _MOST_PARTS:
        raise RecipeError(f"{text[:40]}...: a key has at most {_MOST_PARTS} parts, not {len(parts)}")
    path = _regrouped(tuple(part[1:-1] if part[0] in "\"'" else part for part in parts))
    if path == ("wire",) and found[2].strip().strip("\"'") == PLAN:
        path = ("wire", "format")  # the other keys of [wire] can be changed beside it
    return path, _value(found[2].strip(), kind_at(path), path)


def _regrouped(path: tuple[str, ...]) -> Path:
    """Names of layers have dots too: in `precision.layers.stem.conv.weights`, the layers are `stem.conv`."""
    for end in range(1, len(path)):
        kind = kind_at(path[:end])
        inside = kind_inside(kind, "")
        if is_table(kind) and inside is not Any:
            last = 1 if section_of(inside) is not None and len(path) > end + 1 else 0
            return (*path[:end], ".".join(path[end : len(path) - last]), *path[len(path) - last :])
    return path


def _value(text: str, kind: Any, path: Path) -> Any:
    """What a text says for a key of this kind, the one at `path`."""
    entries = next((get_args(each)[0] for each in choices(kind) if get_origin(each) is tuple), None)
    if can_be_absent(kind) and text in ("", "none", "None"):
        return None
    if not text:
        return {} if is_table(kind) and str not in choices(kind) else [] if entries is not None else ""
    value = _parsed(text.lower() if kind is bool else text, path)
    if is_text(kind) and not isinstance(value, str):
        return text
    if entries is not None and not isinstance(value, list):
        return [_value(part.strip(), entries, path) for part in text.split(",")]
    return _absences(value, kind)


def _parsed(text: str, path: Path) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return float(text) if _NUMBER.fullmatch(text) else text
    except RecursionError:  # of Python's parser
        raise RecipeError(f"{written(path)}: tables and lists are nested more than {DEEPEST} deep") from None
    except ValueError as error:  # Python reads no number of thousands of digits
        raise RecipeError(f"{written(path)}: {error}") from None
    return plain(document["value"], path) if len(document) == 1 else text
