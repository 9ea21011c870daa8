"""A network of LeNet's size, for short runs on a CPU: two convolutions, two linear layers."""

from collections.abc import Sequence

from torch import nn

from lowp.training.models.shapes import image_sides


def cnn(shape: tuple[int, ...], classes: int, *, channels: Sequence[int] = (16, 32), hidden: int = 128) -> nn.Sequential:
    """Each convolution (5 x 5) is followed by a pooling that halves the image."""
    colours, height, width = image_sides(shape, "cnn", smallest=4)
    if len(channels) != 2:
        raise ValueError(f"cnn: channels are two numbers, one for each convolution, not {list(channels)}")
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(colours, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip
