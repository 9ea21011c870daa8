"""What a first call costs, with the compiler's cache empty and full; and that new sizes cost nothing.

Run as a script it is the fresh process that is measured: it prints the seconds of each first step as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "e4m3fn", "e3m4"
NEW_SIZES = 40
NEW_SIZES_FORMAT = "e6m9"  # not timed later: a kernel is tuned on the first size that it meets


def cold_and_warm(device: str) -> dict[str, dict[str, float]]:
    """Seconds of the first calls in a new process: twice, with one cache directory that is empty the first time."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, "-m", "benchmarks.speed.first_calls", "--device", device]
        results = {}
        for label in ("cold", "warm"):
            output = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[label] = json.loads(output.strip().splitlines()[-1])
    return results


def builds_for_new_sizes(device: str) -> int:
    """How many kernels are built while a format that is known meets sizes, large and small, that it has not seen."""
    import torch

    import lowp

    x = torch.randn(1 << 20, device=device)
    lowp.quantize(x, NEW_SIZES_FORMAT)
    before = lowp.kernel_info()["built"]
    for k in range(1, NEW_SIZES + 1):
        lowp.quantize(x[k : -11 * k], NEW_SIZES_FORMAT)
        lowp.quantize(x[: 7 * k], NEW_SIZES_FORMAT)
        lowp.quantize(x[: 1000 * k].view(k, 10, 100).transpose(0, 1), NEW_SIZES_FORMAT)
    return lowp.kernel_info()["built"] - before


def _probe(device: str) -> dict[str, float]:
    steps = {}
    began = time.perf_counter()

    def step(name: str) -> None:
        nonlocal began
        steps[name] = round(time.perf_counter() - began, 3)
        began = time.perf_counter()

    import torch

    step("import torch")
    import lowp

    step("import lowp")
    x = torch.randn(1 << 20, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    step("start the device")
    small = lowp.quantize(x[:1000], FIRST)
    small.cpu()
    step("first call, 1000 elements")
    lowp.quantize(x, FIRST).cpu()
    step("first large call (imports the compiler)")
    lowp.quantize(x, SECOND).cpu()
    step("first large call of a second format")
    lowp.quantize(x, SECOND, "stochastic", seed=1).cpu()
    step("and stochastic")
    return steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    print(json.dumps(_probe(parser.parse_args().device)))
