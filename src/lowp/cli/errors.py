"""A user's mistake is one line on stderr and exit code 2, never a traceback; so is Ctrl-C, with exit code 130.

A name that has changed is one line too.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from lowp.former_names import OLD_NAME
from lowp.starting import INTERRUPTED, has_ended, has_started

TRACEBACK = "LOWP_TRACEBACK"  # the environment variable that stands for --traceback
USER_ERRORS = (ValueError, TypeError, OSError)  # what the library raises when it is asked for something impossible


def one_line(error: Exception) -> str:
    """The message, on one line; for the system's errors the file first, as other Unix tools have it."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _out_of_memory(error: Exception) -> bool:
    """Was more memory asked for than there is? torch says so with a RuntimeError: on CUDA with its own, on a CPU in words."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _flags_without_value(params: Any) -> Any:
    """`--json`, and not `--json <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """What is written for users, such as that a name has changed, without the line of ours that found it."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is FutureWarning and str(message).endswith(OLD_NAME):
            typer.echo(f"lowp: {message}", err=True)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class OneLineErrors(TyperGroup):
    """The group of all commands. `lowp --traceback ...` lets the exception through. Flags are shown without a value."""

    def get_params(self, ctx: Any) -> Any:
        return _flags_without_value(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and "get_params" not in vars(command):
            all_of_it = command.get_params
            vars(command)["get_params"] = lambda ctx: _flags_without_value(all_of_it(ctx))
        return command

    def invoke(self, ctx: Any) -> Any:  # typer keeps its own kind of context to itself
        try:
            has_started()
            with _warnings_in_one_line():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("lowp: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # `lowp formats | head` is no mistake; typer ends quietly
        except (*USER_ERRORS, RuntimeError, MemoryError) as error:
            if ctx.params.get("traceback") or not (isinstance(error, USER_ERRORS) or _out_of_memory(error)):
                raise
            typer.echo(f"lowp: {one_line(error)}", err=True)
            raise typer.Exit(2) from None
        finally:
            has_ended()
