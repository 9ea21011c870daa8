"""Fashion-MNIST in float32, with 8-bit gradients, and in 16 bits alone: what is lost, and what travels.

    python -m benchmarks fashion                       2 real ranks on the CPU, 4 settings x 3 seeds, some 10 minutes
    python -m benchmarks fashion --device cuda --data DIR    2 virtual ranks on one GPU, and pure FP16
    python -m benchmarks fashion --quick               one epoch of 2,000 samples, one seed: does it run?

The runs are ordinary runs of `lowp train` and lie under runs/fashion/, with their recipes, for `lowp runs` to compare. What is
finished is not run again, and what was stopped goes on.

A seed decides initial weights and the order of samples, and is the same in all settings: differences to float32 are taken seed
by seed. ± is Student's 95 % interval of the mean. A setting is within noise if the interval of its difference contains 0, or
if its mean difference is at most 0.1 points.
"""

import argparse
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, facts_of, heading, interval, table, write

from lowp.training.check import check
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe
from lowp.training.run import run
from lowp.training.runs import Run, differences, is_run
from lowp.training.toml import to_toml

RANKS = 2
EPOCHS = 10
MARGIN = 0.001  # of accuracy
MODEL = {"name": "mlp", "options": {"hidden": [256, 128]}}
MAY_DIFFER = {"ranks", "threads", "device"}  # filled in by the run itself

# What each setting changes in a named recipe. 16 bits are what is stored and computed in; the audit finds no wider tensor.
BF16 = ("precision.weights=bf16", "precision.loss_scale=none", "wire.format=bf16")
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp32": ("fp32", ()),
    "aps8 e5m2": ("aps8", ()),
    "aps8 e4m3fn": ("aps8", ("wire.format=e4m3fn",)),
    "pure bf16": ("pure16", BF16),
    "pure fp16": ("pure16", ()),
}
ON_CUDA = ("pure fp16",)  # FP16 products crawl on most CPUs


def recipe_of(setting: str, seed: int, options: argparse.Namespace) -> Recipe:
    name, changes = SETTINGS[setting]
    cuda = options.device == "cuda"
    recipe = with_changes(
        read_recipe(name, changes),
        name=_stem(setting),
        seed=seed,
        epochs=1 if options.quick else options.epochs,
        device=options.device,
        ranks=1 if cuda else RANKS,
        virtual_ranks=RANKS if cuda else 1,
        model=MODEL,
        data={"name": "fashion_mnist", "limit": 2000 if options.quick else 0},
    )
    check(recipe)
    return recipe


def _stem(setting: str) -> str:
    return setting.replace(" ", "-")


def finished(recipe: Recipe, folder: Path) -> bool:
    """Is this run there already? One that was made by another recipe is not overwritten."""
    if not is_run(folder):
        return False
    there = Run.read(folder)
    changed = sorted(set(differences([tomllib.loads(to_toml(recipe)), there.recipe])) - MAY_DIFFER)
    if changed:
        sys.exit(f"{folder} is another recipe's run ({', '.join(changed)} differ): remove it, or choose another --runs")
    return there.state == "finished"


def train(recipe: Recipe, folder: Path, data: Path | None) -> None:
    end = run(recipe, folder, resume=True, data=data, quiet=True)
    if end["kind"] == "stopped":
        sys.exit(f"{folder} was stopped at step {end['step']}; the same command goes on with it")


def row_of(setting: str, runs: list[Run], baseline: list[Run]) -> dict[str, Any]:
    """One setting: its seeds together, and beside float32's same seeds."""
    accuracies, theirs = ([run.accuracy for run in each] for each in (runs, baseline))
    changes = [ours - other for ours, other in zip(accuracies, theirs, strict=True)]
    mean, half = interval(changes)
    return {
        "setting": setting,
        "n": len(runs),
        "accuracies": accuracies,
        "accuracy": interval(accuracies),
        "deviation": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "difference": (mean, half),
        "within_noise": verdict(mean, half) if setting != "fp32" and len(runs) > 1 else "",
        "bytes_sent": runs[0].bytes_sent,
        "share_of_fp32": runs[0].share_of_fp32,
        "bytes_per_parameter": runs[0].bytes_per_parameter,
        "step_ms": statistics.median(run.step_ms for run in runs if run.step_ms is not None),
        "seconds": statistics.fmean(run.seconds for run in runs if run.seconds is not None),
        "audited": all(any(record.get("message", "").startswith("audit:") for record in run.records) for run in runs),
    }


