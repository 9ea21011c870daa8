"""Random changes to images, for a whole batch at once and without a loop over samples.

Crop (pad 4 by reflection, take a window of the old size) and flip only move pixels: each output pixel names the pixel it comes
from, and one gather does both, with no padded copy. Cutout blanks a square of 8 x 8 with zeros, which after normalisation are
the set's mean.

The draws are integers made on the CPU, a row for each kind, and travel to the device with the sample indices in one copy. All
rows are drawn whichever are used: switching flips on does not change the crops.
"""

import torch
from torch import Tensor

from lowp.training.data.base import Key, generator_of

AUGMENTATIONS = ("crop", "flip", "cutout")
PAD = 4
HOLE = 8


class Augment:
    def __init__(self, names: tuple[str, ...], shape: tuple[int, ...], device: torch.device) -> None:
        check_names(names)
        if names and len(shape) != 3:
            raise ValueError(f"data.augment needs images of shape (channels, height, width), not {shape}")
        self.crop, self.flip, self.cutout = (name in names for name in AUGMENTATIONS)
        if not names:
            return
        _, self._height, self._width = shape
        smallest = HOLE if self.cutout else PAD + 1 if self.crop else 1
        if min(self._height, self._width) < smallest:
            raise ValueError(f"data.augment {', '.join(names)} needs images of at least {smallest} x {smallest}, not {shape}")
        self._rows = torch.arange(self._height, device=device)
        self._columns = torch.arange(self._width, device=device)

    def __bool__(self) -> bool:
        return self.crop or self.flip or self.cutout

    def draw(self, key: Key, count: int) -> Tensor:
        """int64 (5, count): crop's row and column, flip, the hole's row and column. Empty when nothing is to be done."""
        if not self:
            return torch.empty(0, count, dtype=torch.int64)
        generator = generator_of(key, "augment")
        below = (2 * PAD + 1, 2 * PAD + 1, 2, max(self._height - HOLE, 0) + 1, max(self._width - HOLE, 0) + 1)
        return torch.stack([torch.randint(top, (count,), generator=generator) for top in below])

    def move(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop and flip (n, channels, height, width), of any dtype."""
        if not (self.crop or self.flip):
            return images
        rows, columns = self._rows[None], self._columns[None]  # (n or 1, height) and (n or 1, width): the sources
        if self.crop:
            rows = _reflected(rows + draws[0, :, None] - PAD, self._height)
            columns = _reflected(columns + draws[1, :, None] - PAD, self._width)
        if self.flip:
            columns = torch.where(draws[2, :, None] == 1, columns.flip(1), columns)
        sources = (rows[:, :, None] * self._width + columns[:, None, :]).flatten(1)
        count, channels = images.shape[:2]
        return images.flatten(2).gather(2, sources[:, None, :].expand(count, channels, -1)).view_as(images)

    def cut(self, images: Tensor, draws: Tensor) -> Tensor:
        """Blank the holes, in place."""
        if not self.cutout:
            return images
        below, right = self._rows - draws[3, :, None], self._columns - draws[4, :, None]
        hole = ((below >= 0) & (below < HOLE))[:, :, None] & ((right >= 0) & (right < HOLE))[:, None, :]
        return images.masked_fill_(hole[:, None], 0)


def check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in AUGMENTATIONS:
            raise ValueError(f"unknown augmentation {name!r} in data.augment; known are {', '.join(AUGMENTATIONS)}")


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places up to size - 1 beyond either edge, mirrored back inside; the edge itself is not repeated."""
    return (size - 1) - ((size - 1) - places.abs()).abs()
