"""Which samples a step takes, and which rank takes which of them.

An epoch is a permutation of the set. A step takes the next `batch` samples of it, whatever the number of ranks: each rank gets
a contiguous share, cut again into micro-batches. So 8 real ranks, 8 virtual ones or 8 accumulated micro-batches train on the
same samples in the same order.
"""

import torch
from torch import Tensor

from lowp.training.randomness import seed_of


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch's samples. A function of seed and epoch alone, so a resumed run needs no saved state."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed_of(seed, "shuffle", epoch)))


def shares(order: Tensor, step: int, batch: int, ranks: int, micro_batches: int) -> Tensor:
    """The step's samples: (ranks, micro-batches, samples). What is left of an epoch after its last whole batch is not used."""
    unit = ranks * micro_batches
    if batch < 1 or batch % unit:
        below = batch // unit * unit
        nearest = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise ValueError(
            f"a batch of {batch} cannot be shared evenly by {ranks} ranks with {micro_batches} micro-batches each; "
            f"the nearest that can: {nearest}"
        )
    whole = len(order) // batch
    if not 0 <= step < whole:
        raise ValueError(f"there is no step {step}: {len(order)} samples in batches of {batch} make {whole} steps")
    return order[step * batch : (step + 1) * batch].view(ranks, micro_batches, batch // unit)
