"""From each rank's gradients to the mean of all ranks, in `parameter.grad`.

One interface, three ways: alone, one of several real ranks, or one process that stands in for all of them. The loop hands
over a function that computes one rank's gradients; the exchange calls it for the ranks that this process stands for.

Why not DistributedDataParallel: it lays gradients into buckets, and after the first step into other buckets, in the order in
which they came. Scales that belong to messages then depend on when a process was started: a resumed run would not repeat the
uninterrupted one. Here buckets follow from the model alone, so that real ranks, virtual ranks and resumed runs add the same
numbers in the same order. Everything else is as in DDP: a bucket travels as soon as its last gradient is there, while backward
goes on.
"""

from collections.abc import Mapping

import torch
from torch import nn

from lowp.training.exchange.alone import NoExchange as NoExchange
from lowp.training.exchange.alone import Placed as Placed
from lowp.training.exchange.base import Exchange as Exchange
from lowp.training.exchange.base import buckets_of as buckets_of
from lowp.training.exchange.real import RealExchange
from lowp.training.exchange.virtual import VirtualRanks as VirtualRanks
from lowp.wire.settings import Settings


def exchange_for(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    settings: Settings,
    bucket_bytes: float,
    *,
    rank: int,
    ranks: int,
    virtual_ranks: int,
    device: torch.device,
) -> Exchange:
    buckets = buckets_of(parameters, bucket_bytes)
    if ranks > 1:
        return RealExchange(model, parameters, buckets, settings, rank, device)
    if virtual_ranks == 1 and settings.format == "fp32":
        return NoExchange()
    return VirtualRanks(model, parameters, buckets, settings, virtual_ranks)
