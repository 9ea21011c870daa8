"""Memory that is used over and over: a fresh megabyte costs more to be mapped by the kernel than to be written, and on CUDA
each allocation, view and memset costs the host as much as a kernel's launch.

A `Workspace` is the memory of one chunk (or of one bucket's scales) under way. Whoever asks it for the same shapes in the same
order as in the step before gets the same tensors: the same objects, at the same addresses. So a step's launches are those of
the step before, and nothing is made anew. What must be zero first lies side by side, and is cleared by one call.
"""

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; kernels ask for 16
_KEPT = 4096  # views and what follows from them, at most: who reduces tensors of ever new sizes asks for ever new ones


class NewMemory:
    """A workspace that keeps nothing: new tensors for every request."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def zeros(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Int32, all zero."""
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def scratch(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room that the next call for the same dtype may use again. (On CUDA the allocator keeps memory itself.)"""
        return _scratch(count, dtype) if device.type == "cpu" else torch.empty(count, dtype=dtype, device=device)

    def once(self, owner: Any, name: Any, make: Callable[[], Any]) -> Any:
        """What follows from tensors of this workspace (views, say): `name` says what it is to its owner."""
        return make()


NEW_MEMORY = NewMemory()


class Workspace(NewMemory):
    """Memory that is given out from its beginning after each `begin`. It belongs to one device."""

    def __init__(self) -> None:
        self._memory, self._zeros = _Region(), _Region()
        self._cleared = 0  # bytes of `_zeros` that are zero in this round
        self._to_clear: Tensor | None = None  # what the last round has used of it
        self._kept: dict[Any, Any] = {}
        self._moved = False  # has this round gone over to new memory? Then some of what is kept may be of the old one

    def begin(self) -> "Workspace":
        if self._moved:
            self._kept.clear()
            self._moved = False
        if len(self._kept) + len(self._memory.views) + len(self._zeros.views) > _KEPT:
            for kept in (self._kept, self._memory.views, self._zeros.views):
                kept.clear()
        self._memory.used = self._zeros.used = self._cleared = 0
        return self

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._take(self._memory, shape, dtype, device)

    def zeros(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if not self._cleared and self._to_clear is not None:
            self._to_clear.zero_()
            self._cleared = self._to_clear.numel()
        found = self._take(self._zeros, shape, torch.int32, device)
        if self._zeros.used > self._cleared:  # the first round
            found.zero_()
            self._cleared = self._zeros.used
            self._to_clear = self._zeros.memory[: self._cleared]
        return found

    def scratch(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On a CPU all chunks share one room, which stays in the cache."""
        return _scratch(count, dtype) if device.type == "cpu" else self.empty((count,), dtype, device)

    def once(self, owner: Any, name: Any, make: Callable[[], Any]) -> Any:
        """It is made once for each owner, name and place in the order of requests."""
        key = id(owner), name, self._memory.used, self._zeros.used
        if key not in self._kept:
            self._kept[key] = owner, make()  # the owner is kept, so that its id is not given to another
        return self._kept[key][1]

    def _take(self, region: "_Region", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        found = region.views.get((region.used, shape, dtype))
        if found is None:
            before = region.memory
            found = region.make(shape, dtype, device)
            if region.memory is not before:  # what is kept of later places is of memory that is used no more
                self._kept.clear()
                self._moved = True
        view, region.used = found
        return view


class _Region:
    """Bytes, how many are given out, and the tensors that were made of them, by place."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.used = 0
        self.views: dict[Any, tuple[Tensor, int]] = {}

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
        length = prod(shape) * dtype.itemsize
        end = -(-(self.used + length) // _ALIGNMENT) * _ALIGNMENT
        if end > self.memory.numel() or self.memory.device != device:
            self.memory = torch.empty(end, dtype=torch.uint8, device=device)
            self.views.clear()  # those that are in use stay where they are until the next round
        view = self.memory[self.used : self.used + length].view(dtype).view(shape)
        found = view, end
        self.views[self.used, shape, dtype] = found
        return found


class Workspaces:
    """Those of a rank's chunks under way, and those of its buckets. Each is used by one thread, and on CUDA on one stream."""

    def __init__(self) -> None:
        self._free: list[Workspace] = []
        self._of_buckets: dict[Any, Workspace] = {}

    def take(self) -> Workspace:
        """One that is free. There are as many as chunks were under way at once, each as large as the largest chunk."""
        return (self._free.pop() if self._free else Workspace()).begin()

    def give_back(self, workspace: Workspace) -> None:
        self._free.append(workspace)

    def memory(self) -> list[Tensor]:
        """All memory that they have now."""
        every = [*self._free, *self._of_buckets.values()]
        return [region for workspace in every for region in (workspace._memory.memory, workspace._zeros.memory)]

    def of(self, bucket: Any) -> Workspace:
        """A bucket's own: what is there stays until the bucket's next step."""
        if len(self._of_buckets) > _KEPT:
            self._of_buckets.clear()
        if bucket not in self._of_buckets:
            self._of_buckets[bucket] = Workspace()
        return self._of_buckets[bucket].begin()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.kept: dict[torch.dtype, Tensor] = {}


_of_thread = _OfThread()


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Room on the CPU, this thread's until its next call with the same dtype."""
    found = _of_thread.kept.get(dtype)
    if found is None or found.numel() < count:
        with torch.inference_mode(False):  # what is made within inference mode cannot be written to outside of it
            found = torch.empty(max(count, 1 << 16), dtype=dtype, device="cpu")
        _of_thread.kept[dtype] = found
    return found[:count]
