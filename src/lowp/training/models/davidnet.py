"""DavidNet: D. Page's ResNet-9 of the DAWNBench contest, which trains CIFAR-10 to 94 % in 24 short epochs.

    prep     64 channels
    layer1  128, pool, residual (two convolutions around a shortcut)
    layer2  256, pool
    layer3  512, pool, residual
    head    largest number of each channel, linear without bias, times 0.125

Every convolution is 3 x 3 without bias, followed by batch norm and ReLU. The factor of the head keeps the first logits small,
so that the learning rate can be large from the first epochs on. It is a power of two: in 16 bits it costs nothing.
"""

from collections import OrderedDict

from torch import Tensor, nn

from lowp.training.models.shapes import image_sides

LOGIT_FACTOR = 0.125


def davidnet(shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Sequential:
    """`width` is the number of channels after the first convolution."""
    channels, height, image_width = image_sides(shape, "davidnet", smallest=8)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        prep=_convolution(channels, width),
        layer1=nn.Sequential(_convolution(width, 2 * width), nn.MaxPool2d(2), Residual(2 * width)),
        layer2=nn.Sequential(_convolution(2 * width, 4 * width), nn.MaxPool2d(2)),
        layer3=nn.Sequential(_convolution(4 * width, 8 * width), nn.MaxPool2d(2), Residual(8 * width)),
        pool=nn.MaxPool2d((height // 8, image_width // 8)),  # of all that is left: 4 x 4 for CIFAR
        flatten=nn.Flatten(),
        linear=nn.Linear(8 * width, classes, bias=False),
        factor=Times(LOGIT_FACTOR),
    )
    return nn.Sequential(parts)


class Residual(nn.Module):
    """x plus two convolutions of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(channels, channels), _convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Times(nn.Module):
    """A constant factor; a Python number, so that it takes the dtype of what it multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return str(self.factor)


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )
