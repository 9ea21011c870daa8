"""Real gradients of virtual ranks: a recipe's model, trained in float32, stopped at several steps.

1. Train a recipe on one rank, with float32 gradients, and store everything that training needs to go on at each moment
   (a number of steps). A later run finds these files and trains no more.
2. At a moment, each rank computes the gradient of its own micro-batch with the same weights. Rank r's samples do not depend on
   the number of ranks, so that 8 ranks are the first 8 of 64.
3. Gradients lie in one temporary file, a row a rank, mapped into memory: 64 gradients of a ResNet-18 are 2.9 GB, and every
   codec reads them once or twice.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp.training.data.base import Request
from lowp.training.loss import CrossEntropy
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World

ALONE: dict[str, Any] = {
    "ranks": 1,
    "virtual_ranks": 1,
    "wire": {"format": "fp32", "scale": "none"},
    "parallel": {"scale": "local"},  # without effect here; named because files of weights are found by the whole recipe
    "device": "cpu",
}


@dataclass(frozen=True)
class Task:
    """A recipe, what a CPU needs changed in it, the samples of a rank's micro-batch, and after how many steps to look."""

    recipe: str
    micro_batch: int
    moments: tuple[int, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)


TASKS = {
    "gpt": Task("gpt", 8, (20, 200, 600)),
    "lstm": Task("lstm", 8, (20, 200, 600)),
    # The recipe has 4,096 samples in a step and a rate of 1.6. A step of 64 gets a rate in proportion, and no warm-up.
    "resnet18": Task(
        "resnet18-cifar",
        16,
        (20, 100, 200),
        {"batch": 64, "optimizer": {"lr": 0.025}, "learning_rate": {"warmup": 0, "start": 0.0}},
    ),
}
QUICK = {  # a tiny model on data that lie in the package: does it run?
    "mlp": Task("fp32", 16, (2,), {"model": {"options": {"hidden": [64]}}}),
}


@dataclass
class Snapshot:
    """A model at one moment of its training."""

    task: Task
    step: int
    trainer: Trainer

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.trainer.parameters.items()}

    def gradient(self, rank: int) -> Tensor:
        """All parameters' gradients on a rank's own micro-batch, flat, in the order of `shapes`."""
        trainer, recipe = self.trainer, self.trainer.recipe
        generator = torch.Generator().manual_seed(1_000_003 * (self.step + 1) + rank)
        indices = torch.randint(len(trainer.data.train), (self.task.micro_batch,), generator=generator)
        asked = Request(indices, (recipe.seed, 0, self.step, rank, 0))
        inputs, targets = next(iter(trainer.data.train.stream([asked])))
        if recipe.model.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss = CrossEntropy(recipe.model.name, recipe.data.name, trainer.data.classes)
        trainer.model.train()
        value = loss(trainer.model(inputs), targets, recipe.label_smoothing)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(trainer.parameters.values()))])


def recipe_of(task: Task) -> Recipe:
    return with_changes(with_changes(read_recipe(task.recipe), **ALONE), **task.changes)


def snapshots(name: str, task: Task, moments: tuple[int, ...], cache: Path, data: Path | None) -> Iterator[Snapshot]:
    """The model at each moment, trained as far as there is no file of it."""
    recipe = recipe_of(task)
    mark = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:8]  # other settings, other files
    trainer = Trainer(recipe, World(0, 1, torch.device("cpu")), data)
    cache.mkdir(parents=True, exist_ok=True)
    for moment in sorted(moments):
        path = cache / f"{name}-{mark}-{moment}.pt"
        if path.exists():
            saved = torch.load(path, weights_only=False)
            trainer.load_state(saved["state"], saved["of_ranks"])
        else:
            while trainer.step < moment:
                trainer.train_step()
            _store({"state": trainer.state(), "of_ranks": trainer.state_of_ranks()}, path)
        yield Snapshot(task, moment, trainer)
    trainer.close()


def _store(content: Any, path: Path) -> None:
    """Under another name first: a file that has its name is complete."""
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(content, partial)
    partial.rename(path)


@contextmanager
def rows_of_gradients(snapshot: Snapshot, ranks: int, folder: Path) -> Iterator[Tensor]:
    """(ranks, elements) float32, in a temporary file that is mapped into memory."""
    size = sum(shape.numel() for shape in snapshot.shapes.values())
    with tempfile.NamedTemporaryFile(dir=folder, prefix="gradients-") as file:
        file.truncate(4 * ranks * size)
        rows = torch.from_file(file.name, shared=True, size=ranks * size, dtype=torch.float32).view(ranks, size)
        for rank in range(ranks):
            rows[rank] = snapshot.gradient(rank)
        yield rows
