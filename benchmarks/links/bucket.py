"""What a bucket of 100 layers costs a rank: time of the host to submit it, and time of the device, beside what `copy_` takes.

The caller's time is that of `Compressor.submit`: what a bucket takes from the thread that runs backward. The host's time goes
on until everything is launched, by the wire's own thread. Neither waits for the device: medians over calls, the device idle
before each. The device's time is the sum of all kernels' times of a call, as torch's profiler sees them.

The bound of the device's time is the time that `copy_` takes for the bytes that must be read and written, for each element with
c bytes on the wire, on one rank:

    measure (aps, local: the largest magnitude must be known first)    4 read
    encode                                                             4 read, c written
    fold                                                               c read, c written
    finish                                                             c read, 4 written
"""

import statistics
import time

import torch
from benchmarks.links.clock import Clock, tried
from benchmarks.links.model_steps import HOOKS
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SIZES = (600_000,) * 30 + (100_003,) * 70
WIRE_BYTES = {
    "e5m2": 1.0,
    "e2m1fn": 0.5 + 1 / 32,
    "mxfp8_e4m3": 1 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "adaptive:4.4": 4.4 / 8,
}
CALLS = 30
PROFILED = 5
HOST_BAR = 0.3e-3  # seconds
DEVICE_BAR = 1.3  # of the bound


def buckets(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    flat = torch.randn(sum(SIZES), device=clock.device).mul_(1e-3)
    copy = _copy_seconds(flat, clock)
    rows = []
    for name in case["contenders"]:
        if name not in HOOKS:
            continue
        row: dict = {}
        reason = tried(lambda name=name, row=row: row.update(_bucket(name, flat, clock)))
        if reason:
            failures[f"bucket, {name}"] = reason
        else:
            rows.append({"contender": name, "bound": row["bytes"] * flat.numel() * copy / (8 * flat.numel())} | row)
    return rows


def _bucket(name: str, flat: Tensor, clock: Clock) -> dict:
    import lowp

    fmt, settings = HOOKS[name]
    shapes = {f"layer{i}": (size,) for i, size in enumerate(SIZES)}
    compressor = lowp.Compressor(shapes, fmt, device=clock.device, **settings)
    names, numbers = list(shapes), flat.clone()

    def call() -> tuple[float, float]:
        """Seconds of the caller, and of the host."""
        clock.wait()
        began = time.perf_counter()
        future = compressor.submit(numbers, names)
        submitted = time.perf_counter()
        future.wait()
        launched = time.perf_counter()
        compressor.step_done()
        compressor.step_arrived([])
        return submitted - began, launched - began

    for _ in range(3):
        call()
    caller, host = zip(*(call() for _ in range(CALLS)), strict=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        for _ in range(PROFILED):
            call()
        clock.wait()
    compressor.close()
    kernels = [e for e in seen.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    device = sum(event.time_range.elapsed_us() for event in kernels) / PROFILED / 1e6
    scale = settings.get("scale", "local")
    code = WIRE_BYTES[fmt]
    needed = 8 + 4 * code + (4 if scale in ("aps", "local") else 0)
    return {
        "host": list(host),
        "caller": statistics.median(caller),
        "device": device,
        "kernels": len(kernels) / PROFILED,
        "bytes": needed,
        "median": statistics.median(host),
    }


def _copy_seconds(flat: Tensor, clock: Clock) -> float:
    """Of a copy_ of the whole bucket: the median of single calls, the cache full of other things."""
    other, more = torch.empty_like(flat), torch.empty_like(flat)
    if clock.device.type != "cuda":
        times = []
        for _ in range(5):
            began = time.perf_counter()
            other.copy_(flat)
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    times = []
    for _ in range(20):
        more.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        other.copy_(flat)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
