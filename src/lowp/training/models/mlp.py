"""A multi-layer perceptron: linear layers with ReLU between them, for data of any shape.

The MNIST network of docs/PAPERS.md, section 2, is `hidden=(1024, 1024), dropout=(0.2, 0.3, 0.3)`.
"""

import math
from collections.abc import Sequence

from torch import nn


def mlp(
    shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (256, 256), dropout: float | Sequence[float] = 0.0
) -> nn.Sequential:
    """`dropout` is one rate for all hidden layers, or one for the input and then one for each hidden layer."""
    rates = list(dropout) if isinstance(dropout, Sequence) else [0.0, *[dropout] * len(hidden)]
    if len(rates) != len(hidden) + 1:
        raise ValueError(
            f"mlp: dropout has {len(rates)} rates; {len(hidden)} hidden layers take {len(hidden) + 1}, the input's first"
        )
    layers: list[nn.Module] = [nn.Flatten(), *_dropout(rates[0])]
    width = math.prod(shape)
    for units, rate in zip(hidden, rates[1:], strict=True):
        layers += [nn.Linear(width, units), nn.ReLU(), *_dropout(rate)]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, classes))


def _dropout(rate: float) -> list[nn.Module]:
    return [nn.Dropout(rate)] if rate else []
