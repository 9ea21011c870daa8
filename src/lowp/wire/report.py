"""What compression did: bytes, time, and what rounding lost."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from lowp.tensor.ops import quantize
from lowp.tensor.overflow import overflows
from lowp.wire.codec import Codec
from lowp.wire.messages import Messages

SAMPLE = 1024  # elements of a message part that are looked at for saturation and underflow
ONE_IN = 64  # steps, on CUDA
ONE_PART_IN = 32  # on a CPU: a sample takes some twenty operations


def ring_bytes(size: int, world: int) -> float:
    """What each rank sends for a message of `size` bytes without compression: float32 all-reduces are rings."""
    return 2 * (world - 1) / world * size


@dataclass
class WireReport:
    """Figures of one step or of many. On CUDA seconds and fractions are known of one step in 64: they are the sampled steps'.

    `saturated` and `underflowed` are fractions of the non-zero numbers that this rank encoded, estimated from the beginnings of
    one message part in 16 (or, with `measure`, from everything). `relative_error` is |ours - exact| / |exact| of the sum.
    """

    steps: int = 0
    skipped: int = 0
    elements: int = 0
    bytes_sent: int = 0
    bytes_of_fp32: float = 0.0
    encode_seconds: float = 0.0
    transfer_seconds: float = 0.0
    decode_seconds: float = 0.0
    seen: float = 0.0
    saturated_count: float = 0.0
    underflowed_count: float = 0.0
    error_squared: float = 0.0
    exact_squared: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than float32."""
        return self.bytes_of_fp32 / self.bytes_sent if self.bytes_sent else math.nan

    @property
    def saturated(self) -> float:
        return self.saturated_count / self.seen if self.seen else 0.0

    @property
    def underflowed(self) -> float:
        return self.underflowed_count / self.seen if self.seen else 0.0

    @property
    def relative_error(self) -> float | None:
        """None unless it was asked for (measure=True)."""
        return math.sqrt(self.error_squared / self.exact_squared) if self.exact_squared else None

    def add(self, other: "WireReport") -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    def __str__(self) -> str:
        sent = f"{self.bytes_sent / 1e6:.3g} MB sent, {self.ratio:.2f} x fewer than fp32" if self.bytes_sent else "nothing sent"
        text = (
            f"{self.steps} step{'' if self.steps == 1 else 's'} ({self.skipped} skipped): {sent}; "
            f"encode {self.encode_seconds:.3g} s, transfer {self.transfer_seconds:.3g} s, decode {self.decode_seconds:.3g} s; "
            f"{self.saturated:.2%} saturated, {self.underflowed:.2%} underflowed"
        )
        if self.relative_error is not None:
            text += f"; relative error {self.relative_error:.2e}"
        return "; ".join([text, *dict.fromkeys(self.notes)])


class Meter:
    """Collects a step's figures. On CUDA nothing here waits for the device until the figures are asked for."""

    def __init__(self, whole: bool = False, samples: bool = True) -> None:
        self._whole = whole
        self.samples = samples or whole
        self._parts: Counter[Codec] = Counter()
        self.report = WireReport()
        self._counts: Tensor | None = None  # seen, saturated, underflowed
        self._errors: Tensor | None = None  # squares of the errors, squares of the exact sums
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        """`what` is encode, transfer or decode."""
        if device.type == "cuda" and not self.samples:
            yield
            return
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((what, begin, end))
            return
        began = time.perf_counter()
        yield
        self._spend(what, time.perf_counter() - began)

    def _spend(self, what: str, seconds: float) -> None:
        setattr(self.report, f"{what}_seconds", getattr(self.report, f"{what}_seconds") + seconds)

    def see(self, messages: Messages, numbers: Tensor, buffer: Tensor, factors: Tensor | None) -> None:
        """Count what saturated and what became zero in these messages; without `whole`, in some parts, at their beginning.

        On CUDA, where each sample is some ten launches, in one part of a message, and in one step in 64 (see `Compressor`).
        """
        if not self.samples:
            return
        for group in messages.groups:
            if group.codec.adaptive:  # nothing saturates; what has no bits is no matter of single numbers
                continue
            count, before = len(group.segments), self._parts[group.codec]
            self._parts[group.codec] += count
            first, step = (
                (before % ONE_IN % count, count) if numbers.device.type != "cpu" else (-before % ONE_PART_IN, ONE_PART_IN)
            )
            for segment in group.segments if self._whole else group.segments[first::step]:
                own = numbers[segment.start : segment.start + segment.part.size]
                own = (own if self._whole else own[: max(SAMPLE, group.codec.scale.block)]).to(torch.float32)
                own = own if factors is None else own * factors[segment.part.layer]
                self._sample(group.codec, own, buffer[segment.begin : segment.end], segment.part.size)

    def _sample(self, codec: Codec, numbers: Tensor, message: Tensor, count: int) -> None:
        sample = numbers if self._whole and codec.scale.kind != "block" else numbers[:SAMPLE]
        if codec.scale.kind == "block":
            sample = sample[: codec.scale.block]
        sample = sample * codec.factor(message, count)
        rounded = quantize(sample, codec.format, saturate=True)
        zero = sample == 0
        saturated, underflowed = overflows(sample, codec.format), (rounded == 0) & ~zero
        counts = torch.stack([(~zero).sum(), saturated.sum(), underflowed.sum()]).to(torch.float64)
        self._counts = counts if self._counts is None else self._counts + counts

    def compare(self, ours: Tensor, exact: Tensor) -> None:
        """Note the error of a sum, where both are finite."""
        ours, exact = ours.to(torch.float64), exact.to(torch.float64)
        finite = ours.isfinite() & exact.isfinite()
        zero = torch.zeros((), dtype=torch.float64, device=ours.device)
        errors = torch.stack([torch.where(finite, x, zero).square().sum() for x in (ours - exact, exact)])
        self._errors = errors if self._errors is None else self._errors + errors

    def finish(self) -> WireReport:
        """The figures; on CUDA this waits for the device."""
        if self._counts is not None:
            seen, saturated, underflowed = self._counts.tolist()
            self.report.seen += seen
            self.report.saturated_count += saturated
            self.report.underflowed_count += underflowed
            self._counts = None
        if self._errors is not None:
            error, exact = self._errors.tolist()
            self.report.error_squared += error
            self.report.exact_squared += exact
            self._errors = None
        for what, begin, end in self._events:
            end.synchronize()
            self._spend(what, begin.elapsed_time(end) / 1e3)
        self._events.clear()
        return self.report
