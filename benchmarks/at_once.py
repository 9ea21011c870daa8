"""Several runs at once on one GPU: samples a second of all of them together, by how many there are and what they compute in.

    python -m benchmarks at_once --data DIR --jobs 1 8 14 [--mps] [--only bf16] [--seconds 4]        on a GPU
    python -m benchmarks at_once --quick                                                     tiny, on the CPU: does it run?

Each job is a process with a trainer of its own (DavidNet, 8 virtual ranks of 64, or one rank of 512). All processes make the
same contender's steps at the same time: they get ready, wait for each other, and count steps for some seconds. The sum counts.
"""

import argparse
import json
import queue
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, table, write
from benchmarks.training.clock import steps_within, warm_up_seconds

from lowp.lab.mps import mps
from lowp.training.cuda_settings import cuda_settings
from lowp.training.reading import read_recipe, with_overrides
from lowp.training.trainer import Trainer
from lowp.training.world import World

APS = ["wire.format=e5m2", "wire.scale=aps", "wire.reduction=sequential"]
ALONE = ["virtual_ranks=1"]
PURE = ["precision.weights=fp16", "precision.update=stochastic", "precision.loss_scale=dynamic"]
CONTENDERS: dict[str, list[str]] = {
    "8 x 64, tf32": [],
    "8 x 64, bf16": ["precision.activations=bf16"],
    "8 x 64, bf16, e5m2 aps": ["precision.activations=bf16", *APS],
    "8 x 64, bf16, compiled": ["precision.activations=bf16", "model.compile=true"],
    "8 x 64, bf16, e5m2 aps, compiled": ["precision.activations=bf16", *APS, "model.compile=true"],
    "512, fp32": [*ALONE, "precision.tf32=false"],
    "512, tf32": ALONE,
    "512, fp16 autocast": [*ALONE, "precision.activations=fp16", "precision.loss_scale=dynamic"],
    "512, pure fp16": [*ALONE, *PURE],
    "512, tf32, compiled": [*ALONE, "model.compile=true"],
    "512, fp16 autocast, compiled": [
        *ALONE,
        "precision.activations=fp16",
        "precision.loss_scale=dynamic",
        "model.compile=true",
    ],
    "512, pure fp16, compiled": [*ALONE, *PURE, "model.compile=true"],
}
QUICK = ["batch=64", "data.limit=256", "model.options={width=4}"]


def work(number: int, names: list[str], options: argparse.Namespace, barrier: Any, answers: Any) -> None:
    """One process: each contender in turn, all processes at the same one."""
    world = World.join("cpu" if options.quick else "cuda", 1)
    for name in names:
        row: dict[str, Any] = {"contender": name, "job": number}
        try:
            recipe = with_overrides(read_recipe("davidnet-512", []), [*CONTENDERS[name], *(QUICK if options.quick else [])])
            with cuda_settings(recipe, world.device):
                trainer = Trainer(recipe, world, options.data)
                if world.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                row["ready_s"] = warm_up_seconds(trainer, options.warm_up)
                barrier.wait(timeout=400)
                steps, seconds = steps_within(trainer, options.seconds)
                row |= {"steps": steps, "seconds": seconds, "batch": recipe.batch}
                if world.device.type == "cuda":
                    row["peak_bytes"] = torch.cuda.max_memory_allocated()
                trainer.close()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            barrier.abort()
        answers.put(row)
        trainer = None
        if "error" in row:
            break
        barrier.wait(timeout=400)


def measured(jobs: int, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    context = get_context("spawn")
    barrier, answers = context.Barrier(jobs), context.Queue()
    processes = [context.Process(target=work, args=(n, names, options, barrier, answers)) for n in range(jobs)]
    for process in processes:
        process.start()
    found: list[dict[str, Any]] = []
    while any(process.is_alive() for process in processes) or not answers.empty():
        try:
            found.append(answers.get(timeout=1))
            print(json.dumps({"jobs": jobs, **found[-1]}), flush=True)  # should the rest be stopped
        except queue.Empty:  # look again whether anybody is still there
            continue
    for process in processes:
        process.join()
    rows = []
    for name in names:
        own = [row for row in found if row["contender"] == name]
        if errors := [row["error"] for row in own if "error" in row]:
            rows.append({"contender": name, "jobs": jobs, "error": errors[0]})
        elif len(own) == jobs:
            rate = sum(row["steps"] * row["batch"] / row["seconds"] for row in own)
            row = {"contender": name, "jobs": jobs, "samples_per_second": rate, "ready_s": max(r["ready_s"] for r in own)}
            rows.append(row | {"peak_bytes": max(r.get("peak_bytes", 0) for r in own)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where cifar10 lies; default as for lowp train")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 8, 14])
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm-up", type=int, default=6, help="steps before the clock starts")
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="at-once", help="of the file of results")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.seconds, options.warm_up, options.only = [2], 0.2, 1, ["8 x 64, tf32"]
    names = [name for name in CONTENDERS if any(part in name for part in options.only)]
    rows: list[dict[str, Any]] = []
    for jobs in options.jobs:
        if options.mps and jobs > 1:
            with mps():
                rows += measured(jobs, names, options)
        else:
            rows += measured(jobs, names, options)
    facts = facts_of("cpu" if options.quick else "cuda", 1) | {"mps": options.mps}
    lines = [*heading("several runs at once: DavidNet", facts), "", "Samples a second of all runs together. n = 1.", ""]
    cells = [[r["contender"], str(r["jobs"]), f"{r.get('samples_per_second', 0):,.0f}", f"{r.get('ready_s', 0):.0f}",
              f"{r.get('peak_bytes', 0) / 1e6:,.0f}", r.get("error", "")] for r in rows]  # fmt: skip
    lines += table(["computed in", "runs", "samples/s", "s until ready", "peak MB of one", ""], cells)
    print("\n".join(lines))
    if not options.quick or options.out != RESULTS:
        write(options.out, options.name, facts, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
