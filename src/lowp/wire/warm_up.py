"""Kernels are built at registration, and not during training while the other ranks wait.

Which kernels a run needs follows from formats, rounding, reduction, error feedback and more. A list of them would be a second
statement of all that. So a step is rehearsed instead: each rank's work on a few numbers, in this process, with messages of
zeros in place of the others'. Whatever that calls is built at its first call (`kernels.building`); kernels serve every size.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp import compat
from lowp.tensor.kernels import building, kernel_info
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.codec import Codec, codec_for
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.link import ChunkLink, GroupLink, Pending
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import Meter
from lowp.wire.settings import Settings

RANKS = 8  # of a larger world, as many are rehearsed: the others call no other kernels
ELEMENTS = 64  # of a layer, for each rank
_DEFAULT = TwoShot()


def warm_up(
    codecs: Iterable[Codec],
    device: torch.device,
    settings: Settings | None = None,
    reduction: Reduction = _DEFAULT,
    world: int = 2,
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> None:
    """Build all kernels that these codecs need in this reduction for gradients of these dtypes, unless that was done before.

    Each is rehearsed alone, and all of them together: messages are added in one pass only where all codecs in them can do that.
    """
    if kernel_info()["policy"] == "never":
        return
    settings = settings or Settings("fp32")
    asked = settings.describe()
    together = frozenset(codecs)
    mixes = {*(frozenset([codec]) for codec in together), together} - {frozenset()}
    cases = [
        _Case(frozenset(codec_for(codec, dtype) for codec in mix), device, dtype, asked, reduction)
        for mix in mixes
        for dtype in dtypes
    ]
    for case in cases:
        if case not in _warm:
            with compat.without_dispatch_modes(), building():  # an audit is not concerned
                _rehearse(case, settings, min(world, RANKS))
            _warm.add(case)


class _Case(NamedTuple):
    codecs: frozenset[Codec]
    device: torch.device
    dtype: torch.dtype
    settings: str
    reduction: Reduction


_warm: set[_Case] = set()


def _rehearse(case: _Case, settings: Settings, world: int) -> None:
    """A step of one bucket, with all codecs in every shard; where the reduction depends on the bucket's size, of both kinds."""
    codecs = [*case.codecs] * world
    bucket = Bucket.of(tuple(Layer(str(number), ELEMENTS, codec, number) for number, codec in enumerate(codecs)))
    for kind in dict.fromkeys((case.reduction.of_size(0), case.reduction.of_size(1 << 62))):
        for rank in range(world):
            flat = torch.ones(bucket.size, dtype=case.dtype, device=case.device)
            scheduler, link, meter = ChunkScheduler(), SilentLink(rank, world), Meter(whole=settings.measure)
            BucketExchange(flat, bucket, settings, kind, link, State(), meter, True, lambda marks: None).start(scheduler)
            scheduler.run()


class SilentLink(GroupLink):
    """A link that sends nothing, and on which zeros arrive."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.bytes_sent, self._taken = rank, world, 0, 0

    def maximum(self, numbers: Tensor) -> list[Pending]:
        return []

    def plain_sum(self, numbers: Tensor) -> list[Pending]:
        return []

    def for_chunk(self) -> ChunkLink:
        return SilentChunkLink(self, self.take_number())


class SilentChunkLink(ChunkLink):
    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Pending]:
        for rank, message in enumerate(messages):
            if rank != self.rank:
                message.zero_()
        return []

    def send_receive(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        for rank, message in receives.items():
            if rank != self.rank:
                message.zero_()
        return []
