"""One process for all ranks, one after the other."""

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lowp.training.buffers import BufferCopies
from lowp.training.exchange.base import Gradients, Seen
from lowp.wire.layer_tensors import Residuals
from lowp.wire.naming import all_names
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange


class VirtualRanks:
    """One process for all ranks, one after the other.

    Where a rank's gradients are needed twice (to agree on scales, then to add) they are kept if memory allows, and computed
    again if not. Buffers are rank 0's, as in DDP: every rank starts from the step's, and what rank 0 made of them stays.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[list[str]],
        settings: Settings,
        size: int,
    ) -> None:
        self.ranks = range(size)
        self._parameters = parameters
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._exchange = VirtualExchange(size, shapes, settings, buckets=buckets, names=all_names(model))
        self._sent = self._of_fp32 = 0.0
        self._step_bytes: tuple[int, float] | None = None  # of a step, where all are alike
        self._buffers = BufferCopies(model), BufferCopies(model)
        self.before_travel: Seen | None = None

    def reduce(self, gradients: Gradients) -> None:
        self._begin_step()
        self.add(gradients)
        self._exchange.state.step += 1

    def step_launched(self) -> None:
        """A step's `add` was launched by a graph, and is to be counted."""
        self._begin_step()
        self._exchange.state.step += 1

    @property
    def steady(self) -> bool:
        """Does `add` launch the same in every step, and ask for each rank's gradients once?"""
        return self._exchange.steady and (self._fits or not self._exchange.asks_twice)

    def _begin_step(self) -> None:
        example = next(iter(self._parameters.values()))
        if self._step_bytes is None or not self.steady:
            self._step_bytes = self._exchange.bytes_sent(0, example.device, example.dtype)
        self._before = self._exchange.state.snapshot()
        self._residuals = [residuals.copy() for residuals in self._exchange.residuals]
        sent, of_fp32 = self._step_bytes
        self._sent += sent
        self._of_fp32 += of_fp32

    def add(self, gradients: Gradients) -> None:
        """The mean of all ranks' gradients, and the model's buffers as rank 0 leaves them. It counts no step."""
        keep = self._exchange.asks_twice and self._fits
        source = _RankGradients(self._buffers, self._parameters, gradients, keep, self.before_travel)
        means = self._exchange.sums(source)
        source.finish()
        for name, parameter in self._parameters.items():
            parameter.grad = means[name]

    @cached_property
    def _fits(self) -> bool:
        """Is there memory for all ranks' gradients? Asked once: to ask a GPU is to wait for it."""
        size = sum(p.numel() * p.element_size() for p in self._parameters.values())
        first = next(iter(self._parameters.values()))
        if first.is_cuda:
            free = torch.cuda.mem_get_info(first.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return len(self.ranks) * size < free / 2

    def bytes_sent(self) -> tuple[float, float]:
        """By rank 0, as a real run counts them."""
        return self._sent, self._of_fp32

    def seconds(self) -> dict[str, float]:
        return {}  # rounding and adding are all that takes time, and between phases of a step that is known already

    def undo(self) -> None:
        self._exchange.state.restore(self._before)
        self._exchange.residuals = [residuals.copy() for residuals in self._residuals]

    def state_of_rank(self) -> list[dict[str, Any]]:
        shared = self._exchange.state.state_dict()
        return [shared | {"residuals": self._exchange.residuals[rank].named()} for rank in self.ranks]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        device = next(iter(self._parameters.values())).device
        self._exchange.state.load_state_dict(saved[0] | {"residuals": {}}, device)
        for rank, theirs in zip(self.ranks, saved, strict=True):
            residuals = {n: r.to(device, copy=True) for n, r in theirs["residuals"].items()}
            self._exchange.residuals[rank] = Residuals(residuals)

    def close(self) -> None: ...


class _RankGradients:
    """Each rank's gradients in one step, kept or computed again. `buffers` is room for those before and after rank 0's pass."""

    def __init__(
        self,
        buffers: tuple[BufferCopies, BufferCopies],
        parameters: Mapping[str, nn.Parameter],
        gradients: Gradients,
        keep: bool,
        seen: Seen | None,
    ) -> None:
        self._parameters, self._gradients, self._keep, self._seen = parameters, gradients, keep, seen
        self._before, self._after = buffers
        self._before.save()
        self._after.save()
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._last = -1

    def __call__(self, rank: int) -> Mapping[str, Tensor]:
        if rank not in self._kept:
            if not self._keep:
                self._kept.clear()
            self._kept[rank] = self._compute(rank)
        return self._kept[rank]

    def _compute(self, rank: int) -> dict[str, Tensor]:
        if self._last >= 0:
            self._before.restore()
        self._gradients(rank, lambda: None)
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()}
        if rank == 0 and self._last < 0:
            self._after.save()
            if self._seen is not None:
                for name, gradient in found.items():
                    self._seen(name, gradient)
        self._last = rank
        return found

    def finish(self) -> None:
        self._after.restore()
