"""The models and data sets that training is measured on, from steps of a millisecond, where every line of Python shows, to long
ones."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowp.training.data import open_data
from lowp.training.recipe import Recipe

SEED = 1
RATE, MOMENTUM = 0.01, 0.9
NEVER = 10**9  # steps


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    data: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    limit: int = 0
    augment: tuple[str, ...] = ()

    def recipe(self, *, epochs: int = 1, ranks: int = 1, device: str = "cpu") -> Recipe:
        """In float32, without tests and checkpoints before the end: steps are measured, and the log's lines."""
        return Recipe(
            name="overhead",
            seed=SEED,
            epochs=epochs,
            batch=self.batch,
            test_every=0,
            ranks=ranks,
            device=device,
            model={"name": self.model, "options": self.options},
            data={"name": self.data, "augment": self.augment, "limit": self.limit},
            optimizer={"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
            checkpoints={"every": NEVER},
        )

    def unavailable(self, directory: Path | None) -> str:
        """Why its data cannot be had; empty if they can."""
        try:
            open_data(self.recipe().data, device=torch.device("cpu"), dtype=torch.float32, directory=directory)
        except ValueError as error:
            return str(error)
        return ""


def cases_for(device: str) -> tuple[Case, ...]:
    """A GPU gets the networks in full width; two cores get ones that take steps of milliseconds."""
    cuda = device == "cuda"
    return (
        Case("mlp, fashion14", "mlp", "fashion14", 128, {"hidden": [256, 128]}),
        Case("cnn, fashion_mnist", "cnn", "fashion_mnist", 512 if cuda else 128, limit=0 if cuda else 12_800),
        Case("davidnet, cifar10", "davidnet", "cifar10", 512, {"width": 64})
        if cuda
        else Case("davidnet with 8 channels, cifar10", "davidnet", "cifar10", 128, {"width": 8}, limit=2560),
    )


def augmented(case: Case) -> Case:
    """What a data set asks of the input at most."""
    return replace(case, name=f"{case.name}: crop, flip, cutout", augment=("crop", "flip", "cutout"))
