"""DavidNet on CIFAR-10 with 8 virtual ranks on one GPU: what APS e5m2 does to accuracy, and what simulating ranks costs.

    python -m benchmarks davidnet --data DIR --out DIR           CPD's setting (recipe `davidnet`, 8 x 512), 24 epochs
    python -m benchmarks davidnet --data DIR --recipe davidnet-512 --seeds 3 --sections train     the author's, 8 x 64
    python -m benchmarks davidnet --data DIR --sections train --wires fp32 "e5m2 aps" "e5m2 aps sequential"
    python -m benchmarks davidnet --sections steps               step times alone
    python -m benchmarks davidnet --quick                        everything tiny, on the CPU: does it run?

`train`: whole runs in float32 (with TF32 products, as the recipe has it) with each of --wires between the ranks: accuracy,
images/s. In "sequential" every partial sum is rounded too, as CPD does; elsewhere sums are float32 and rounded once.

`steps`: the time of a step of recipe `davidnet` as

    (a) one rank that accumulates 8 micro-batches of 512: the work without any simulation,
    (b) 8 virtual ranks of 512, float32 on the wire,
    (c) 8 virtual ranks of 512, e5m2 with APS,

in float32 without and with TF32 and under autocast in BF16 and FP16. All three are there at once and take turns, a block of
steps each, in changing order; the device is waited for around each block. A ratio is taken within a round; its median counts.
"""

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, interval, table, take_turns, write
from benchmarks.training.clock import step_ms

from lowp.training.cuda_settings import cuda_settings
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe
from lowp.training.run import run
from lowp.training.trainer import Trainer
from lowp.training.units import share_of_fp32
from lowp.training.world import World

BAR = 1.3  # the step of 8 virtual ranks over the one with 8 accumulated micro-batches
SECTIONS = ("train", "steps")
RECIPES = ("davidnet", "davidnet-512")
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"format": "fp32", "scale": "none"},
    "e5m2 aps": {"format": "e5m2", "scale": "aps"},
    "e5m2 aps sequential": {"format": "e5m2", "scale": "aps", "reduction": "sequential"},
    "e4m3fn aps": {"format": "e4m3fn", "scale": "aps"},
    "e4m3fn aps sequential": {"format": "e4m3fn", "scale": "aps", "reduction": "sequential"},
    "e4m3fn local": {"format": "e4m3fn", "scale": "local"},
    "e2m1fn local": {"format": "e2m1fn", "scale": "local"},
    "e2m1fn block:32": {"format": "e2m1fn", "scale": "block:32"},
}
KEPT = ("accuracy", "best_accuracy", "loss", "samples_per_second", "step_ms", "seconds", "memory_bytes", "bytes_per_parameter")
RANKS = 8
CONTENDERS: dict[str, dict[str, Any]] = {
    "8 micro-batches, 1 rank": {"virtual_ranks": 1, "micro_batches": RANKS, "wire": {"format": "fp32", "scale": "none"}},
    "8 virtual ranks, fp32": {"virtual_ranks": RANKS, "wire": {"format": "fp32", "scale": "none"}},
    "8 virtual ranks, e5m2 aps": {"virtual_ranks": RANKS, "wire": {"format": "e5m2", "scale": "aps"}},
}
MODES: dict[str, dict[str, Any]] = {  # precisions
    "fp32": {"tf32": False},
    "tf32": {"tf32": True},
    "bf16 autocast": {"tf32": True, "activations": "bf16"},
    "fp16 autocast": {"tf32": True, "activations": "fp16", "loss_scale": "dynamic"},
}

Rows = list[dict[str, Any]]


def recipe_of(name: str, options: argparse.Namespace, **changes: Any) -> Recipe:
    recipe = with_changes(read_recipe(name), device=options.device, **changes)
    if not options.quick:
        return recipe
    return with_changes(recipe, batch=8 * RANKS, model={"options": {"width": 4}}, data={"limit": 512}, log={"every": 2})


# Whole runs.


