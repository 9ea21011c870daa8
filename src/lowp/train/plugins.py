"""What a recipe names by `module:function`: a model, a data set, a hook, in the user's own code."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_plugin(name: str) -> bool:
    return ":" in name


def load_plugin(name: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` names. The current directory counts, as with `python -m`."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{what} {name!r} must be written module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"{what} {name!r}: there is no module {module_name!r} here or on the Python path") from None
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        public = ", ".join(
            sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))[:10]
        )
        raise ValueError(f"{what} {name!r}: {module_name} has no function {function_name!r}; it has {public or 'none'}")
    return function
