"""Inception-v3 (arXiv 1512.00567), with torchvision's channels. It is only ever built on tensors without memory.

A block is a list of branches that see the same input and whose outputs are joined; a branch is a list of convolutions (each
with a batch norm and a ReLU) and pools. Branches that fork at their end (in the last two blocks) are blocks within a branch.
"""

import torch
from torch import Tensor, nn

CLASSES = 1000
Branch = nn.Sequential


class Inception(nn.Module):
    """`branches` side by side, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionV3(nn.Module):
    """The auxiliary head, which exists in training only, looks at the output of the fourth block of 17 x 17 pixels."""

    def __init__(self, auxiliary: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, 3, stride=2), _conv(32, 32, 3), _conv(32, 64, 3, padding=1), nn.MaxPool2d(3, 2),
            _conv(64, 80, 1), _conv(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.wide = nn.Sequential(_a(192, 32), _a(256, 64), _a(288, 64), _b(288), *(_c(768, c) for c in (128, 160, 160, 192)))
        self.auxiliary = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                nn.AvgPool2d(5, 3), _conv(768, 128, 1), _conv(128, 768, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(768, CLASSES),
            )  # fmt: skip
        self.narrow = nn.Sequential(_d(768), _e(1280), _e(2048))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.wide(self.stem(x))
        aside = () if self.auxiliary is None else (self.auxiliary(x),)
        return (self.head(self.narrow(x)), *aside)


def _conv(channels_in: int, channels: int, kernel: int | tuple[int, int], stride: int = 1, padding: object = 0) -> nn.Module:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False)  # type: ignore[arg-type]
    return nn.Sequential(convolution, nn.BatchNorm2d(channels, eps=0.001), nn.ReLU())


def _same(channels_in: int, *steps: tuple[int, int | tuple[int, int]]) -> Branch:
    """Convolutions of (channels, kernel) that keep the image's size."""
    parts = []
    for channels, kernel in steps:
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        parts.append(_conv(channels_in, channels, kernel, padding=(rows // 2, columns // 2)))
        channels_in = channels
    return Branch(*parts)


def _pooled(channels_in: int, channels: int) -> Branch:
    return Branch(nn.AvgPool2d(3, 1, 1), *_same(channels_in, (channels, 1)))


def _a(c: int, pooled: int) -> Inception:
    return Inception(_same(c, (64, 1)), _same(c, (48, 1), (64, 5)), _same(c, (64, 1), (96, 3), (96, 3)), _pooled(c, pooled))


def _b(c: int) -> Inception:
    doubled = Branch(*_same(c, (64, 1), (96, 3)), _conv(96, 96, 3, stride=2))
    return Inception(_conv(c, 384, 3, stride=2), doubled, nn.MaxPool2d(3, 2))


def _c(c: int, n: int) -> Inception:
    row, column = (1, 7), (7, 1)
    once = _same(c, (n, 1), (n, row), (192, column))
    twice = _same(c, (n, 1), (n, column), (n, row), (n, column), (192, row))
    return Inception(_same(c, (192, 1)), once, twice, _pooled(c, 192))


def _d(c: int) -> Inception:
    once = Branch(*_same(c, (192, 1)), _conv(192, 320, 3, stride=2))
    twice = Branch(*_same(c, (192, 1), (192, (1, 7)), (192, (7, 1))), _conv(192, 192, 3, stride=2))
    return Inception(once, twice, nn.MaxPool2d(3, 2))


def _e(c: int) -> Inception:
    def fork(n: int) -> Inception:
        return Inception(_same(n, (384, (1, 3))), _same(n, (384, (3, 1))))

    once, twice = Branch(*_same(c, (384, 1)), fork(384)), Branch(*_same(c, (448, 1), (384, 3)), fork(384))
    return Inception(_same(c, (320, 1)), once, twice, _pooled(c, 192))
