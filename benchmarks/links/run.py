"""The command line of `python -m benchmarks links`: makes the links one by one, and runs what was asked for on each."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.links.namespaces import LOOPBACK, CannotShapeError, bits_per_second, check_able, network
from benchmarks.links.plan import Job, jobs
from benchmarks.links.processes import RATE_TOLERANCE, RanksFailedError, end_on_sigterm, measured_rate, run_ranks
from benchmarks.links.report import Report
from rich.console import Console

SECTIONS = ("collective", "ddp", "nodes")
RATES = ("200mbit", "1gbit", "10gbit", LOOPBACK)
CANNOT_RUN = 2


def main() -> None:
    options = _parse()
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        check_able()
    except CannotShapeError as error:
        print(f"benchmarks links: {error}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    end_on_sigterm()
    todo = jobs(options)
    console.print(f"{len(todo)} links, about {sum(job.estimate() for job in todo) / 60:.0f} minutes")
    report = Report()
    began = time.perf_counter()
    try:
        for job in todo:
            console.print(f"[dim]{time.perf_counter() - began:6.1f} s  {job.topology.name}, about {job.estimate():.0f} s[/]")
            measure(job, report)
            report.write(options.out)  # what is there already, should the rest fail or be stopped
    except CannotShapeError as error:
        print(f"benchmarks links: {error}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    except KeyboardInterrupt:
        report.show(console)
        sys.exit("stopped; what was done is above, and, where a link was finished, in its files")
    report.show(console)
    for path in report.write(options.out):
        console.print(f"written: {path}")
    if report.failures:
        sys.exit(f"{len(report.failures)} contenders failed")


def measure(job: Job, report: Report) -> None:
    """Make the link, see that it has its rate, run the ranks. A link on which they fail is recorded, and the next one tried."""
    name = job.topology.name
    try:
        with network(job.topology) as nodes:
            if job.rate != LOOPBACK:
                report.rates[name] = measured_rate(job.topology, nodes)
                if abs(report.rates[name] - 1) > RATE_TOLERANCE:
                    report.notes.append(f"{name}: the link has {report.rates[name]:.3f} of its rate; the computer may be busy")
            result = run_ranks(job.topology, nodes, job.plan, timeout=180 + 4 * job.estimate())
    except RanksFailedError as error:
        report.failures[name] = str(error)
        return
    about = {"link": name, "rate": job.rate, "ranks": job.topology.ranks}
    report.rows += [about | row for row in result["rows"]]
    report.failures |= {f"{name}: {contender}": reason for contender, reason in result["failures"].items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks links", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="one on each node (default 2 4)")
    parser.add_argument("--rates", type=_rate, nargs="+", default=None, help=f"default {' '.join(RATES)}")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="powers of two, as exponents (default 22 23 24 25)")
    parser.add_argument("--rounds", type=int, default=None, help="in which contenders take turns (default 7)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 ranks, 200mbit and 1gbit, 2^24 elements, 2 x 2 ranks, a few contenders, 3 rounds",
    )
    parser.add_argument("--only", metavar="REGEX", help="contenders whose name matches; fp32 always runs")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="default all; collective and nodes with --quick")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    quick = options.quick
    options.ranks = options.ranks or ([2] if quick else [2, 4])
    options.rates = options.rates or list(RATES[:2] if quick else RATES)
    options.sizes = options.sizes or ([24] if quick else [22, 23, 24, 25])
    options.sections = options.sections or ([SECTIONS[0], SECTIONS[2]] if quick else SECTIONS)
    options.rounds = options.rounds or (3 if quick else 7)
    if min(options.ranks) < 2:
        parser.error("--ranks: a link has at least two ends")
    return options


def _rate(text: str) -> str:
    try:
        if text != LOOPBACK:
            bits_per_second(text)
        return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
