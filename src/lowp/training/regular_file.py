"""Files that a recipe names, opened with care: a pipe or a device may never end, and a file may be larger than memory."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lowp.training.units import bytes_text

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path, largest: int) -> BinaryIO:
    """The file at `path`, for reading. ValueError, `path: why`, if it is no regular file or has more than `largest` bytes.

    A pipe that nobody writes to would block `open` itself, unless it is opened without waiting. For a regular file that flag
    does nothing.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ValueError(f"{path}: {_why(path, error)}") from None
    except ValueError:  # a null byte
        raise ValueError(f"{str(path)!r}: is not a path") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise ValueError(f"{path}: is {kind_of(found.st_mode)}, not a regular file")
    if found.st_size > largest:
        os.close(handle)
        raise ValueError(f"{path}: has {bytes_text(found.st_size)}, and at most {bytes_text(largest)} are read")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, largest: int) -> bytes:
    with open_regular(path, largest) as file:
        return file.read(largest)


def check_regular(path: Path) -> None:
    """ValueError if something else is there than a regular file. Nothing at all may be there."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # not there, or no path: who opens it will say so
        return
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: is {kind_of(mode)}, not a regular file")


def kind_of(mode: int) -> str:
    return next((name for is_one, name in _KINDS if is_one(mode)), "something else")


def _why(path: Path, error: OSError) -> str:
    """A socket cannot be opened at all, and the system's words for it do not say why."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return error.strerror or str(error)
    return (error.strerror or str(error)) if stat.S_ISREG(mode) else f"is {kind_of(mode)}, not a regular file"


def user_path(text: str) -> Path:
    """The path that a user writes, with ~ for a home directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text}: there is no such user") from None