def verdict(mean: float, half: float) -> str:
    if abs(mean) <= max(MARGIN, half):
        return "yes"
    return "better" if mean > 0 else "**no**"


def lines_of(rows: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    heads = ["setting", "n", "test accuracy", "by seed", "difference to fp32", "within noise"]
    heads += ["sent by a rank", "of fp32's bytes", "B/parameter", "step ms", "s a run", "no fp32 tensor"]
    body = []
    for row in rows:
        by_seed = ", ".join(f"{100 * accuracy:.2f}" for accuracy in row["accuracies"])
        cells = [row["setting"], str(row["n"]), _percent(row["accuracy"]), by_seed]
        cells += ["" if row["setting"] == "fp32" else _percent(row["difference"], "+"), row["within_noise"]]
        cells += [f"{row['bytes_sent'] / 1e6:.1f} MB", f"{row['share_of_fp32']:.4f}", f"{row['bytes_per_parameter']:.2f}"]
        cells += [f"{row['step_ms']:.2f}", f"{row['seconds']:.1f}", "audited" if row["audited"] else ""]
        body.append(cells)
    return [*heading("Fashion-MNIST", facts), "", *table(heads, body)]


def _percent(pair: tuple[float, float], sign: str = "") -> str:
    mean, half = pair
    return f"{100 * mean:{sign}.2f} %" if half != half else f"{100 * mean:{sign}.2f} ± {100 * half:.2f} %"


def facts_with(options: argparse.Namespace) -> dict[str, Any]:
    layers = ", ".join(map(str, MODEL["options"]["hidden"]))
    ranks = f"{RANKS} virtual ranks" if options.device == "cuda" else f"{RANKS} real ranks (gloo)"
    return facts_of(options.device) | {
        "model": f"mlp, hidden layers of {layers}",
        "training": f"{1 if options.quick else options.epochs} epochs, batch 128, {ranks}; else as recipe `fp32`",
        "seeds": f"{options.seeds}; ± is the 95 % interval of the mean",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), help="some of them; fp32 is always there")
    parser.add_argument("--data", type=Path, help="where fashion_mnist lies; default as for lowp train")
    parser.add_argument("--runs", type=Path, help="default runs/fashion, or runs/fashion-quick")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    options.runs = options.runs or Path("runs/fashion-quick" if options.quick else "runs/fashion")
    wanted = {"fp32", *(options.settings or SETTINGS)}
    settings = [s for s in SETTINGS if s in wanted and (options.device == "cuda" or s not in ON_CUDA)]
    jobs = [(setting, seed) for seed in range(options.seeds) for setting in settings]
    folders = {(setting, seed): options.runs / f"{options.device}-{_stem(setting)}-{seed}" for setting, seed in jobs}
    began = time.perf_counter()
    for (setting, seed), folder in folders.items():
        recipe = recipe_of(setting, seed, options)
        if not finished(recipe, folder):
            train(recipe, folder, options.data)
        print(f"{time.perf_counter() - began:6.1f} s  {setting}, seed {seed}: {Run.read(folder).accuracy:.4f}", flush=True)
    runs = {setting: [Run.read(folders[setting, seed]) for seed in range(options.seeds)] for setting in settings}
    rows = [row_of(setting, runs[setting], runs["fp32"]) for setting in settings]
    facts = facts_with(options)
    print("\n".join(lines := lines_of(rows, facts)))
    for path in write(options.out, "fashion-quick" if options.quick else "fashion", facts, {"settings": rows}, lines):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
