"""Files that are whole or not there, whatever happens to the process or the machine while they are written.

A new file is written under another name, forced to the disk (fsync) and only then renamed, which a file system does at once or
not at all; then the directory is forced too, since it is the directory that holds the name.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def explained(kind: type[OSError], doing: str) -> Iterator[None]:
    """Errors of the system become `kind`, and say what could not be done, to which file, and why."""
    try:
        yield
    except kind:
        raise  # explained already
    except OSError as error:
        where = f" ({error.filename})" if error.filename and not doing.endswith(str(error.filename)) else ""
        raise kind(f"cannot {doing}{where}: {error.strerror or error}") from error


def write_file(path: Path, content: bytes) -> None:
    """The file is on the disk when this returns; until then it may be there in part."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """The file has the old content or the new one at every moment. For one writer at a time."""
    partial = partial_of(path)
    try:
        write_file(partial, content)
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # the error above is the one to tell
            partial.unlink()
        raise
    sync_directory(path.parent)


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """With its parents; each is on the disk when this returns."""
    if path.is_dir():
        return
    if path != path.parent:
        make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # else another process was faster
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_directory(path.parent)
