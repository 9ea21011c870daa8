"""What the training loop asks of data, and nothing about where data come from.

The loop knows ahead which samples a step needs, so it hands a stream its requests and takes batches in that order. A batch is
random in its request's key alone: the same key gives the same batch on any rank, device or process, and after a resume.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lowp.training.randomness import seed_of

Key = tuple[int | str, ...]

AHEAD = 16  # micro-batches whose integers travel to a device in one copy
SMALL = 32  # samples of a batch, at most, that is made together with others
TOGETHER = ("cuda",)  # where: on a CPU operations begin at once
ROUND = 512  # bytes: where torch lets memory on CUDA begin


class Request(NamedTuple):
    """One micro-batch, asked for ahead of time."""

    indices: Tensor  # int64, on the CPU: which samples, in this order
    key: Key  # (seed, epoch, step, rank, micro-batch)


class Split(Protocol):
    """Training or test samples."""

    def __len__(self) -> int: ...

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) on the device, one pair a request, in the order asked. May take requests ahead of its answers."""
        ...


@dataclass(frozen=True)
class Data:
    name: str
    train: Split
    test: Split
    shape: tuple[int, ...]  # of one input: (channels, height, width), or (context,) for text
    classes: int  # the size of the vocabulary for text
    kind: str  # "image" or "text"


class DataChoice(Protocol):
    """The part of a recipe that chooses data."""

    @property
    def name(self) -> str: ...
    @property
    def augment(self) -> tuple[str, ...]: ...
    @property
    def transform(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def generator_of(key: Key, purpose: str) -> torch.Generator:
    """On the CPU whatever the device, so that all devices see the same draws."""
    return torch.Generator().manual_seed(seed_of(*key, purpose))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting: from pinned memory a copy to a GPU queues behind the work already there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def batches_on(
    device: torch.device,
    plan: Callable[[Request], Tensor],
    requests: Iterable[Request],
    make: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """`make` of `plan(request)` (integers, a column a sample, on the device) for each request.

    Requests are taken ahead: a copy to a GPU takes the host as long as several kernels. Small batches are also made together
    there, and cut: each operation of `make` treats samples alike, whichever others there are.
    """
    coming = iter(requests)
    while plans := [*map(plan, islice(coming, AHEAD))]:
        sizes = [each.shape[1] for each in plans]
        there = to_device(torch.cat(plans, 1), device)
        if device.type not in TOGETHER or max(sizes) > SMALL:
            yield from map(make, there.split(sizes, 1))
        else:
            inputs, targets = make(there)
            yield from zip(map(as_its_own, inputs.split(sizes)), targets.split(sizes), strict=True)


def as_its_own(part: Tensor) -> Tensor:
    """A part of a larger tensor, or a copy of it, which begins at an address as round as any tensor's: a product may have other
    bits where an operand's address is less round."""
    return part if part.data_ptr() % ROUND == 0 else part.clone()
