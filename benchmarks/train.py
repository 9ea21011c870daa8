"""What `lowp train` costs beside a bare PyTorch loop: samples a second in float32, same model, batches and optimizer.

    python -m benchmarks train                     1 rank, and 2 ranks on gloo beside DistributedDataParallel
    python -m benchmarks train --quick             two rounds of short segments: does it run?
    python -m benchmarks train --only mlp --sections overhead --ranks 2 --rounds 9
    python -m benchmarks train --device cuda       1 rank, wider networks

Sections: `overhead` (training/segments.py: whole runs of lowp and of training/bare.py take turns), `input`
(training/input_pipeline.py: real batches beside a ready-made one), `virtual` (training/virtual_ranks.py: virtual ranks under
autocast beside micro-batches) and `profile` (where Python's time goes, once).

A ratio is lowp's speed over the bare loop's of the same round; its median counts, with the range of the rounds beside it. It is
taken by the median stretch of 20 steps and again by all the time that steps took: where the two disagree on the bar, it is
undecided. "bare / bare" is the bare loop's speed over its own in the round before: what ratios can be trusted to.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, table, write
from benchmarks.training import input_pipeline, segments, virtual_ranks
from benchmarks.training.cases import Case, augmented, cases_for
from benchmarks.training.python_profile import LISTED, profiled

SPEED_BAR = 0.97  # of the bare loop's samples a second
INPUT_BAR = 1.03  # of the time of a step on a ready batch
VIRTUAL_BAR = 1.15  # of the time of a step in micro-batches
SECTIONS = ("overhead", "input", "virtual", "profile")


def overhead(case: Case, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    found = segments.compare(case, ranks, options.device, options.rounds, options.seconds, options.data)
    speeds = found["speeds"]
    rounds = list(zip(speeds["lowp"], speeds["bare"], strict=True))
    ratios = {how: [ours[how] / bare[how] for ours, bare in rounds] for how in ("by_median", "by_total")}
    itself = [after["by_median"] / before["by_median"] for before, after in pairwise(speeds["bare"])]
    return {"case": case.name, "ranks": ranks, "batch": case.batch, "ratios": ratios, "bare_to_bare": itself} | found


def overhead_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", f"## Overhead: samples a second of lowp over the bare loop's (wanted: >= {SPEED_BAR})", "")
    heads = ["case", "ranks", "batch", "threads", "n", "lowp /s", "bare /s", "step ms"]
    heads += ["ratio", "range", "by total", "bare / bare", ""]
    body = []
    for row in rows:
        speeds = {side: statistics.median(each["by_median"] for each in row["speeds"][side]) for side in ("lowp", "bare")}
        ratio, total = (statistics.median(row["ratios"][how]) for how in ("by_median", "by_total"))
        cells = [row["case"], *(str(row[key]) for key in ("ranks", "batch", "threads")), str(len(row["ratios"]["by_median"]))]
        cells += [f"{speeds['lowp']:,.0f}", f"{speeds['bare']:,.0f}", f"{1e3 * row['batch'] / speeds['lowp']:.2f}"]
        cells += [f"{ratio:.3f}", _range(row["ratios"]["by_median"]), f"{total:.3f}", _range(row["bare_to_bare"])]
        body.append([*cells, verdict(ratio >= SPEED_BAR, total >= SPEED_BAR)])
    yield from table(heads, body)


def input_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", f"## Input: a step on real batches over one on a ready batch (wanted: <= {INPUT_BAR})", "")
    heads = ["case", "batch", "n", "steps a block", "real ms", "ready ms", "ratio", "range", "by minima", ""]
    body = []
    for row in rows:
        real, ready = row["ms"]["real"], row["ms"]["ready"]
        ratios = [ours / other for ours, other in zip(real, ready, strict=True)]
        ratio, least = statistics.median(ratios), min(real) / min(ready)
        cells = [row["case"], str(row["batch"]), str(len(ratios)), str(row["steps"])]
        cells += [f"{statistics.median(each):.3f}" for each in (real, ready)]
        cells += [f"{ratio:.3f}", _range(ratios), f"{least:.3f}"]
        body.append([*cells, verdict(ratio <= INPUT_BAR, least <= INPUT_BAR)])
    yield from table(heads, body)


def virtual_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", f"## Virtual ranks under autocast: a step over one in micro-batches (wanted: <= {VIRTUAL_BAR})", "")
    heads = ["case", "batch", "activations", "n", "contender", "step ms", "ratio", "range", "by minima", ""]
    body = []
    for row in rows:
        base = row["ms"][virtual_ranks.BASE]
        for name, times in row["ms"].items():
            ratios = [ours / other for ours, other in zip(times, base, strict=True)]
            ratio, least = statistics.median(ratios), min(times) / min(base)
            cells = [row["case"], str(row["batch"]), row["activations"], str(len(ratios)), name]
            cells += [f"{statistics.median(times):.3f}", f"{ratio:.3f}", _range(ratios), f"{least:.3f}"]
            body.append([*cells, verdict(ratio <= VIRTUAL_BAR, least <= VIRTUAL_BAR)])
    yield from table(heads, body)


def profile_tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        ours = sum(each["own_us"] for each in row["sides"]["lowp"] if each["ours"])
        yield from ("", f"## Where Python's time goes: {row['case']}, {row['ranks']} ranks, rank 0, {row['steps']} steps", "")
        yield f"Under cProfile, which makes calls slower. lowp's own functions, without what they call: {ours:.0f} us a step."
        for side, functions in row["sides"].items():
            yield from ("", f"### {side}", "")
            heads = ["function", "calls a step", "own us a step", "us a step with what it calls"]
            body = [[f["function"], f"{f['calls']:.2f}", f"{f['own_us']:.1f}", f"{f['us']:.1f}"] for f in functions[:LISTED]]
            yield from table(heads, ([f"`{cells[0]}`", *cells[1:]] for cells in body))


def verdict(met: bool, met_otherwise: bool) -> str:
    if met != met_otherwise:
        return "**undecided**"
    return "met" if met else "**missed**"


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if values else ""


class Benchmark:
    """The sections one after the other; what is there is written after each case, should the rest be stopped."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.perf_counter()
        self.facts = facts_of(options.device)
        self.facts["a segment"] = f"{options.seconds:g} s"
        self.rows: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
        self.missing: dict[str, str] = {}

    def run(self) -> None:
        options = self.options
        chosen = [case for case in cases_for(options.device) if not options.only or re.search(options.only, case.name)]
        for case in chosen:
            if reason := case.unavailable(options.data):
                self.missing[case.name] = reason
        chosen = [case for case in chosen if case.name not in self.missing]
        if "overhead" in options.sections:
            for case in chosen:
                for ranks in options.ranks:
                    self._note("overhead", f"{case.name}, {ranks} ranks", overhead(case, ranks, options))
        if "input" in options.sections:
            for case in (*chosen, *(augmented(case) for case in chosen if case.data == "cifar10")):
                found = input_pipeline.compare(case, options.device, options.rounds, options.seconds / 2, options.data)
                self._note("input", case.name, found)
        if "virtual" in options.sections:
            for case in chosen[-1:]:  # the largest
                for activations in ("bf16", "fp16") if options.device == "cuda" else ("bf16",):
                    found = virtual_ranks.compare(
                        case, options.device, activations, options.rounds, options.seconds / 2, options.data
                    )
                    self._note("virtual", f"{case.name}, {activations}", found)
        if "profile" in options.sections and chosen:
            for ranks in options.ranks:
                found = profiled(chosen[0], ranks, options.device, options.profile_steps, options.data)
                self._note("profile", f"{chosen[0].name}, {ranks} ranks", {"case": chosen[0].name, "ranks": ranks} | found)

    def _note(self, section: str, what: str, row: dict[str, Any]) -> None:
        self.rows[section].append(row)
        print(f"{time.perf_counter() - self.began:6.1f} s  {section}: {what}", flush=True)
        self.write()

    def write(self) -> list[Path]:
        content = self.rows | {"not_available": self.missing}
        return write(self.options.out, "train-quick" if self.options.quick else "train", self.facts, content, self.lines())

    def lines(self) -> list[str]:
        lines = heading("lowp train beside a bare loop", self.facts)
        lines += overhead_table(self.rows["overhead"]) if self.rows["overhead"] else []
        lines += input_table(self.rows["input"]) if self.rows["input"] else []
        lines += virtual_table(self.rows["virtual"]) if self.rows["virtual"] else []
        lines += profile_tables(self.rows["profile"])
        return [*lines, "", *(f"- not available: {name}: {reason}" for name, reason in self.missing.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one segment")
    parser.add_argument("--ranks", type=int, nargs="+", help="default 1 and 2; on CUDA 1")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--profile-steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="2 rounds of half a second, 100 steps for the profile")
    parser.add_argument("--data", type=Path, help="where data sets lie; default as for lowp train")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.ranks = options.ranks or ([1] if options.device == "cuda" else [1, 2])
    if options.quick:
        options.rounds, options.seconds, options.profile_steps = 2, 0.5, 100
    if options.device == "cuda" and max(options.ranks) > torch.cuda.device_count():
        sys.exit(f"{max(options.ranks)} ranks on CUDA need as many GPUs; there are {torch.cuda.device_count()}")
    benchmark = Benchmark(options)
    benchmark.run()
    print("\n".join(benchmark.lines()))
    for path in benchmark.write():
        print(f"written: {path}")


if __name__ == "__main__":
    main()
