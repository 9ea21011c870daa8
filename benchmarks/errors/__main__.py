"""The error of reduced gradients by codec, on real gradients: vNMSE at the bits an element that were counted.

    python -m benchmarks errors --data DIR                                 all codecs, models, moments; 8 and 64 ranks
    python -m benchmarks errors --data DIR --models gpt --ranks 8 --codecs nvfp4 "e2m1fn block:16" "int4 block:32 stochastic"
    python -m benchmarks errors --data DIR --add --codecs adaptive:4       further codecs into the file of results
    python -m benchmarks errors --docs FILE.json                           the table of docs/WIRE.md again, from a file
    python -m benchmarks errors --quick                                    a tiny model, 4 ranks: does it run?

The models are those of the recipes gpt, lstm and resnet18-cifar, trained in float32 on this machine, and looked at after some
numbers of steps (errors/gradients.py). Each rank has its own micro-batch. What vNMSE and bits are: errors/measure.py. Weights
are kept in --cache, so that a second run trains nothing. Results go to benchmarks/results/<machine>-errors.json, .md and .png,
after every moment; a run without --out or --quick writes the table in docs/WIRE.md, too.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.errors.gradients import QUICK, TASKS, rows_of_gradients, snapshots
from benchmarks.errors.measure import CODECS, Row, Wire, exact_mean, measured
from benchmarks.errors.report import DOCS, by_moment, draw, rewritten
from benchmarks.harness import RESULTS, facts_of, file_stem, heading, machine_name, write

KEY = ("model", "step", "ranks", "codec")


def measure_all(options: argparse.Namespace, wires: list[Wire], began: float):
    """Rows, moment by moment."""
    tasks = QUICK if options.quick else {name: TASKS[name] for name in options.models}
    for name, task in tasks.items():
        moments = tuple(options.moments or task.moments)
        for snapshot in snapshots(name, task, moments, options.cache, options.data):
            print(f"{time.perf_counter() - began:6.0f} s  {name} after {snapshot.step} steps", flush=True)
            with rows_of_gradients(snapshot, max(options.ranks), options.cache) as every:
                for ranks in sorted(options.ranks):
                    exact, found = exact_mean(every[:ranks]), []
                    for wire in wires:
                        where = {"model": name, "step": snapshot.step, "ranks": ranks}
                        found.append(where | measured(wire, every[:ranks], exact, snapshot))
                    print(f"{time.perf_counter() - began:6.0f} s  {name}, step {snapshot.step}, {ranks} ranks", flush=True)
                    yield found


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Both, with the new row where both have one, in the order of models, moments, ranks and codecs in which they came."""
    rows = {tuple(row[key] for key in KEY): row for row in (*old, *new)}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--codecs", nargs="+", default=CODECS, metavar="CODEC", help="'FORMAT [SCALE] [ROUNDING]'")
    parser.add_argument("--ranks", nargs="+", type=int, default=(8, 64))
    parser.add_argument("--moments", nargs="+", type=int, help="steps; default: each model's own")
    parser.add_argument("--data", type=Path, help="where CIFAR-10 and the text lie; default as for lowp train")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/lowp/gradients").expanduser(), help="of trained weights")
    parser.add_argument("--add", action="store_true", help="keep the rows of the results' file that are not measured anew")
    parser.add_argument("--docs", type=Path, metavar="JSON", help="measure nothing: the table of docs/WIRE.md from this file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model; the figures mean nothing")
    options = parser.parse_args()
    if options.docs:
        DOCS.write_text(rewritten(DOCS.read_text(), options.docs))
        return
    try:
        wires = [Wire.of(text) for text in options.codecs]
    except ValueError as error:
        sys.exit(f"--codecs: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            options.ranks, options.cache = (4,), Path(scratch)
        logger = logging.getLogger("lowp")
        before, logger.disabled = logger.disabled, True  # it would warn of scales whose error is measured here
        try:
            run(options, wires)
        finally:
            logger.disabled = before


def run(options: argparse.Namespace, wires: list[Wire]) -> None:
    began, facts, name = time.perf_counter(), facts_of("cpu"), "errors-smoke" if options.quick else "errors"
    existing = options.out / f"{file_stem(machine_name('cpu'))}-{name}.json"
    rows: list[Row] = []
    if options.add and existing.exists():
        content = json.loads(existing.read_text())
        rows, facts["command"] = content["rows"], f"{content['facts']['command']}; {facts['command']}"
    lines: list[str] = []
    for found in measure_all(options, wires, began):
        rows = merged(rows, found)
        lines = [*heading("errors of reduced gradients (two_shot), vNMSE", facts), *by_moment(rows)]
        results, page = write(options.out, name, facts, {"rows": rows}, lines)
        draw(rows, results.with_suffix(".png"))
    print("\n".join(lines))
    print(f"\nwritten: {results}, {page}, {results.with_suffix('.png')}")
    if options.out == RESULTS and not options.quick:
        DOCS.write_text(rewritten(DOCS.read_text(), results))


if __name__ == "__main__":
    main()
