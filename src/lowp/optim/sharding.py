"""Whole and sharded parameters: which elements of a parameter this rank holds, and whom it shares it with.

FSDP2 makes parameters DTensors, split along their first dimension. Noise is counted by the element's place in the whole
parameter, and scales and norms are agreed among the ranks that hold shards, so that a sharded parameter takes the same steps as
a whole one. Parts that are parameters of their own (lowp/training/parallel) have a `NoisePlace` for the same reason.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp import compat


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor? (Asked without importing torch.distributed.tensor, which takes a while.)"""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


class NoisePlace(NamedTuple):
    """Which noise a parameter draws: that of the whole model's parameter of a number, from one of its elements on."""

    number: int
    first: int = 0


@dataclass(frozen=True)
class LocalParameter:
    """One parameter on this rank. `first` is the place of its first element, where it is a part that is no shard."""

    parameter: Any
    first: int = 0

    @cached_property
    def local(self) -> Tensor:
        """This rank's part, sharing memory with the parameter."""
        return self.part_of(self.parameter.detach())

    def part_of(self, tensor: Any) -> Tensor:
        if not is_sharded(tensor):
            return tensor.detach()
        part = tensor.to_local()
        return part.wait() if hasattr(part, "wait") else part.detach()

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.parameter.shape

    @property
    def elements(self) -> int:
        return self.parameter.numel()

    @cached_property
    def offset(self) -> int:
        """The place of this rank's first element in the whole parameter."""
        if not is_sharded(self.parameter):
            return self.first
        return compat.first_element_of_shard(self.parameter)

    def check(self) -> None:
        """Whole, replicated, or split along the first dimension over one dimension of the mesh."""
        if is_sharded(self.parameter):
            split = [placement for placement in self.parameter.placements if not placement.is_replicate()]
            if len(split) > 1 or not all(placement.is_shard(0) for placement in split):
                found = self.parameter.placements
                raise ValueError(f"parameters may be replicated, or sharded once, along their first dimension, not {found}")

    @cached_property
    def groups(self) -> tuple[Any, ...]:
        """The process groups over which the parameter is split."""
        if not is_sharded(self.parameter):
            return ()
        mesh = self.parameter.device_mesh
        return tuple(mesh.get_group(i) for i, placement in enumerate(self.parameter.placements) if placement.is_shard())

    def like(self, local: Tensor, shape: torch.Size) -> Tensor:
        """A tensor of this rank's part (of a whole of `shape`, split along the first dimension as the parameter is)."""
        if not is_sharded(self.parameter):
            return local
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
