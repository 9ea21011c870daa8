"""The micro-batches that each rank of this process trains on, step by step, fetched ahead."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from lowp.training.data.base import Request, Split
from lowp.training.data.order import epoch_order, shares
from lowp.training.recipe import Recipe


def steps_in_epoch(recipe: Recipe, samples: int) -> int:
    return _passes_in_epoch(recipe, samples) * samples // recipe.batch


def _passes_in_epoch(recipe: Recipe, samples: int) -> int:
    """Through the data: 1, but for huge batches."""
    return -(-recipe.batch // samples)


class Feed:
    """`ranks` are those of this process."""

    def __init__(self, recipe: Recipe, split: Split, ranks: range) -> None:
        self._recipe, self._split, self._ranks = recipe, split, ranks
        self._passes = _passes_in_epoch(recipe, len(split))
        self._steps_per_epoch = steps_in_epoch(recipe, len(split))
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None
        self._next: tuple[int, int] | None = None  # the (step, rank) that `_batches` gives next

    def _requests(self, first: int) -> Iterator[Request]:
        """From a step on to the end of its epoch."""
        recipe = self._recipe
        epoch, begin = divmod(first, self._steps_per_epoch)
        passes = range(epoch * self._passes, (epoch + 1) * self._passes)
        order = torch.cat([epoch_order(len(self._split), recipe.seed, number) for number in passes])
        for step in range(begin, self._steps_per_epoch):
            table = shares(order, step, recipe.batch, recipe.shares, recipe.micro_batches)
            for rank in self._ranks:
                for micro in range(recipe.micro_batches):
                    yield Request(table[rank, micro], (recipe.seed, epoch, step, rank, micro))

    def micro_batches(self, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's samples of a step. Asked for in order they were fetched ahead; a second time, they are fetched again."""
        count = self._recipe.micro_batches
        if rank == self._ranks.start and (self._batches is None or self._next != (step, rank)):
            self._batches = self._split.stream(self._requests(step))
            self._next = step, rank
        if self._next == (step, rank) and self._batches is not None:
            self._next = (step, rank + 1) if rank + 1 in self._ranks else self._first_of(step + 1)
            return [next(self._batches) for _ in range(count)]
        skipped = (rank - self._ranks.start) * count
        return list(self._split.stream(islice(self._requests(step), skipped, skipped + count)))

    def _first_of(self, step: int) -> tuple[int, int] | None:
        """None where an epoch begins: its order is another."""
        return (step, self._ranks.start) if step % self._steps_per_epoch else None

    def forget(self) -> None:
        """What was fetched ahead is not what comes next."""
        self._batches = None
