"""A rank's own process group for compressed gradients, and the check that all ranks mean the same."""

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lowp import compat
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.faults import explain, poison
from lowp.wire.link import GroupLink
from lowp.wire.workspace import Workspaces

_idle: "WeakKeyDictionary[Any, dict[tuple, list[GroupLink]]]" = WeakKeyDictionary()
"""Links of groups that were given back, by the world that they belong to, its ranks and the backend."""

_made: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""Groups that were made for a parent of some of the ranks."""


class Communicator:
    """Messages here cannot meet the user's: the group has the ranks of the user's group, and only lowp uses it.

    Groups that are given back are used again. (torch names a group after its ranks, and one that is made where another of the
    same name was destroyed finds that one's addresses in the store.)
    """

    def __init__(self, parent: Any, device: torch.device) -> None:
        self.parent = dist.group.WORLD if parent is None else parent
        self.timeout = compat.timeout_of(self.parent, device)
        ranks = dist.get_process_group_ranks(self.parent)
        backend = "nccl" if device.type == "cuda" else "gloo"
        idle = _idle.setdefault(dist.group.WORLD, {}).setdefault((*ranks, backend, self.timeout), [])
        self._idle = idle
        self.link = idle.pop() if idle else GroupLink(self._new_group(ranks, backend))
        self.workspaces = Workspaces()  # of collectives on a CPU, one after the other
        self.reductions = 0  # that `lowp.all_reduce` has done
        self.closed = False

    def _new_group(self, ranks: list[int], backend: str) -> Any:
        """Under a name that is new even after a failure. Where all ranks of the world take part torch numbers the group. Some
        ranks alone may be in groups that others do not know: they count those that were made for this parent."""
        if len(ranks) == dist.get_world_size():
            return dist.new_group(ranks, timeout=self.timeout, backend=backend, group_desc="lowp")
        assert self.parent is not None
        made = _made[self.parent] = _made.get(self.parent, 0) + 1
        return compat.new_group(f"lowp {made} of {self.parent.group_name}", ranks, self.timeout, backend)

    @property
    def group(self) -> Any:
        return self.link.group

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def world(self) -> int:
        return self.link.world

    def run(self, scheduler: ChunkScheduler, doing: str) -> None:
        """Run a scheduler to its end; a failure ends the group and is explained."""
        try:
            scheduler.run()
        except Exception as error:
            explained = explain(error, doing, scheduler.waiting_for, self.group)
            self.close(failed=True)
            raise explained from error

    def close(self, failed: bool = False) -> None:
        """Give the group back. After a failure, end everything that still waits in it, and the group itself."""
        if self.closed:
            return
        self.closed = True
        if not failed:
            self._idle.append(self.link)
            return
        group, self.link.group = self.link.group, None
        poison(group)
        if dist.is_initialized():
            with suppress(dist.DistError):  # NCCL ends no group without an error whose peer is gone
                dist.destroy_process_group(group)


def agree(parent: Any, mine: str, what: str) -> None:
    """All ranks must say the same; a ValueError names the first that does not, and both sides."""
    world = dist.get_world_size(parent)
    said: list[Any] = [None] * world
    try:
        dist.all_gather_object(said, mine, group=parent)
    except RuntimeError as error:
        raise explain(error, f"comparing {what}", "", parent, ours=False) from error
    for rank, other in enumerate(said):
        if other != said[0]:
            ours, theirs = differing(said[0], other)
            raise ValueError(f"ranks disagree on {what}: rank 0 has {ours}, rank {rank} has {theirs}")


def differing(ours: str, theirs: str) -> tuple[str, str]:
    """Only the words that differ, if both have the same number of words."""
    left, right = ours.split(), theirs.split()
    if len(left) == len(right):
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
        return " ".join(a for a, _ in pairs), " ".join(b for _, b in pairs)
    return ours, theirs
