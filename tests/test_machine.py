"""Without what Linux has and others may lack: affinity, locks on files, /proc and /sys."""

import os
import subprocess
import sys
from pathlib import Path

import lowp

SCRIPT = """
import builtins, io, os, pathlib, sys
import torch
del os.sched_getaffinity
sys.modules["fcntl"] = None  # import fcntl: ImportError
opened = io.open

def without_proc(file, *more, **named):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return opened(file, *more, **named)

builtins.open = io.open = without_proc
pathlib.io.open = without_proc
import lowp
from lowp.machine import HAS_LOCKS, usable_cores
assert not HAS_LOCKS and usable_cores() == os.cpu_count()
assert lowp.quantize(torch.tensor([3.3]), "e4m3fn").item() == 3.25
small = {"epochs": 1, "data.limit": 64, "batch": 64, "model.options.hidden": [4], "device": "cpu"}
result = lowp.train("aps8", small, virtual_ranks=2, out="run", quiet=True)
assert result.state == "finished" and result.run.state == "finished"
print("done")
"""


def test_without_what_linux_has(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(lowp.__file__).parents[1]), "LOWP_KERNELS": "never"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_this_machine():
    from lowp.machine import usable_cores

    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
