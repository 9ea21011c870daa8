"""On every rank of a link: `lowp calibrate` first, then steps under DistributedDataParallel, wire by wire, in turns.

A step is `zero_grad`, forward, backward and what DDP sends meanwhile; the optimizer is left out, as it is in predictions. Steps
follow each other in blocks; a figure is the time of a block over its steps, of the slowest rank.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.harness import take_turns
from benchmarks.links.clock import Clock, summarize, tried
from benchmarks.predict.models import BATCH, named
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

TORCH = ("fp32", "fp16")  # torch's own all-reduce, and its hook
WIRES = (  # as `lowp predict --wire` has them
    "fp32",
    "fp16",
    "e4m3fn/local@two_shot",
    "e4m3fn/local@one_shot",
    "e2m1fn/block:32@two_shot",
    "e2m1fn/block:32@one_shot",
)
WARM_UP = 3  # steps; DDP makes its buckets anew after the first
BLOCK_SECONDS = 0.6  # that a block of steps takes, about
MOST_STEPS = 10  # of a block

Step = Callable[[], None]


def calibrated(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    """One row, which holds the cluster as it was calibrated on this very link."""
    from lowp.predict.calibration import calibrate_cluster
    from lowp.predict.cluster_file import cluster_toml
    from lowp.predict.subjects import subject_of

    _above_others()
    began = time.perf_counter()
    subjects = [subject_of(named(model), batch=BATCH, device=clock.device) for model in case["models"]]
    codecs = [wire.partition("@")[0] for wire in case["wires"] if wire not in TORCH]
    cluster = calibrate_cluster(
        name=case["name"],
        subjects=subjects,
        codecs=codecs,
        seconds=case["seconds"],
        device=clock.device,
        say=lambda text: print(text, flush=True),
    )
    return [{"what": "cluster", "toml": cluster_toml(cluster), "seconds_taken": time.perf_counter() - began, "load": load()}]


def _above_others() -> None:
    """Where the kernel shares processors between sessions (autogroup), ranks come before what else runs on this computer."""
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-19")


def load() -> float:
    """What runs on this computer, over the last minute. Our own ranks are part of it."""
    return os.getloadavg()[0]


def measured_steps(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    """Rows of a model's steps, wire by wire."""
    model, steps = case["model"], {}
    for wire in case["wires"]:
        reason = tried(lambda wire=wire: steps.__setitem__(wire, ddp_step(model, wire, clock.device)))
        if reason:
            failures[f"{model}, {wire}"] = reason
            steps.pop(wire, None)
    blocks = {wire: _block(step, clock) for wire, step in steps.items()}
    rounds: dict[str, list[dict[str, float]]] = {wire: [] for wire in steps}

    def measure(wire: str) -> float:
        found = clock.measure(lambda: [steps[wire]() for _ in range(blocks[wire])])
        rounds[wire].append({key: value / blocks[wire] for key, value in found.items()})
        return rounds[wire][-1]["seconds"]

    take_turns(steps, case["rounds"], measure)
    figures = summarize(rounds)
    steps.clear()
    gc.collect()
    return [{"what": "step", "model": model, "wire": wire, "block": blocks[wire]} | own for wire, own in figures.items()]


def _block(step: Step, clock: Clock) -> int:
    """How many steps make a block: as many on every rank."""
    times = []
    for _ in range(2):
        dist.barrier()
        clock.wait()
        began = time.perf_counter()
        step()
        clock.wait()
        times.append(time.perf_counter() - began)
    agreed = torch.tensor([statistics.median(times)], dtype=torch.float64, device=clock.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return max(1, min(MOST_STEPS, round(BLOCK_SECONDS / float(agreed))))


def ddp_step(model: str, wire: str, device: torch.device) -> Step:
    """A step of a new copy of the model that sends in this way, after some steps to warm up."""
    import lowp
    from lowp.predict.subjects import subject_of
    from lowp.predict.wires import compress_arguments

    subject = subject_of(named(model), batch=BATCH, device=device)
    ddp = DistributedDataParallel(subject.module)
    if wire == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif wire != "fp32":
        lowp.compress_gradients(ddp, **compress_arguments(wire))

    def step() -> None:
        ddp.zero_grad(set_to_none=True)
        subject.forward(ddp).backward()

    for _ in range(WARM_UP):
        step()
    return step
