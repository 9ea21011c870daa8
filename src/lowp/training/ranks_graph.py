"""All virtual ranks' passes of a step, and their exchange, as one CUDA graph.

A pass over a few samples takes the device less time than the host needs to launch it, even as a graph of its own: batches,
figures and gradients are copied around it, and the exchange launches some ten kernels for each rank. In one graph there is one
launch in a step, and no copies: each rank's batch, and what is made of it, have places of their own.

It is taken where every step launches the same: no noise, no error feedback, no top-k on the wire; where each pass is taken once
in a step; and where passes draw nothing (dropout), as there can be no seed for each rank. Of large batches launches take no
time, and the graph would hold much memory.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lowp.training.data.base import as_its_own
from lowp.training.exchange import Exchange, VirtualRanks
from lowp.training.feed import Feed
from lowp.training.step_graph import StepGraph

RANKS = 512  # at most
ELEMENTS = 1 << 24  # of all their inputs, at most


def suits_ranks_graph(exchange: Exchange, batch: int, shape: Sequence[int]) -> bool:
    """`shape` is a sample's. (Whether passes draw is known after the first.)"""
    if not isinstance(exchange, VirtualRanks) or not 1 < len(exchange.ranks) <= RANKS:
        return False
    return batch * math.prod(shape) <= ELEMENTS and exchange.steady


class RanksGraph:
    """`take(rank, inputs, targets)` is a rank's pass; `around` is entered for all of them."""

    def __init__(
        self,
        exchange: VirtualRanks,
        feed: Feed,
        parameters: Iterable[nn.Parameter],
        take: Callable[[int, Tensor, Tensor], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._exchange, self._feed, self._take_one, self._around = exchange, feed, take, around
        self._parameters = [*parameters]
        self._graph = StepGraph(self._take, self._parameters)
        self._ahead: tuple[int, list[tuple[Tensor, Tensor]]] = -1, []  # a step's batches, before it begins

    def _take(self, inputs: Tensor, targets: Tensor) -> None:
        """A step as the graph holds it."""
        size = len(targets) // len(self._exchange.ranks)

        def gradients(rank: int, last: Callable[[], None]) -> None:
            for parameter in self._parameters:
                parameter.grad = None
            own = slice(rank * size, (rank + 1) * size)
            self._take_one(rank, as_its_own(inputs[own]), targets[own])

        with self._around():
            self._exchange.add(gradients)

    def run(self, step: int, number: Hashable, laid_out: Callable[[Tensor], Tensor]) -> list[int] | None:
        """Take a step; how many predictions each rank made. None: nothing was done, and it must be taken without a graph."""
        fetched, batches = self._ahead
        if fetched != step:
            batches = self._batches(step)
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        if not self._graph.run(laid_out(inputs), targets, number):
            return None
        self._exchange.step_launched()
        return [own.numel() for _, own in batches]

    def fetch(self, step: int) -> None:
        """The batches of the next step, while the device computes: whoever reads the gradients waits for it."""
        self._ahead = step, self._batches(step)

    def _batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return [batch for rank in self._exchange.ranks for batch in self._feed.micro_batches(step, rank)]
