"""The optimizer's step, whole or not at all: where a gradient is not finite, weights and states stay as they were.

There are two kinds of optimizers. lowp's kernels (16-bit weights, narrow states, LARS, LAMB) look at the gradients themselves,
and leave everything as it is (`GatedUpdate`). Functions of torch (torch.optim; SGD and AdamW of lowp, in float32) do not look:
`CheckedUpdate` does it before them.

To read a number of a GPU is to wait until it has done all that was queued; afterwards it waits for the host to queue more. So
with `later` nobody reads in the same step:

1. The largest magnitude of each gradient is copied to pinned memory, and an event is recorded behind the copy.
2. Weights and states are copied on the device, and the update is queued.
3. `confirm`, in the next step when its backward pass is queued, waits for the event (it is long over) and reads. Where a
   gradient was not finite, weights and states are copied back.

Kernels that look themselves need no copies. An alternative for torch's functions is their fused form, which can leave a step
out on the device. It is not used: whether its bits on CUDA are those of the form used here has not been looked at. Copies
need as much memory as weights and states, so a large model (`COPIES_AT_MOST`) waits in every step.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp import compat
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.tensor.errors import NonFiniteGradient, surely_finite
from lowp.training.world import World

COPIES_AT_MOST = 1 << 30  # bytes
ANSWER_LATER = ("cuda",)  # devices whose numbers the host has to wait for


class OptimizerStep(Protocol):
    def take(self) -> None:
        """The optimizer's step. Raises NonFiniteGradient, with nothing changed; with `later`, `confirm` does."""

    def confirm(self) -> None:
        """Read the answer about the last step, if it is still to be read. Raises NonFiniteGradient; the step is undone."""


class GatedUpdate:
    """For kernels that leave a step out themselves. On a CPU they raise at once, on CUDA when they are asked."""

    def __init__(self, optimizer: LowPrecisionOptimizer, *, later: bool) -> None:
        self._optimizer, self._later = optimizer, later

    def take(self) -> None:
        self._optimizer.step()
        if not self._later:
            self.confirm()

    def confirm(self) -> None:
        self._optimizer.check()


class CheckedUpdate:
    """For optimizers that do not look at gradients.

    `world` is for divided models, whose ranks have different gradients: all of them step, or none. `later` is for lowp's
    optimizers: a step of theirs changes the weights, the tensors in their states and the count of steps beside them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        *,
        world: World | None = None,
        later: bool = False,
    ) -> None:
        assert not later or isinstance(optimizer, LowPrecisionOptimizer)
        self._optimizer, self._world, self._later = optimizer, world, later
        self._parameters = {name: p for name, p in parameters.items() if p.numel()}
        self._copies: _Copies | None = None
        self._pending = False

    def take(self) -> None:
        assert not self._pending
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        known = self._copies is not None and self._copies.names == [*gradients]
        if self._copies is not None and known:
            self._copies.save(_largest(gradients))
            self._pending = True
        else:
            self._raise_for(_not_finite(gradients))
        self._optimizer.step()
        if self._later and not known and gradients:
            self._prepare([*gradients])

    def _prepare(self, names: list[str]) -> None:
        """After a step, which has made the states: the next one may be answered later."""
        parameters = [self._parameters[name] for name in names]
        states = [self._optimizer.state[p] for p in parameters]
        tensors = [p.detach() for p in parameters]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        if sum(tensor.nbytes for tensor in tensors) > COPIES_AT_MOST:
            self._later, self._copies = False, None
        else:
            self._copies = _Copies(names, tensors, states)

    def confirm(self) -> None:
        pending, self._pending = self._pending, False
        if pending and self._copies is not None and (bad := self._copies.not_finite()):
            self._copies.restore()
            self._raise_for(bad)

    def _raise_for(self, bad: list[str]) -> None:
        if self._world is not None and not bad and float(self._world.sum(torch.zeros(1))):
            bad = ["a layer of another rank"]
        elif self._world is not None and bad:
            self._world.sum(torch.ones(1))
        if bad:
            raise NonFiniteGradient(f"the gradient of {bad[0]!r} is infinite or NaN", bad[0])


class _Copies:
    """Weights and states before an update, in memory that is made once, and the answer whether it was right to be taken."""

    def __init__(self, names: list[str], tensors: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.names = names
        self._tensors, self._states = tensors, states
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        on_cuda = tensors[0].is_cuda
        self._answer = torch.empty(len(names), dtype=torch.float32, pin_memory=on_cuda)
        self._event = torch.cuda.Event() if on_cuda else None

    @torch.no_grad()
    def save(self, largest: Tensor) -> None:
        self._answer.copy_(largest, non_blocking=True)
        if self._event is not None:
            self._event.record()
        compat.foreach_copy_(self._copies, self._tensors)

    def not_finite(self) -> list[str]:
        if self._event is not None:
            self._event.synchronize()
        answers = self._answer.numpy().tolist()  # host memory, read without an operation of torch
        return [] if math.isfinite(math.fsum(answers)) else _named(self.names, map(math.isfinite, answers))

    @torch.no_grad()
    def restore(self) -> None:
        compat.foreach_copy_(self._tensors, self._copies)
        for state in self._states:
            state["step"] -= 1


def _largest(gradients: Mapping[str, Tensor]) -> Tensor:
    """The largest magnitude of each gradient, NaN where it has one."""
    return torch.stack(compat.foreach_norm([*gradients.values()], math.inf))


def _not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """The names of gradients that are infinite or NaN. Waits for the device. On a CPU most calls take a shorter way."""
    if not gradients or surely_finite(gradients.values()):
        return []
    return _named(gradients, _largest(gradients).isfinite().tolist())


def _named(names: Any, finite: Any) -> list[str]:
    return [name for name, good in zip(names, finite, strict=True) if not good]
