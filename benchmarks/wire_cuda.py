"""The wire on a GPU: steps of ResNet-50 and GPT-2 with each hook, a bucket's cost, and 2, 4 and 8 NCCL ranks on one GPU.

    python -m benchmarks wire_cuda --quick                        parts step, bucket and collective: about 3 minutes
    python -m benchmarks wire_cuda --part collective --ranks 2    one part
    python -m benchmarks wire_cuda --only 'e5m2|mxfp4'            contenders whose name matches, and what they are compared with
    python -m benchmarks wire_cuda --smoke                        everything tiny, gloo on the CPU: does it run?

    step         one rank: forward and backward under bf16 autocast with DDP, without a hook, with torch's fp16 hook, and lowp's
    bucket       one rank: host time to launch a bucket of 100 layers, and its kernels' time beside copy_'s for the same bytes
    collective   2, 4 and 8 ranks: all-reduce of 2^24 float32
    ddp          2 ranks: the steps of `step` with a smaller batch
    fsdp         2 ranks: GPT-2 under FSDP2, with and without rounded gathers and reductions

Ranks are processes that share the GPU and talk through sockets on the loopback interface, as machines do through a network.
Processes take turns on a GPU. With --mps (src/lowp/lab/mps.py) their kernels run at the same time, as those of ranks with a GPU
each.
Contenders take turns, step by step; figures are medians over rounds, and a ratio is taken within a round. With --out or the
variable OUT, results go there, and else to benchmarks/results.
"""

import argparse
import os
import re
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, median_interval, ratio, table, write
from benchmarks.links.bars import NCCL, verdicts
from benchmarks.links.bucket import DEVICE_BAR, HOST_BAR, SIZES
from benchmarks.links.contenders import AUTO, BASE, COLLECTIVES, NEEDS_NODES
from benchmarks.links.contenders import HALF as HALF_COLLECTIVE
from benchmarks.links.model_steps import CONTENDERS, FSDP, HALF, PLAIN
from benchmarks.links.models import MODELS
from benchmarks.links.namespaces import HERE, LOOPBACK, Topology
from benchmarks.links.processes import RanksFailedError, end_on_sigterm, run_ranks

from lowp.lab.mps import mps

PARTS = ("step", "bucket", "collective", "ddp", "fsdp")
STEP_BAR = 1.03  # of the step without a hook
ALWAYS = (BASE, HALF_COLLECTIVE, PLAIN, HALF)  # what others are compared with

Rows = list[dict[str, Any]]


def cases_of(part: str, options: argparse.Namespace) -> dict[int, list[dict]]:
    """By number of ranks: the cases of a part."""
    rounds = options.rounds
    if part == "bucket":
        return {1: [{"kind": "bucket", "contenders": _only(CONTENDERS, options)}]}
    if part == "collective":
        names = [name for name in COLLECTIVES if name not in NEEDS_NODES and name != AUTO]
        case = {"kind": "collective", "elements": 1 << (16 if options.smoke else 24), "rounds": rounds + 2}
        return {n: [case | {"contenders": _only(names, options), "one_rank_a_node": False}] for n in options.ranks}
    if part == "fsdp":
        models = [name for name in options.models if name != "resnet50"]
        step = {"kind": "fsdp", "contenders": _only(FSDP, options), "rounds": rounds, "block": 1}
        return {2: [step | {"model": model} for model in models]}
    step = {"kind": "model", "contenders": _only(CONTENDERS, options), "rounds": rounds, "block": 1, "seconds": options.seconds}
    return {1 if part == "step" else 2: [step | {"model": model} for model in options.models]}


def _only(names: Any, options: argparse.Namespace) -> list[str]:
    return [name for name in names if name in ALWAYS or options.only is None or re.search(options.only, name)]


def measure(options: argparse.Namespace) -> tuple[Rows, dict[str, str]]:
    """The rows of all parts. After each start of ranks the results so far are written."""
    rows: Rows = []
    failures: dict[str, str] = {}
    began = time.perf_counter()
    for part in options.part:
        for ranks, cases in cases_of(part, options).items():
            where = f"{part}, {ranks} rank{'s' if ranks > 1 else ''}"
            plan = {"interface": "lo", "device": "cpu" if options.smoke else "cuda:0", "cases": cases}
            try:
                found = run_ranks(Topology((LOOPBACK,), ranks), [HERE], plan, options.timeout)
            except RanksFailedError as error:
                failures[where] = str(error)
                found = {"rows": [], "failures": {}}
            rows += [{"part": part, "ranks": ranks, "rate": NCCL} | row for row in found["rows"]]
            failures |= {f"{where}: {name}": reason for name, reason in found["failures"].items()}
            print(f"{time.perf_counter() - began:6.1f} s  {where}", flush=True)
            report(rows, failures, options)
    return rows, failures


