"""Small runs of a study, several at once on one GPU or on the cores: how much sooner they are all done.

    python -m benchmarks ablate --device cuda [--jobs 1 2 4 8] [--out DIR]      some minutes
    python -m benchmarks ablate --quick                                         one run at a time and two

A study of `lowp ablate`: the embedded set, an mlp, nine settings of the wire with four virtual ranks, two seeds (--seeds).
Time counts from the begin of the first run to the end of the last (study.jsonl): to start the workers is a part of
it. On CUDA every number of jobs above one is measured without and with NVIDIA's Multi-Process Service, where that is there.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from benchmarks.harness import RESULTS, facts_of, heading, table, write

from lowp.lab.mps import CONTROL
from lowp.lab.study_directory import read_log

STUDY = """
name = "small"
base = "fp32"
seeds = {seeds}
[set]
device = "{device}"
threads = 1
epochs = {epochs}
virtual_ranks = 4
checkpoints = {{ every = 1000000, keep = 1 }}
[axes]
"wire.format" = ["e5m2", "e4m3fn"]
"wire.scale" = ["local", "aps"]
"wire.reduction" = ["two_shot", "ring"]
"""


def seconds_of(study: Path, jobs: int, mps: bool, folder: Path) -> tuple[float, int]:
    """Of all runs, and how many were finished."""
    out = folder / f"{jobs}-{mps}"
    command = [sys.executable, "-m", "lowp", "ablate", str(study), "--jobs", str(jobs), "--out", str(out), "--no-estimate"]
    subprocess.run([*command, *["--mps"] * mps], check=True, stdout=subprocess.DEVNULL, timeout=590)
    log = read_log(out)
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in log if record["kind"] in ("begin", "end")]
    return max(times) - min(times), sum(record.get("state") == "finished" for record in log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one epoch, one job and two: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    jobs = [1, 2] if options.quick else options.jobs
    services = [False, True] if options.device == "cuda" and shutil.which(CONTROL) else [False]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        study = Path(name) / "small.toml"
        study.write_text(STUDY.format(device=options.device, seeds=1, epochs=1))
        seconds_of(study, max(jobs), False, Path(name) / "warm")  # kernels are built once, and kept
        study.write_text(
            STUDY.format(device=options.device, seeds=options.seeds, epochs=1 if options.quick else options.epochs)
        )
        for mps in services:
            for count in jobs if not mps else [count for count in jobs if count > 1]:
                seconds, finished = seconds_of(study, count, mps, Path(name))
                rows.append({"jobs": count, "mps": mps, "seconds": seconds, "runs": finished})
                print(rows[-1], flush=True)
    facts = facts_of(options.device, 1)
    first = rows[0]["seconds"]
    lines = [
        *heading("small runs at once", facts),
        "",
        "Runs of a study, some at a time: seconds until all are done. n = 1.",
        "",
    ]
    cells = [
        [f"{r['jobs']}", "yes" if r["mps"] else "no", f"{r['runs']}", f"{r['seconds']:.0f}", f"{first / r['seconds']:.2f}"]
        for r in rows
    ]
    lines += table(["at once", "MPS", "runs", "seconds", "times as fast"], cells)
    print("\n".join(lines))
    if not options.quick or options.out != RESULTS:
        write(options.out, "ablate", facts, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
