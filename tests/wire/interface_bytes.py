"""What ranks really send, as the network interface counts it: a program that test_traffic.py starts in a network of its own.

There, nothing else is sent. It prints for each case the interface's bytes and the sum of what the ranks' reports say.
"""

import json
import subprocess
from pathlib import Path

import ranks
import torch
import torch.distributed as dist

import lowp

WORLD, ELEMENTS = 3, 1 << 18
CASES = [
    {"format": "e5m2", "scale": "aps", "reduction": "two_shot"},
    {"format": "e2m1fn", "scale": "block:32", "reduction": "one_shot"},
    {"format": "mxfp8_e4m3", "reduction": "hierarchical(2)"},
    {"format": "topk:0.1:e4m3fn", "scale": "local", "reduction": "ring"},
]


def tx_bytes() -> int:
    """Of loopback, in the network of this process. (/sys/class/net would show that of the process that has mounted it.)"""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def sent(rank: int) -> list[tuple[int, int]]:
    """The bytes that left the interface during each case, and those that this rank says it has sent."""
    found = []
    for case in CASES:
        x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
        lowp.all_reduce(x.clone(), **case)  # ranks connect, and compare what they ask for
        dist.barrier()
        before = tx_bytes()
        dist.barrier()  # nobody sends before all have looked
        report = lowp.all_reduce(x, **case)
        dist.barrier()
        after = tx_bytes()
        dist.barrier()
        found.append((after - before, report.bytes_sent))
    return found


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    of_ranks = ranks.run(sent, WORLD)
    print(json.dumps([[of_ranks[0][i][0], sum(found[i][1] for found in of_ranks)] for i in range(len(CASES))]))
