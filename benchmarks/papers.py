"""The papers' trainings in narrow numbers against float32: does the recipe of each train to within noise of it?

    python -m benchmarks papers                                   the embedded set, 5 seeds
    python -m benchmarks papers --set fashion_mnist --seeds 3     all of Fashion-MNIST
    python -m benchmarks papers --quick                           two epochs of 1,280 samples, one seed: does it run?

Each setting is a recipe of `lowp recipes`, or one with a change. Beside it runs float32 with the same model, data, optimizer
and seeds, so that only the numbers differ. The runs are ordinary runs of `lowp train`, in one process, and lie under
runs/papers/. What is finished is not run again.

A seed decides initial weights and the order of samples: differences are taken seed by seed. ± is Student's 95 % interval of the
mean. A setting is within noise if the interval of its difference contains 0, or if its mean difference is at most 0.1 points.
Fixed point to nearest is there to fail, as its paper says it does.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fashion import finished, verdict
from benchmarks.harness import RESULTS, facts_of, heading, interval, table, write

from lowp.training.check import check
from lowp.training.divergence import Diverged
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Precision, Recipe, Wire
from lowp.training.run import run
from lowp.training.runs import Run

NEAREST = ("precision.rounding=nearest", "precision.update=nearest")


@dataclass(frozen=True)
class Setting:
    """A recipe, what is changed in it, and what its paper says of it."""

    recipe: str
    paper: str
    changes: tuple[str, ...] = ()
    fails: bool = False


SETTINGS = {
    "fp8-all": Setting("fp8-all", "1905.12334"),
    "fixed16": Setting("fixed16", "1502.02551"),
    "fixed16 to nearest": Setting("fixed16", "1502.02551", NEAREST, fails=True),
    "posit-warmup": Setting("posit-warmup", "1909.03831"),
    "posit8-quire": Setting("posit8-quire", "2105.00053"),
    "no-multiply": Setting("no-multiply", "2012.03458"),
}


def recipe_of(setting: Setting, name: str, seed: int, options: argparse.Namespace) -> Recipe:
    recipe = with_changes(
        read_recipe(setting.recipe, setting.changes),
        name=name.replace(" ", "-"),
        seed=seed,
        device=options.device,
        threads=options.threads,
        data={"name": options.set, "limit": 1280 if options.quick else 0},
        test_every=0,
        checkpoints={"keep": 1},
        **({"epochs": 2} if options.quick else {}),
    )
    check(recipe)
    return recipe


def in_float32(recipe: Recipe) -> Recipe:
    """The same training with all numbers in float32, which settings with the same optimizer share."""
    usual = dict(read_recipe("fp32").optimizer)
    own = [f"{key}-{value}" for key, value in recipe.optimizer if value != usual[key]]
    name = "-".join(["fp32", f"{recipe.epochs}-epochs", *own])
    return recipe.model_copy(update={"name": name, "description": "", "precision": Precision(), "wire": Wire()})


def train(recipe: Recipe, folder: Path, data: Path | None) -> Run:
    """The run, made if it is not there. One that diverged stays as it is: it failed."""
    if not finished(recipe, folder) and (not folder.exists() or Run.read(folder).state != "diverged"):
        try:
            run(recipe, folder, resume=True, data=data, quiet=True)
        except Diverged as error:
            print(f"{folder.name}: {error}", flush=True)
    found = Run.read(folder)
    if found.state not in ("finished", "diverged"):
        sys.exit(f"{folder} is {found.state}; the same command goes on with it")
    return found


def row_of(name: str, runs: list[Run], baseline: list[Run]) -> dict[str, Any]:
    """One setting: its seeds together, and beside float32's same seeds."""
    setting = SETTINGS[name]
    failed = [run.message for run in runs if run.state == "diverged"]
    pairs = [(ours.accuracy, theirs.accuracy) for ours, theirs in zip(runs, baseline, strict=True) if ours.state == "finished"]
    mean, half = interval([ours - theirs for ours, theirs in pairs])
    within = "**no**" if failed or not pairs else verdict(mean, half) if len(runs) > 1 else ""
    return {
        "setting": name,
        "recipe": setting.recipe,
        "changes": setting.changes,
        "paper": setting.paper,
        "n": len(runs),
        "diverged": failed,
        "accuracies": [ours for ours, _ in pairs],
        "accuracies_of_fp32": [run.accuracy for run in baseline],
        "difference": (mean, half),
        "within_noise": within,
        "as_the_paper_says": (within == "**no**") == setting.fails if within else None,
        "seconds": statistics.fmean(run.seconds for run in runs if run.seconds is not None),
        "seconds_of_fp32": statistics.fmean(run.seconds for run in baseline if run.seconds is not None),
    }


def lines_of(rows: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    heads = ["setting", "arXiv", "n", "fp32", "test accuracy", "by seed", "difference to fp32", "within noise"]
    heads += ["the paper says", "s a run", "of fp32"]
    body = []
    for row in rows:
        by_seed = ", ".join(f"{100 * accuracy:.2f}" for accuracy in row["accuracies"])
        by_seed += f" ({len(row['diverged'])} diverged)" if row["diverged"] else ""
        means = [f"{100 * interval(row[key])[0]:.2f} %" for key in ("accuracies_of_fp32", "accuracies")]
        says = "it fails" if SETTINGS[row["setting"]].fails else "it trains"
        mean, half = row["difference"]
        difference = f"{100 * mean:+.2f}" + ("" if half != half else f" ± {100 * half:.2f}")
        cells = [row["setting"], row["paper"], str(row["n"]), *means, by_seed, f"{difference} %", row["within_noise"]]
        body.append([*cells, says, f"{row['seconds']:.0f}", f"{row['seconds_of_fp32']:.0f}"])
    return [*heading("the papers' trainings in narrow numbers", facts), "", *table(heads, body)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="fashion14", help="a data set of `lowp recipes --data`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="as for lowp train; 0: all cores")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--data", type=Path, help="where data sets lie; default as for lowp train")
    parser.add_argument("--runs", type=Path, help="default runs/papers, or runs/papers-quick")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    options.runs = options.runs or Path("runs/papers-quick" if options.quick else "runs/papers")
    began = time.perf_counter()
    runs: dict[str, list[Run]] = {name: [] for name in options.settings}
    baselines: dict[str, list[Run]] = {name: [] for name in options.settings}
    for seed in range(options.seeds):
        for name in options.settings:
            recipe = recipe_of(SETTINGS[name], name, seed, options)
            for each, kept in ((in_float32(recipe), baselines), (recipe, runs)):
                folder = options.runs / f"{options.device}-{options.set}-{each.name}-{seed}"
                kept[name].append(train(each, folder, options.data))
            ours, theirs = runs[name][-1].accuracy, baselines[name][-1].accuracy
            print(f"{time.perf_counter() - began:6.0f} s  {name}, seed {seed}: {ours:.4f}, fp32 {theirs:.4f}", flush=True)
    rows = [row_of(name, runs[name], baselines[name]) for name in options.settings]
    facts = facts_of(options.device) | {
        "training": f"{options.set}, else as the recipes; fp32 has the same model, optimizer and seeds",
        "seeds": f"{options.seeds}; ± is the 95 % interval of the mean of the differences",
    }
    print("\n".join(lines := lines_of(rows, facts)))
    stem = "papers" + ("" if options.set == "fashion14" else f"-{options.set}") + ("-quick" if options.quick else "")
    for path in write(options.out, stem.replace("_", "-"), facts, {"settings": rows}, lines):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
