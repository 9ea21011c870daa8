"""Models that go wrong in their own ways."""

import os
import time
from pathlib import Path

import torch
from torch import nn


def broken(shape, classes):
    raise RuntimeError("this model cannot be built\nreally")


def deadly(shape, classes):
    """A worker dies when the model is built, as if there were no memory left."""
    if "LOWP_STUDY" in os.environ:
        os.kill(os.getpid(), 9)
    return exploding(shape, classes)


class Exploding(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.flat, self.last = nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, inputs):
        return self.last(self.flat(inputs)) * float("inf")


def exploding(shape, classes):
    return Exploding(shape, classes)


def on_a_node(shape, classes):
    """Says on which node of a Ray cluster it is built."""
    if folder := os.environ.get("NODES_SEEN"):
        import ray

        if ray.is_initialized():
            (Path(folder) / f"{ray.get_runtime_context().get_node_id()}-{os.getpid()}-{time.time_ns()}").touch()
            time.sleep(1)  # so that the other node gets the next run
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))
