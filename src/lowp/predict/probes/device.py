"""What computes: its name, its memory, and how fast it copies and multiplies.

The speeds serve for models that were not measured themselves. They are of one large product and one large copy; most models
reach less.
"""

import os
import statistics
from dataclasses import replace

import torch

from lowp.predict.cluster import Device
from lowp.predict.probes.meeting import Meeting
from lowp.training.environment import processor_name

SIDE = {"cpu": 768, "cuda": 8192}  # of the matrices that are multiplied
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}  # bytes
ROUNDS = 7


def bare_device(device: torch.device, ranks_here: int) -> Device:
    """Its name, its kind and its memory, of which every rank on this machine has its share."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        sharing = -(-ranks_here // max(1, torch.cuda.device_count()))
        return Device(found.name, "cuda", memory=float(found.total_memory // sharing))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here
    threads = torch.get_num_threads()
    return Device(f"{threads} thread{'s' if threads > 1 else ''} of {processor_name()}", "cpu", memory=float(memory))


def with_speeds(meeting: Meeting, device: Device, seconds: float) -> Device:
    """The device, with the bandwidth of its memory and its FLOP/s, all ranks at once."""
    side, size = SIDE[device.kind], COPIED[device.kind]
    a = torch.randn(side, side, device=meeting.device)
    source = torch.zeros(size, dtype=torch.uint8, device=meeting.device)
    target, product = torch.empty_like(source), torch.empty_like(a)
    calls = {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, a, out=product)}
    for call in calls.values():
        call()
    found = meeting.in_turns(calls, seconds, ROUNDS)
    copied, multiplied = (statistics.median(meeting.mean(found[what])) for what in calls)
    return replace(device, bandwidth=2 * size / copied, flops=2 * side**3 / multiplied)
