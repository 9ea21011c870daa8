"""Images that live on the device whole.

A micro-batch is an index_select, the augmentation, and normalisation. A pixel has 256 values, so normalisation is a table
with 256 entries a channel, computed once in double precision and rounded once to the run's dtype: a 16-bit run holds no fp32
copy of a batch, and all devices give the same bits. The set is kept as bytes and looked up batch by batch; one that is small in
the run's dtype too is looked up once, whole.

There is nothing to prefetch but the integers (`batches_on`). On a GPU a batch is only queued work: no call here waits for the
device.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lowp.training.data.augment import Augment
from lowp.training.data.base import Request, batches_on

_READY_BYTES = 256 << 20  # a set up to this size is kept normalised


class ResidentImages:
    def __init__(self, images: Tensor, labels: Tensor, values: Tensor, augment: Augment, device: torch.device) -> None:
        """`images` are uint8 (n, channels, height, width); `values` (channels, 256), in the run's dtype: what bytes become."""
        self._labels = labels.to(device, torch.int64)
        self._images = images.to(device)
        self._values = values.to(device)
        self._augment = augment
        self._device = device
        self._ready = images.numel() * values.element_size() <= _READY_BYTES
        if self._ready:
            self._images = self._normalised(self._images)

    def __len__(self) -> int:
        return len(self._labels)

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        return batches_on(self._device, self._plan, requests, self._batch)

    def _plan(self, request: Request) -> Tensor:
        """All of a batch's integers: which samples, and what is drawn for them."""
        indices = request.indices[None]
        return torch.cat((indices, self._augment.draw(request.key, len(request.indices)))) if self._augment else indices

    def _batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        chosen = plan[0]
        images = self._images.index_select(0, chosen)
        if self._augment:
            images = self._augment.move(images, plan[1:])
        if not self._ready:
            images = self._normalised(images)
        if self._augment:
            images = self._augment.cut(images, plan[1:])
        return images, self._labels.index_select(0, chosen)

    def _normalised(self, images: Tensor) -> Tensor:
        channels = len(self._values)
        first = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=self._device)  # where a channel's table begins
        entries = images + first[:, None, None]
        return self._values.flatten().index_select(0, entries.flatten()).view(images.shape)


def values_of(mean: tuple[float, ...], deviation: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """(channels, 256): what each byte becomes. Means and deviations are of pixels between 0 and 1."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    of_channel = [(levels - middle) / spread for middle, spread in zip(mean, deviation, strict=True)]
    return torch.stack(of_channel).to(dtype)
