"""How a candidate is timed: against `copy_` of the same number of elements, on sizes that no call of it has seen before.

On a CPU that others use too, absolute times mean little. Each round times `copy_`, the candidate and `copy_` again; a round
gives one ratio, and the median over the rounds is reported: what slows both down cancels. Rounds in which `copy_` itself was
far from its best are repeated, up to a limit. On CUDA, events around each call measure the device alone: the L2 cache is
emptied, and a pause on the device lets the host get ahead, so that launching is hidden, as it is in a program that keeps the
device busy. What launching costs the host is recorded beside it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOW = 0.5  # seconds a call: such candidates get a slice and fewer rounds
SLICE = 32  # how much smaller
QUIET = 1.5  # a round counts where copy_ took no longer than this times its best
COPY_BYTES = 8
L2_BYTES = 256 << 20  # more than the cache of any GPU today
PAUSE = 1_000_000  # cycles, half a millisecond: longer than the host takes to launch a call


@dataclass(frozen=True)
class Candidate:
    """One thing to time. `call(n)` works on n elements; `bytes` are read and written for each of them."""

    library: str
    format: str
    operation: str
    call: Callable[[int], object]
    bytes: float = COPY_BYTES
    bar: float | None = None  # the ratio to `copy_` that we want to reach
    unit: int = 1  # n must be a multiple: the rows of block formats

    @property
    def name(self) -> str:
        return f"{self.library} {self.operation} {self.format}"


@dataclass(frozen=True)
class Timing:
    ratio: float  # to copy_: of elements a second on the CPU, of bytes a second on CUDA
    elements: int
    elements_per_second: float
    ratios: list[float]
    host_seconds: float | None = None  # a call, on CUDA


@dataclass
class FreshSizes:
    """Numbers of elements just below a power of two, multiples of `unit`, each one given out once."""

    largest: int
    unit: int = 1
    given: list[int] = field(default_factory=list)

    def take(self) -> int:
        size = (self.largest // self.unit - len(self.given) - 1) * self.unit
        if size < self.largest // 2:
            raise ValueError(f"{self.largest:,} elements are too few for so many sizes in steps of {self.unit}")
        self.given.append(size)
        return size


@dataclass
class Stage:
    """The memory that candidates work on."""

    device: torch.device
    size: int
    rounds: int
    x: Tensor = field(init=False)
    out: Tensor = field(init=False)
    best_copy: float = float("inf")
    disturbed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(1)
        self.x = torch.randn(self.size, device=self.device, generator=generator)
        # 48 binades: more than most 8-bit floats hold, so that rounding, underflow and overflow all happen
        self.x *= torch.exp2(torch.randint(-24, 24, (self.size,), device=self.device, generator=generator).float())
        self.out = torch.empty_like(self.x)
        if self.device.type == "cpu":
            sizes = FreshSizes(self.size)
            self.best_copy = min(_seconds(self.copy, sizes.take()) for _ in range(50))

    def copy(self, n: int) -> object:
        return self.out[:n].copy_(self.x[:n])

    def time(self, candidate: Candidate) -> Timing:
        if self.device.type == "cuda":
            return self._time_cuda(candidate, FreshSizes(self.size, candidate.unit))
        slice_sizes = FreshSizes(self.size // SLICE, candidate.unit)
        candidate.call(slice_sizes.take())  # builds what has to be built
        if min(_seconds(candidate.call, slice_sizes.take()) for _ in range(3)) * SLICE > SLOW:
            return self._time_cpu(candidate, slice_sizes, min(3, self.rounds))
        return self._time_cpu(candidate, FreshSizes(self.size, candidate.unit), self.rounds)

    def _time_cpu(self, candidate: Candidate, sizes: FreshSizes, rounds: int) -> Timing:
        quiet: list[tuple[float, float]] = []  # the ratio to copy_, and seconds an element
        others: list[tuple[float, float]] = []
        copy_sizes = FreshSizes(self.size)
        while len(quiet) < rounds and len(others) < 2 * rounds:
            before = _seconds(self.copy, copy_sizes.take())
            n = sizes.take()
            seconds = _seconds(candidate.call, n) / n
            after = _seconds(self.copy, copy_sizes.take())
            self.best_copy = min(self.best_copy, before, after)
            disturbed = max(before, after) > QUIET * self.best_copy
            (others if disturbed else quiet).append(((before + after) / 2 / self.size / seconds, seconds))
        self.disturbed += len(quiet) < rounds
        ratios, times = zip(*(quiet if len(quiet) >= rounds / 3 else quiet + others), strict=True)
        return Timing(statistics.median(ratios), n, 1 / statistics.median(times), list(ratios))

    def _time_cuda(self, candidate: Candidate, sizes: FreshSizes) -> Timing:
        copy_sizes = FreshSizes(self.size)
        times, ratios, host = [], [], []
        for _ in range(max(1, self.rounds // 4)):
            copy, _ = self._device_seconds(self.copy, copy_sizes)
            seconds, host_seconds = self._device_seconds(candidate.call, sizes)
            times.append(seconds)
            host.append(host_seconds)
            ratios.append((candidate.bytes / seconds) / (COPY_BYTES / copy))
        return Timing(statistics.median(ratios), sizes.given[0], 1 / statistics.median(times), ratios, statistics.median(host))

    def _device_seconds(self, call: Callable[[int], object], sizes: FreshSizes) -> tuple[float, float]:
        """Seconds an element on the device, and seconds a call on the host: medians."""
        call(sizes.take())  # builds what has to be built, and tunes it on this size
        torch.cuda.synchronize()
        calls = 5 if _seconds(lambda n: (call(n), torch.cuda.synchronize()), sizes.take()) > 0.01 else 25
        cache = torch.empty(L2_BYTES, dtype=torch.int8, device=self.device)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        host = []
        for start, end in events:
            cache.zero_()
            torch.cuda._sleep(PAUSE)
            start.record()
            host.append(_seconds(call, sizes.take()))
            end.record()
        torch.cuda.synchronize()
        seconds = statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)
        return seconds / statistics.median(sizes.given[-calls:]), statistics.median(host)


def _seconds(call: Callable[[int], object], n: int) -> float:
    began = time.perf_counter()
    call(n)
    return time.perf_counter() - began
