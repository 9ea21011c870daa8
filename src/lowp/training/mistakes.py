"""A mistake in a recipe, said in one line: where it is, what was given, what is wanted, and what was probably meant.

    recipe aps8: optimizer.lr: 'fast' is not a number
    my.toml: precision.weigths: no such key; did you mean precision.weights?

pydantic finds the mistakes. It reports one for each alternative of a union, under a path with the alternative's name in it, and
one for a list as well as for its entry: here each mistake is told once, at the deepest key.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from lowp.names import did_you_mean, question
from lowp.training.keys import Path, all_keys, choices, kind_at, kind_inside, section_of, written
from lowp.training.recipe import Recipe, Section

_LIKELY = 0.6  # how alike a word and what was meant are at least, from 0 to 1
_NEAR = 0.1  # so much less alike a key of the same section may be
_MANY = 12  # keys, which are too many to list
_WANTED = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a string",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}
_PATTERNS = {r"^[\w.-]+$": "letters, digits, '_', '.' and '-'"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


class RecipeError(ValueError):
    """A recipe that cannot be run, in one line with the key's path."""


@contextmanager
def about(*path: str | int) -> Iterator[None]:
    """What goes wrong in here is wrong with the key at this path."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{written(path)}: {error}") from error.__cause__  # what a plugin raised, for --traceback


def explain(error: ValidationError, source: str) -> RecipeError:
    """What is wrong with the recipe from `source`: the first mistake, and how many more there are."""
    root, prefix = _root(error.title)
    found: dict[Path, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(prefix + _path(detail["loc"], root), []).append(dict(detail))
    deepest = {
        path: details
        for path, details in found.items()
        if not any(len(p) > len(path) and p[: len(path)] == path for p in found)
    }
    path, details = next(iter(deepest.items()))
    more = f" (and {len(deepest) - 1} more)" if len(deepest) > 1 else ""
    return RecipeError(f"{source}: {written(path) or 'a recipe'}: {_sentence(path, details)}{more}")


def nearest(word: str, known: Iterable[str], likely: float = _LIKELY) -> str:
    """`; did you mean 'poly'?`, or nothing where no word is near."""
    return f"; {hint}" if (hint := did_you_mean(word, known, likely=likely)) else ""


def _root(title: str) -> tuple[type[Section], Path]:
    """The section that failed, and where it is: users build sections by themselves too."""
    for path in all_keys():
        section = section_of(kind_at(path))
        if section is not None and section.__name__ == title:
            return section, path
    return Recipe, ()


def _path(location: tuple[Any, ...], root: type[Section]) -> Path:
    """pydantic's location without the names of a union's alternatives."""
    path: list[str | int] = []
    kind: Any = root
    parts = iter(location)
    for part in parts:
        path.append(part)
        kind = kind_inside(kind, part)
        if len(choices(kind)) > 1:
            next(parts, None)
    return tuple(path)


def _sentence(path: Path, details: list[dict[str, Any]]) -> str:
    """What is wrong with one key. Several details are the alternatives of a union, none of which fits."""
    detail = details[0]
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"no such key{_nearest_key(path, isinstance(given, dict))}"
    if kind == "missing":
        return "is missing"
    if kind == "literal_error":
        return _not_a_choice(path, given, context)
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"has {len(given)} entries, and {bound} are wanted"
    if kind == "finite_number":
        return f"{_shown(given)} is not a finite number"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"{_shown(given)} must be {words} {_number(context[bound])}"
    wanted = [_WANTED[each["type"].split("_")[0]] for each in details if each["type"].split("_")[0] in _WANTED]
    if context.get("pattern") in _PATTERNS:
        return f"{_shown(given)} must consist of {_PATTERNS[context['pattern']]}"
    if not wanted or "pattern" in context:
        return f"{_shown(given)}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    section = section_of(kind_at(path))
    hint = f"; {question([f'{written(path)}.name'])}" if section is not None and "name" in section.model_fields else ""
    return f"{_shown(given)} is not {' or '.join(wanted)}{hint}"


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _not_a_choice(path: Path, given: Any, context: dict[str, Any]) -> str:
    kind = kind_at(path)
    allowed = [str(each) for each in get_args(kind)] if get_origin(kind) is Literal else []
    listed = ", ".join(each or '""' for each in allowed) or context["expected"]
    return f"{_shown(given)} is not one of {listed}{nearest(str(given), allowed, 0.7)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest_key(path: Path, table: bool) -> str:
    """The keys most like an unknown one, in its own section rather than elsewhere; sections only if a table was given."""
    *here, word = path
    section = section_of(kind_at(tuple(here)))
    own = [(*here, name) for name in section.model_fields] if section is not None else []
    scores = {key: _likeness(str(word), str(key[-1])) for key in all_keys()}
    scores |= {key: _likeness(str(word), str(key[-1])) + _NEAR for key in own}
    scores = {key: score for key, score in scores.items() if table or section_of(kind_at(key)) is None}
    best = max(scores.values())
    if best >= _LIKELY + _NEAR:
        return "; " + question([written(key) for key, score in scores.items() if score == best][:3])
    return f"; there are {', '.join(str(key[-1]) for key in own)}" if 0 < len(own) <= _MANY else ""


def _likeness(word: str, key: str) -> float:
    """From 0 to 1. `learning_rate` is like `lr`, and `wd` like `weight_decay`: one is the other's initials."""
    if word.lower() == key:
        return 1.0
    short, long = sorted((word.lower(), key), key=len)
    if len(short) > 1 and short == "".join(part[:1] for part in long.split("_")):
        return 0.95
    return difflib.SequenceMatcher(None, word.lower(), key).ratio()
