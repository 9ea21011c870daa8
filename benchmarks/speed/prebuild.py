"""Fill the compiler's cache with all kernels that a run will need, in several processes at once.

Building the kernels one after the other takes most of a benchmark's time. What is timed later is not changed by this: the
cost of building is measured apart, in processes with a cache of their own (first_calls.py), and which of a kernel's variants is
the fastest is not decided here, on a GPU that the workers share.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.speed.candidates import formats, lowp_candidates
from benchmarks.speed.measure import FreshSizes, Stage

ROOT = Path(__file__).parents[2]
ELEMENTS = 3 << 16


def prebuild(device: str, workers: int, quick: bool, only: str | None, conv_net: bool) -> list[str]:
    """Run the workers and wait for them. Returns what the ones that failed had to say."""
    options = ["--device", device, "--workers", str(workers)]
    options += ["--quick"] if quick else []
    options += ["--only", only] if only else []
    commands = [["benchmarks.speed.prebuild", *options, "--worker", str(i)] for i in range(workers)]
    commands += [["benchmarks.speed.conv_net"]] if conv_net else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = [process.communicate()[1] for process in running]
    return [error.strip().splitlines()[-1] for process, error in zip(running, errors, strict=True) if process.returncode]


def tune_later() -> None:
    """Let every process that loads a kernel from the cache choose among its variants by itself."""
    from torch._inductor import config

    config.autotune_local_cache = False


def _work(device: torch.device, quick: bool, only: str | None, worker: int, workers: int) -> None:
    tune_later()
    stage = Stage(device, ELEMENTS, rounds=1)
    for fmt in formats(device, quick, only)[worker::workers]:
        for candidate in lowp_candidates(fmt, stage):
            candidate.call(FreshSizes(ELEMENTS, candidate.unit).take())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--workers", type=int)
    _work(**vars(parser.parse_args()))
