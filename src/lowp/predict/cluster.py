"""A cluster: what computes, what joins it, and how evenly it runs.

Links come in levels, the innermost first: NVLink or PCIe inside a node, network cards between nodes, perhaps uplinks between
racks. A message between two ranks takes the links of the innermost level that both are in. Of a level are known

- `bandwidth`: bytes a second through one link in one direction, as it is reached in practice. The other direction is free.
- `shared`: how many ranks share a link. All that they send at once shares its bandwidth.
- `latency`: from sending a message until it is there, beside its bytes. It may grow with the message (`latencies`).
- `overhead`: what every message costs the rank that sends or receives it. An all-to-all of 1,000 ranks pays it 1,000 times.
- `burst`: bytes that pass at once after a pause, as a token bucket lets them: shaped links and cloud instances have one.
- `processor`: seconds that the computation of a rank loses for each byte that the rank sends, where the network's work is done
  by the processors that compute. (As many bytes are received meanwhile.)
- `point_to_point`: the share of the bandwidth that messages from rank to rank reach, where collectives (all-reduce, all-gather)
  are faster, as NCCL's are.
- `separate`: a rank reaches these links past those inside (a network card beside NVLink): both carry messages at the same time.
  Else what a rank sends on all levels goes through one port, one after the other.

Ranks of a synchronous step wait for the slowest. The times of their computation are taken as normally distributed with a
coefficient of variation; the slowest of n is then expected (1 + variation * e(n)) times as slow as the mean, where e(n) is the
expected maximum of n standard normal numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

KINDS = ("cuda", "cpu")
_END, _POINTS = 9.0, 4000  # beyond +-9 there is nothing of a normal distribution that counts


@dataclass(frozen=True)
class LinkLevel:
    """Links that join `ranks` ranks (None: as many as there are)."""

    name: str
    bandwidth: float
    latency: float
    overhead: float = 0.0
    ranks: int | None = None
    shared: int = 1
    separate: bool = False
    latencies: tuple[tuple[float, float], ...] = ()  # (bytes of a message, seconds), ascending; empty: `latency` for all
    burst: float = 0.0
    processor: float = 0.0
    point_to_point: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "bandwidth")
        for name in ("latency", "overhead", "burst", "processor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name):g} must be at least 0")
        if not 0 < self.point_to_point <= 1:
            raise ValueError(f"point_to_point: {self.point_to_point:g} must be above 0 and at most 1")
        for name in ("ranks", "shared"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        for before, after in zip(self.latencies, self.latencies[1:], strict=False):
            if after[0] <= before[0] or after[1] < before[1]:
                raise ValueError("latency: sizes must ascend, and latencies must not fall with them")

    def latency_of(self, size: float) -> float:
        """Of a message of `size` bytes: between the sizes that are known in proportion, beyond them as at the last one."""
        if not self.latencies:
            return self.latency
        below, above = self.latencies[0], self.latencies[-1]
        if size <= below[0]:
            return below[1]
        for known in self.latencies:
            if known[0] >= size:
                above = known
                break
            below = known
        else:
            return above[1]
        return below[1] + (above[1] - below[1]) * (size - below[0]) / (above[0] - below[0])


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds for one number: to encode it, to decode it and add it to a sum, to decode it."""

    encode: float
    add: float
    decode: float


@dataclass(frozen=True)
class ModelTimes:
    """A model as it was measured on a device: seconds of forward and backward for a batch.

    `layers`: seconds of backward from one gradient to the next, by parameter, where that was measured. `overhead`: what a step
    takes more on several ranks, beside its messages: DistributedDataParallel's copies and hooks. `excess`: what whole steps
    took beyond the sum of their parts, by kind of wire (`WireChoice.kind`, probes/whole_step.py).
    """

    batch: int
    forward: float
    backward: float
    layers: Mapping[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    excess: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """What one rank computes with.

    How long a model takes is found in `times` (measured), else in `samples` (samples a second, as (batch, rate) pairs), else
    from `flops` and `bandwidth`, both as they are reached in practice. `codecs` are speeds that were measured here; without,
    those of a device of this kind count (codec_speed.py). `beside`: the share of encoding and decoding that runs beside the
    computation, on processors that would be idle; the rest takes its time from the computation. `step_overhead`: what every
    step on more than one rank takes beside its messages: the framework's hooks, launches and barriers. `chunk_overhead`: what
    every chunk that is compressed takes of the host beside its numbers and messages; None: as usual on such a device.
    """

    name: str
    kind: str = "cuda"
    memory: float | None = None
    bandwidth: float | None = None
    flops: float | None = None
    samples: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    times: Mapping[str, ModelTimes] = field(default_factory=dict)
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    beside: float = 0.0
    step_overhead: float = 0.0
    chunk_overhead: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        for name in ("memory", "bandwidth", "flops"):
            if getattr(self, name) is not None:
                _positive(self, name)
        for name in ("step_overhead", "chunk_overhead"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name):g} must be at least 0")
        if not 0 <= self.beside <= 1:
            raise ValueError(f"beside: {self.beside:g} must be from 0 to 1")
        for model, points in self.samples.items():
            if not points or any(batch < 1 or not 0 < rate < math.inf for batch, rate in points):
                raise ValueError(f"samples.{model}: batches are at least 1 and samples a second above 0")
            if len({batch for batch, _ in points}) < len(points):
                raise ValueError(f"samples.{model}: every batch has one rate")

    def step_seconds(self, model: str, batch: int) -> float | None:
        """Forward and backward by `samples`; None where the model is not in it.

        With rates for several batches, seconds are in proportion between them and beyond: a step has a part that does not
        depend on its batch.
        """
        points = sorted(self.samples.get(model, ()))
        if not points:
            return None
        if len(points) == 1:
            return batch / points[0][1]
        seconds = [(known, known / rate) for known, rate in points]
        below = max((i for i in range(len(seconds) - 1) if seconds[i][0] <= batch), default=0)
        (b0, t0), (b1, t1) = seconds[below], seconds[below + 1]
        slope = (t1 - t0) / (b1 - b0)
        fixed = t0 - slope * b0
        return fixed + slope * batch if fixed >= 0 < slope else batch * t1 / b1


