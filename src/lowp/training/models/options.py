"""What the options of a model can be, read from its function's annotations.

Whole numbers are sizes: at least 1, and not so large that building the model would not end. Other numbers are rates of dropout:
at least 0 and below 1. What options cannot be together (a width and its heads), the function itself says.
"""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 1 << 20  # size of a layer
MOST = 1 << 10  # layers

_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_options(model: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """ValueError with the option's name for the first one that cannot be. Options that there are not are left to others."""
    kinds = get_type_hints(function)
    for name, value in options.items():
        if name in kinds and (wrong := _wrong(name, value, kinds[name])):
            raise ValueError(f"model {model!r}: the option {name} {wrong}")


def _wrong(name: str, value: Any, kind: Any) -> str:
    """Why the value cannot be, as the rest of a sentence; nothing if it can."""
    alternatives = [kind] if kind in _WANTED or get_origin(kind) is Sequence else list(get_args(kind))
    if value is None and NoneType in alternatives:
        return ""
    lists = [each for each in alternatives if get_origin(each) is Sequence]
    single = [each for each in alternatives if each in _WANTED]
    if lists and (isinstance(value, (list, tuple)) or not single):
        if not isinstance(value, (list, tuple)):
            return f"must be a list, not {value!r}"
        if len(value) > MOST:
            return f"has {len(value)} entries; at most {MOST} are possible"
        (entry,) = get_args(lists[0])
        return next((wrong for each in value if (wrong := _wrong_entry(name, each, entry))), "")
    return _wrong_entry(name, value, single[0])


def _wrong_entry(name: str, value: Any, kind: type) -> str:
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        return f"must be {_WANTED[kind]}, not {value!r:.60}"
    largest = MOST if name == "layers" else LARGEST
    if kind is int and not 1 <= value <= largest:
        return f"must be from 1 to {largest:,}, not {value!r:.60}"
    if kind is float and not 0 <= value < 1:
        return f"must be at least 0 and below 1, not {value!r:.60}"
    return ""
