"""Accuracy against bits on the wire: whole trainings with gradients in few bits beside the same ones in float32.

    python -m benchmarks bits --data DIR                             Fashion-MNIST and a GPT on characters, on the CPU
    python -m benchmarks bits --data DIR --device cuda --jobs 8      DavidNet on CIFAR-10 (recipe davidnet-512), on a GPU
    python -m benchmarks bits --data DIR --tasks gpt --wires adaptive:3.5 "e2m1fn block:16" "adaptive:2 feedback"
    python -m benchmarks bits --quick                                a tiny model, two wires: does it run?

A task is a recipe of `lowp train` with 8 virtual ranks, and only the wire differs between its runs. A wire is a format, then in
any order a scale (`local` where none is named), a rounding, and `feedback` for error feedback.

A seed decides initial weights and the order of samples, and is the same for all wires: differences to float32 are taken seed by
seed. ± is Student's 95 % interval of the mean. A wire is within noise if the interval of its difference contains 0, or if its
mean difference is at most 0.1 points of accuracy, or .001 of loss. With many wires, one in 20 is outside by chance.

Bits are the bytes that a rank sent, headers and scales included, over those of float32 in a ring, times 32.

Results go to <machine>-bits-<task>.json and .md after every run, and the figure of all tasks to <machine>-bits.png. Runs that
the file has are not made again, so that the same command goes on after a stop, and other wires or more seeds are added;
--again makes them again. A run of the file is dropped when this module no longer describes it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.fashion import verdict
from benchmarks.harness import RESULTS, facts_of, file_stem, heading, interval, machine_name, table, write
from benchmarks.papers import train

from lowp.cli.format_plot import COLOURS, empty_figure, label, save
from lowp.formats import Rounding
from lowp.lab.mps import mps
from lowp.training.check import check
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe

RANKS = 8
BASELINE = "fp32 none"
FEEDBACK = "feedback"
WIRES = (
    BASELINE,
    "bf16 none",  # its error is tiny: what its differences are, any rounding does to the course of a training
    "e4m3fn local",
    "e2m1fn block:32",
    "nvfp4",
    "adaptive:4.4",
    "adaptive:3",
    "adaptive:2.4",
    "adaptive:2",
    "adaptive:2 feedback",
    "adaptive:1.5",
    "adaptive:1.5 feedback",
)
QUICK_WIRES = (BASELINE, "adaptive:4.4")
ALL: dict[str, Any] = {"virtual_ranks": RANKS, "ranks": 1, "test_every": 0, "checkpoints": {"keep": 1}}

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A recipe, what is changed in it, how the tables call it, and the figure that counts: accuracy or loss."""

    recipe: str
    title: str
    metric: str
    changes: Mapping[str, Any]
    quick: Mapping[str, Any]

    def recipe_of(self, wire: str, seed: int, device: str, quick: bool) -> Recipe:
        recipe = with_changes(read_recipe(self.recipe), **{**ALL, **self.changes})
        recipe = with_changes(recipe, **self.quick) if quick else recipe
        # One thread: small models gain little from two, and the last bits of sums depend on it
        own = {"device": device, "threads": 1 if device == "cpu" else 0, "seed": seed}
        recipe = with_changes(recipe, name="bits", wire=wire_of(wire), **own)
        check(recipe)
        return recipe

    def described(self, device: str) -> str:
        """What decides a run beside its wire and seed, as this module says it (a whole recipe gets new keys now and then)."""
        return f"recipe {self.recipe}, {device}, {json.dumps({**ALL, **self.changes}, sort_keys=True)}"


