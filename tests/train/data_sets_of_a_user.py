"""Map-style datasets and transforms as a user writes them; tests name them by `module:function`."""

import random

import numpy as np
import torch


class Pictures:
    """Draws from all three global generators, as transforms in the wild do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return torch.full((3, 8, 10), float(index)) + noise, index % 7


class Counting(Pictures):
    """Nothing random; each pixel has a value of its own."""

    classes = ("a", "b")

    def __getitem__(self, index: int):
        return torch.arange(240.0).view(3, 8, 10) + 1000 * index, index % 2


class Letters(Pictures):
    def __getitem__(self, index: int):
        return torch.arange(4) + index, torch.arange(1, 5) + index


def pictures(size: int = 20):
    return Pictures(size), Pictures(4), 7


def counting():
    return Counting(20), Counting(4)


def letters():
    return Letters(9), Letters(2), 30


def unsaid():
    return Pictures(3), Pictures(3)


def alone():
    return Pictures(3)


def empty():
    return Pictures(0), Pictures(3), 7


def strange():
    return [("a picture", 1)], [("a picture", 1)], 7


def streaming():
    return iter(()), iter(()), 7


def brighter(inputs, targets, generator):
    # A sixteenth is exact in every dtype: CPUs round a scalar to the tensor's dtype first, GPUs do not.
    return inputs + int(torch.randint(1, 16, (), generator=generator)) / 16, targets


def odd_ones(inputs, targets, generator):
    kept = targets % 2 == 1
    return inputs[kept], targets[kept]


def forgetful(inputs, targets, generator):
    return inputs


not_a_function = 3
