"""Forward and backward of a rank's batch as one CUDA graph: recorded once, launched by one call.

A small model's step is some hundred launches of a few microseconds of work each, and the host needs longer to launch them than
the device to do them. A graph holds the launches, with the addresses of all that they read and write. So

- a batch is copied to where the recorded one was,
- gradients come out where the recorded ones did, and `parameter.grad` is these tensors in every step,
- loss and right predictions are left at the same places.

One process for several virtual ranks launches the same graph once for each of them, and copies a rank's gradients before the
next launch (`own_gradients`). A graph for each rank would save the copies, and would need the memory of all of them.

Random numbers: what a graph draws follows the generator's seed at its launch, as it would in the same layers without a graph.
Keys of stochastic rounding, in a simulated model, are written to memory before each launch (`lowp.tensor.recorded_step`).

The first passes are taken one launch at a time, by the code that is recorded afterwards: a compiled model (`model.compile`) is
compiled in them, and kernels of this package are built, however small their tensors.

The code of a model runs once, while it is recorded. What it decides in Python is decided for all steps. So only models of this
package are recorded (`MODELS`), none of a user's. What the pass takes from Python and may change (the loss scale, a simulated
model's formats) is told to `run`: where it has changed, the pass is recorded again.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lowp import compat
from lowp.tensor.kernels import building
from lowp.tensor.recorded_step import RecordedStep

EAGER_STEPS = 3  # before the first recorded one: libraries choose algorithms and take memory in them


class StepGraph:
    """`backward(inputs, targets)` leaves gradients in the parameters, and figures at fixed places."""

    def __init__(
        self,
        backward: Callable[[Tensor, Tensor], None],
        parameters: Sequence[nn.Parameter],
        keyed_by: RecordedStep | None = None,
    ) -> None:
        self._backward, self._parameters, self._keyed_by = backward, parameters, keyed_by
        self._seen = 0
        self._failed = False
        self._number: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: tuple[Tensor, Tensor] | None = None
        self._gradients: list[Tensor | None] = []

    def run(self, inputs: Tensor, targets: Tensor, number: Hashable = None, step: int = 0) -> bool:
        """Take the pass over this batch. `number` is what the pass takes from Python; `step` keys stochastic rounding. False:
        nothing was done, and the pass must be taken without a graph."""
        if self._failed:
            return False
        if number != self._number:
            self._number, self._graph, self._seen = number, None, 0
        if self._graph is None:
            if self._seen < EAGER_STEPS:
                self._seen += 1
                self._take(inputs, targets, step)
                return True
            if not self._record(inputs, targets):
                return False
        assert self._graph is not None
        assert self._batch is not None
        if (inputs.shape, targets.shape) != (self._batch[0].shape, self._batch[1].shape):
            return False
        for place, new in zip(self._batch, (inputs, targets), strict=True):
            place.copy_(new)
        if self._keyed_by is not None:
            self._keyed_by.fill(step)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._graph.replay()
        return True

    def _take(self, inputs: Tensor, targets: Tensor, step: int) -> None:
        """A pass that is not recorded yet."""
        if self._keyed_by is not None:
            self._keyed_by.now = step
        with building():
            self._backward_here(inputs, targets)

    def _backward_here(self, inputs: Tensor, targets: Tensor) -> None:
        """In this thread all of it: `building` is for this thread, and each thread has cuDNN plans of its own, which are chosen
        at its first pass (and cannot be while it is recorded)."""
        with torch.autograd.set_multithreading_enabled(False):
            self._backward(inputs, targets)

    def _record(self, inputs: Tensor, targets: Tensor) -> bool:
        """Record the pass; nothing is computed yet."""
        # A graph of an earlier run that is forgotten while this one is recorded would end the recording.
        gc.collect()
        torch.cuda.empty_cache()  # a graph has memory of its own, and does not find what the steps before it have left
        self._batch = torch.empty_like(inputs), torch.empty_like(targets)
        for place, new in zip(self._batch, (inputs, targets), strict=True):
            place.copy_(new)
        for parameter in self._parameters:
            parameter.grad = None
        graph, stream, collecting = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
        generator = torch.cuda.default_generators[inputs.device.index]
        drawn = generator.get_state()
        gc.disable()
        try:
            keys = nullcontext() if self._keyed_by is None else self._keyed_by.recording()
            with keys, torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads work on
                self._backward_here(*self._batch)
        except Exception as error:  # the same code has just run: what fails is its recording, whatever a model's error is named
            torch.cuda.set_stream(stream)  # where a recording fails, torch leaves its stream the current one,
            unused = torch.Generator(inputs.device)  # and the generator's own state as if it still recorded
            unused.set_state(drawn)
            generator.graphsafe_set_state(unused)
            self._failed, self._batch = True, None
            for parameter in self._parameters:
                parameter.grad = None
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"steps are launched in more pieces, since they could not be recorded as one: {reason}", stacklevel=2)
            return False
        finally:
            if collecting:
                gc.enable()
        self._graph, self._gradients = graph, [parameter.grad for parameter in self._parameters]
        return True

    @torch.no_grad()
    def own_gradients(self) -> None:
        """Move the gradients of the last launch to memory that the next one does not write to."""
        made = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        copies = [torch.empty_like(gradient) for _, gradient in made]
        compat.foreach_copy_(copies, [gradient for _, gradient in made])
        for (parameter, _), copy in zip(made, copies, strict=True):
            parameter.grad = copy
