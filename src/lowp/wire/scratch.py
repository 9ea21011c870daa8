"""Memory that is used over and over: a fresh megabyte costs more to be mapped by the kernel than to be written."""

import threading

import torch
from torch import Tensor


class _Own(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[torch.dtype, int], Tensor] = {}


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
