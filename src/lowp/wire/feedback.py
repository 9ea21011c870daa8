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

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lowp.wire.layer_tensors import Residuals
from lowp.wire.plan import Bucket, Shard, Stretch
from lowp.wire.scaled import scaled


class Feedback:
    """The residuals of one bucket's layers in one step.

    A real rank has its own; a virtual world has everybody's. Losses of sums are collected apart until the step is over: in the
    virtual world a sum may be rounded before its owner's own numbers have had their turn.
    """

    def __init__(self, of_rank: Callable[[int], Residuals], bucket: Bucket) -> None:
        self._of_rank = of_rank
        self._bucket = bucket
        self._of_sums: dict[tuple[int | None, int], Tensor] = {}  # by rank and first element in the bucket

    def add(self, rank: int, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """A rank's gradients of the bucket with its residuals, in float32; in `out` where that is given."""
        return torch.add(flat.to(torch.float32), self._of_rank(rank).of(self._bucket, flat.device), out=out)

    def keep(self, rank: int | None, stretch: Stretch, lost: Tensor, factors: Tensor | None, of_sum: bool) -> None:
        """Remember what was lost of a chunk or a shard, in units of 1 / factor of each layer; nothing of what was not finite.

        `rank` is the one that has rounded; None stands for the owner of each element (see `finish`). `lost` is taken over.
        """
        if not stretch.size:
            return
        if factors is not None:
            lost = scaled(lost, stretch, factors.reciprocal())  # of powers of two, which is exact
        for begin, own in self._pieces(stretch, lost):
            if not of_sum:
                assert rank is not None
                torch.nan_to_num(own, 0, 0, 0, out=self._residual(rank, begin, own))
                continue
            own.nan_to_num_(0, 0, 0)
            if (rank, begin) in self._of_sums:
                self._of_sums[rank, begin].add_(own)
            else:
                self._of_sums[rank, begin] = own

    def finish(self, owners: "Iterable[tuple[int, Shard]]" = ()) -> None:
        """The step is over. `owners` says who adds up which shard, where losses were kept for the owner of each element."""
        for (rank, begin), lost in self._of_sums.items():
            if rank is not None:
                self._residual(rank, begin, lost).add_(lost)
                continue
            for owner, owned in owners:
                first = self._begin(owned) - begin if owned.parts else -1
                if 0 <= first < lost.numel():
                    own = lost[first : first + owned.size]
                    self._residual(owner, begin + first, own).add_(own)
        self._of_sums.clear()

    def _residual(self, rank: int, begin: int, like: Tensor) -> Tensor:
        """A rank's residual of as many elements, from a place in the bucket on."""
        return self._of_rank(rank).of(self._bucket, like.device)[begin : begin + like.numel()]

    def _pieces(self, stretch: Stretch, lost: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Where in the bucket each piece begins: the whole, or the parts of a striped shard."""
        if not (isinstance(stretch, Shard) and stretch.striped):
            yield self._begin(stretch), lost
            return
        for part in stretch.parts:
            yield self._bucket.begins[part.layer] + part.start, lost[part.offset : part.offset + part.size]

    def _begin(self, stretch: Stretch) -> int:
        """Where in the bucket it begins."""
        if not isinstance(stretch, Shard):
            return stretch.start  # of a chunk
        first = stretch.parts[0]
        return self._bucket.begins[first.layer] + first.start
