"""Ranks that measure together: they begin at the same moment, and agree on what they have found.

A machine that others use too changes its speed from second to second. So what is compared is measured in turns (`in_turns`),
and of every figure the median counts. All ranks measure at once: where several share processors or a link, that is what they
will meet.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lowp.wire.collectives import communicator_for
from lowp.wire.communicator import Communicator
from lowp.wire.link import GroupLink

Key = TypeVar("Key", bound=Hashable)
FEWEST = 3  # rounds, however long they take


class Meeting:
    """One rank of those that measure. `group` None and no world: it is alone, and has no link.

    `communicator`: whose group is measured; without, that of `lowp.all_reduce`.
    """

    def __init__(self, device: torch.device, group: Any = None, communicator: Communicator | None = None) -> None:
        self.device = device
        alone = communicator is None and (not dist.is_initialized() or dist.get_world_size(group) == 1)
        self._communicator = None if alone else communicator or communicator_for(group, device)

    @property
    def rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    @property
    def ranks(self) -> int:
        return 1 if self._communicator is None else self._communicator.world

    @property
    def link(self) -> GroupLink:
        assert self._communicator is not None, "a rank that is alone has no link"
        return self._communicator.link

    @property
    def group(self) -> Any:
        """The users' group, for collectives of torch's."""
        return None if self._communicator is None else self._communicator.parent

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self) -> None:
        """Until all ranks are here."""
        self.largest([0.0])
        self.wait()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of all ranks, number by number."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def mean(self, values: Sequence[float]) -> list[float]:
        return [value / self.ranks for value in self._reduced(values, dist.ReduceOp.SUM)]

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        if self._communicator is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, how, group=self.group)
        return numbers.tolist()

    def seconds(self, call: Callable[[], object]) -> float:
        """How long a call takes on this rank, all beginning together."""
        self.together()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def in_turns(
        self, calls: Mapping[Key, Callable[[], object]], seconds: float, most: int, fewest: int = FEWEST
    ) -> dict[Key, list[float]]:
        """Each call once a round, for about so many seconds: how long it took on this rank, round by round."""
        found: dict[Key, list[float]] = {name: [] for name in calls}
        began = time.perf_counter()
        for number in range(most):
            for name, call in calls.items():
                found[name].append(self.seconds(call))
            (elapsed,) = self.largest([time.perf_counter() - began])  # all ranks stop in the same round
            if number + 1 >= fewest and elapsed * (number + 2) / (number + 1) > seconds:
                break
        return found

    def slowest(self, found: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
        """The median over rounds, of each the slowest rank's time."""
        return {name: statistics.median(self.largest(times)) for name, times in found.items()}
