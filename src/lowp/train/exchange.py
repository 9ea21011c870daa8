"""From each rank's gradients to the mean of all ranks, in `parameter.grad`.

One interface, three ways: alone, one of several real ranks, or one process that stands in for all of them. The loop hands
over a function that computes one rank's gradients; the exchange calls it for the ranks that this process stands for.

Why not DistributedDataParallel: it lays gradients into buckets, and after the first step into other buckets, in the order in
which they came. Scales that belong to messages then depend on when a process was started: a resumed run would not repeat the
uninterrupted one. Here buckets follow from the model alone, so that real ranks, virtual ranks and resumed runs add the same
numbers in the same order. Everything else is as in DDP: a bucket travels as soon as its last gradient is there, while backward
goes on.
"""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp.train.parallel import Placement
from lowp.wire.compressor import Compressor
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

FIRST_BUCKET = 1 << 20  # bytes; short, so that the first one is on its way early

Gradients = Callable[[int, Callable[[], None]], None]
"""`gradients(rank, last)` computes a rank's gradients into `parameter.grad`, and calls `last` before its last backward."""


class Exchange(Protocol):
    ranks: range  # whose samples this process trains on

    def reduce(self, gradients: Gradients) -> None:
        """One step's gradients: the mean over all ranks."""

    def bytes_sent(self) -> tuple[float, float]:
        """By this rank so far, and what float32 would have been."""

    def undo(self) -> None:
        """Forget what the last `reduce` taught: its step is not taken."""

    def state_of_rank(self) -> list[dict[str, Any]]:
        """What must be saved for each of `ranks`."""

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        """What `state_of_rank` of all ranks gave."""

    def close(self) -> None: ...


def exchange_for(
    model: nn.Module,
    settings: Settings,
    bucket_bytes: float,
    *,
    rank: int,
    ranks: int,
    virtual_ranks: int,
    device: torch.device,
) -> Exchange:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buckets = buckets_of(parameters, bucket_bytes)
    if ranks > 1:
        return RealExchange(parameters, buckets, settings, rank, device)
    if virtual_ranks == 1 and settings.format == "fp32":
        return Alone()
    return VirtualRanks(model, parameters, buckets, settings, virtual_ranks)


