"""The loop that one writes by hand: PyTorch alone, DistributedDataParallel, nothing but what training needs.

It has every advantage that a hand-written loop can take. All images lie normalised in memory, a batch is one indexing; there is
no schedule, no accuracy, no seed in a step; every 20 steps the loss is read, as anybody would who wants to see it. Initial
weights and the order of samples are lowp's, so that both sides compute the same numbers.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.training.cases import MOMENTUM, RATE, SEED, Case
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowp.training.cuda_settings import cuda_settings
from lowp.training.data import open_data
from lowp.training.data.base import Request
from lowp.training.data.order import epoch_order
from lowp.training.models import build_model
from lowp.training.randomness import seed_of
from lowp.training.world import World

LOG_EVERY = 20


@dataclass(frozen=True)
class Stretch:
    """Steps between two lines of a log, and the means over all ranks."""

    steps: int
    seconds: float
    loss: float


def train(case: Case, epochs: int, world: World, directory: Path | None) -> list[Stretch]:
    """Train as one rank of the world; the same stretches on all of them."""
    with cuda_settings(case.recipe(), world.device):
        images, labels, model = _prepared(case, world.device, directory)
        stretches = _loop(case, epochs, world, model, images, labels)
    return [Stretch(steps, *_means(pair, world)) for steps, *pair in stretches]


def _prepared(case: Case, device: torch.device, directory: Path | None) -> tuple[Tensor, Tensor, nn.Module]:
    data = open_data(case.recipe().data, device=device, dtype=torch.float32, directory=directory)
    images, labels = next(data.train.stream([Request(torch.arange(len(data.train)), ())]))
    torch.manual_seed(seed_of(SEED, "weights"))
    model = build_model(case.model, shape=data.shape, classes=data.classes, options=case.options)
    return images, labels, model.to(device).train()


def _loop(
    case: Case, epochs: int, world: World, model: nn.Module, images: Tensor, labels: Tensor
) -> list[tuple[int, float, float]]:
    """(steps, seconds, mean loss) of this rank's stretches."""
    network = DistributedDataParallel(model) if world.ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    steps, share = len(images) // case.batch, case.batch // world.ranks
    offset = share * world.rank
    stretches = []
    sum_of_losses = torch.zeros((), device=images.device)
    since, began = 0, time.perf_counter()
    for epoch in range(epochs):
        order = epoch_order(len(images), SEED, epoch).to(images.device)
        for step in range(steps):
            first = step * case.batch + offset
            chosen = order[first : first + share]
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            sum_of_losses += loss.detach()
            done = epoch * steps + step + 1
            if done % LOG_EVERY == 0 or step == steps - 1:  # as in lowp, an epoch's end ends a stretch
                mean = sum_of_losses.item() / (done - since)
                now = time.perf_counter()
                stretches.append((done - since, now - began, mean))
                since, began = done, now
                sum_of_losses.zero_()
    return stretches


def _means(numbers: list[float], world: World) -> list[float]:
    """Over all ranks."""
    return (world.sum(torch.tensor(numbers, dtype=torch.float64)) / world.ranks).tolist()
