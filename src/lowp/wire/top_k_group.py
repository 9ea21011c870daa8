"""The parts of a codec with top-k in some messages: positions (top_k.py), and the kept numbers, as any other codec sends them.

The kept numbers of all parts lie one after the other in memory, and are encoded and decoded as messages of their own, whose
parts lie behind the positions. So formats, scales, noise and kernels are those of codecs without top-k.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowp.wire.codec import Codec, PartLayout
from lowp.wire.codec_group import CodecGroup, Noises
from lowp.wire.plan import Part, Shard
from lowp.wire.top_k import KeptRow, KeptTable
from lowp.wire.workspace import NewMemory

if TYPE_CHECKING:
    from lowp.wire.messages import Messages


class TopKGroup:
    """`make` is `Messages`, which this is a part of."""

    def __init__(self, group: CodecGroup, make: "Callable[..., Messages]") -> None:
        self._group, self._make = group, make
        codec = group.codec
        self._table = KeptTable(
            [KeptRow(part.size, codec.kept(part.size), part.layer, start, begin) for _, part, start, begin, _ in group.segments]
        )
        self._dense: dict[tuple[int, int], Messages] = {}

    def _kept_numbers(self, messages: int = 1, stride: int = 0) -> "Messages":
        """The messages of the kept numbers, for as many messages of the whole: one shard for each part of each."""
        if (messages, stride) not in self._dense:
            rows, codec = self._table.rows, self._group.codec
            shards, begins = [], []
            for message in range(messages):
                for segment, row in zip(self._group.segments, rows, strict=True):
                    part = replace(segment.part, codec=codec.of_kept, offset=0, size=row.kept, place=None)
                    shards.append(Shard(0, row.kept, (part,)))
                    begins.append(message * stride + row.begin + PartLayout.of(codec, row.size).payload)
            starts = [0, *accumulate(shard.size for shard in shards)][:-1]
            self._dense[messages, stride] = self._make(shards, _codec_of, starts, begins)
        return self._dense[messages, stride]

    def encode(
        self,
        numbers: Tensor,
        out: Tensor,
        factors: Tensor | None,
        peaks: Tensor | None,
        noises: Noises | None,
        workspace: NewMemory,
    ) -> None:
        """As `Messages.encode` does it."""
        values = self._table.choose(numbers, out, factors, workspace)
        if peaks is not None:
            peaks = peaks[self._group.indices(peaks.device)]
        self._kept_numbers().encode(values, out, factors, peaks, noises, workspace=workspace)

    def decode(
        self,
        source: Tensor,
        out: Tensor,
        factors: Tensor | None,
        divisor: int,
        messages: int,
        stride: int,
        workspace: NewMemory,
    ) -> None:
        """As `Messages.decode` does it, without maxima."""
        values = workspace.empty((messages * self._table.slots,), torch.float32, out.device)
        self._kept_numbers(messages, stride).decode(source, values, workspace=workspace)
        self._table.add(source, values, out, factors, divisor, messages, stride)


def _codec_of(part: Part) -> Codec:
    return part.codec
