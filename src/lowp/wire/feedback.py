"""Error feedback: what rounding took from a gradient is added to the next one.

One residual a parameter, float32, in the gradient's own units (scales change from step to step), kept by whoever rounds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.wire.plan import Part


class Feedback:
    """Residuals by parameter name, those of `rank` (in a virtual world: of whoever rounds at the moment).

    `names` and `sizes` are those of the plan's layers, in order.
    """

    def __init__(self, of_rank: Callable[[int], dict[str, Tensor]], names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self._of_rank = of_rank
        self._names = names
        self._sizes = sizes
        self.rank = 0

    def _residual(self, part: Part, device: torch.device) -> Tensor:
        name, residuals = self._names[part.layer], self._of_rank(self.rank)
        if name not in residuals:
            residuals[name] = torch.zeros(self._sizes[part.layer], dtype=torch.float32, device=device)
        return residuals[name][part.start : part.start + part.size]

    def add(self, numbers: Tensor, part: Part, factor: "float | Tensor") -> Tensor:
        """The numbers, in units of 1 / factor, with what was lost before."""
        return numbers + self._residual(part, numbers.device) * factor

    def keep(self, numbers: Tensor, decoded: Tensor, part: Part, factor: "float | Tensor") -> None:
        """Remember what was lost now; nothing of a gradient that was not finite."""
        lost = (numbers - decoded) / factor
        self._residual(part, numbers.device).copy_(torch.where(lost.isfinite(), lost, torch.zeros_like(lost)))