@dataclass(frozen=True)
class Stragglers:
    """How much the ranks' times differ: the standard deviation of their computation over its mean."""

    variation: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.variation <= 1:
            raise ValueError(f"variation: {self.variation:g} must be from 0 to 1")

    def slowest(self, ranks: int) -> float:
        """How many times as long as the mean the slowest of so many ranks is expected to compute."""
        return 1 + self.variation * expected_maximum(ranks)


@lru_cache(maxsize=1024)
def expected_maximum(count: int) -> float:
    """Of `count` standard normal numbers: the integral of x d(F(x)^count), by parts."""
    return _END - float(np.trapezoid(_normal_distribution() ** count, dx=2 * _END / _POINTS)) if count > 1 else 0.0


@lru_cache(maxsize=1)
def _normal_distribution() -> np.ndarray:
    """F at points from -_END to _END."""
    points = np.linspace(-_END, _END, _POINTS + 1)
    return np.array([0.5 * math.erfc(-point / math.sqrt(2)) for point in points])


@dataclass(frozen=True)
class Arrangement:
    """Ranks on a cluster: the levels that join them, and how many ranks are in a group of each. The last group is all."""

    levels: tuple[LinkLevel, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.sizes[-1]

    @property
    def node(self) -> int:
        """Ranks that the innermost links join."""
        return self.sizes[0]

    @property
    def alike(self) -> int:
        """After so many ranks everything repeats: nodes are alike, and so are ranks that share a link."""
        inner = self.sizes[-2] if len(self.sizes) > 1 else 1
        return min(self.ranks, max([inner, *(level.shared for level in self.levels)]))

    @property
    def burst(self) -> float:
        """Seconds of the outermost links' work that are done at once after a pause."""
        return self.levels[-1].burst / self.levels[-1].bandwidth if self.levels else 0.0

    def level(self, rank: int, other: int) -> int:
        """The innermost level that joins two ranks."""
        return next(i for i, size in enumerate(self.sizes) if rank // size == other // size)


@dataclass(frozen=True)
class Cluster:
    """Without levels it is one device, and has no links."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]
    stragglers: Stragglers = Stragglers()  # frozen
    source: str = ""

    def __post_init__(self) -> None:
        inner: LinkLevel | None = None
        for number, level in enumerate(self.levels):
            last = number == len(self.levels) - 1
            if level.ranks is None and not last:
                raise ValueError(f"levels[{number}].ranks: is missing; only the outermost level joins any number of ranks")
            if inner is not None and level.ranks is not None and (level.ranks <= inner.ranks or level.ranks % inner.ranks):  # type: ignore[operator]
                what = f"{level.ranks} ranks do not divide into groups of {inner.ranks} (level {inner.name!r})"
                raise ValueError(f"levels[{number}].ranks: {what}")
            room = inner.ranks if inner is not None else level.ranks
            if room is not None and room % level.shared:
                raise ValueError(f"levels[{number}].shared: {level.shared} does not divide the {room} ranks of a node")
            inner = level

    def with_times(self, model: str, times: ModelTimes) -> "Cluster":
        """The same, with a model that was measured there."""
        return replace(self, device=replace(self.device, times={**self.device.times, model: times}))

    def arrange(self, ranks: int) -> Arrangement:
        """Where `ranks` ranks are: nodes are filled one after the other."""
        if ranks < 1:
            raise ValueError(f"ranks: {ranks} must be at least 1")
        levels: list[LinkLevel] = []
        sizes: list[int] = []
        for level in self.levels:
            if sizes and ranks % sizes[-1]:
                what = f"{ranks} do not divide into groups of {sizes[-1]} (level {levels[-1].name!r})"
                raise ValueError(f"ranks: {what} of cluster {self.name}")
            levels.append(level)
            if level.ranks is None or ranks <= level.ranks:
                return Arrangement(tuple(levels), (*sizes, ranks))
            sizes.append(level.ranks)
        if ranks == 1:
            return Arrangement((), (1,))
        if not self.levels:
            what = "[[levels]] of its file, which `lowp calibrate --ranks 2` measures"
            raise ValueError(f"ranks: {ranks} need links, and cluster {self.name} has none ({what})")
        outer = self.levels[-1]
        raise ValueError(
            f"ranks: {ranks} need a level of links beyond {outer.name!r}, which joins {outer.ranks}; "
            f"cluster {self.name} has none"
        )


def _positive(what: object, name: str) -> None:
    value = getattr(what, name)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: {value:g} must be above 0")
