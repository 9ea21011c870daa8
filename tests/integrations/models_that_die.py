"""A model whose rank 1 is gone in the middle of its run, the first time."""

import os
from pathlib import Path

from torch import nn


class Mortal(nn.Sequential):
    """With `tomb`, rank 1 ends in its tenth pass in training, unless that file says that it has done so before."""

    def __init__(self, tomb: str) -> None:
        super().__init__(nn.Flatten(), nn.Linear(14 * 14, 16), nn.ReLU(), nn.Linear(16, 10))
        self._tomb, self._passes = tomb, 0

    def forward(self, x):
        self._passes += self.training
        if self._tomb and self._passes == 10 and os.environ.get("RANK") == "1" and not Path(self._tomb).exists():
            Path(self._tomb).touch()
            os._exit(1)
        return super().forward(x)


def mortal(tomb: str = "") -> nn.Module:
    return Mortal(tomb)
