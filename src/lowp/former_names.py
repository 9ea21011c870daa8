"""Names that have changed. The old ones are understood for one version, each with a FutureWarning that says the new one.

A word that had two meanings has one now:

- `accumulate` is the format of sums inside matrix products (`lowp.matmul`, `lowp.simulate`, `precision.accumulate`). The format
  of sums on the wire is `sum_format`. How many parts a rank's share of a batch is divided into is `micro_batches`.
- `hybrid` is a recipe. The reduction that treats small and large buckets differently is `by_size`.
- `simulate` is a function. The recipe is `posit8`, after its format, as `fp32`, `fp8` and `posit8-quire` are.

When the old names go, this file goes, and what imports it shows where they were understood.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

ARGUMENTS_OF_THE_WIRE = {"accumulate": "sum_format"}  # of compress_gradients and its like, and keys of a recipe's [wire]
KEYS_OF_A_RECIPE = {"accumulate": "micro_batches"}
REDUCTIONS = {"hybrid": "by_size"}
RECIPES = {"simulate": "posit8"}

OLD_NAME = "lowp 0.2 will not know the old name"  # the end of every warning

P = ParamSpec("P")
Result = TypeVar("Result")


def current(name: str, names: Mapping[str, str], what: str, where: str = "") -> str:
    """The name of today. For the warning: `what` it is a name of, and `where`."""
    if name not in names:
        return name
    _warn(f"the {what} {name!r}{where} is called {names[name]!r} now; {OLD_NAME}")
    return names[name]


def with_current_names(given: Mapping[str, Any], names: Mapping[str, str], what: str, where: str = "") -> dict[str, Any]:
    """The same arguments or keys, under their names of today, in the same order."""
    if both := next((old for old, new in names.items() if old in given and new in given), None):
        raise ValueError(f"the {what} {both!r}{where} is the old name of {names[both]!r}: give one of them")
    return {current(name, names, what, where): value for name, value in given.items()}


def recipe_of_today(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a run that was made before, to be shown beside others. No warning: nobody has written it."""
    found = {KEYS_OF_A_RECIPE.get(key, key): value for key, value in saved.items()}
    if isinstance(wire := found.get("wire"), dict):
        found["wire"] = {ARGUMENTS_OF_THE_WIRE.get(key, key): value for key, value in wire.items()}
        if "reduction" in wire:
            found["wire"]["reduction"] = REDUCTIONS.get(wire["reduction"], wire["reduction"])
    return found


def former(name: str, names: Mapping[str, str]) -> str:
    """The name that it had before, for what was saved then."""
    return next((old for old, new in names.items() if new == name), name)


def with_former_names(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {former(name, names): value for name, value in given.items()}


def renamed_arguments(names: Mapping[str, str]) -> "Callable[[Callable[P, Result]], Callable[P, Result]]":
    """A function that also takes arguments by their old names. Its signature shows only those of today."""

    def decorate(function: "Callable[P, Result]") -> "Callable[P, Result]":
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            if names.keys().isdisjoint(kwargs):
                return function(*args, **kwargs)
            return function(*args, **with_current_names(kwargs, names, "argument"))  # type: ignore[arg-type]

        return call

    return decorate


def _warn(text: str) -> None:
    """At the line of the user's program that says the old name."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("lowp", "pydantic"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FutureWarning, stacklevel=level)
