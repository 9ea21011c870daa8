"""ResNet-18, -50 and -101 (arXiv 1512.03385), with the stem for ImageNet or the one for CIFAR.

Four stages of residual blocks; each but the first halves the image and doubles the channels. ResNet-18 has blocks of two 3 x 3
convolutions; ResNet-50 and -101 have bottlenecks (1 x 1 down to a quarter of the channels, 3 x 3 with the stride, 1 x 1 up
again). The ImageNet stem (7 x 7, stride 2, pool) makes 224 pixels 56; the CIFAR stem is one 3 x 3 convolution that keeps all
32.

Names and initialisation are torchvision's, so that its checkpoints load. With `zero_gamma`, the last batch norm of each block
begins with a factor of 0: every block begins as the identity, which large batches like (arXiv 1706.02677).
"""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from lowp.training.models.shapes import IMAGENET_PIXELS, image_sides

STEMS = ("cifar", "imagenet")


def resnet18(
    shape: tuple[int, ...], classes: int, *, stem: str | None = None, zero_gamma: bool = False, width: int = 64
) -> nn.Sequential:
    """`stem` follows from the image's size unless it is named; `width` is the number of channels of the first stage."""
    return _resnet("resnet18", BasicBlock, (2, 2, 2, 2), shape, classes, stem, zero_gamma, width)


def resnet50(
    shape: tuple[int, ...], classes: int, *, stem: str | None = None, zero_gamma: bool = False, width: int = 64
) -> nn.Sequential:
    """As `resnet18`; the first stage has 4 x `width` channels outside its bottlenecks."""
    return _resnet("resnet50", Bottleneck, (3, 4, 6, 3), shape, classes, stem, zero_gamma, width)


def resnet101(
    shape: tuple[int, ...], classes: int, *, stem: str | None = None, zero_gamma: bool = False, width: int = 64
) -> nn.Sequential:
    """As `resnet50`, with 23 blocks in the third stage. (Recipes do not name it; predictions do.)"""
    return _resnet("resnet101", Bottleneck, (3, 4, 23, 3), shape, classes, stem, zero_gamma, width)


class Block(nn.Module):
    """What both kinds of block share: a shortcut, with a convolution where the shape changes, and the sum."""

    expansion: int  # channels that leave, for each channel inside

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def last_norm(self) -> nn.BatchNorm2d:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.body(x) + shortcut)


class BasicBlock(Block):
    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(channels_in, channels, stride)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def body(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(x))

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2


class Bottleneck(Block):
    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(channels_in, channels, stride)
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)

    def body(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3


def _resnet(
    name: str,
    block: type[Block],
    depths: tuple[int, ...],
    shape: tuple[int, ...],
    classes: int,
    stem: str | None,
    zero_gamma: bool,
    width: int,
) -> nn.Sequential:
    channels, height, image_width = image_sides(shape, name)
    if stem is None:
        stem = "imagenet" if min(height, image_width) >= IMAGENET_PIXELS else "cifar"
    parts = _stem(name, stem, channels, width)
    channels = width
    for index, depth in enumerate(depths):
        inside = width * 2**index
        strides = [1 if index == 0 else 2] + [1] * (depth - 1)
        blocks = []
        for stride in strides:
            blocks.append(block(channels, inside, stride))
            channels = inside * block.expansion
        parts[f"layer{index + 1}"] = nn.Sequential(*blocks)
    parts |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, classes)}
    model = nn.Sequential(OrderedDict(parts))
    model.apply(partial(_initialise, zero_gamma=zero_gamma))
    return model


def _stem(name: str, stem: str, channels: int, width: int) -> dict[str, nn.Module]:
    if stem not in STEMS:
        raise ValueError(f"{name}: unknown stem {stem!r}; it is one of {', '.join(STEMS)}")
    rest = {"bn1": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    if stem == "cifar":
        return {"conv1": nn.Conv2d(channels, width, 3, padding=1, bias=False), **rest}
    conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    return {"conv1": conv, **rest, "maxpool": nn.MaxPool2d(3, stride=2, padding=1)}


def _initialise(module: nn.Module, zero_gamma: bool) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, Block) and zero_gamma:
        nn.init.zeros_(module.last_norm().weight)
