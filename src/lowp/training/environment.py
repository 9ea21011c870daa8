"""Where a run took place: what somebody needs to know who gets other numbers, or another speed, from the same recipe."""

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lowp.version import __version__

GIT_SECONDS = 5  # on a network file system, looking for changes may take long; the run does not wait for it


def environment() -> dict[str, Any]:
    """The machine, the versions, the commit of the current directory's repository, the command line, the time."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "host": platform.node(),
        "machine": platform.machine(),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "gpu": gpus,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if gpus else None,
        "lowp": __version__,
        "git_commit": _git_commit(),
    }


def processor_name() -> str:
    """The model's name. platform.processor() gives only the architecture on Linux, or nothing."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """The whole hash, with `-dirty` behind it if tracked files have changed. None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