def report(rows: Rows, failures: dict[str, str], options: argparse.Namespace) -> tuple[list[str], list[Path]]:
    facts = facts_of("cpu" if options.smoke else "cuda") | {"mps": "yes" if options.mps else "no"}
    lines = heading("the wire on a GPU", facts)
    for part, ranks, what in dict.fromkeys((row["part"], row["ranks"], row.get("model", "")) for row in rows):
        own = [row for row in rows if (row["part"], row["ranks"], row.get("model", "")) == (part, ranks, what)]
        lines += ["", f"## {TITLES[part].format(ranks=ranks, model=_title(own[0]))}", "", *LINES[part](own)]
    lines += ["", *(f"- FAILED: {name}: {' / '.join(reason.splitlines()[-3:])}" for name, reason in failures.items())]
    return lines, write(
        options.out, "wire-smoke" if options.smoke else "wire", facts, {"rows": rows, "failed": failures}, lines
    )


TITLES = {
    "step": "{model}, one rank: wanted at most " + f"{STEP_BAR} x the step without a hook",
    "bucket": f"A bucket of {len(SIZES)} layers, {sum(SIZES):,} float32, one rank: wanted host at most {1e3 * HOST_BAR} ms, "
    f"device at most {DEVICE_BAR} x the bound",
    "collective": "All-reduce, {ranks} ranks on one GPU over sockets",
    "ddp": "{model}, DDP, {ranks} ranks on one GPU over sockets: wanted faster than the fp16 hook",
    "fsdp": "{model}, FSDP2, {ranks} ranks on one GPU over sockets: wanted faster than without",
}


def _title(row: dict[str, Any]) -> str:
    return f"{MODELS[row['model']].title}, batch {row['samples']}" if "model" in row else ""


def _ms(row: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(row['seconds']):.2f}"


def _over(seconds: list[float], base: list[float]) -> str:
    """The median ratio of a round, and its interval."""
    low, high = median_interval([one / other for one, other in zip(seconds, base, strict=True)])
    return f"{ratio(seconds, base):.3f} ({low:.3f} to {high:.3f})"


def _step_lines(rows: Rows) -> list[str]:
    by_name = {row["contender"]: row for row in rows}
    body = []
    for row in rows:
        over = [_over(row["seconds"], by_name[name]["seconds"]) if name in by_name else "" for name in (PLAIN, HALF)]
        host = f"{1e3 * statistics.median(row['processor']):.1f}"
        body.append([row["contender"], _ms(row), str(len(row["seconds"])), *over, host])
    return table(["contender", "step, ms", "n", f"x {PLAIN}", f"x {HALF}", "processor, ms"], body)


def _bucket_lines(rows: Rows) -> list[str]:
    heads = ["contender", "caller, ms", "host, ms", "device, ms", "kernels", "bound, ms", "x the bound"]
    body = [
        [
            row["contender"],
            f"{1e3 * row['caller']:.3f}",
            f"{1e3 * row['median']:.3f}",
            f"{1e3 * row['device']:.3f}",
            f"{row['kernels']:.0f}",
            f"{1e3 * row['bound']:.3f}",
            f"{row['device'] / row['bound']:.2f}",
        ]
        for row in rows
    ]
    return table(heads, body)


def _collective_lines(rows: Rows) -> list[str]:
    by_name = {row["contender"]: row for row in rows}
    body = []
    for row in rows:
        times = [f"{1 / ratio(row['seconds'], by_name[name]['seconds']):.2f}" for name in (BASE, HALF_COLLECTIVE)]
        wanted = "; ".join(str(verdict) for verdict in verdicts(row, by_name))
        body.append([row["contender"], _ms(row), str(len(row["seconds"])), *times, f"{row['error']:.2g}", wanted])
    return table(["contender", "ms", "n", "times as fast as fp32", "as fp16", "error", "wanted"], body)


LINES = {
    "step": _step_lines,
    "bucket": _bucket_lines,
    "collective": _collective_lines,
    "ddp": _step_lines,
    "fsdp": _step_lines,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks wire_cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all; with --quick step, bucket and collective")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["resnet50", "gpt2-medium"])
    parser.add_argument("--ranks", type=int, nargs="+", help="of part collective (default 2 4 8; 2 with --quick)")
    parser.add_argument("--rounds", type=int, help="default 7, or 3 with --quick")
    parser.add_argument("--seconds", type=float, default=0.0, help="of parts step and ddp: more rounds, while they fit into it")
    parser.add_argument("--only", metavar="REGEX", help="contenders whose name matches")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one start of ranks")
    parser.add_argument("--quick", action="store_true", help="fewer parts, ranks and rounds")
    parser.add_argument("--mps", action="store_true", help="with NVIDIA's Multi-Process Service; for parts of several ranks")
    parser.add_argument("--smoke", action="store_true", help="tiny, gloo on the CPU; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    options = parser.parse_args()
    short = options.quick or options.smoke
    options.part = options.part or (PARTS[:3] if options.quick else PARTS)
    options.ranks = options.ranks or ([2] if short else [2, 4, 8])
    options.rounds = options.rounds or (2 if options.smoke else 3 if options.quick else 7)
    if options.smoke:
        options.models = ["mlp"]
    elif not torch.cuda.is_available():
        parser.exit(2, "this benchmark is for a GPU; --smoke shows on a CPU that it runs\n")
    end_on_sigterm()
    with mps() if options.mps else nullcontext():
        rows, failures = measure(options)
    lines, paths = report(rows, failures, options)
    print("\n".join(lines))
    print(f"\nwritten: {', '.join(map(str, paths))}")
    if failures:
        parser.exit(1, f"{len(failures)} contenders or parts failed\n")


if __name__ == "__main__":
    main()