def trained(wire: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    recipe = recipe_of(options.recipe, options, seed=seed, epochs=options.epochs, wire=WIRES[wire])
    folder = Path(tempfile.mkdtemp(prefix="davidnet-"))
    try:
        end = run(recipe, folder / "run", data=options.data, quiet=True)
        if end["kind"] != "end":
            sys.exit(f"stopped in step {end['step']}: {wire}, seed {seed}")
    finally:
        shutil.rmtree(folder)
    share = share_of_fp32(end["bytes_sent"], end["bytes_of_fp32"])
    facts = {"recipe": options.recipe, "wire": wire, "seed": seed, "epochs": options.epochs, "share_of_fp32": share}
    return facts | {key: end[key] for key in KEPT}


def train_table(runs: Rows) -> Iterator[str]:
    yield from ("", f"## Trained, recipe {runs[0]['recipe']}, {runs[0]['epochs']} epochs, {RANKS} virtual ranks", "")
    heads = ["wire", "n", "test accuracy", "by seed", "difference to fp32"]
    heads += ["images/s", "step ms", "s a run", "of fp32's bytes", "GPU memory"]
    baseline = {each["seed"]: each["accuracy"] for each in runs if each["wire"] == "fp32"}
    body = []
    for wire in WIRES:
        own = [each for each in runs if each["wire"] == wire]
        if not own:
            continue
        accuracies = [each["accuracy"] for each in own]
        changes = [each["accuracy"] - baseline[each["seed"]] for each in own if each["seed"] in baseline]
        cells = [wire, str(len(own)), _percent(accuracies), ", ".join(f"{100 * each:.2f}" for each in accuracies)]
        cells += [_percent(changes, "+") if wire != "fp32" and changes else "", f"{_median(own, 'samples_per_second'):,.0f}"]
        cells += [f"{_median(own, 'step_ms'):.1f}", f"{_median(own, 'seconds'):.1f}", f"{own[0]['share_of_fp32']:.4f}"]
        body.append([*cells, f"{_median(own, 'memory_bytes') / 1e9:.2f} GB"])
    yield from table(heads, body)


def _median(runs: Rows, key: str) -> float:
    return statistics.median(each[key] for each in runs)


def _percent(values: list[float], sign: str = "") -> str:
    mean, half = interval(values)
    return f"{100 * mean:{sign}.2f} %" if len(values) < 2 else f"{100 * mean:{sign}.2f} ± {100 * half:.2f} %"


# Step times.


def step_times(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step: a figure for each contender and round."""
    world = World(0, 1, torch.device(options.device))
    recipes = {name: recipe_of("davidnet", options, precision=MODES[mode], **c) for name, c in CONTENDERS.items()}
    trainers = {name: Trainer(recipe, world, options.data) for name, recipe in recipes.items()}
    any_recipe = next(iter(recipes.values()))  # what follows is the same in all of them
    with cuda_settings(any_recipe, world.device):
        for trainer in trainers.values():
            step_ms(trainer, options.warm_up)
        times = take_turns(trainers, options.rounds, lambda name: step_ms(trainers[name], options.block))
    memory = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    for trainer in trainers.values():
        trainer.close()
    return {"mode": mode, "batch": any_recipe.batch, "block": options.block, "ms": times, "peak_bytes_of_all": memory}


def ratios_of(row: dict[str, Any]) -> dict[str, list[float]]:
    """Each contender's time over that of the accumulated micro-batches in the same round."""
    first, *others = CONTENDERS
    return {name: [ours / base for ours, base in zip(row["ms"][name], row["ms"][first], strict=True)] for name in others}


def steps_table(rows: Rows) -> Iterator[str]:
    yield from ("", f"## The cost of simulating {RANKS} ranks (wanted: e5m2 aps <= {BAR} x the accumulated micro-batches)", "")
    heads = ["computed in", "n", *(f"{name}, ms (images/s)" for name in CONTENDERS)]
    heads += [f"{name.rpartition(', ')[2]}: ratio (range)" for name in list(CONTENDERS)[1:]]
    body = []
    for row in rows:
        medians = {name: statistics.median(times) for name, times in row["ms"].items()}
        ratios = ratios_of(row)
        cells = [row["mode"], str(len(next(iter(row["ms"].values()))))]
        cells += [f"{ms:.2f} ({1e3 * row['batch'] / ms:,.0f})" for ms in medians.values()]
        cells += [f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})" for each in ratios.values()]
        met = statistics.median(list(ratios.values())[-1]) <= BAR
        body.append([*cells, "met" if met else "**missed**"])
    yield from table([*heads, ""], body)


# The whole.


def written(options: argparse.Namespace, facts: dict[str, Any], runs: Rows, rows: Rows) -> tuple[list[str], list[Path]]:
    """The report so far, and the files that it is in: after each part, should the rest fail or be stopped."""
    lines = heading("DavidNet on CIFAR-10, virtual ranks", facts)
    lines += train_table(runs) if runs else []
    lines += steps_table(rows) if rows else []
    content = {"runs": runs, "steps": [row | {"ratios": ratios_of(row)} for row in rows]}
    return lines, write(options.out, f"{options.recipe}-smoke" if options.quick else options.recipe, facts, content, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where cifar10's .bin files lie; default as for lowp train")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--recipe", choices=RECIPES, default="davidnet", help="of the whole runs")
    parser.add_argument("--wires", nargs="+", choices=tuple(WIRES), default=("fp32", "e5m2 aps"), help="of the whole runs")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES))
    parser.add_argument("--seeds", type=int, default=1, help="of the whole runs")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=6, help="steps in a block")
    parser.add_argument("--warm-up", type=int, default=4, help="steps of each contender before the first round")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU; the figures mean nothing")
    options = parser.parse_args()
    options.device = "cpu" if options.quick else "cuda"
    if options.quick:
        options.epochs, options.rounds, options.block, options.warm_up = 1, 2, 1, 1
    elif not torch.cuda.is_available():
        sys.exit("this benchmark is for a GPU; --quick shows on a CPU that it runs")
    facts, runs, rows = facts_of(options.device), [], []
    began = time.perf_counter()
    if "train" in options.sections:
        for seed in range(options.seeds):
            for wire in options.wires:
                runs.append(trained(wire, seed, options))
                written(options, facts, runs, rows)
                print(f"{time.perf_counter() - began:6.1f} s  {wire}, seed {seed}: {runs[-1]['accuracy']:.4f}", flush=True)
    if "steps" in options.sections:
        for mode in options.modes:
            rows.append(step_times(mode, options))
            written(options, facts, runs, rows)
            print(f"{time.perf_counter() - began:6.1f} s  steps in {mode}", flush=True)
            gc.collect()
    lines, paths = written(options, facts, runs, rows)
    print("\n".join(lines))
    print(f"\nwritten: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
