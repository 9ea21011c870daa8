"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU run at the same time.

Without it processes take turns of some milliseconds, and a rank's kernel waits while another rank's NCCL kernel, which waits
for it, has the GPU. Ranks with a GPU each do not wait for that.
"""

import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("lowp")
CONTROL = "nvidia-cuda-mps-control"
COMMAND = CONTROL[:15]  # what the kernel keeps of the name, of the servers' too
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
SECONDS = 10.0  # for the service to end by itself


@contextmanager
def mps() -> Iterator[None]:
    """The service, for processes that are started within."""
    if shutil.which(CONTROL) is None:
        raise FileNotFoundError(f"{CONTROL} is not on the PATH: run without --mps")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = (FOLDER, "CUDA_MPS_LOG_DIRECTORY")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        subprocess.run([CONTROL, "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            _end(folder)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _end(folder: str) -> None:
    """`quit` waits for all clients, also for some that were killed, of which it did not hear: then it is killed too."""
    try:
        subprocess.run([CONTROL], input="quit\n", text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        logger.info("%s did not end within %g s, and is killed", CONTROL, SECONDS)
        for pid in _processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes(folder: str) -> list[int]:
    """The service's own, of this folder: the control process and its servers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            ours = f"{FOLDER}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")
            if ours and (process / "comm").read_text(encoding="utf-8", errors="replace").strip() == COMMAND:
                found.append(int(process.name))
    return found
