"""Nothing to exchange: one rank, or a model whose ranks exchange activations instead."""

from typing import Any

from lowp.training.exchange.base import Gradients, Seen
from lowp.training.parallel import Placement


class NoExchange:
    """One rank: nothing travels."""

    ranks = range(1)
    before_travel: Seen | None = None

    def reduce(self, gradients: Gradients) -> None:
        gradients(0, lambda: None)

    def bytes_sent(self) -> tuple[float, float]:
        return 0.0, 0.0

    def seconds(self) -> dict[str, float]:
        return {}

    def undo(self) -> None: ...

    def state_of_rank(self) -> list[dict[str, Any]]:
        return [{}]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class Placed(NoExchange):
    """A divided model: all ranks see all samples, and what travels are activations (parallel/)."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def bytes_sent(self) -> tuple[float, float]:
        return self._placement.bytes_sent, self._placement.bytes_of_fp32