def buckets_of(parameters: Mapping[str, Tensor], limit: float) -> list[list[str]]:
    """Names, from the last parameter to the first, as backward makes them; a bucket has one dtype."""
    buckets: list[list[str]] = []
    size, dtype, room = 0.0, None, float(min(FIRST_BUCKET, limit))
    for name, parameter in reversed(list(parameters.items())):
        if not buckets or parameter.dtype != dtype or size >= room:
            room = limit if buckets else room
            buckets.append([])
            size, dtype = 0.0, parameter.dtype
        buckets[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return buckets


class Alone:
    """One rank: nothing travels."""

    ranks = range(1)

    def reduce(self, gradients: Gradients) -> None:
        gradients(0, lambda: None)

    def bytes_sent(self) -> tuple[float, float]:
        return 0.0, 0.0

    def undo(self) -> None: ...

    def state_of_rank(self) -> list[dict[str, Any]]:
        return [{}]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class Placed(Alone):
    """A divided model: all ranks see all samples, and what travels are activations (parallel/)."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def bytes_sent(self) -> tuple[float, float]:
        return self._placement.bytes_sent, self._placement.bytes_of_fp32


class _Bucket:
    """A stretch of memory in which some parameters' gradients lie side by side."""

    def __init__(self, names: list[str], parameters: Mapping[str, nn.Parameter]) -> None:
        first = parameters[names[0]]
        self.names = names
        self.flat = torch.zeros(sum(parameters[n].numel() for n in names), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([parameters[name].numel() for name in names])
        self.views = {n: piece.view(parameters[n].shape) for n, piece in zip(names, pieces, strict=True)}
        self.missing = len(names)


class RealExchange:
    """One of several processes.

    1. Every gradient, when the last micro-batch has made it, is copied into its bucket (a hook on the parameter).
    2. A bucket that is full is handed to the compressor, in the order of buckets: all ranks must send alike.
    3. After backward: parameters that got no gradient count as zeros; wait for what is still under way.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[list[str]],
        settings: Settings,
        rank: int,
        device: torch.device,
    ) -> None:
        self.ranks = range(rank, rank + 1)
        self._parameters = parameters
        self._compressor = Compressor({n: p.shape for n, p in parameters.items()}, settings, device=device)
        self._buckets = [_Bucket(names, parameters) for names in buckets]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._armed = False
        self._next = 0
        self._arrivals: list[torch.futures.Future[Tensor]] = []
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in parameters.items()]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._armed:
                self._put(name, parameter)
                self._send_full()

        return arrived

    def _put(self, name: str, parameter: Tensor) -> None:
        bucket = self._bucket_of[name]
        view = bucket.views[name]
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view
        bucket.missing -= 1

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            self._next += 1
            flat = bucket.flat
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
            self._arrivals.append(future)
            self._compressor.submit(flat, bucket.names, lambda future=future, flat=flat: future.set_result(flat))

    def _arm(self) -> None:
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)

    def reduce(self, gradients: Gradients) -> None:
        self._before = self._compressor.state.snapshot()
        try:
            gradients(self.ranks.start, self._arm)
        finally:
            self._armed = False
        for name, parameter in self._parameters.items():
            if parameter.grad is not self._bucket_of[name].views[name]:
                self._put(name, parameter)
        self._send_full()
        self._compressor.step_done()
        for future in self._arrivals:
            future.wait()
        self._arrivals.clear()
        self._compressor.step_arrived(self._parameters.values())

    def bytes_sent(self) -> tuple[float, float]:
        total = self._compressor.total()
        return total.bytes_sent, total.bytes_of_fp32

    def undo(self) -> None:
        self._compressor.state.restore(self._before)

    def state_of_rank(self) -> list[dict[str, Any]]:
        return [self._compressor.state_dict()]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        self._compressor.load_state_dict(saved[self.ranks.start])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._compressor.close()


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
        self._model = model
        self._parameters = parameters
        self._exchange = VirtualExchange(size, {n: p.shape for n, p in parameters.items()}, settings, buckets=buckets)
        self._sent = self._of_fp32 = 0.0

    def reduce(self, gradients: Gradients) -> None:
        source = _Source(self._model, self._parameters, gradients, keep=self._exchange.asks_twice and self._fits)
        sent, of_fp32 = self._exchange.bytes_a_rank()
        self._before = self._exchange.state.snapshot()
        self._residuals = [{n: r.clone() for n, r in residuals.items()} for residuals in self._exchange.residuals]
        means = self._exchange.reduce(source)
        source.finish()
        for name, parameter in self._parameters.items():
            parameter.grad = means[name]
        self._sent += sent
        self._of_fp32 += of_fp32

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
        return self._sent, self._of_fp32

    def undo(self) -> None:
        self._exchange.state.restore(self._before)
        self._exchange.residuals = [dict(residuals) for residuals in self._residuals]

    def state_of_rank(self) -> list[dict[str, Any]]:
        shared = self._exchange.state.state_dict()
        return [shared | {"residuals": dict(self._exchange.residuals[rank])} for rank in self.ranks]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        device = next(iter(self._parameters.values())).device
        self._exchange.state.load_state_dict(saved[0] | {"residuals": {}}, device)
        for rank, theirs in zip(self.ranks, saved, strict=True):
            self._exchange.residuals[rank] = {n: r.to(device, copy=True) for n, r in theirs["residuals"].items()}

    def close(self) -> None: ...


class _Source:
    """Each rank's gradients in one step, kept or computed again."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], gradients: Gradients, keep: bool) -> None:
        self._parameters, self._gradients, self._keep = parameters, gradients, keep
        self._buffers = list(model.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._after: list[Tensor] = self._before
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._last = -1

    def __call__(self, rank: int) -> Mapping[str, Tensor]:
        if rank not in self._kept:
            if not self._keep:
                self._kept.clear()
            self._kept[rank] = self._compute(rank)
        return self._kept[rank]

    def _compute(self, rank: int) -> dict[str, Tensor]:
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._last >= 0:
            self._set(self._before)
        self._gradients(rank, lambda: None)
        if rank == 0 and self._last < 0:
            self._after = [buffer.clone() for buffer in self._buffers]
        self._last = rank
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()}

    def _set(self, values: list[Tensor]) -> None:
        if values:
            torch._foreach_copy_(self._buffers, values)

    def finish(self) -> None:
        self._set(self._after)
