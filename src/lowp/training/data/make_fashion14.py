"""Makes fashion14.npz, the set inside the package, out of Fashion-MNIST:

    python -m lowp.training.data.make_fashion14 OUT.npz [DATA_DIRECTORY]

The first 10,000 training and 2,000 test images, averaged over squares of 2 x 2 pixels to 14 x 14, in 64 levels of grey: small
enough to come with the package, and still real clothes that are hard to tell apart. The classes are as balanced as the first
images are (942 to 1,027 each). Not all 256 levels, since the two lowest bits are noise, and noise does not compress.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowp.training.data.sets import fashion_mnist

IN_TRAIN = 10_000
IN_TEST = 2_000


def shrink(images: Tensor) -> Tensor:
    """uint8 (n, 1, 28, 28) to (n, 14, 14): the sums of four pixels, 0 to 1020, become levels 0 to 63."""
    squares = images.view(-1, 14, 2, 14, 2).to(torch.int32)
    return (squares.sum(dim=(2, 4)) // 16).to(torch.uint8)


def make(directory: Path | None) -> tuple[Tensor, Tensor]:
    """All images, then their labels; the training ones first."""
    train, test = fashion_mnist(directory)
    images = torch.cat((train.images[:IN_TRAIN], test.images[:IN_TEST]))
    labels = torch.cat((train.labels[:IN_TRAIN], test.labels[:IN_TEST]))
    return shrink(images), labels


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    images, labels = make(Path(rest[0]) if rest else None)
    np.savez_compressed(out, images=images.numpy(), labels=labels.numpy(), in_train=np.array(IN_TRAIN))
