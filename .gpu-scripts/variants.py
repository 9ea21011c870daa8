"""Device time of an optimizer's step, by how its kernel is cut. Processes compile at once, and take turns (LOWP_TURNS)."""

import json
import statistics
import sys
from pathlib import Path

import torch
from benchmarks.harness import alone
from benchmarks.optim import LAYOUTS, Clock, contenders, prepare
from torch.profiler import ProfilerActivity, profile

from lowp.tensor.lists import function

algorithm, weights, setting = sys.argv[1].split(":")
out = Path(sys.argv[2])
VARIANTS = {  # elements of a step, of a warp, steps of a program, registers of a thread
    "1024/256 x 8": (1024, 256, 8, None),
    "1024/256 x 4": (1024, 256, 4, None),
    "1024/256 x 16": (1024, 256, 16, None),
    "1024/256 x 1": (1024, 256, 1, None),
    "1024/256 x 8, 128": (1024, 256, 8, 128),
    "1024/256 x 8, 96": (1024, 256, 8, 96),
    "512/128 x 8": (512, 128, 8, None),
    "512/128 x 16": (512, 128, 16, None),
    "2048/256 x 8": (2048, 256, 8, None),
    "256/256 x 16": (256, 256, 16, None),
}
cases = {c.name: c for c in contenders(algorithm, False)}
mine, fused = cases[f"lowp {algorithm} {weights} {setting}"], cases[f"torch {algorithm} {weights} fused"]
running, failed = {"torch fused": prepare(fused, LAYOUTS["ResNet-50"], "cuda")}, {}
for name, (chunk, each, steps, registers) in VARIANTS.items():
    function._CUDA_CHUNK, function._CUDA_EACH, function._CUDA_STEPS, function._CUDA_REGISTERS = chunk, each, steps, registers
    function.Lists.chunks.__defaults__ = (chunk,)
    try:
        running[name] = prepare(mine, LAYOUTS["ResNet-50"], "cuda")
        running[name].optimizer.step()
    except Exception as error:
        failed[name] = repr(error)[:300]
print(sys.argv[1], "ready", failed, flush=True)
with alone():
    clock = Clock("cuda")
    for _ in range(7):
        for each in running.values():
            clock.round(each)
    kernels = {}
    for name, each in running.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                each.optimizer.step()
            torch.cuda.synchronize()
        times = {}
        for e in seen.events():
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation:
                times[e.name[:40]] = times.get(e.name[:40], 0) + e.time_range.elapsed_us() / 3
        kernels[name] = {k: round(v, 1) for k, v in sorted(times.items(), key=lambda kv: -kv[1])[:6]}
base, wall = (statistics.median(x) for x in (running["torch fused"].times, running["torch fused"].wall))
rows = {
    name: {
        "device_ms": statistics.median(each.times), "over_fused": statistics.median(each.times) / base,
        "wall_ms": statistics.median(each.wall), "wall_over_fused": statistics.median(each.wall) / wall,
        "host_ms": statistics.median(each.host), "kernels": kernels[name],
    }
    for name, each in running.items()
}  # fmt: skip
out.write_text(json.dumps({"case": sys.argv[1], "rows": rows, "failed": failed}, indent=1))
for name, row in rows.items():
    print(
        f"{sys.argv[1]:34} {name:20} device {row['device_ms']:.3f} {row['over_fused']:.2f}  wall {row['wall_ms']:.3f} {row['wall_over_fused']:.2f}"
    )
