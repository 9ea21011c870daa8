"""What an exchange of gradients is, and how they are laid into buckets."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

FIRST_BUCKET = 1 << 20  # bytes; short, so that the first one is on its way early

Gradients = Callable[[int, Callable[[], None]], None]
"""`gradients(rank, last)` computes a rank's gradients into `parameter.grad`, and calls `last` before its last backward."""


Seen = Callable[[str, Tensor], None]
"""`seen(name, gradient)` looks at a parameter's gradient."""


class Exchange(Protocol):
    ranks: range  # whose samples this process trains on
    before_travel: Seen | None  # is shown the gradients of the first of `ranks` before they travel

    def reduce(self, gradients: Gradients) -> None:
        """One step's gradients: the mean over all ranks."""

    def bytes_sent(self) -> tuple[float, float]:
        """By this rank so far, and what float32 would have been."""

    def seconds(self) -> dict[str, float]:
        """Of a step, to encode, transfer and decode: the wire's own work, partly while backward goes on. Empty: not known."""

    def undo(self) -> None:
        """Forget what the last `reduce` taught: its step is not taken."""

    def state_of_rank(self) -> list[dict[str, Any]]:
        """What must be saved for each of `ranks`."""

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        """What `state_of_rank` of all ranks gave."""

    def close(self) -> None: ...


def buckets_of(parameters: Mapping[str, Tensor], limit: float) -> list[list[str]]:
    """Names, from the last parameter to the first, as backward makes them; a bucket has one dtype."""
    buckets: list[list[str]] = []
    size, dtype, room = 0.0, None, float(min(FIRST_BUCKET, limit))
    for name, parameter in reversed(list(parameters.items())):
        if not buckets or parameter.dtype != dtype or size >= room:
            room = limit if buckets else room
            buckets.append([])
            size, dtype = 0.0, parameter.dtype
        buckets[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return buckets
