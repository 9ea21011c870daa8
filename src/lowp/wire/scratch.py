"""Memory that is used over and over: a fresh megabyte costs more to be mapped by the kernel than to be written."""

import threading

import torch
from torch import Tensor


class _Own(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[torch.dtype, int], Tensor] = {}
        self.free: dict[int, list[Tensor]] = {}  # buffers by size


_own = _Own()


def scratch(count: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    """Room for `count` elements on the CPU, this thread's until its next call with the same dtype and number."""
    found = _own.kept.get((dtype, number))
    if found is None or found.numel() < count:
        found = torch.empty(max(count, 1 << 16), dtype=dtype)
        _own.kept[dtype, number] = found
    return found[:count]


def room(count: int, dtype: torch.dtype, device: torch.device, number: int = 0) -> Tensor:
    """The same for any device: elsewhere the allocator keeps memory itself, and streams must not share it."""
    return scratch(count, dtype, number) if device.type == "cpu" else torch.empty(count, dtype=dtype, device=device)


class Buffers:
    """Memory of the messages of one chunk. On a CPU it is taken from this thread's free buffers and goes back to them.

    Several chunks are under way at once, so that each needs buffers of its own. What is not given back (after an error, when
    messages may still arrive) is freed like any other tensor.
    """

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def take(self, count: int, device: torch.device) -> Tensor:
        """Room for `count` bytes, not set to anything."""
        if device.type != "cpu":
            return torch.empty(count, dtype=torch.uint8, device=device)
        size = max(count, 1)
        size = -(-size // (step := 1 << max(12, size.bit_length() - 3))) * step  # chunks of about the same length share buffers
        free = _own.free.setdefault(size, [])
        self._taken.append(free.pop() if free else torch.empty(size, dtype=torch.uint8))
        return self._taken[-1][:count]

    def give_back(self) -> None:
        """Nothing may read or write these buffers any more."""
        for buffer in self._taken:
            _own.free[buffer.numel()].append(buffer)
        self._taken.clear()
