"""The table of named recipes, and how one is entered."""

from collections.abc import Callable

from lowp.training.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {}


def named(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Enter a recipe under its function's name, with - for _."""
    name = function.__name__.replace("_", "-")

    def complete() -> Recipe:
        return function().model_copy(update={"name": name, "description": (function.__doc__ or "").splitlines()[0]})

    complete.__doc__ = function.__doc__
    RECIPES[name] = complete
    return complete
