"""Triton's interpreter: kernels for CUDA run on a CPU, in a program of their own.

The interpreter must be chosen before Triton is imported, and it wants an older numpy. So tests start a program, with what
`make setup` has put into its own folder of the virtual environment.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not FOLDER.exists(), reason=f"Triton is not in {FOLDER}: make setup")


def run(program: str, timeout: float = 280) -> None:
    """Run a file of the tests by itself; an error where it fails."""
    paths = [str(FOLDER), str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent), str(Path(program).parent)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
