"""ResNet-50 at 224 x 224 on one GPU: images a second and peak memory of fp32, TF32, mixed and pure FP16.

    python -m benchmarks resnet50 [--batch 256] [--seconds 3] [--compiled]        on a GPU
    python -m benchmarks resnet50 --quick                                        tiny, on the CPU: does it run?

Whole steps of `lowp train` (input, forward, backward, SGD with momentum), one rank. **Images are random bytes** that lie on the
device: what is measured is computing, not reading. Steps are made for some seconds; the mean counts.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, table, write
from benchmarks.training.clock import steps_within, warm_up_seconds

from lowp.training import trainer as training
from lowp.training.cuda_settings import cuda_settings
from lowp.training.data.augment import Augment
from lowp.training.data.base import Data
from lowp.training.data.images import ResidentImages, values_of
from lowp.training.reading import read_recipe, with_overrides
from lowp.training.recipe import Recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World

PURE = ["precision.update=stochastic", "precision.loss_scale=dynamic"]
CONTENDERS: dict[str, list[str]] = {
    "mixed: FP16 autocast": ["precision.activations=fp16", "precision.loss_scale=dynamic"],
    "pure FP16": ["precision.weights=fp16", *PURE],
    "mixed: BF16 autocast": ["precision.activations=bf16"],
    "pure BF16": ["precision.weights=bf16", "precision.update=stochastic"],
    "fp32, TF32 products": ["precision.tf32=true"],
    "fp32": ["precision.tf32=false"],
}
CLASSES, IMAGES = 1000, 1024


def random_images(recipe: Recipe, device: torch.device, dtype: torch.dtype, side: int, count: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    values = values_of((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), dtype)
    split = ResidentImages(images, labels, values, Augment((), (3, side, side), device), device)
    return Data("random", split, split, (3, side, side), CLASSES, "image")


def measured(name: str, options: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    world = World.join("cpu" if options.quick else "cuda", 1)
    sizes = [f"batch={options.batch}", f"model.compile={str(compiled).lower()}"]
    base = read_recipe("davidnet-512", ["model.name=resnet50", "data.augment=[]", "virtual_ranks=1", "wire.format=fp32"])
    recipe = with_overrides(base, [*sizes, *CONTENDERS[name]])
    side, count = (32, 2 * options.batch) if options.quick else (224, IMAGES)
    training.open_data = lambda settings, *, device, dtype, directory: random_images(recipe, device, dtype, side, count)
    row: dict[str, Any] = {"contender": name + ", compiled" * compiled, "batch": options.batch}
    with cuda_settings(recipe, world.device):
        trainer = Trainer(recipe, world)
        on_cuda = world.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        row["ready_s"] = warm_up_seconds(trainer, options.warm_up)
        steps, seconds = steps_within(trainer, options.seconds)
        row |= {"steps": steps, "images_per_second": steps * options.batch / seconds}
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if on_cuda else 0
        trainer.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=int, default=6, help="steps before the clock starts")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--compiled", action="store_true", help="compiled models after the others; a minute each")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no contender is begun")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.seconds, options.warm_up, options.only = 4, 0.1, 1, ["fp32", "BF16 autocast"]
    names = [name for name in CONTENDERS if any(part in name for part in options.only)]
    rows, began = [], time.perf_counter()
    for compiled in (False, True) if options.compiled else (False,):
        for name in names:
            if time.perf_counter() - began > options.limit:
                break
            try:
                rows.append(measured(name, options, compiled))
            except Exception as error:  # the other rows still count
                rows.append({"contender": name + ", compiled" * compiled, "error": f"{type(error).__name__}: {error}"[:300]})
            print(json.dumps(rows[-1]), flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    facts = facts_of("cpu" if options.quick else "cuda", 1) | {"batch": options.batch, "images": "random, on the device"}
    said = f"Images a second. n = 1, {options.seconds:g} s."
    lines = [*heading("ResNet-50, 224 x 224: whole training steps", facts), "", said, ""]
    cells = [[r["contender"], f"{r.get('images_per_second', 0):,.0f}", f"{r.get('ready_s', 0):.0f}",
              f"{r.get('peak_bytes', 0) / 1e6:,.0f}", r.get("error", "")] for r in rows]  # fmt: skip
    lines += table(["computed in", "images/s", "s until ready", "peak MB", ""], cells)
    print("\n".join(lines))
    if not options.quick or options.out != RESULTS:
        write(options.out, "resnet50", facts, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