SMALL_GPT: dict[str, Any] = {
    "model": {"options": {"layers": 2, "width": 64, "heads": 4}},
    "data": {"context": 64, "limit": 9600},
    "batch": 32,
    "epochs": 1,
    "learning_rate": {"warmup": 0.1},
}
TINY_GPT: dict[str, Any] = {"data": {"context": 16, "limit": 64}, "batch": 16}
TASKS = {
    "fashion": Task(
        "fp32",
        "Fashion-MNIST, an MLP",
        "accuracy",
        {"data": {"name": "fashion_mnist"}, "batch": 256, "epochs": 5, "model": {"options": {"hidden": [128, 64]}}},
        {"data": {"name": "fashion14", "limit": 512}, "batch": 64, "epochs": 1, "model": {"options": {"hidden": [64]}}},
    ),
    # Smaller than the recipe's GPT: 300 steps, some 20 seconds a run on one core. At a rate of .01 float32's gradient is many
    # times as large as usual in some of the first steps: a hard test. At .003 training is calm.
    "gpt": Task("gpt", "A GPT on characters, rate .01", "loss", {**SMALL_GPT, "optimizer": {"lr": 0.01}}, TINY_GPT),
    "gpt-calm": Task("gpt", "A GPT on characters, rate .003", "loss", {**SMALL_GPT, "optimizer": {"lr": 0.003}}, TINY_GPT),
    "davidnet": Task(
        "davidnet-512",
        "DavidNet on CIFAR-10",
        "accuracy",
        {},
        {"batch": 8 * RANKS, "epochs": 1, "model": {"options": {"width": 4}}, "data": {"limit": 256}},
    ),
}


def wire_of(text: str) -> dict[str, Any]:
    """The keys of a recipe's wire: `e2m1fn block:32`, `adaptive:2 stochastic feedback`."""
    format, *words = text.split() or [""]
    roundings = [word for word in words if word in tuple(Rounding)]
    scales = [word for word in words if word not in (*roundings, FEEDBACK)]
    if len(scales) > 1 or len(roundings) > 1:
        raise ValueError(f"{text!r} has more than one scale or rounding: {', '.join(max(scales, roundings, key=len))}")
    scale, rounding = (scales or ["local"])[0], (roundings or ["nearest"])[0]
    return {"format": format, "scale": scale, "rounding": rounding, "error_feedback": FEEDBACK in words}


def trained(name: str, wire: str, seed: int, options: argparse.Namespace) -> Row:
    """One run. Its directory is not kept: what counts goes to the file of results."""
    task = TASKS[name]
    recipe = task.recipe_of(wire, seed, options.device, options.quick)
    with tempfile.TemporaryDirectory(prefix="bits-") as folder:
        run = train(recipe, Path(folder) / "run", options.data)
    assert run.share_of_fp32 is not None, "eight ranks send something"
    row = {"task": name, "wire": wire, "seed": seed, "accuracy": run.accuracy, "loss": run.loss, "bits": 32 * run.share_of_fp32}
    row |= {"steps": run.step, "parameters": run.parameters, "step_ms": run.step_ms, "seconds": run.seconds}
    return row | {"diverged": run.message if run.state == "diverged" else "", "training": task.described(options.device)}


# What was found, for readers.


def summary(wire: str, rows: Sequence[Row]) -> Row:
    """All seeds of a wire, beside the same seeds in float32."""
    baseline = {row["seed"]: row for row in rows if row["wire"] == BASELINE and not row["diverged"]}
    own = [row for row in rows if row["wire"] == wire]
    ended = [row for row in own if not row["diverged"]]
    found: Row = {"wire": wire, "bits": own[0]["bits"], "n": len(own), "diverged": len(own) - len(ended)}
    found["seconds"] = interval([row["seconds"] for row in ended])[0]
    for metric, better in (("accuracy", 1), ("loss", -1)):
        mean, half = interval([row[metric] - baseline[row["seed"]][metric] for row in ended if row["seed"] in baseline])
        said = verdict(better * mean, half) if wire != BASELINE and half == half else ""
        found[metric] = interval([row[metric] for row in ended])
        found[f"{metric}_difference"] = (mean, half)
        found[f"{metric}_within_noise"] = "**no**" if found["diverged"] else said
    return found


def summaries(rows: Sequence[Row]) -> list[Row]:
    """From the most bits to the least."""
    found = [summary(wire, rows) for wire in dict.fromkeys(row["wire"] for row in rows)]
    return sorted(found, key=lambda row: -row["bits"])


