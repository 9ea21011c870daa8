"""What can be put around any split: fewer samples, augmentation on the device, the user's own transform."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowp.training.data.augment import Augment
from lowp.training.data.base import Key, Request, Split, generator_of, to_device
from lowp.training.plugins import blamed
from lowp.training.randomness import seed_of

Transform = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


class Limited:
    """The first `limit` samples after a shuffle, since sets may come sorted by class or by time.

    The shuffle is fixed: runs with one limit have the same samples whatever their seed, and fewer are a part of more.
    """

    def __init__(self, split: Split, limit: int) -> None:
        self._split = split
        self._kept = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed_of("limit")))[:limit]

    def __len__(self) -> int:
        return len(self._kept)

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        return self._split.stream(Request(self._kept[request.indices], request.key) for request in requests)


class Augmented:
    """Augmentation of batches that come from elsewhere and are already on the device."""

    def __init__(self, split: Split, augment: Augment, device: torch.device) -> None:
        self._split, self._augment, self._device = split, augment, device

    def __len__(self) -> int:
        return len(self._split)

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        for key, images, targets in _with_keys(self._split, requests):
            draws = to_device(self._augment.draw(key, len(images)), self._device)
            yield self._augment.cut(self._augment.move(images, draws), draws), targets


class Transformed:
    """The user's `function(inputs, targets, generator)`, on each micro-batch. It may also drop samples."""

    def __init__(self, split: Split, function: Transform, name: str) -> None:
        self._split, self._function, self._name = split, function, name

    def __len__(self) -> int:
        return len(self._split)

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        for key, inputs, targets in _with_keys(self._split, requests):
            yield self._checked(self._function(inputs, targets, generator_of(key, "transform")))

    def _checked(self, result: object) -> tuple[Tensor, Tensor]:
        match result:
            case (Tensor() as inputs, Tensor() as targets) if len(inputs) == len(targets):
                return inputs, targets
        raise ValueError(f"data.transform {self._name!r} must return (inputs, targets), two tensors with as many samples each")


def chosen(keep: Any, inputs: Tensor, targets: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The samples that the user's filter `name` has chosen: by one truth value for each, or by indices."""
    with blamed(f"data.filter {name!r} returned {type(keep).__name__}, which cannot choose samples"):
        of_inputs, of_targets = inputs[keep], targets[keep]
    if of_targets.dim() != targets.dim():  # None or a number are indices too, for torch
        raise ValueError(
            f"data.filter {name!r} returned {type(keep).__name__}, which cannot choose samples; wanted is a tensor of one "
            "truth value a sample, or of indices"
        )
    return of_inputs, of_targets


def _with_keys(split: Split, requests: Iterable[Request]) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """A split may take requests ahead of what it yields; it keeps their order, so a queue of keys is enough."""
    keys: deque[Key] = deque()

    def noted() -> Iterator[Request]:
        for request in requests:
            keys.append(request.key)
            yield request

    for inputs, targets in split.stream(noted()):
        yield keys.popleft(), inputs, targets
