"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU run at the same time.

Without it processes take turns of some milliseconds, and a rank's kernel waits while another rank's NCCL kernel, which waits
for it, has the GPU. Ranks with a GPU each do not wait for that.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps() -> Iterator[None]:
    """The service, for processes that are started within."""
    if shutil.which(CONTROL) is None:
        raise FileNotFoundError(f"{CONTROL} is not on the PATH: run without --mps")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        subprocess.run([CONTROL, "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, timeout=60, check=False)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