def lines_of(task: Task, rows: Sequence[Row], facts: Mapping[str, Any]) -> Iterator[str]:
    yield from (*heading(f"{task.title}, by bits on the wire", facts), "")
    yield f"± is the 95 % interval of the mean; differences are paired by seed. `{task.metric}` is what counts."
    yield ""
    heads = ["wire", "bits", "n", "test accuracy, %", "difference to fp32", "within noise"]
    heads += ["test loss", "difference to fp32", "within noise", "s a run"]
    body = []
    for row in summaries(rows):
        seeds = f"{row['n']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
        cells = [f"`{row['wire']}`", f"{row['bits']:.2f}", seeds]
        for metric, scale, digits in (("accuracy", 100, 2), ("loss", 1, 4)):
            cells.append(_plus_minus(row[metric], scale, digits))
            cells.append("" if row["wire"] == BASELINE else _plus_minus(row[f"{metric}_difference"], scale, digits, "+"))
            cells.append(row[f"{metric}_within_noise"])
        body.append([*cells, f"{row['seconds']:.0f}"])
    yield from table(heads, body)


def _plus_minus(pair: tuple[float, float], scale: float, digits: int, sign: str = "") -> str:
    mean, half = pair
    if mean != mean:
        return ""
    return f"{scale * mean:{sign}.{digits}f}" + ("" if half != half else f" ± {scale * half:.{digits}f}")


