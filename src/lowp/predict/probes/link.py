"""What joins the ranks: bandwidth, latency by size, what a message costs, how many ranks share a link.

Messages go the way that gradients go (wire/link.py): every rank sends to the next one and receives from the one before, all at
once. A round of `count` messages of `size` bytes takes, as the predictor has it,

    latency(size) + count * overhead + (count * size - burst) / bandwidth

1. `overhead` is what every further message of a few bytes takes: 16 at once, against one.
2. `bandwidth` is the slope between the two largest sizes. Sizes grow until a round takes a third of a second.
3. `burst` is what passes at once after a pause, as token buckets of shaped links and of cloud instances let it: where the line
   through the two largest sizes leads to less than a message of a few bytes takes.
4. What remains is the latency of each size.
5. On CUDA, where NCCL's collectives are faster than messages from rank to rank, the bandwidth is that of an all-gather, and
   `point_to_point` what messages reach of it.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from lowp.predict.cluster import LinkLevel
from lowp.predict.probes.meeting import Meeting

SIZES = (256, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes
LARGEST = {"cpu": 4 << 20, "cuda": 64 << 20}
Kind = tuple[int, int]  # messages at once, bytes of each
SMALL, MANY = 256, 16
LONGEST = 0.35  # seconds of a round, from which on sizes do not grow
ROUNDS = 15


class RingNeighbours:
    """Messages from every rank to the next of a ring, and from the one before. `ring` is this rank's, in order."""

    def __init__(self, meeting: Meeting, ring: list[int], largest: int) -> None:
        self._link = meeting.link
        place = ring.index(meeting.rank)
        self._next, self._before = ring[(place + 1) % len(ring)], ring[place - 1]
        self._out = torch.ones(largest, dtype=torch.uint8, device=meeting.device)
        self._in = torch.empty(largest, dtype=torch.uint8, device=meeting.device)

    def send_receive(self, count: int, size: int) -> None:
        pending = []
        for _ in range(count):
            chunk = self._link.for_chunk()
            pending += chunk.send_receive({self._next: self._out[:size]}, {self._before: self._in[:size]})
        for message in pending:
            message.wait()


def link_levels(meeting: Meeting, here: int, seconds: float) -> list[LinkLevel]:
    """All levels, the innermost first. `here`: ranks on every machine, which are numbered in a row."""
    ranks, rank = meeting.ranks, meeting.rank
    if here >= ranks or here == 1:
        return [link_level(meeting, "machine" if here > 1 else "network", list(range(ranks)), seconds)]
    if ranks % here:
        raise ValueError(f"ranks: {ranks} do not divide into machines of {here}")
    first = rank // here * here
    inside = link_level(meeting, "machine", list(range(first, first + here)), seconds / 3)
    ring = list(range(rank % here, ranks, here))
    outside = link_level(meeting, "network", ring, seconds / 3)
    alone = link_level(meeting, "network", ring, seconds / 3, sends=rank == first)
    shared = sharing_ranks(alone.bandwidth / outside.bandwidth, here)
    return [replace(inside, ranks=here), replace(outside, bandwidth=outside.bandwidth * shared, shared=shared)]


def sharing_ranks(times: float, here: int) -> int:
    """How many ranks of a machine share a link, where one that is alone on it is so many times as fast."""
    return min((count for count in range(1, here + 1) if here % count == 0), key=lambda count: abs(count - times))


def link_level(meeting: Meeting, name: str, ring: list[int], seconds: float, sends: bool = True) -> LinkLevel:
    """The links between the ranks of a ring, measured by all of them at once, or by those alone that send."""
    largest = LARGEST[meeting.device.type]
    neighbours = RingNeighbours(meeting, ring, largest)
    if meeting.device.type == "cpu":
        return fitted(name, _by_size(meeting, neighbours, largest, seconds, sends))
    level = fitted(name, _by_size(meeting, neighbours, largest, seconds / 2, sends))
    if not sends or len(ring) < meeting.ranks:  # an all-gather is of all ranks
        return level
    gathered = _gathering_rate(meeting, largest, seconds / 2)
    faster = max(gathered, level.bandwidth)
    return replace(level, bandwidth=faster, point_to_point=level.bandwidth / faster)


def _gathering_rate(meeting: Meeting, largest: int, seconds: float) -> float:
    """Bytes a second that a rank receives in an all-gather: the slope between two sizes."""
    own = torch.ones(largest // meeting.ranks, dtype=torch.uint8, device=meeting.device)
    every = torch.empty(own.numel() * meeting.ranks, dtype=torch.uint8, device=meeting.device)

    def call(size: int) -> Callable[[], object]:
        return lambda: dist.all_gather_into_tensor(every[: size * meeting.ranks], own[:size], group=meeting.group)

    sizes = own.numel() // 8, own.numel()
    for size in sizes:
        call(size)()
    small, large = meeting.slowest(meeting.in_turns({size: call(size) for size in sizes}, seconds, ROUNDS)).values()
    if large <= small:
        small, sizes = 0.0, (0, sizes[1])
    return (sizes[1] - sizes[0]) * (meeting.ranks - 1) / (large - small)


def _by_size(meeting: Meeting, neighbours: RingNeighbours, largest: int, seconds: float, sends: bool) -> dict[Kind, float]:
    """Seconds of a round by (messages, bytes of each)."""

    def call(count: int, size: int) -> Callable[[], None]:
        return lambda: neighbours.send_receive(count, size) if sends else None

    kinds: list[Kind] = [(MANY, SMALL)]
    for size in dict.fromkeys((*SIZES, largest)):
        kinds.append((1, size))
        (took,) = meeting.largest([meeting.seconds(call(1, size))])
        if took > LONGEST:
            break
    return meeting.slowest(meeting.in_turns({kind: call(*kind) for kind in kinds}, seconds, ROUNDS))


def fitted(name: str, times: Mapping[Kind, float]) -> LinkLevel:
    """The level that takes these times (in seconds, by messages and bytes of each)."""
    single = {size: took for (count, size), took in sorted(times.items()) if count == 1}
    small = min(single)
    overhead = max(0.0, (times[MANY, SMALL] - single[small]) / (MANY - 1))
    *_, middle, largest = single
    slope = (single[largest] - single[middle]) / (largest - middle)
    if slope <= 0:  # a link that is faster than the clock is sure of: all of the largest message's time is its bytes'
        slope = single[largest] / largest
    first = statistics.median([took for size, took in single.items() if size <= 4 << 10])
    burst = max(0.0, first - (single[largest] - largest * slope)) / slope
    overhead = min(overhead, first)
    rests = {size: max(0.0, took - overhead - max(0.0, size - burst) * slope) for size, took in single.items()}
    # Latencies do not fall with the size: where one seems to, the smaller of the two counts, as the less disturbed.
    latencies = tuple((float(size), min(rest for other, rest in rests.items() if other >= size)) for size in rests)
    return LinkLevel(name, 1 / slope, latencies[0][1], overhead, latencies=latencies, burst=burst)
