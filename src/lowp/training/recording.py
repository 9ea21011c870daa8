"""What of a step is launched as CUDA graphs: all virtual ranks' passes with their exchange, each rank's pass, or nothing.

How a pass is recorded, and why: step_graph.py; all of a step's passes: ranks_graph.py.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lowp.training.exchange import Exchange, NoExchange, Placed, VirtualRanks
from lowp.training.feed import Feed
from lowp.training.models import MODELS
from lowp.training.passes import Passes
from lowp.training.randomness import has_drawn
from lowp.training.ranks_graph import RanksGraph, suits_ranks_graph
from lowp.training.recipe import Recipe
from lowp.training.step_clock import COMPUTE, EXCHANGE, INPUT, StepClock
from lowp.training.step_graph import StepGraph


class Recording:
    """`shape` is a sample's. Anew where states are loaded: graphs hold addresses of the old ones."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        shape: Sequence[int],
        exchange: Exchange,
        feed: Feed,
        passes: Passes,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        self._recipe, self._device, self._shape = recipe, device, shape
        self._exchange, self._feed, self._passes, self._parameters = exchange, feed, passes, [*parameters]
        self.of_pass: StepGraph | None = None
        self.of_ranks: RanksGraph | None = None
        self.draws: bool | None = None  # a pass, from torch's generators; None: not known yet
        recorded = self._may_be_recorded()
        self._undecided = recorded and self._may_be_one_graph()  # until a step has shown whether its passes draw
        passes.keeps_casts = True
        if recorded and not self._undecided:
            self._make_graph_of_pass()

    def _may_be_recorded(self) -> bool:
        """Is a rank's pass the same launches every time? Not where the host decides something in it, or looks at it; nor where
        buckets travel while it goes on, as those of real ranks do."""
        recipe, exchange, scale, numerics = self._recipe, self._exchange, self._passes.loss_scale, self._passes.numerics
        one_process = isinstance(exchange, (NoExchange, VirtualRanks)) and not isinstance(exchange, Placed)
        by_layer = scale is not None and scale.kind == "per_layer"  # its exponents change in every step
        compiles = recipe.model.compile and numerics.simulation is not None  # the keys of its noise are the host's
        steady = not by_layer and not compiles and numerics.may_be_recorded and not recipe.data.filter
        ours = recipe.model.name in MODELS and recipe.micro_batches == 1 and not recipe.log.health
        return self._device.type == "cuda" and one_process and steady and ours

    def _may_be_one_graph(self) -> bool:
        return self._passes.numerics.keyed_by is None and suits_ranks_graph(self._exchange, self._recipe.batch, self._shape)

    def _make_graph_of_pass(self) -> None:
        """What a graph makes is its own: weights that were cast in it must not be kept."""
        self.of_pass, self._passes.keeps_casts = StepGraph(self._pass, self._parameters, self._passes.numerics.keyed_by), False

    def _make_graph_of_ranks(self) -> None:
        assert isinstance(self._exchange, VirtualRanks)
        around = self._passes.of_one_step
        self.of_ranks = RanksGraph(self._exchange, self._feed, self._parameters, self._pass_of_rank, around)

    def _pass(self, inputs: Tensor, targets: Tensor) -> None:
        """Of one rank, figures are added in the graph too: two launches fewer."""
        self._passes.record(inputs, targets)
        if len(self._exchange.ranks) == 1:
            self._passes.metrics.add_recorded(0)

    def _pass_of_rank(self, rank: int, inputs: Tensor, targets: Tensor) -> None:
        self._passes.record(inputs, targets)
        self._passes.metrics.add_recorded(rank)

    def _number(self) -> Hashable:
        """What a pass takes from Python, and may change."""
        scale = self._passes.loss_scale
        return None if scale is None else scale.value, self._passes.numerics.number

    def _launched(self) -> None:
        if self._passes.loss_scale is not None:
            self._passes.loss_scale.mark_scaled()

    def launch_pass(self, inputs: Tensor, targets: Tensor, rank: int) -> bool:
        """Take a rank's pass by its graph. False: there is none, and nothing was done."""
        graph = self.of_pass
        if graph is None or not graph.run(inputs, targets, self._number(), self._passes.numerics.moment):
            return False
        self._launched()
        if len(self._exchange.ranks) > 1:
            self._passes.metrics.add_recorded(rank)
            graph.own_gradients()
        return True

    def launch_step(self, step: int, last: bool, clock: StepClock) -> bool:
        """Take all ranks' passes and their exchange by one graph. False: there is none, and nothing was done."""
        graph = self.of_ranks
        if graph is None:
            return False
        clock.enter(COMPUTE)
        predictions = graph.run(step, self._number(), self._passes.laid_out)
        if predictions is None:
            self.of_ranks = None
            self._make_graph_of_pass()
            return False
        self._launched()
        for rank, count in zip(self._exchange.ranks, predictions, strict=True):
            self._passes.metrics.add_samples(rank, count)
        clock.enter(INPUT)
        if not last:
            graph.fetch(step + 1)
        clock.enter(EXCHANGE)
        return True

    def pass_taken(self, seed: int) -> None:
        """A pass that was seeded so has been taken."""
        if self.draws is None:
            self.draws = has_drawn(seed, self._device)

    def step_taken(self) -> None:
        """After a step that was not launched by a graph: can all of the next one be a graph?"""
        if not self._undecided:
            return
        self._undecided = False
        if self.draws:
            self._make_graph_of_pass()
        else:
            self._make_graph_of_ranks()

    def forget(self) -> None:
        self.of_pass = self.of_ranks = None
