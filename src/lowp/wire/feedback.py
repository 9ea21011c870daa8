"""Error feedback: what rounding takes from a sum is added to the next one.

Every rank keeps one residual a parameter: float32, in the gradient's own units (scales change from step to step).

1. A rank adds its residual to its gradient before anything else is done with it. Scales are measured on the result.
2. Whoever rounds keeps what was lost: of its own numbers, of partial sums, of the total. Of a Kahan sum, what counts is the sum
   less its compensation.
3. At the end of the step both kinds of losses together are the new residual.

So, over any number of steps, what all ranks were given and what everybody got differ by the sum of the ranks' residuals, and
these do not grow: a residual is one rounding error of its own number and one of every sum that its rank rounds in a step. It
does not matter which rank keeps the loss of a sum, since it comes back as a part of that rank's gradient of the same parameter.
Buckets may be cut anew from one step to the next.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from lowp.wire.plan import Layer, Shard

Residuals = dict[str, Tensor]  # by parameter, flat


class Feedback:
    """The residuals of one bucket's layers in one step.

    A real rank has its own; a virtual world has everybody's. Losses of sums are collected apart until the step is over: in the
    virtual world a sum may be rounded before its owner's own numbers have had their turn.
    """

    def __init__(self, of_rank: Callable[[int], Residuals], layers: tuple[Layer, ...]) -> None:
        self._of_rank = of_rank
        self._layers = layers
        self._begins = (0, *accumulate(layer.size for layer in layers))
        self._of_sums: dict[tuple[int | None, int], tuple[Shard, Tensor]] = {}  # by rank and first element of the shard

    def _residual(self, rank: int, layer: Layer, device: torch.device) -> Tensor:
        residuals = self._of_rank(rank)
        if layer.name not in residuals:
            residuals[layer.name] = torch.zeros(layer.size, dtype=torch.float32, device=device)
        return residuals[layer.name]

    def add(self, rank: int, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """A rank's gradients of the bucket with its residuals, in float32; in `out` where that is given."""
        residuals = [self._residual(rank, layer, flat.device) for layer in self._layers]
        return torch.add(flat.to(torch.float32), torch.cat(residuals), out=out)

    def keep(self, rank: int | None, shard: Shard, lost: Tensor, factors: Tensor | None, of_sum: bool) -> None:
        """Remember what was lost of a shard, in units of 1 / factor of each layer; nothing of what was not finite.

        `rank` is the one that has rounded; None stands for the owner of each element (see `finish`).
        """
        if not shard.parts:
            return
        if factors is not None:
            lost = torch.cat([lost[p.offset : p.offset + p.size] / factors[p.layer] for p in shard.parts])
        lost = lost.nan_to_num(0, 0, 0)
        if not of_sum:
            assert rank is not None
            self._store(rank, shard, lost, Tensor.copy_)
            return
        key = rank, self._begin(shard)
        if key in self._of_sums:
            self._of_sums[key][1].add_(lost)
        else:
            self._of_sums[key] = shard, lost

    def finish(self, owners: "Iterable[tuple[int, Shard]]" = ()) -> None:
        """The step is over. `owners` says who adds up which shard, where losses were kept for the owner of each element."""
        for (rank, begin), (shard, lost) in self._of_sums.items():
            if rank is not None:
                self._store(rank, shard, lost, Tensor.add_)
                continue
            for owner, owned in owners:
                first = self._begin(owned) - begin if owned.parts else -1
                if 0 <= first < shard.size:
                    self._store(owner, owned, lost[first : first + owned.size], Tensor.add_)
        self._of_sums.clear()

    def _begin(self, shard: Shard) -> int:
        """Where in the bucket a shard begins."""
        first = shard.parts[0]
        return self._begins[first.layer] + first.start

    def _store(self, rank: int, shard: Shard, lost: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> None:
        for part in shard.parts:
            residual = self._residual(rank, self._layers[part.layer], lost.device)
            put(residual[part.start : part.start + part.size], lost[part.offset : part.offset + part.size])
