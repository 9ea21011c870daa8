"""How a call is measured: barrier, call, barrier.

The time of a round is that of the slowest rank. The bytes are those that the busiest node's interface sent, from before the
first barrier to after the second: a barrier is some hundred bytes, and after the second one nothing is left in a queue. The
processor time is that of all threads of a rank during the call, the kernel's work for its messages included as far as the
kernel counts it to the process. On CUDA the device is waited for before and after the call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.harness import in_a_line


@dataclass
class Clock:
    """Measures calls on this rank and knows those of the others."""

    interface: str
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # frozen

    def sent(self) -> tuple[int, int]:
        """Bytes and packets that left this node, so far. TCP hands packets of up to 64 KiB down, which count as one."""
        statistics = Path("/sys/class/net") / self.interface / "statistics"
        return tuple(int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets"))

    def measure(self, call: Callable[[], object]) -> dict[str, float]:
        before = self.sent()
        dist.barrier()
        self.wait()
        began, busy = time.perf_counter(), time.process_time()
        call()
        self.wait()
        seconds, processor = time.perf_counter() - began, time.process_time() - busy
        dist.barrier()
        after = self.sent()
        sent = {"bytes": after[0] - before[0], "packets": after[1] - before[1]}
        return {"seconds": seconds, "processor": processor} | sent

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def everyone(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tried(call: Callable[[], object]) -> str | None:
    """The reason why this fails, on any rank; all ranks learn it, and leave it out together."""
    try:
        call()
        reason = None
    except Exception as error:
        reason = in_a_line(error)
    return next((r for r in everyone(reason) if r), None)


def summarize(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Over ranks: the slowest's time, the busiest's processor time, the busiest interface's bytes."""
    ranks = everyone(rounds)
    result = {}
    for name in rounds:
        together = list(zip(*(rank[name] for rank in ranks), strict=True))
        result[name] = {key: [max(r[key] for r in one) for one in together] for key in together[0][0]}
    return result
