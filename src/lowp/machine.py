"""What the operating system may or may not have: the cores of a process, locks on files. (Linux has all; macOS no affinity.)"""

import os
from typing import IO, Any

try:
    import fcntl
except ImportError:  # no Unix
    fcntl: Any = None


def usable_cores() -> int:
    """The cores that this process may use, where the system tells; otherwise all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def try_lock(file: "IO[Any] | int", *, shared: bool = False) -> None:
    """Take the kernel's lock on a file or a descriptor, which is gone when the process is; OSError where another has it.

    Where the system has no such locks nothing is taken: two processes in one directory are then the user's to avoid.
    """
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


HAS_LOCKS = fcntl is not None
