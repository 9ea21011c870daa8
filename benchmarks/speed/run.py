"""The command line of benchmarks/operations.py: which sections to run, in which order, and what becomes a row."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from benchmarks.harness import RESULTS
from benchmarks.speed.candidates import formats, lowp_candidates
from benchmarks.speed.conv_net import conv_net_costs
from benchmarks.speed.eager import SIZES, times_as_long
from benchmarks.speed.first_calls import NEW_SIZES_FORMAT, builds_for_new_sizes, cold_and_warm
from benchmarks.speed.measure import Candidate, Stage
from benchmarks.speed.peers import peer_candidates
from benchmarks.speed.prebuild import prebuild
from benchmarks.speed.report import Report, Row, in_a_line
from benchmarks.speed.small_tensors import FORMAT as SMALL_FORMAT
from benchmarks.speed.small_tensors import small_costs
from rich.console import Console

SECTIONS = ("numbers", "first", "small", "eager", "net")
CUDA_SIZES = (1 << 24, 1 << 28)
SMALL_BAR = 20.0
EAGER_BAR = 2.0
CONV_NET_BAR = 1.03


def main() -> None:
    options = _parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    report = Report(options.device, torch.get_num_threads())
    began = time.perf_counter()

    def tell(what: str) -> None:
        console.print(f"[dim]{time.perf_counter() - began:6.1f} s  {what}[/]")

    for section in _sections(report, options, tell):
        tell(section)
        report.write(options.out)  # what is there already, should the rest fail or be stopped
    report.show(console)
    for path in report.write(options.out):
        console.print(f"written: {path}")
    if report.failures:
        sys.exit(f"{len(report.failures)} candidates of lowp failed")


def _sections(report: Report, options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[str]:
    """Run what was asked for, piece by piece; the name of each piece is given when it is done."""
    device, sections = options.device, options.sections
    if "first" in sections:
        report.first_calls = cold_and_warm(device)
        builds = builds_for_new_sizes(device)
        what = "kernels built for 120 new sizes"
        report.rows.append(Row("New sizes", "lowp", NEW_SIZES_FORMAT, what, builds, bar=0, less_is_better=True))
        yield "first calls, in processes of their own"
    if options.prebuild and {"numbers", "net"} & set(sections):
        conv_net = device == "cuda" and "net" in sections
        for error in prebuild(device, options.prebuild, options.quick, options.only, conv_net):
            report.notes.append(f"building ahead failed, so kernels are built as they are met: {error}")
        yield f"kernels built in {options.prebuild} processes"
    if "numbers" in sections:
        for size in options.size or (CUDA_SIZES if device == "cuda" else (1 << 24,)):
            numbers(report, Stage(torch.device(device), size, options.rounds), options, tell)
            yield f"{size:,} elements"
    if "small" in sections:
        report.rows += [_small_row(row) for row in small_costs(device, options.rounds)]
        yield "small tensors"
    if "eager" in sections and device == "cpu":
        title = "Eager calls: times as long as copy_ of the same dtype (block formats allocate their results)"
        for name, row in times_as_long():
            for size, value in zip(SIZES, row, strict=True):
                bar = EAGER_BAR if size <= 1 << 22 else None
                operation = f"2^{size.bit_length() - 1}"
                report.rows.append(Row(title, "lowp", name, operation, value, bar, True, rounds=(value,)))
        yield "eager calls"
    if "net" in sections and device == "cuda":
        report.rows += [_conv_net_row(name, value) for name, value in conv_net_costs(min(3, options.rounds)).items()]
        yield "conv net"


def numbers(report: Report, stage: Stage, options: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Time every candidate on one size. A candidate that fails is recorded, and does not stop the others."""

    def time_one(candidate: Candidate) -> None:
        try:
            timing = stage.time(candidate)
        except Exception as error:
            reasons = report.failures if candidate.library == "lowp" else report.missing
            reasons[candidate.name] = in_a_line(error)
            return
        report.rows.append(
            Row(
                f"Speed as a ratio to copy_, {stage.size:,} float32 on {stage.device}",
                candidate.library,
                candidate.format,
                candidate.operation,
                timing.ratio,
                candidate.bar,
                elements=timing.elements,
                elements_per_second=timing.elements_per_second,
                rounds=tuple(timing.ratios),
                host_seconds=timing.host_seconds,
            )
        )

    # Twice the same: how far from 1 this is, is what a ratio here can be trusted to
    time_one(Candidate("torch", "copy_ itself", "quantize", stage.copy))
    for fmt in formats(stage.device, options.quick, options.only):
        tell(f"{stage.size:,}  {fmt}")
        try:
            candidates = list(lowp_candidates(fmt, stage))
        except Exception as error:
            report.failures[str(fmt)] = in_a_line(error)
            continue
        for candidate in candidates:
            time_one(candidate)
    if options.peers:
        tell(f"{stage.size:,}  peers")
        for candidate in peer_candidates(stage, report.missing):
            time_one(candidate)
    host = [row.host_seconds for row in report.rows if row.library == "lowp" and row.host_seconds]
    if host:
        median = statistics.median(host) * 1e6
        report.notes.append(f"{stage.size:,}: launching a call of lowp costs the host {median:.0f} microseconds (median)")
    if stage.disturbed:
        report.notes.append(f"the machine was busy with something else during {stage.disturbed} measurements")


def _small_row(row: dict) -> Row:
    section = "Small tensors: time of a call over that of torch.add"
    speed = row["size"] / row["seconds"]
    return Row(section, "lowp", SMALL_FORMAT, row["operation"], row["cost"], SMALL_BAR, True, row["size"], speed)


def _conv_net_row(name: str, value: float) -> Row:
    bar = CONV_NET_BAR if name == "compiled: with / without" else None
    section = "ResNet-18 on 512 images of 32 x 32, bf16, forward and backward, a quantizer after each activation"
    return Row(section, "lowp", "e4m3fn / e5m2", name, value, bar, less_is_better=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks operations", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, action="append", help="elements; can be given twice (default 2^24; CUDA also 2^28)")
    parser.add_argument("--quick", action="store_true", help="a few formats and rounds")
    parser.add_argument("--only", metavar="REGEX", help="formats whose name matches")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, help="of interleaved measurements (default 11, or 5 with --quick)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="on the CPU (default 2)")
    parser.add_argument("--prebuild", type=int, help="processes that build kernels ahead; 0 for none")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 5 if options.quick else 11
    if options.prebuild is None:
        options.prebuild = min(12, os.cpu_count() or 1) if options.device == "cuda" else 0
    return options
