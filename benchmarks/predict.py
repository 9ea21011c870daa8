"""How long predictions take: 4,096 ranks x 20 codecs, wanted under 2 s on one core.

    python -m benchmarks predict            ten seconds
    python -m benchmarks predict --quick    once

ResNet-50 on 1, 2, 4 ... 4,096 ranks of DGX A100 nodes, 20 codecs, in a process that has predicted nothing before (patterns of
messages are counted) and in one that has. Seconds of the processor.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import RESULTS, facts_of, heading, table, write

CODECS = (
    "fp32", "fp16", "bf16", "e5m2/aps", "e5m2/local", "e5m2/none", "e4m3fn/local", "e4m3fn/aps", "e2m1fn/block:32",
    "int8/block:256", "int4/block:32", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "adaptive:4.4", "adaptive:2.4",
    "topk:0.01", "nf4/block:32", "posit8",
)  # fmt: skip
WANTED = 2.0
REDUCTIONS = ("two_shot", "hierarchical", "ring")


def wires(reduction: str) -> list[str]:
    return [codec if codec in ("fp32", "fp16", "bf16") else f"{codec}@{reduction}" for codec in CODECS]


def measure(reduction: str) -> None:
    """In a process of its own: print the seconds of the first and of the second time."""
    import torch

    from lowp.predict.architectures import workload_of
    from lowp.predict.cluster_file import cluster_of
    from lowp.predict.prediction import predict

    torch.set_num_threads(1)
    workload, cluster = workload_of("resnet50"), cluster_of("dgx-a100")
    for _ in range(2):
        began = time.process_time()
        predict(workload, cluster, wires(reduction), "1:4096", batch=64)
        print(time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one reduction: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    rows = []
    for reduction in REDUCTIONS[: 1 if options.quick else None]:
        command = [sys.executable, "-m", "benchmarks", "predict", "--measure", reduction]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
        first, again = (float(line) for line in said.split())
        rows.append({"reduction": reduction, "first": first, "again": again, "met": first < WANTED})
    facts = facts_of("cpu", 1)
    lines = heading("predictions", facts)
    lines += ["", "13 numbers of ranks up to 4,096, 20 codecs: seconds of one core, wanted under 2.", ""]
    cells = [[r["reduction"], f"{r['first']:.2f}", f"{r['again']:.2f}", "met" if r["met"] else "NOT met"] for r in rows]
    lines += table(["reduction", "first", "again", "wanted"], cells)
    print("\n".join(lines))
    if not options.quick or options.out != RESULTS:
        write(options.out, "predict", facts, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
