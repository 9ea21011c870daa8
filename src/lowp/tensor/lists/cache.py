"""Where compiled kernels are kept between processes.

What lies here is loaded and run, so it must be this user's, and writable by nobody else: the folder, and each file.

1. The folder is opened once, and checked by what was opened: its owner and its mode. Files are then reached through it, not by
   their path. Where somebody else may rename a folder above it, he gains nothing: what he puts there is refused for its owner.
2. A file ends in the SHA-256 of what is before (a loader of libraries does not look behind their end). One that was cut off or
   damaged, by a full disk or a crash, is made again: to load it would end the process.
3. A new file is written under another name, for this user alone, and renamed: others see it whole or not at all.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lowp.machine import try_lock

OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
DIGEST = hashlib.sha256().digest_size
LONGEST_WAIT = 120  # seconds, for another process to make a file


class UnsafeCache(PermissionError):
    """Somebody else could have put a library there. Nothing of it was loaded."""


def load_library(name: str, make: Callable[[], bytes]) -> ctypes.CDLL:
    """The library of that name, which `make` compiles if it is not there, or not whole. A name stands for one content."""
    with _cache() as (folder, path):
        os.close(_found_or_made(folder, name, path, make))
        return ctypes.CDLL(f"/proc/self/fd/{folder}/{name}" if os.path.isdir("/proc/self/fd") else f"{path}/{name}")


def open_file(name: str, make: Callable[[], bytes] | None) -> int | None:
    """A descriptor of the file of that name, which is made as a library is; None where it is not there, and not to be made."""
    with _cache() as (folder, path):
        return _whole(folder, name, path) if make is None else _found_or_made(folder, name, path, make)


@contextmanager
def _cache() -> Iterator[tuple[int, str]]:
    path = cache_folder()
    folder = _open_folder(path)
    try:
        yield folder, path
    finally:
        os.close(folder)


def _found_or_made(folder: int, name: str, path: str, make: Callable[[], bytes]) -> int:
    """A descriptor of the file. Of processes that need it at once, one makes it."""
    file = _whole(folder, name, path)
    if file is None:
        with _alone(folder, f".{name}.lock"):
            file = _whole(folder, name, path)
            if file is None:
                _write(folder, name, make())
                file = _whole(folder, name, path)
    if file is None:
        raise OSError(errno.EIO, "what was written is not what was read back", f"{path}/{name}")
    return file


@contextmanager
def _alone(folder: int, name: str) -> Iterator[None]:
    """Others who come here wait, but not for ever, and not where a disk has no locks: to make a file twice does no harm."""
    lock = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < deadline:
            try:
                try_lock(lock)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(lock)


def check_cache() -> None:
    """OSError where kernels cannot be kept: the folder is somebody else's, or nothing can be written there."""
    folder = _open_folder(cache_folder())
    try:
        if not os.access(cache_folder(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cache_folder())
    finally:
        os.close(folder)


def cache_folder() -> str:
    """LOWP_CACHE, which may be a symbolic link of the user's, or a folder among temporary files, which may not be one."""
    named = os.environ.get("LOWP_CACHE")
    return os.path.realpath(named) if named else os.path.join(tempfile.gettempdir(), f"lowp-kernels-{os.getuid()}")


def _open_folder(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafeCache(
                f"the kernel cache {path} is a link or a file, not a folder: remove it, or set LOWP_CACHE"
            ) from None
        raise
    try:
        _check(os.fstat(folder), f"the kernel cache {path}")
    except UnsafeCache:
        os.close(folder)
        raise
    return folder


def _check(found: os.stat_result, what: str) -> None:
    if found.st_uid not in (os.getuid(), 0):
        raise UnsafeCache(f"{what} belongs to user {found.st_uid}: remove it, or set LOWP_CACHE to a folder of your own")
    if found.st_mode & OF_OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafeCache(
            f"{what} can be written by others (mode {mode:o}): remove it, or set LOWP_CACHE to a folder of your own"
        )


def _whole(folder: int, name: str, path: str) -> int | None:
    """A descriptor of the file, if it is there, nobody else's, and as it was written."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsafeCache(f"the kernel {path}/{name} cannot be opened ({error.strerror}): remove it") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeCache(f"the kernel {path}/{name} is not a file: remove it")
        _check(found, f"the kernel {path}/{name}")
        with open(file, "rb", closefd=False) as opened:
            content = memoryview(opened.read())
        whole = hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
    except BaseException:
        os.close(file)
        raise
    if whole:
        return file
    os.close(file)
    return None


def _write(folder: int, name: str, content: bytes) -> None:
    partial = f".{name}.{secrets.token_hex(8)}"
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as opened:
            opened.write(content + hashlib.sha256(content).digest())
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):  # the error above is the one to tell
            os.unlink(partial, dir_fd=folder)
        raise
