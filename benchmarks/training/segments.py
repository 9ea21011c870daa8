"""lowp and the bare loop take turns in the same processes: one segment of some seconds each, the first of a round changing.

Everything that could differ between them other than the loop is shared: the processes, their threads, the memory allocator's
state, the machine's mood. A segment of lowp is a whole `run`: its log, its agreement on stopping, its progress (hidden). Its
speed is read from its own log, which leaves setting up, the last test and the last checkpoint out; the bare loop keeps the same
kind of log.
"""

import io
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from benchmarks.harness import free_port
from benchmarks.training import bare
from benchmarks.training.bare import LOG_EVERY, Stretch
from benchmarks.training.cases import Case

from lowp.training.json_lines import read_lines
from lowp.training.run import run
from lowp.training.world import World

FEWEST_EPOCHS = 3  # in a segment: the first stretch is not counted
WARM_UP = 0.1  # of a segment's stretches; not counted
SAME_LOSS = 1e-3  # relative: how near the first stretches' losses must be, or the two sides do not train alike


@dataclass(frozen=True)
class Plan:
    """What the ranks of one comparison need to know."""

    case: Case
    ranks: int
    device: str
    rounds: int
    seconds: float  # a segment
    data: Path | None
    folder: Path
    port: int


def compare(case: Case, ranks: int, device: str, rounds: int, seconds: float, data: Path | None) -> dict[str, Any]:
    """Speeds, samples a second, one of each side a round."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(case, ranks, device, rounds, seconds, data, Path(folder), free_port())
        torch.multiprocessing.spawn(_rank, (plan,), nprocs=ranks)
        return json.loads((plan.folder / "result.json").read_text())


@contextmanager
def world_of(rank: int, ranks: int, device: str, port: int) -> Iterator[World]:
    """Meet the other ranks, told apart the way torchrun does it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World.join(device, threads=0)
    try:
        yield world
    finally:
        world.leave()


def _rank(rank: int, plan: Plan) -> None:
    with world_of(rank, plan.ranks, plan.device, plan.port) as world:
        result = _segments(plan, world)
        if world.first:
            _check_alike(result["first_losses"])
            (plan.folder / "result.json").write_text(json.dumps(result))


def _segments(plan: Plan, world: World) -> dict[str, Any]:
    epochs = _epochs(plan, world)
    speeds: dict[str, list[dict[str, float]]] = {"lowp": [], "bare": []}
    first_losses: dict[str, float] = {}
    for number in range(plan.rounds):
        for side in ("lowp", "bare") if number % 2 == 0 else ("bare", "lowp"):
            if side == "lowp":
                stretches = _lowp(plan, world, epochs, number)
            else:
                stretches = bare.train(plan.case, epochs, world, plan.data)
            if world.first:
                speeds[side].append(_speeds(stretches, plan.case.batch))
                first_losses[side] = stretches[0].loss
    return {"epochs": epochs, "threads": torch.get_num_threads(), "speeds": speeds, "first_losses": first_losses}


def _epochs(plan: Plan, world: World) -> int:
    """How many make a segment of the wanted length, by the second of two epochs of the bare loop."""
    stretches = bare.train(plan.case, 2, world, plan.data)
    seconds = sum(stretch.seconds for stretch in stretches[len(stretches) // 2 :])
    return max(FEWEST_EPOCHS, round(plan.seconds / seconds))


def _lowp(plan: Plan, world: World, epochs: int, number: int) -> list[Stretch]:
    """Rank 0 has the log; others return nothing."""
    out = plan.folder / f"run-{number}"
    recipe = plan.case.recipe(epochs=epochs, ranks=plan.ranks, device=plan.device)
    with redirect_stdout(io.StringIO()):
        run(recipe, out, data=plan.data, quiet=True, world=world)
    return _stretches_of(out, recipe.batch) if world.first else []


def _stretches_of(folder: Path, batch: int) -> list[Stretch]:
    """From a run's log. A line knows its speed, and so its time."""
    stretches, before = [], 0
    for record in read_lines(folder / "metrics.jsonl"):
        if record["kind"] == "train":
            steps = record["step"] - before
            stretches.append(Stretch(steps, steps * batch / record["samples_per_second"], record["loss"]))
            before = record["step"]
    return stretches


def _speeds(stretches: list[Stretch], batch: int) -> dict[str, float]:
    """Samples a second: by the median stretch, which a disturbance does not touch, and by all the time that steps took."""
    counted = stretches[max(1, round(WARM_UP * len(stretches))) :]
    whole = [stretch.seconds / stretch.steps for stretch in counted if stretch.steps == LOG_EVERY]
    total = sum(stretch.steps for stretch in counted) * batch / sum(stretch.seconds for stretch in counted)
    return {"by_median": batch / statistics.median(whole) if whole else total, "by_total": total}


def _check_alike(first_losses: dict[str, float]) -> None:
    lowp, plain = first_losses["lowp"], first_losses["bare"]
    if abs(lowp - plain) > SAME_LOSS * abs(plain):
        raise RuntimeError(f"the two sides do not train alike: their first steps' losses are {lowp} and {plain}")
