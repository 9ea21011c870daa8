"""Kernels are built at registration, and not during training while the other ranks wait.

Which kernels a run needs follows from formats, rounding, reduction, error feedback and more. A list of them would be a second
statement of all that. So a step is rehearsed instead: each rank's work on a few numbers, in this process, with messages of
zeros in place of the others'. Whatever that calls is built at its first call (`kernels.building`); kernels serve every size.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lowp.tensor.kernels import building, kernel_info
from lowp.wire.codec import Codec
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.link import ChunkLink, GroupLink, Pending
from lowp.wire.plan import Layer
from lowp.wire.pump import Pump
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import Meter
from lowp.wire.settings import Settings

RANKS = 8  # of a larger world, as many are rehearsed: nobody does anything else in it
ELEMENTS = 64  # of a layer, for each rank
_DEFAULT = TwoShot()


def warm_up(
    codecs: Iterable[Codec],
    device: torch.device,
    settings: Settings | None = None,
    reduction: Reduction = _DEFAULT,
    world: int = 2,
) -> None:
    """Build all kernels that these codecs need in this reduction, unless that was done before."""
    settings = settings or Settings("fp32")
    known = {codec for codec in codecs if (codec, device, settings.describe(), reduction) not in _warm}
    if kernel_info()["policy"] == "never" or not known:
        return
    _rehearse(known, device, settings, reduction, world)  # tables are made here, once, and need no kernel
    with building():
        _rehearse(known, device, settings, reduction, world)
    _warm.update((codec, device, settings.describe(), reduction) for codec in known)


_warm: set[tuple[Codec, torch.device, str, Reduction]] = set()


def _rehearse(codecs: Iterable[Codec], device: torch.device, settings: Settings, reduction: Reduction, world: int) -> None:
    """A step of a bucket with one layer, for each codec; where the reduction depends on the bucket's size, of both kinds.

    Codecs are alone in a bucket because messages are added in one pass only where all codecs in them can do that.
    """
    world = min(world, RANKS)
    for number, codec in enumerate(codecs):
        layer = Layer("rehearsed", ELEMENTS * world, codec, number)
        for kind in dict.fromkeys((reduction.of_size(0), reduction.of_size(1 << 62))):
            for rank in range(world):
                flat = torch.ones(layer.size, device=device)
                pump, link, meter = Pump(), _Mute(rank, world), Meter(whole=settings.measure)
                BucketExchange(flat, (layer,), settings, kind, link, State(), meter, True, lambda marks: None).start(pump)
                pump.run()


class _Mute(GroupLink):
    """A link that sends nothing, and on which zeros arrive."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.bytes_sent, self._taken = rank, world, 0, 0

    def maximum(self, numbers: Tensor) -> list[Pending]:
        return []

    def plain_sum(self, numbers: Tensor) -> list[Pending]:
        return []

    def for_chunk(self) -> ChunkLink:
        return _MuteChunk(self, self.take_number())


class _MuteChunk(ChunkLink):
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        for rank, message in receives.items():
            if rank != self.rank:
                message.zero_()
        return []
