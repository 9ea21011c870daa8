"""What a recipe names by `module:function`: a model, a data set, a hook, in the user's own code.

Such code can raise anything, at import, when it is called, or in the middle of training. The user then gets one line that names
the plugin, its error, and the line of the user's own code where it happened; the error itself is the cause of the one raised
here, so that `lowp --traceback` prints all of it.
"""

import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lowp.training.torch_settings import torch_unchanged

_LONGEST = 300  # characters of an error's own message that are repeated
_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_USERS = tuple(  # folders of code that is called by a plugin, or calls it
    str(Path(folder).resolve())
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)


class PluginError(ValueError):
    """What code that a recipe names has raised, in one line."""


def is_plugin(name: str) -> bool:
    return ":" in name


def load_plugin(name: str, what: str, passing: tuple[type[Exception], ...] = ()) -> Callable[..., Any]:
    """The function that `module:function` names. The current directory counts, as with `python -m`. What the module sets in
    torch when it is imported (a default dtype, say) is undone: it would hold for the first run of a process alone.

    Whatever the function raises when it is called is a PluginError, but for the kinds in `passing`.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{what} {name!r} must be written module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with torch_unchanged(), blamed(f"{what} {name!r}", (ModuleNotFoundError,)):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"{what} {name!r}: there is no module {module_name!r} here or on the Python path") from None
        raise _named(error, f"{what} {name!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = ", ".join(
            sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))[:10]
        )
        raise ValueError(f"{what} {name!r}: {module_name} has no function {function_name!r}; it has {public or 'none'}")
    with blamed(f"{what} {name!r}"):
        inspect.signature(function)  # who calls it asks for it; some of Python's own functions have none

    @functools.wraps(function, updated=())
    def call(*arguments: Any, **options: Any) -> Any:
        with blamed(f"{what} {name!r}", passing):
            return function(*arguments, **options)

    return call


class blamed:  # noqa: N801  # a context, used like a function
    """What goes wrong in here is wrong with `what`. An error that names a plugin already stays as it is.

    It has no state and can be entered many times: steps enter one.
    """

    def __init__(self, what: str, passing: tuple[type[Exception], ...] = ()) -> None:
        self._what, self._passing = what, (PluginError, *passing)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # SystemExit: a module that calls sys.exit() would end the command without a word.
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, self._passing):
            raise _named(error, self._what) from error


def _named(error: BaseException, what: str) -> PluginError:
    lines = str(error).strip().splitlines()
    message = f": {lines[0][:_LONGEST]}" if lines else ""
    return PluginError(f"{what}: {type(error).__name__}{message}{_place(error)}")


def _place(error: BaseException) -> str:
    """` (file.py:7)`: the innermost line that is the user's; nothing where all of it happened in torch, say."""
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # Python's own message has file and line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_users(frame.filename)]
    if not frames:
        return ""
    file = Path(frames[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f" ({shown}:{frames[-1].lineno})"


def _is_the_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    file = Path(filename).resolve()
    stdlib = _NOT_THE_USERS[-1]
    return not any(
        file.is_relative_to(folder) and not (folder == stdlib and any(part in _INSTALLED for part in file.parts))
        for folder in _NOT_THE_USERS
    )
