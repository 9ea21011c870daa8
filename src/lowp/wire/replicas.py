"""Are replicas still bit-identical? One number a tensor tells."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x3C6EF372FE94F82A  # even, so that weights are odd: a product with one loses no bit


class ReplicasDiffer(RuntimeError):
    """Parameters or gradients that should be the same on all ranks are not."""


def digest(tensor: Tensor) -> Tensor:
    """An int64 that differs where one bit differs (and, but for one chance in 2^64, where several do).

    The sum of (bits of element i) * (step * i + 1), modulo 2^64.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()]).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) * _STEP + 1
    return (bits * weights).sum()


def check_replicas(tensors: "Mapping[str, Tensor] | torch.nn.Module", group: Any = None, what: str = "parameter") -> None:
    """Raise `ReplicasDiffer` on every rank if a tensor is not the same everywhere, naming the first and the ranks.

    Takes a module (its parameters) or tensors by name. 8 bytes a tensor travel, in one message.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = dict(tensors.named_parameters())
    if not tensors:
        return
    mine = torch.stack([digest(tensor) for tensor in tensors.values()])
    world = dist.get_world_size(group)
    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine, group=group)
    table = torch.stack(gathered)
    differing = (table != table[0]).any(0)
    if bool(differing.any()):
        column = int(differing.int().argmax())
        ranks = [rank for rank in range(world) if table[rank, column] != table[0, column]]
        name = list(tensors)[column]
        raise ReplicasDiffer(
            f"{what} {name!r} differs between rank 0 and rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
            f"({int(differing.sum())} of {len(tensors)} {what}s differ)"
        )