def draw(found: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel a task: float32's mean and each wire's mean difference to it, with the interval, against bits."""
    figure = empty_figure(width=6.4 * len(found), height=5.2)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, found.items(), strict=True):
        task, (base, *others) = TASKS[name], summaries(rows)
        level, spread = base[task.metric]
        label(axes, task.title, "", "bits for each number that is sent", f"test {task.metric}")
        axes.axhline(level, color=COLOURS[5], linewidth=1, label="fp32: the mean of all seeds")
        if spread == spread:
            axes.axhspan(level - spread, level + spread, color="#EEEEEE", zorder=0, label="fp32: 95 % interval of this mean")
        for kind, colour in zip(("adaptive", "adaptive, error feedback", "fixed format"), COLOURS, strict=False):
            points = [row for row in others if _kind(row["wire"]) == kind and row[task.metric][0] == row[task.metric][0]]
            if not points:
                continue
            bits = [row["bits"] for row in points]
            means, halves = zip(*(row[f"{task.metric}_difference"] for row in points), strict=True)
            heights = [level + mean for mean in means]
            line = "-" if kind == "adaptive" else ""
            axes.errorbar(bits, heights, halves, fmt="o", linestyle=line, color=colour, capsize=3, markersize=5, label=kind)
            for row, height in zip(points, heights, strict=True):
                place = (row["bits"], height)
                axes.annotate(row["wire"], place, (5, -9), textcoords="offset points", fontsize=7, color="#444444")
        every = [row["bits"] for row in others]
        axes.set_xscale("log", base=2)
        axes.set_yscale("linear")
        axes.set_xlim(min(every, default=1) / 1.5, max(every, default=32) * 1.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = {name: each for axes in panels for each, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(5, 2 * len(found)), frameon=False
    )
    figure.suptitle("Bars: 95 % intervals of the difference to fp32, paired by seed", fontsize=9, color="#666666")
    save(figure, path)


def _kind(wire: str) -> str:
    if not wire.startswith("adaptive"):
        return "fixed format"
    return "adaptive, error feedback" if FEEDBACK in wire.split() else "adaptive"


# Files of results. They are read before each run and after it, so that processes with other wires can work beside this one.


def path_of(name: str, options: argparse.Namespace, suffix: str = ".json") -> Path:
    stem = "-".join(filter(None, (file_stem(machine_name(options.device)), "bits", name, "smoke" if options.quick else "")))
    return options.out / f"{stem}{suffix}"


def runs_of(name: str, options: argparse.Namespace) -> list[Row]:
    path = path_of(name, options)
    return json.loads(path.read_text())["runs"] if path.exists() else []


def store(name: str, rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """Write the file of a task; its commands are all that have added to it. The lines of its page."""
    rows = list({(row["wire"], row["seed"]): row for row in rows}.values())  # two processes may both have made float32's
    facts = facts_of(options.device, threads=1 if options.device == "cpu" else None)
    facts |= {"training": TASKS[name].described(options.device)}
    path = path_of(name, options)
    before = json.loads(path.read_text())["facts"]["command"].split("; ") if path.exists() and not options.quick else []
    facts["command"] = "; ".join(dict.fromkeys((*before, facts["command"])))
    lines = list(lines_of(TASKS[name], rows, facts))
    write(options.out, path.stem.removeprefix(f"{file_stem(facts['machine'])}-"), facts, {"runs": rows}, lines)
    return lines


def prepare(name: str, options: argparse.Namespace) -> None:
    """Drop the runs that this module would make in another way, and those that are asked for again."""
    there = runs_of(name, options)
    same = [row for row in there if row["training"] == TASKS[name].described(options.device) and not options.quick]
    if len(same) < len(there) and not options.quick:
        print(f"{name}: {len(there) - len(same)} runs in the file were made in another way and are dropped", flush=True)
    store(name, [row for row in same if not (options.again and row["wire"] in options.wires)], options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), help="default: all but davidnet; on a GPU davidnet")
    parser.add_argument("--wires", nargs="+", metavar="WIRE", help="'FORMAT [SCALE] [ROUNDING] [feedback]'; fp32 is added")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, help="where the data sets lie; default as for lowp train")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--mps", action="store_true", help="on a GPU, runs at once under NVIDIA's Multi-Process Service")
    parser.add_argument("--again", action="store_true", help="make the runs of these wires again")
    parser.add_argument("--quick", action="store_true", help="tiny models, one seed; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    usual = ("fashion",) if options.quick else ("davidnet",) if options.device == "cuda" else ("fashion", "gpt", "gpt-calm")
    options.tasks = options.tasks or usual
    options.seeds = 1 if options.quick else options.seeds
    options.wires = tuple(dict.fromkeys((BASELINE, *(options.wires or (QUICK_WIRES if options.quick else WIRES)))))
    try:
        for name in options.tasks:
            for wire in options.wires:
                TASKS[name].recipe_of(wire, 0, options.device, options.quick)
    except ValueError as error:
        sys.exit(f"{error}")
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Seed by seed: a benchmark that is stopped has whole seeds of everything."""
    began = time.perf_counter()
    for name in options.tasks:
        prepare(name, options)
    known = {(name, row["wire"], row["seed"]) for name in options.tasks for row in runs_of(name, options)}
    asked = [(name, wire, seed) for seed, name, wire in product(range(options.seeds), options.tasks, options.wires)]
    for row in rows_of([run for run in asked if run not in known], options):
        name = row["task"]
        store(name, [*runs_of(name, options), row], options)
        figures = row["diverged"] or f"accuracy {row['accuracy']:.4f}, loss {row['loss']:.4f}, {row['bits']:.2f} bits"
        print(f"{time.perf_counter() - began:6.0f} s  {name}, {row['wire']}, seed {row['seed']}: {figures}", flush=True)
    for name in options.tasks:
        print("\n".join(store(name, runs_of(name, options), options)))
        print(f"\nwritten: {path_of(name, options)}, {path_of(name, options, '.md')}\n")
    draw({name: rows for name in TASKS if (rows := runs_of(name, options))}, picture := path_of("", options, ".png"))
    print(f"drawn: {picture}")


def rows_of(runs: Sequence[tuple[str, str, int]], options: argparse.Namespace) -> Iterator[Row]:
    """What came of runs, one after the other, or `--jobs` at once: processes that share the GPU, or the cores."""
    if options.jobs == 1:
        yield from (trained(*run, options) for run in runs)
        return
    with mps() if options.mps else nullcontext(), ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(trained, *run, options) for run in runs]))


if __name__ == "__main__":
    main()
