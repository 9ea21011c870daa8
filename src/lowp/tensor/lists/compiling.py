"""One run of the C++ compiler.

**Headers.** Half of g++'s time for a usual kernel goes to the headers that every text begins with: they are 80,000 lines. GCC
can keep them as it has read them, in a file of 38 MB that takes longer to make than a kernel. So the first process that
compiles a second kernel makes it, and all later ones use it. It lies in the kernel cache, under the rules of cache.py. A
library is the same with it and without it, byte for byte. GCC leaves it aside by itself if it does not fit the command; where
a compiler fails with it, or makes no such file (clang has its own kind), kernels are compiled without.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lowp.tensor.lists.cache import UnsafeCache, cache_folder, open_file
from lowp.tensor.lists.preamble import HEADERS

_OF_GCC = b"gpch"  # what its precompiled headers begin with
_ROOM = 500_000_000  # bytes: on a smaller disk kernels need the room
_compiled_before = False


def compiled(command: list[str], text: str, machine: str) -> bytes:
    """The library that a compiler's command makes of a text; `machine` is what -march=native depends on."""
    global _compiled_before
    headers, _compiled_before = _headers(cache_folder(), tuple(command), machine, _compiled_before), True
    if headers is not None:
        with suppress(RuntimeError):  # where it is not for the headers, it comes again
            return _library(command, text, headers)
    return _library(command, text, None)


def _library(command: list[str], text: str, headers: int | None) -> bytes:
    with tempfile.TemporaryDirectory(prefix="lowp-build-") as folder:
        if headers is None:
            return _run(command, text, Path(folder) / "kernel.cpp")
        # The file that was checked, whatever lies under its name by now.
        (Path(folder) / "headers.h.gch").symlink_to(f"/proc/self/fd/{headers}")
        (Path(folder) / "headers.h").write_text(HEADERS, encoding="utf-8")
        return _run([*command, "-include", f"{folder}/headers.h"], text, Path(folder) / "kernel.cpp", headers)


@lru_cache(maxsize=8)
def _headers(cache: str, command: tuple[str, ...], machine: str, make: bool) -> int | None:
    """A descriptor of the precompiled headers for a command. None: there are none, or they are not to be made yet."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    found = os.stat(shutil.which(command[0]) or command[0])
    what = [HEADERS, machine, *command, str(found.st_mtime_ns), str(found.st_size)]  # GCC knows its own version's file only
    name = f"headers-{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:32]}.gch"
    try:
        headers = open_file(name, (lambda: _precompiled(command)) if make and _has_room(cache) else None)
    except UnsafeCache:
        raise
    except (OSError, RuntimeError):
        return None
    if headers is not None and os.pread(headers, len(_OF_GCC), 0) != _OF_GCC:
        os.close(headers)
        return None
    return headers


def _has_room(cache: str) -> bool:
    return shutil.disk_usage(cache).free > _ROOM


def _precompiled(command: tuple[str, ...]) -> bytes:
    """The headers as GCC keeps them; nothing where the compiler is another one. That is kept, too: nobody tries again."""
    with tempfile.TemporaryDirectory(prefix="lowp-build-") as folder:
        made = _run([*command, "-x", "c++-header"], HEADERS, Path(folder) / "headers.h")
    return made if made.startswith(_OF_GCC) else b""


def _run(command: list[str], text: str, written: Path, *inherited: int) -> bytes:
    """What the compiler makes of a text. It is a group of processes of its own: Ctrl-C on the terminal is for this process to
    hear, which may have a step to finish first, and ends all of them if it is to end at once."""
    written.write_text(text, encoding="utf-8")
    made = written.with_suffix(".out")
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        started.append(
            subprocess.Popen(
                [*command, str(written), "-o", str(made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                process_group=0,
                pass_fds=inherited,
            )
        )

    # By another thread: Ctrl-C interrupts the main one, within Popen as well, which would leave the process behind.
    with ThreadPoolExecutor(1) as other:
        try:
            other.submit(start).result()
            said = started[0].communicate(timeout=300)[1]
        except BaseException:
            other.shutdown()  # waits for `start`
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            raise
    if started[0].returncode:
        raise RuntimeError(f"{command[0]} could not compile a kernel: {said[:2000]}")
    return made.read_bytes()
