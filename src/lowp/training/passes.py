"""What is computed of one batch: the forward and the backward pass, loss and figures; the forward pass alone in a test."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp.optim.loss_scale import LossScale
from lowp.training.loss import CrossEntropy
from lowp.training.metrics import Metrics
from lowp.training.numerics import Numerics
from lowp.training.parallel import Placement
from lowp.training.plugins import blamed
from lowp.training.recipe import Recipe


class Passes:
    """`placement`: where the model is divided among the ranks. Figures are added to `metrics`."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        classes: int,
        device: torch.device,
        *,
        placement: Placement | None,
        numerics: Numerics,
        loss_scale: LossScale | None,
        metrics: Metrics,
    ) -> None:
        self._recipe, self._device, self._placement = recipe, device, placement
        self.numerics, self.loss_scale, self.metrics = numerics, loss_scale, metrics
        self.keeps_casts = True  # may a weight that autocast has cast serve the next pass of the step?
        self._forward = torch.compile(model) if recipe.model.compile else model
        self._in_model = blamed(f"model {recipe.model.name!r}")
        self.cross_entropy = CrossEntropy(recipe.model.name, recipe.data.name, classes)

    def backward(self, rank: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of one micro-batch; its loss."""
        if self._placement is not None:
            return self._placement.forward_backward(inputs, targets, partial(self._counted_loss, rank), self._scaled)
        with self.autocast():
            loss = self._counted_loss(rank, self._outputs(inputs), targets)
        self._scaled(loss).backward()
        return loss.detach()

    def record(self, inputs: Tensor, targets: Tensor) -> None:
        """The same as a graph holds it: it does not know the rank."""
        with self.numerics.recorded():
            with self.autocast():
                logits = self._outputs(inputs)
                loss = self.loss(logits, targets)
            self._scaled(loss).backward()
        self.metrics.record(loss.detach(), logits.detach(), targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """That of training."""
        return self.cross_entropy(logits, targets, self._recipe.label_smoothing)

    def predict(self, inputs: Tensor) -> Tensor:
        if self._placement is not None:
            return self._placement.evaluate(inputs)
        with self.autocast():
            return self._outputs(inputs)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self.numerics.autocast
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype, cache_enabled=self.keeps_casts)

    def laid_out(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous(memory_format=torch.channels_last) if self._recipe.model.channels_last else inputs

    def of_one_step(self) -> AbstractContextManager[Any]:
        """Around the passes of one step: autocast keeps the weights that it has cast until the outermost context ends, so that
        all micro-batches and virtual ranks share them. It is switched off here, as backward passes are taken without it."""
        return nullcontext() if self.numerics.autocast is None else torch.autocast(self._device.type, enabled=False)

    def _outputs(self, inputs: Tensor) -> Tensor:
        """What the model makes of a batch; what goes wrong inside is the model's error, in one line."""
        with self._in_model:
            return self._forward(inputs)

    def _counted_loss(self, rank: int, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(logits, targets)
        self.metrics.add_predictions(rank, logits, targets)
        return loss

    def _scaled(self, loss: Tensor) -> Tensor:
        share = loss / self._recipe.micro_batches if self._recipe.micro_batches > 1 else loss
        return share if self.loss_scale is None else self.loss_scale.scale(share)
