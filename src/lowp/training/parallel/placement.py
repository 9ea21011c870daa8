"""Where a model lives, and what a training step is there.

The loop's step is the same call wherever the layers are: whole in every process (one process, or data parallel), split over
ranks (split.py), or one stage after the other (pipeline.py). After `forward_backward` the gradients of the parameters that live
here are in `parameter.grad`, added to what was there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowp.training.parallel.team import Team

LossFunction = Callable[[Tensor, Tensor], Tensor]
ScaleLoss = Callable[[Tensor], Tensor]


def unscaled(loss: Tensor) -> Tensor:
    return loss


class Placement(ABC):
    """`module` has what lives in this process: its parameters, and its buffers."""

    def __init__(self, module: nn.Module, team: Team | None = None) -> None:
        self.module = module
        self._team = team

    @property
    def bytes_sent(self) -> float:
        """By each rank that lives here, for activations and their gradients, since the model was placed. Evaluation counts."""
        return 0 if self._team is None else self._team.bytes_sent

    @property
    def bytes_of_fp32(self) -> float:
        """What would have been sent in float32."""
        return 0 if self._team is None else self._team.bytes_of_fp32

    def whole_of(self, name: str) -> tuple[str, int]:
        """What a parameter of `module` is a part of: its name in the whole model, and the place there of its first element."""
        return name, 0

    @abstractmethod
    def forward_backward(
        self, inputs: Tensor, targets: Tensor, loss_function: LossFunction, scale_loss: ScaleLoss = unscaled
    ) -> Tensor:
        """The loss of a batch, the same on all ranks; its gradients are added to `parameter.grad`.

        All ranks give the same inputs and targets. `scale_loss` is applied before backward, and not to the loss returned.
        """

    @abstractmethod
    def evaluate(self, inputs: Tensor) -> Tensor:
        """The model's outputs in evaluation mode, on all ranks."""


class Whole(Placement):
    """A model in one piece: nothing travels during a step. (Gradients may after it: that is data parallelism.)"""

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, loss_function: LossFunction, scale_loss: ScaleLoss = unscaled
    ) -> Tensor:
        loss = loss_function(self.module(inputs), targets)
        scale_loss(loss).backward()
        return loss.detach()

    def evaluate(self, inputs: Tensor) -> Tensor:
        with evaluating(self.module):
            return self.module(inputs)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients, for a while."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
