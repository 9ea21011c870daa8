"""The model and the data of own_recipe.toml.

cd examples && lowp train own_recipe.toml --ranks 2
"""

import math

import torch
from torch import nn
from torch.utils.data import Dataset


def network(shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """lowp gives `shape` (of one sample) and `classes`; `width` is from the recipe's options."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes))


class Rings(Dataset):
    """Points on three rings around the origin. A sample is a tensor and the number of its class, as in any PyTorch dataset."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(0, 3, (samples,), generator=generator)
        angles = 2 * math.pi * torch.rand(samples, generator=generator)
        radii = 1 + self.classes + 0.2 * torch.randn(samples, generator=generator)
        self.points = torch.stack([radii * angles.cos(), radii * angles.sin()], 1)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index].view(1, 1, 2), int(self.classes[index])  # channels, height, width


def rings(samples: int) -> tuple[Dataset, Dataset, int]:
    """What to train on, what to test on, and the number of classes."""
    return Rings(samples, seed=0), Rings(512, seed=1), 3
