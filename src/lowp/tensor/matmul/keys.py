"""The noise of stochastic rounding, defined.

Rounding number r (from 0, in the order in which one element of a result is computed, those of products included, also where
nothing is inexact) of element e (its row-major index in the result) takes the draw of its `Noise` at the index

    (2^32 + part * 2^30 + r) * 2^30 + offset + e

which is far beyond those of any tensor. `part` is 0 for a result, 1 for the gradient of the first operand (or an image), 2 for
that of the second (or a kernel), 3 for that of a bias; e counts in the gradient as it is computed: [.., M, K] and [.., K, N], a
padded image, and for a kernel [groups, (channel, row, column), output channel]. The same on every device.
"""

import torch
from torch import Tensor

from lowp.tensor.noise import KEY_SIZE, KeySource, Noise, key_columns, signed, words_of

FORWARD, FIRST, SECOND, BIAS = range(4)
_BLOCK = 1 << 30  # indices of one key
_PARTS = 1 << 32


def keys_of(noise: Noise, part: int, roundings: int, elements: int, device: torch.device) -> Tensor:
    """The keys of all roundings, int32 [roundings, KEY_SIZE]."""
    if noise.offset + elements > _BLOCK or roundings > _BLOCK:
        raise ValueError(
            f"stochastic rounding counts 2^30 elements of a product, and as many roundings of each: {elements} elements from "
            f"offset {noise.offset} with {roundings} roundings are too many"
        )
    assert not isinstance(noise.step, KeySource)
    there = device if isinstance(noise.seed, Tensor) or isinstance(noise.step, Tensor) else torch.device("cpu")
    numbers = torch.arange(roundings, dtype=torch.int64, device=there)
    firsts = (numbers + (_PARTS + part * _BLOCK)) * _BLOCK + noise.offset
    streams = torch.full_like(numbers, signed(noise.stream))
    seed, step = (_words(number, there) for number in (noise.seed, noise.step))
    columns = key_columns(noise.domain, seed, step, streams, firsts)
    return torch.stack([column.expand(roundings) for column in columns], dim=1).to(device, non_blocking=True)


def no_keys(device: torch.device) -> Tensor:
    return torch.empty((0, KEY_SIZE), dtype=torch.int32, device=device)


def _words(number: "int | Tensor", device: torch.device) -> list:
    return words_of(number.reshape(()).to(device=device, dtype=torch.int64) if isinstance(number, Tensor) else number)
