"""Gradients of a model, compressed step after step: what the hooks of DDP and a training loop of one's own have in common."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.names import matches_nothing
from lowp.tensor.errors import NonFiniteGradient
from lowp.version import __version__
from lowp.wire.auto import best_for, choose
from lowp.wire.codec import Codec
from lowp.wire.collectives import check_gradient
from lowp.wire.comm_thread import CommThread, PendingBucket
from lowp.wire.communicator import Communicator, agree
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.link import GroupLink
from lowp.wire.reductions.base import Reduction
from lowp.wire.replay import Marks, ReplayedBucket, Replays, completed
from lowp.wire.report import ONE_IN, Meter, WireReport, ring_bytes
from lowp.wire.scale_warnings import warn_of_scales
from lowp.wire.scaling import NONFINITE, divide_
from lowp.wire.settings import Parameters, Scheduled, Settings
from lowp.wire.state import Owner
from lowp.wire.warm_up import warm_up


class Compressor:
    """Reduces named gradients over a group.

    Args:
        parameters: in the model's order: `model.named_parameters()`, or other pairs of a name and a tensor or a shape, or a
            dict of them.
        format, options: how they travel, as for `lowp.compress_gradients`.
        group: the ranks, all of them by default.
        device: where the gradients are.
        names: all names of parameters that have several (`lowp.wire.naming.all_names(model)`): patterns may name any of them.

    >>> compressor = lowp.Compressor(model.named_parameters(), "e5m2", scale="aps")
    >>> means = compressor.reduce({name: p.grad for name, p in model.named_parameters()})
    """

    def __init__(
        self,
        parameters: "Mapping[str, Shaped] | Iterable[tuple[str, Shaped]]",
        format: "Scheduled | Settings",
        *,
        group: Any = None,
        device: "torch.device | str" = "cpu",
        names: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = format if isinstance(format, Settings) else Settings.of(format, **options)
        device = torch.device(device)
        shapes, self._dtypes = _read(parameters)
        self._shapes = shapes
        self._parameters = Parameters(shapes, settings, names)
        self.settings = settings
        for pattern in settings.unmatched(shapes if names is None else names):
            raise ValueError(f"skip or layers: {matches_nothing(pattern, shapes if names is None else names)}")
        self.state = State()
        self._device = device
        world = dist.get_world_size(group)
        if world < 1:
            raise ValueError("this rank is not in the group")
        for codecs in self._parameters.known_codecs:
            self._warm_up(codecs, world)  # before the ranks meet
        self._communicator = Communicator(group, device)
        parent = self._communicator.parent
        try:
            agree(parent, f"version={__version__} {settings.describe()} parameters={_digest(shapes)}", "how to compress")
            if self._communicator.rank == 0:
                warn_of_scales(settings.codecs(), self._communicator.world)
            self._reduction = self._choose()
        except Exception as error:  # the group is not lost: the next one may have it
            self._communicator.close(failed=not isinstance(error, ValueError))
            raise
        self._comm_thread = CommThread(self._communicator, device)
        self._replays = Replays(settings, self._reduction)
        self._meter = self._new_meter()
        self._meters: list[Meter] = []
        self._total = WireReport()
        if self._reduction is None:
            self._total.notes.append("not compressed: reduction='auto' found uncompressed gradients as fast on this link")
        self._last_step = WireReport()
        self._marks: list[tuple[tuple[str, ...], Marks]] = []
        self._buckets: list[tuple[str, ...]] = []
        self._layouts: list[tuple[int, list[tuple[str, ...]]]] = []  # buckets, and from which step on they were these
        self._sent = self._communicator.link.bytes_sent
        self._layouts_agreed: set[tuple[tuple[str, ...], ...]] = set()  # that `reduce` was given

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

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the last step's gradients, bucket by bucket."""
        return [list(names) for names in self._layouts[-1][1]] if self._layouts else []

    def buckets_at(self, step: int) -> list[list[str]]:
        """Names of a step's gradients, bucket by bucket, of any step that this object has done."""
        found = [layout for first, layout in self._layouts if first <= step]
        if not found or step >= self.state.step:
            done = f"steps {self._layouts[0][0]} to {self.state.step - 1} were" if self._layouts else "no step was"
            raise ValueError(f"the buckets of step {step} are not known here: {done} done")
        return [list(names) for names in found[-1]]

    def _warm_up(self, codecs: Iterable[Codec], world: int) -> None:
        """Build the kernels for codecs that travel together, so that no step waits for a compiler."""
        reduction = self.settings.reduction
        reduction = reduction if isinstance(reduction, Reduction) else best_for(world)
        warm_up(codecs, self._device, self.settings, reduction, world, self._dtypes)

    def _new_meter(self) -> Meter:
        return Meter(self.settings.measure, samples=self._device.type == "cpu" or self.state.step % ONE_IN == 0)

    def _choose(self) -> Reduction | None:
        if self.settings.reduction == "auto":
            numbers = sum(shape.numel() for shape in self._shapes.values())
            dtype = next(iter(self._dtypes)) if len(self._dtypes) == 1 else torch.float32
            return choose(self._communicator, self.settings, self._device, numbers, dtype)
        assert isinstance(self.settings.reduction, Reduction)
        return self.settings.reduction

    def submit(self, flat: Tensor, names: Iterable[str]) -> "torch.futures.Future[Tensor]":
        """Start reducing a bucket in place: the mean over the ranks. The future holds it when it is there, or has failed.

        On CUDA the future is complete when everything is launched, on a stream of its own. Other streams wait for it where
        `step_done` is called.
        """
        names = tuple(names)
        if not self._buckets and self.settings.nonfinite != "propagate":
            self._before = self.state.memory()
        self._buckets.append(names)
        if self._comm_thread.error is not None:
            return completed(flat)
        meter, step = self._meter, self.state.step
        meter.report.elements += flat.numel()
        meter.report.bytes_of_fp32 += ring_bytes(4 * flat.numel(), self.world)
        name = f"{self._reduction} of bucket {len(self._buckets)} in step {step}"
        if flat.is_cuda and torch.cuda.is_current_stream_capturing():
            meter.samples = False  # a graph's events have no times
        bucket = self._parameters.bucket(names, step, flat.dtype)
        if self.settings.scheduled:  # a function of the step may say a format that was not known
            self._warm_up({layer.codec for layer in bucket.layers}, self.world)
        reduction, link = self._reduction, self._communicator.link
        assert reduction is not None

        def make(link: GroupLink, done: Callable[[Marks], None], meter: Meter) -> BucketExchange:
            return BucketExchange(flat, bucket, self.settings, reduction, link, self.state, meter, True, done)

        if not meter.samples:
            replayed = self._replays.find(flat, names, bucket, lambda: ReplayedBucket(make, link, self.state.workspaces, flat))
            if replayed is not None and self._comm_thread.launch(replayed, name):
                if replayed.marks is not None:
                    self._marks.append((names, replayed.marks))
                return replayed.future
            if replayed is not None:
                self._replays.give_up(names)
        exchange = make(link, lambda marks: self._marks.append((names, marks)), meter)
        if flat.is_cuda:
            self._comm_thread.send(PendingBucket(exchange, meter, name, lambda: None))
            return completed(flat)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._comm_thread.send(PendingBucket(exchange, meter, name, lambda: future.set_result(flat)))
        return future

    def step_done(self) -> None:
        """All gradients of a step are submitted: what comes next belongs to the next step, and what comes next on the current
        CUDA stream waits for the means."""
        self._comm_thread.join_stream()
        if not self._layouts or self._layouts[-1][1] != self._buckets:
            self._layouts.append((self.state.step, self._buckets))
        self._buckets = []
        self.state.step += 1

    def step_arrived(self, parameters: Iterable[Tensor]) -> None:
        """All gradients of a step are there: raise what must be raised, skip what must be skipped, add up the figures."""
        meter, self._meter = self._meter, self._new_meter()
        marks, self._marks = self._marks, []
        meter.report.steps = 1
        meter.report.bytes_sent = self._communicator.link.bytes_sent - self._sent
        self._sent = self._communicator.link.bytes_sent
        bad = self._nonfinite(marks) if self.settings.nonfinite != "propagate" else []
        meter.report.skipped = int(bool(bad))
        self._meters.append(meter)
        if len(self._meters) > 100 or self._device.type == "cpu":
            self._collect()
        if self._comm_thread.error is not None:
            _forget(parameters)
            raise self._comm_thread.error
        if bad:
            self.state.residuals, self.state.bounds = self._before
        self._refuse(bad, parameters)

    def _nonfinite(self, marks: list[tuple[tuple[str, ...], Marks]]) -> list[str]:
        """Names of the parameters whose gradient was not finite on some rank."""
        return [name for names, mark in marks for name, byte in zip(names, mark().tolist(), strict=True) if byte == NONFINITE]

    def _collect(self) -> None:
        for meter in self._meters:
            self._last_step = meter.finish()
            self._total.add(self._last_step)
        self._meters.clear()

    def report(self) -> WireReport:
        """The last step's figures."""
        self._collect()
        return self._last_step

    def total(self) -> WireReport:
        """The figures of all steps so far."""
        self._collect()
        return self._total

    @torch.inference_mode(False)  # what is made within it cannot be written to by the wire's thread
    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor], buckets: "Iterable[Iterable[str]] | None" = None) -> dict[str, Tensor]:
        """One step for a loop of one's own: the mean of every gradient over the ranks, in new tensors.

        All ranks give the same gradients. `buckets` are lists of their names; by default there is one, in the model's order.
        """
        layout = self._checked(gradients, buckets)
        if not self.compresses:
            means = {name: gradients[name].detach().clone() for names in layout for name in names}
            for mean in means.values():
                dist.all_reduce(mean, group=self.parent)
                divide_(mean, self.world)
            self.uncompressed_step(means, [])
            return {name: means[name] for name in gradients}
        results, waiting = {}, []
        for names in layout:
            flat = torch.cat([gradients[name].detach().reshape(-1) for name in names])
            sizes = [gradients[name].numel() for name in names]
            results |= {n: piece.view(gradients[n].shape) for n, piece in zip(names, flat.split(sizes), strict=True)}
            waiting.append(self.submit(flat, names))
        self.step_done()
        torch.futures.wait_all(waiting)
        self.step_arrived([])
        return {name: results[name] for name in gradients}

    def _checked(self, gradients: Mapping[str, Tensor], buckets: "Iterable[Iterable[str]] | None") -> list[list[str]]:
        """The buckets, if the gradients are those of the parameters, and if all ranks have the same."""
        for name, gradient in gradients.items():
            if name not in self._shapes:
                raise ValueError(f"reduce: {matches_nothing(name, self._shapes)}")
            check_gradient(gradient, f"reduce (gradient of {name!r})")
            if gradient.shape != self._shapes[name]:
                own = tuple(self._shapes[name])
                raise ValueError(f"reduce: the gradient of {name!r} has the shape {tuple(gradient.shape)}, the parameter {own}")
        if not gradients:
            raise ValueError("reduce: there are no gradients")
        layout = [[n for n in self._shapes if n in gradients]] if buckets is None else [list(bucket) for bucket in buckets]
        if sorted(name for names in layout for name in names) != sorted(gradients) or not all(layout):
            raise ValueError("reduce: the buckets must name each gradient once")
        if (known := tuple(map(tuple, layout))) not in self._layouts_agreed:
            digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
            agree(self.parent, f"{len(gradients)} gradients in {len(layout)} buckets:{digest}", "what to reduce")
            self._layouts_agreed.add(known)
        return layout

    def give_back(self, flat: Tensor, names: Sequence[str], unused: Collection[str]) -> None:
        """With error feedback: what was sent of parameters whose means nobody takes becomes a residual again."""
        pieces = flat.split([self._shapes[name].numel() for name in names])
        self.state.residuals.give_back({name: piece for name, piece in zip(names, pieces, strict=True) if name in unused})

    def uncompressed_step(self, means: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> None:
        """A step whose gradients torch has reduced is counted, and does what `nonfinite` says."""
        self.state.step += 1
        bad: list[str] = []
        if self.settings.nonfinite != "propagate":
            bad = [name for name, mean in means.items() if not bool(mean.isfinite().all())]
        self._last_step = WireReport(steps=1, skipped=int(bool(bad)))
        self._total.add(self._last_step)
        self._refuse(bad, parameters)

    def _refuse(self, bad: Sequence[str], parameters: Iterable[Tensor]) -> None:
        """Where gradients were not finite: no rank takes the step, or all raise."""
        if bad:
            _forget(parameters)
        if bad and self.settings.nonfinite == "raise":
            first = min(bad, key=self._parameters.numbers.__getitem__)
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NonFiniteGradient(
                f"step {self.state.step - 1}: the gradient of {first!r}{more} is infinite or NaN on some rank", first
            )

    @property
    def _owner(self) -> Owner:
        delayed = any(codec.scale.kind == "aps_delayed" for codecs in self._parameters.known_codecs for codec in codecs)
        link, settings = self._communicator.link, self.settings
        return Owner(link.rank, link.world, self._shapes, settings.describe_codec(), settings.error_feedback, delayed)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The step, error feedback's residuals and delayed scales (state.py says in which form).

        Residuals are this rank's own. With `all_ranks`, which all ranks must call, they are every rank's.
        """
        residuals, bounds = self.state.residuals.named(), self.state.bounds.named()
        saved = self._owner.save(self.state.step, residuals, bounds, self._device)
        return self._owner.gather(saved, self.parent) if all_ranks else saved

    def load_state_dict(self, saved: Mapping[str, Any], step_only: bool = False) -> None:
        """Take what `state_dict` gave; a ValueError says what does not fit, before anything is changed.

        With `step_only` residuals and delayed scales are left out: after a change of format, or of the number of ranks.
        """
        step, residuals, bounds = self._owner.load(saved, step_only)
        self.state.load_state_dict({"step": step, "residuals": residuals, "bounds": bounds}, self._device)
        self._layouts.clear()

    def close(self) -> None:
        self._comm_thread.close()


def _forget(parameters: Iterable[Tensor]) -> None:
    """Optimizers pass over parameters without a gradient: the step does not happen."""
    for parameter in parameters:
        parameter.grad = None


Shaped = Tensor | Sequence[int]  # a shape, or what has one


def _read(parameters: Any) -> tuple[dict[str, torch.Size], set[torch.dtype]]:
    """Shapes by name, and the dtypes: where shapes alone are given, float32."""
    wanted = "lowp.Compressor takes model.named_parameters(), or a dict or pairs of names and shapes"
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    if not isinstance(parameters, (Mapping, Iterable)) or isinstance(parameters, (str, Tensor)):
        raise TypeError(f"{wanted}, not {type(parameters).__name__}")
    found: dict[str, torch.Size] = {}
    dtypes: set[torch.dtype] = set()
    for entry in parameters.items() if isinstance(parameters, Mapping) else parameters:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise TypeError(f"{wanted}; an entry here is {_kind(entry)}, which has no name")
        name, shaped = entry
        if isinstance(shaped, Tensor):
            check_gradient(shaped, f"lowp.Compressor (parameter {name!r})")
        shape = shaped.shape if isinstance(shaped, Tensor) else shaped
        if not isinstance(shape, Sequence) or not all(isinstance(length, int) for length in shape):
            raise TypeError(f"{wanted}; {name!r} comes with {_kind(shaped)}")
        if name in found:
            raise ValueError(f"two parameters are called {name!r}")
        found[name] = torch.Size(shape)
        dtypes.add(shaped.dtype if isinstance(shaped, Tensor) else torch.float32)
    return found, dtypes


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:50]


def _digest(shapes: Mapping[str, torch.Size]) -> str:
    text = ";".join(f"{name}{tuple(shape)}" for name, shape in shapes.items())
    return f"{len(shapes)}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
