"""Steps of whole models on a GPU: under DDP with each hook, and under FSDP2 with rounded gathers and reductions.

All contenders are there at once, each with a copy of the model, and take turns: a block of steps each.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.harness import take_turns
from benchmarks.links.clock import Clock, summarize, tried
from benchmarks.links.models import MODELS, on_device, step_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

PLAIN, HALF = "no hook", "fp16 hook"
HOOKS: dict[str, tuple[str, dict[str, Any]]] = {  # format and settings by name
    "e5m2 aps": ("e5m2", {"scale": "aps"}),
    "e5m2 none": ("e5m2", {"scale": "none"}),
    "e5m2 local": ("e5m2", {"scale": "local"}),
    "e2m1fn block:32": ("e2m1fn", {"scale": "block:32"}),
    "mxfp8_e4m3": ("mxfp8_e4m3", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "adaptive:4.4": ("adaptive:4.4", {}),
}
CONTENDERS = (PLAIN, HALF, *HOOKS)
FSDP: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "reduce=e5m2": {"reduce": "e5m2"},
    "gather=e4m3fn": {"gather": "e4m3fn"},
    "reduce=e5m2, gather=e4m3fn": {"reduce": "e5m2", "gather": "e4m3fn"},
    "reduce=mxfp4, gather=mxfp8_e4m3": {"reduce": "mxfp4", "gather": "mxfp8_e4m3"},
}
WARM_UP = 3  # steps; DDP makes its buckets anew after the first

Step = Callable[[], None]


def ddp_step(model: str, contender: str, samples: int, device: torch.device) -> Step:
    """A step of a new copy of the model with this hook, after some steps to warm up."""
    import lowp

    ddp = DistributedDataParallel(on_device(model, device), gradient_as_bucket_view=True, broadcast_buffers=False)
    if contender == HALF:
        ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    elif contender != PLAIN:
        fmt, settings = HOOKS[contender]
        lowp.compress_gradients(ddp, fmt, **settings)
    return _warm(step_of(model, ddp, samples, device))


def fsdp_step(model: str, contender: str, samples: int, device: torch.device) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import lowp

    net: nn.Module = on_device(model, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in MODELS[model].layers(net):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if contender != PLAIN:
        lowp.fsdp.compress(net, **FSDP[contender])
    return _warm(step_of(model, net, samples, device))


def _warm(step: Step) -> Step:
    for _ in range(WARM_UP):
        step()
    return step


def model_steps(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    return _steps(ddp_step, case, clock, failures)


def fsdp_steps(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    return _steps(fsdp_step, case, clock, failures)


def _steps(build: Callable[..., Step], case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    """Seconds a step: a figure for each contender and round, of the slowest rank."""
    model, block = case["model"], case["block"]
    samples = MODELS[model].samples if dist.get_world_size() == 1 else MODELS[model].shared
    steps: dict[str, Step] = {}
    for name in case["contenders"]:
        reason = tried(lambda name=name: steps.__setitem__(name, build(model, name, samples, clock.device)))
        if reason:
            failures[f"{model}, {name}"] = reason
            steps.pop(name, None)
        elif dist.get_rank() == 0:
            print(f"{model}, {name}: ready", flush=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in steps}

    def measure(name: str) -> float:
        found = clock.measure(lambda: [steps[name]() for _ in range(block)])
        rounds[name].append({key: value / block for key, value in found.items()})
        return rounds[name][-1]["seconds"]

    began = time.perf_counter()
    take_turns(steps, 1, measure)
    fit = (case.get("seconds", 0.0) - (time.perf_counter() - began)) / max(1e-3, time.perf_counter() - began)
    agreed = [max(case["rounds"] - 1, round(fit))]
    dist.broadcast_object_list(agreed, src=0)
    take_turns(steps, agreed[0], measure)
    figures = summarize(rounds)
    steps.clear()
    gc.collect()
    return [{"contender": name, "model": model, "samples": samples} | figures[name] for name in rounds]
