"""AlexNet in its single-tower form (arXiv 1404.5997), with a batch norm after pool5.

That batch norm is what lets AlexNet train in batches of 64 k (docs/PAPERS.md, section 3): without it, the inputs of the first
linear layer drift with the learning rate.

Images of 128 pixels and more enter by the original stem (11 x 11, stride 4, overlapping pools). Smaller ones would be gone
after it: theirs is a 3 x 3 convolution, and every pool halves the image, so that 32 pixels end as 4 and 28 as 3.
"""

from torch import nn

from lowp.training.models.shapes import IMAGENET_PIXELS, image_sides


def alexnet(
    shape: tuple[int, ...], classes: int, *, batch_norm: bool = True, dropout: float = 0.5, hidden: int = 4096
) -> nn.Sequential:
    """`batch_norm` is the one after pool5, `hidden` the width of both hidden linear layers."""
    channels, height, width = image_sides(shape, "alexnet", smallest=8)
    if min(height, width) >= IMAGENET_PIXELS:
        stem = nn.Conv2d(channels, 64, 11, stride=4, padding=2)
        pools = [nn.MaxPool2d(3, stride=2) for _ in range(3)]
        rows = columns = 6  # at 224 pixels that is what arrives, and the adaptive pool does nothing
        last = [pools[2], nn.AdaptiveAvgPool2d(6)]
    else:
        stem = nn.Conv2d(channels, 64, 3, padding=1)
        pools = [nn.MaxPool2d(2) for _ in range(3)]
        rows, columns = height // 8, width // 8
        last = [pools[2]]
    return nn.Sequential(
        stem, nn.ReLU(), pools[0],
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), pools[1],
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), *last,
        *([nn.BatchNorm2d(256)] if batch_norm else []),
        nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(256 * rows * columns, hidden), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip
