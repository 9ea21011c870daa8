"""How to call the `lowp` command from the shell that this process was started in.

A command that is printed must work as it is printed. In a virtual environment that is not active, `lowp` is not on the PATH,
and the command is `.venv/bin/lowp`; after `python -m lowp` it is `python -m lowp`.
"""

import os
import shlex
import shutil
import sys
from functools import cache

VARIABLE = "LOWP_COMMAND"  # the environment variable that tells ranks, which are no commands of a user, what he called


def command(*arguments: object) -> str:
    """The text to type: `command("train", "aps8")` is `lowp train aps8`, `.venv/bin/lowp train aps8` ..."""
    return " ".join((program(), *(shlex.quote(str(argument)) for argument in arguments)))


@cache
def program() -> str:
    """How `lowp` itself is called."""
    if told := os.environ.get(VARIABLE):
        return told
    called = sys.argv[0] if getattr(sys, "argv", None) else ""
    name = os.path.basename(called)
    if name == "lowp":  # a script; found on the PATH, Python has its whole path, and otherwise what was typed
        return "lowp" if _same(shutil.which("lowp"), called) else shlex.quote(called)
    script = os.path.join(os.path.dirname(sys.executable), "lowp")
    if name not in ("__main__.py", "-m") and _same(shutil.which("lowp"), script):
        return "lowp"
    return f"{_python()} -m lowp"


def _python() -> str:
    for name in ("python", "python3"):
        if _same(shutil.which(name), sys.executable):
            return name
    path = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if path.startswith("..") else path)


def _same(found: str | None, path: str) -> bool:
    """One place? Links are not followed: the interpreters of all virtual environments link to one."""
    return found is not None and os.path.abspath(found) == os.path.abspath(path)
