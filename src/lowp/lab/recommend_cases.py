"""What `recommend` trains: a recipe's model with its data and optimizer, or a module with one batch of its own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp.optim import AdamW
from lowp.predict.subjects import Subject, subject_of
from lowp.training.check import check
from lowp.training.data import open_data
from lowp.training.data.base import Request
from lowp.training.data.order import epoch_order
from lowp.training.loss import CrossEntropy
from lowp.training.models import MODELS, build_model
from lowp.training.optimizers import optimizer_for
from lowp.training.plugins import is_plugin
from lowp.training.randomness import seed_of
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe

MOST_SAMPLES = 8192  # that are read into memory
KEPT = 512  # samples kept aside, at most a quarter of all
RATE = 1e-3  # of AdamW, for a module without a recipe


class TriedModel(Protocol):
    name: str

    def model(self, seed: int) -> nn.Module:
        """A new one, in training mode."""
        ...

    def batches(self, seed: int, step: int, ranks: int) -> list[Any]:
        """The batch of a step, divided among some ranks."""
        ...

    def kept(self, seed: int) -> Any:
        """What no step trains on, where there is enough."""
        ...

    def loss(self, module: nn.Module, batch: Any) -> Tensor: ...

    def optimizer(self, module: nn.Module, state: str | None) -> torch.optim.Optimizer:
        """With its states in a format, where one is given."""
        ...


def case_of(model: "str | nn.Module", inputs: Any, targets: Any, loss: Callable[..., Tensor] | None, data: Any) -> TriedModel:
    if isinstance(model, nn.Module):
        subject = subject_of(model, inputs, loss)
        subject.targets, subject.whole = targets, loss is not None and targets is None
        return ModuleCase(subject)
    if inputs is not None or targets is not None or loss is not None:
        raise ValueError("inputs, targets and loss belong to an nn.Module; a recipe or module:function has its own")
    if is_plugin(model):
        return ModuleCase(subject_of(model))
    recipe = read_recipe("fp32", [f"model.name={model}"]) if model in MODELS else read_recipe(model)
    return RecipeCase(recipe, None if data is None else Path(data))


class RecipeCase:
    """The first samples of the recipe's data. Precision and wire of the recipe are left aside: they are what is asked for."""

    def __init__(self, recipe: Recipe, data: Path | None) -> None:
        plain = {"weights": "fp32", "activations": "", "errors": "", "gradients": "", "state": "", "master": "", "layers": {}}
        plain |= {"schedule": [], "promote": None, "switch": None, "accumulate": "", "loss_scale": "none", "audit": False}
        self._recipe = with_changes(recipe, precision=plain, ranks=1, virtual_ranks=1, device="cpu", wire={"format": "fp32"})
        check(self._recipe)
        self.name = recipe.model.name
        opened = open_data(recipe.data, device=torch.device("cpu"), dtype=torch.float32, directory=data)
        count = min(len(opened.train), MOST_SAMPLES)
        chosen = epoch_order(len(opened.train), recipe.seed, 0)[:count]
        self._inputs, self._targets = next(opened.train.stream([Request(chosen, ())]))
        kept = min(KEPT, count // 4)
        self._train = count - kept
        self._batch = min(recipe.batch, self._train)
        self._shape, self._classes = opened.shape, opened.classes
        self._cross_entropy = CrossEntropy(recipe.model.name, recipe.data.name, opened.classes)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed_of(seed, "weights"))
        settings = self._recipe.model
        return build_model(settings.name, shape=self._shape, classes=self._classes, options=settings.options).train()

    def batches(self, seed: int, step: int, ranks: int) -> list[Any]:
        each = self._train // self._batch
        order = epoch_order(self._train, seed, step // each)
        chosen = order[step % each * self._batch :][: self._batch]
        return [(self._inputs[part], self._targets[part]) for part in chosen.chunk(ranks)]

    def kept(self, seed: int) -> Any:
        return self._inputs[self._train :], self._targets[self._train :]

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return self._cross_entropy(module(batch[0]), batch[1], self._recipe.label_smoothing)

    def optimizer(self, module: nn.Module, state: str | None) -> torch.optim.Optimizer:
        recipe = with_changes(self._recipe, **{"precision.state": state or ""})
        return optimizer_for(recipe, dict(module.named_parameters()))


class ModuleCase:
    """A module with one batch. Every step trains on half of it, drawn by the seed (on all where the loss is of the whole).

    The weights are the user's: seeds differ by their halves, and by what the model draws itself.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._start = copy.deepcopy(subject.module).cpu().float()
        self.name = subject.name

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return copy.deepcopy(self._start).train()

    def batches(self, seed: int, step: int, ranks: int) -> list[Any]:
        subject = self._subject
        if subject.whole or subject.batch < 4:
            return [self.kept(seed)] * ranks
        generator = torch.Generator().manual_seed(1000 * seed + step)
        order = torch.randperm(subject.batch, generator=generator)[: max(ranks, subject.batch // 2)]
        return [subject.samples(rows) for rows in order.chunk(ranks)]

    def kept(self, seed: int) -> Any:
        return self._subject.inputs, self._subject.targets

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return self._subject.forward(module, *batch)

    def optimizer(self, module: nn.Module, state: str | None) -> torch.optim.Optimizer:
        return AdamW(module.named_parameters(), lr=RATE, state=state)
