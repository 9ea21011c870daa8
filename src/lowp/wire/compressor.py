"""Gradients of a model, compressed step after step: what the hooks of DDP and a training loop of one's own have in common."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.version import __version__
from lowp.wire.auto import choose
from lowp.wire.communicator import Communicator, agree
from lowp.wire.courier import Courier, Parcel
from lowp.wire.errors import NonFiniteGradient
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.reductions.base import Reduction
from lowp.wire.report import Meter, Report, ring_bytes
from lowp.wire.scaling import NONFINITE, warn_of_headroom
from lowp.wire.settings import Parameters, Scheduled, Settings
from lowp.wire.warm_up import warm_up


class Compressor:
    """Reduces named gradients over a group.

    Args:
        shapes: of the parameters, by name, in the model's order.
        format, options: how they travel, as for `lowp.compress_gradients`.
        group: the ranks, all of them by default.
        device: where the gradients are.
        names: all names of parameters that have several (`lowp.wire.naming.all_names(model)`): patterns may name any of them.

    >>> compressor = lowp.Compressor({name: p.shape for name, p in model.named_parameters()}, "e5m2", scale="aps")
    >>> means = compressor.reduce({name: p.grad for name, p in model.named_parameters()})
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        format: "Scheduled | Settings",
        *,
        group: Any = None,
        device: "torch.device | str" = "cpu",
        names: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = format if isinstance(format, Settings) else Settings.of(format, **options)
        device = torch.device(device)
        self._parameters = Parameters(shapes, settings, names)
        self.settings = settings
        if unmatched := settings.unmatched(shapes if names is None else names):
            raise ValueError(f"no parameter is called like {', '.join(map(repr, unmatched))}; there are {_some(shapes)}")
        self.state = State()
        warm_up(
            {self._parameters.codec(name, 0) for name in shapes}, device
        )  # before the ranks meet, so that nobody waits for a compiler
        self._communicator = Communicator(group, device)
        parent = self._communicator.parent
        self._device = device
        try:
            agree(parent, f"version={__version__} {settings.describe()} parameters={_digest(shapes)}", "how to compress")
            if self._communicator.rank == 0:
                warn_of_headroom(settings.formats, self._communicator.world)
            self._reduction = self._choose()
        except Exception as error:  # the group is not lost: the next one may have it
            self._communicator.close(failed=not isinstance(error, ValueError))
            raise
        self._courier = Courier(self._communicator, device)
        self._meter = Meter(whole=settings.measure)
        self._meters: list[Meter] = []
        self._total = Report()
        if self._reduction is None:
            self._total.notes.append("not compressed: reduction='auto' found fp32 as fast on this link")
        self._last_step = Report()
        self._marks: list[tuple[tuple[str, ...], Tensor]] = []
        self._buckets: list[tuple[str, ...]] = []
        self._sent = self._communicator.link.bytes_sent
        self.buckets: list[list[str]] = []  # names of the last step's gradients, bucket by bucket

    @property
    def compresses(self) -> bool:
        """False where `reduction="auto"` found that compression does not pay."""
        return self._reduction is not None

    @property
    def world(self) -> int:
        return self._communicator.world

    @property
    def parent(self) -> Any:
        return self._communicator.parent

    def _choose(self) -> Reduction | None:
        if self.settings.reduction == "auto":
            return choose(self._communicator, self.settings, self._device)
        assert isinstance(self.settings.reduction, Reduction)
        return self.settings.reduction

    def submit(self, flat: Tensor, names: Iterable[str]) -> "torch.futures.Future[Tensor]":
        """Start reducing a bucket in place: the mean over the ranks. The future holds it when it is there, or has failed; who
        waits for it on CUDA has its stream wait for ours."""
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        names = tuple(names)
        if not self._buckets and self.settings.nonfinite != "propagate":
            self._before = self.state.memory()
        self._buckets.append(names)
        if self._courier.error is not None:
            future.set_result(flat)
            return future
        meter, step, number = self._meter, self.state.step, len(self._buckets)
        layers = self._parameters.layers(names, step)
        assert self._reduction is not None
        exchange = BucketExchange(
            flat,
            layers,
            self.settings,
            self._reduction,
            self._communicator.link,
            self.state,
            meter,
            True,
            lambda marks: self._marks.append((names, marks)),
        )
        meter.report.elements += flat.numel()
        meter.report.bytes_of_fp32 += ring_bytes(4 * flat.numel(), self.world)
        name = f"{self._reduction} of bucket {number} in step {step}"
        self._courier.send(Parcel(exchange, meter, name, lambda: future.set_result(flat)))
        return future

    def step_done(self) -> None:
        """All gradients of a step are submitted: what comes next belongs to the next step."""
        self.buckets = [list(names) for names in self._buckets]
        self._buckets.clear()
        self.state.step += 1

    def step_arrived(self, parameters: Iterable[Tensor]) -> None:
        """All gradients of a step are there: raise what must be raised, skip what must be skipped, add up the figures."""
        meter, self._meter = self._meter, Meter(whole=self.settings.measure)
        marks, self._marks = self._marks, []
        meter.report.steps = 1
        meter.report.bytes_sent = self._communicator.link.bytes_sent - self._sent
        self._sent = self._communicator.link.bytes_sent
        bad = self._nonfinite(marks) if self.settings.nonfinite != "propagate" else []
        meter.report.skipped = int(bool(bad))
        self._meters.append(meter)
        if len(self._meters) > 100 or self._device.type == "cpu":
            self._collect()
        if self._courier.error is not None:
            _forget(parameters)
            raise self._courier.error
        if bad:
            _forget(parameters)
            self.state.residuals, self.state.bounds = self._before
        if bad and self.settings.nonfinite == "raise":
            first = min(bad, key=self._parameters.numbers.__getitem__)
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NonFiniteGradient(
                f"step {self.state.step - 1}: the gradient of {first!r}{more} is infinite or NaN on some rank"
            )

    def _nonfinite(self, marks: list[tuple[tuple[str, ...], Tensor]]) -> list[str]:
        """Names of the parameters whose gradient was not finite on some rank."""
        return [name for names, mark in marks for name, byte in zip(names, mark.tolist(), strict=True) if byte == NONFINITE]

    def _collect(self) -> None:
        for meter in self._meters:
            self._last_step = meter.finish()
            self._total.add(self._last_step)
        self._meters.clear()

    def report(self) -> Report:
        """The last step's figures."""
        self._collect()
        return self._last_step

    def total(self) -> Report:
        """The figures of all steps so far."""
        self._collect()
        return self._total

    def reduce(self, gradients: Mapping[str, Tensor], buckets: "Iterable[Iterable[str]] | None" = None) -> dict[str, Tensor]:
        """One step for a loop of one's own: the mean of every gradient over the ranks, in new tensors."""
        if not self.compresses:
            means = {name: gradient.detach().clone() for name, gradient in gradients.items()}
            for mean in means.values():
                dist.all_reduce(mean, group=self.parent)
                mean.div_(self.world)
            return means
        results, waiting = {}, []
        for names in [list(gradients)] if buckets is None else [list(bucket) for bucket in buckets]:
            flat = torch.cat([gradients[name].detach().reshape(-1) for name in names])
            sizes = [gradients[name].numel() for name in names]
            results |= {n: piece.view(gradients[n].shape) for n, piece in zip(names, flat.split(sizes), strict=True)}
            waiting.append(self.submit(flat, names))
        self.step_done()
        torch.futures.wait_all(waiting)
        self.step_arrived([])
        return {name: results[name] for name in gradients}

    def state_dict(self) -> dict[str, Any]:
        """The step and, by parameter, residuals and scales. Residuals are this rank's own: every rank saves its own."""
        return self.state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state.load_state_dict(saved, self._device)

    def close(self) -> None:
        self._courier.close()


def _forget(parameters: Iterable[Tensor]) -> None:
    """Optimizers pass over parameters without a gradient: the step does not happen."""
    for parameter in parameters:
        parameter.grad = None


def _digest(shapes: Mapping[str, torch.Size]) -> str:
    text = ";".join(f"{name}{tuple(shape)}" for name, shape in shapes.items())
    return f"{len(shapes)}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
