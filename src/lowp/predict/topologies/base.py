"""What a topology is: the rounds of messages of one chunk, and what they cost on the links of a cluster.

A chunk is cut into shards. In a *round* every rank sends and receives some messages of some shards, and waits for them. A
`Pattern` lists rounds, in units of shards and messages, whatever the codec; equal rounds in a row are one entry with `times`.

A round takes

- the latency of the links over which messages come: of the slowest that a rank waits for, and of all ranks the mean. (Shards
  travel around a ring independently of each other: one that crosses a slow link meets fast ones before and after it.)
- and what the busiest port needs: for each rank that sends or receives, the overhead of its messages and the bytes that its
  links carry, which are those of all ranks that share them, on all levels that go through the port.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lowp.predict.cluster import Arrangement
from lowp.wire.rules import Stage

Amount = tuple[str, Stage, float]  # what is done ("encode", "add", "decode") to so many shards at a stage
OUT, IN = 0, 1
MESSAGES, SHARDS = 0, 1


@dataclass(frozen=True, eq=False)
class Round:
    """`loads`: [out or in, rank, level, messages or shards] for the ranks that are not alike. `point_to_point`: messages go
    from rank to rank, not by a collective."""

    times: int
    stage: Stage
    work: tuple[Amount, ...]  # before it, by the busiest rank
    loads: np.ndarray
    point_to_point: bool = False


@dataclass(frozen=True, eq=False)
class Pattern:
    shards: float  # into which a chunk is cut
    rounds: tuple[Round, ...]
    last_work: tuple[Amount, ...] = ()

    @property
    def waits(self) -> int:
        """How many rounds there are, one after the other."""
        return sum(each.times for each in self.rounds)


class PortLoad(NamedTuple):
    """What a rank sends or receives in one direction: seconds of overhead, and seconds for each byte of a shard's message."""

    overhead: float
    per_byte: float


class Arrival(NamedTuple):
    """How the messages come that a rank waits for: the level, and how many shards one of them has."""

    level: int
    shards: float


@dataclass(frozen=True)
class Leg:
    """A round on given links, ready to be evaluated for any length of a shard's message."""

    times: int
    stage: Stage
    work: tuple[Amount, ...]
    loads: tuple[PortLoad, ...]  # those that can be the longest
    latency: Callable[[float], float]
    sent: float  # shards that a rank sends, by the busiest
    messages: float
    handling: float = 0.0  # seconds of the processor for each byte of a shard's message, of the busiest rank

    def busy(self, length: float) -> tuple[float, float]:
        """Seconds for which the busiest link is taken, where a shard's message has so many bytes; and how many of these it is
        whatever the length."""
        return max((load.overhead + load.per_byte * length, load.overhead) for load in self.loads)


@dataclass(frozen=True)
class Route:
    """A pattern on given links."""

    shards: float
    legs: tuple[Leg, ...]
    last_work: tuple[Amount, ...]

    @property
    def waits(self) -> int:
        return sum(leg.times for leg in self.legs)


class Topology(ABC):
    """Frozen, and printed as its name. An entry of TOPOLOGIES."""

    @abstractmethod
    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        """Ways to reduce a chunk on these ranks. Of several, the fastest is taken for every message."""

    def of_size(self, elements: int) -> "Topology":
        """The topology for a bucket of this many elements."""
        return self

    def addends(self, ranks: int) -> int:
        """How many messages in the wire's format are added up: one of each rank, or of each node."""
        return ranks


@lru_cache(maxsize=4096)
def routes(topology: Topology, arrangement: Arrangement) -> tuple[Route, ...]:
    return tuple(
        Route(pattern.shards, tuple(_leg(each, arrangement) for each in pattern.rounds), pattern.last_work)
        for pattern in topology.patterns(arrangement)
    )


def _leg(each: Round, arrangement: Arrangement) -> Leg:
    levels = arrangement.levels
    ranks = range(each.loads.shape[1])
    loads = {load for way in (OUT, IN) for rank in ranks for load in _port_loads(each, way, rank, arrangement)}
    comes = [_comes(each.loads, rank) for rank in ranks]

    def latency_of(length: float) -> float:
        times = [max((levels[at].latency_of(shards * length) for at, shards in ways), default=0.0) for ways in comes]
        return sum(times) / len(times)

    constant = latency_of(0.0)
    varies = any(levels[at].latencies for ways in comes for at, _ in ways)
    sent = each.loads[OUT].sum(1).max(0)
    return Leg(
        each.times,
        each.stage,
        each.work,
        _longest(loads),
        latency_of if varies else lambda length: constant,
        float(sent[SHARDS]),
        float(sent[MESSAGES]),
        float((each.loads[OUT, :, :, SHARDS] @ np.array([level.processor for level in levels])).max()),
    )


def _port_loads(each: Round, way: int, rank: int, arrangement: Arrangement) -> list[PortLoad]:
    """Of one direction: the loads of a rank's ports, with those that share its links."""
    loads = each.loads[way]
    found: list[PortLoad] = []
    for at, level in enumerate(arrangement.levels):
        first = rank // level.shared * level.shared
        overhead, per_byte = float(loads[rank, at, MESSAGES]) * level.overhead, 0.0
        if loads[rank, at, SHARDS]:
            bandwidth = level.bandwidth * (level.point_to_point if each.point_to_point else 1.0)
            per_byte = float(loads[first : first + level.shared, at, SHARDS].sum()) / bandwidth
        if found and not level.separate:
            overhead, per_byte = found[-1].overhead + overhead, found[-1].per_byte + per_byte
            found.pop()
        found.append(PortLoad(overhead, per_byte))
    return found


def _comes(loads: np.ndarray, rank: int) -> list[Arrival]:
    """What a rank waits for: what it receives; where it only sends, that its messages arrive."""
    way = IN if loads[IN, rank, :, MESSAGES].any() else OUT
    found = loads[way, rank]
    return [Arrival(at, float(found[at, SHARDS] / found[at, MESSAGES])) for at in range(len(found)) if found[at, MESSAGES]]


def _longest(loads: set[PortLoad]) -> tuple[PortLoad, ...]:
    """Without those that another one exceeds in everything."""
    kept = [
        one
        for one in loads
        if not any(other != one and other.overhead >= one.overhead and other.per_byte >= one.per_byte for other in loads)
    ]
    return tuple(sorted(kept))


def even(arrangement: Arrangement, *loads: tuple[int, float, float]) -> np.ndarray:
    """All ranks send and receive alike: (level, messages, shards)."""
    found = np.zeros((2, 1, len(arrangement.levels), 2))
    for level, messages, shards in loads:
        found[:, :, level] += (messages, shards)
    return np.repeat(found, arrangement.alike, axis=1)
