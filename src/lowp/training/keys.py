"""The keys of a recipe: which there are, what each holds, how a path to one is written.

A path is a tuple: field names of sections, keys of tables, indices of lists. It is written with dots, as TOML does:
`precision.schedule[0].weights`, `wire.layers."fc.*"`.
"""

import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lowp.training.recipe import Recipe, Section

Path = tuple[str | int, ...]
BARE = re.compile(r"[A-Za-z0-9_-]+")  # what TOML takes for a key without quotes


def written(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if BARE.fullmatch(part) else _quoted(part))
    return text


def _quoted(key: str) -> str:
    """As TOML writes it; in an error it must not break the line."""
    return json.dumps(key, ensure_ascii=not key.isprintable())


def choices(kind: Any) -> tuple[Any, ...]:
    """What a key may hold, None aside: (str, float) for `str | float`."""
    union = get_origin(kind) in (Union, UnionType)
    return tuple(each for each in get_args(kind) if each is not NoneType) if union else (kind,)


def can_be_absent(kind: Any) -> bool:
    return NoneType in get_args(kind)


def is_text(kind: Any) -> bool:
    """Does a key hold text and nothing else?"""
    return all(each is str or get_origin(each) is Literal for each in choices(kind))


def section_of(kind: Any) -> type[Section] | None:
    """The section that a key holds, if it holds one."""
    return next((each for each in choices(kind) if isinstance(each, type) and issubclass(each, Section)), None)


def is_table(kind: Any) -> bool:
    """Does a key hold a table whose keys are the user's own?"""
    return any(get_origin(each) is dict for each in choices(kind))


def kind_inside(kind: Any, key: str | int) -> Any:
    """What the key of a section, a table or a list holds; None if it has no such key, or the schema does not say."""
    section = section_of(kind)
    if section is not None:
        return section.model_fields[key].annotation if key in section.model_fields else None
    for each in choices(kind):
        if get_origin(each) is dict:
            return get_args(each)[1]
        if get_origin(each) is tuple and isinstance(key, int):
            return get_args(each)[0]
    return None


def kind_at(path: Path) -> Any:
    kind: Any = Recipe
    for key in path:
        kind = kind_inside(kind, key)
    return kind


def all_keys(section: type[Section] = Recipe, prefix: Path = ()) -> Iterator[Path]:
    """Every key of the schema, sections too, in its order; not what is inside lists and tables."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from all_keys(inner, (*prefix, name))
