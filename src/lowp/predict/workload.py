"""A workload: what one step of a model computes, parameter by parameter, and how long that takes on a device.

A layer is one parameter's gradient, as on the wire. `forward` is the work from the first use of a module's parameters to that
of the next module's, and stands with the module's first parameter. `backward` is the work from the gradient that was ready
before to its own. `turn` is its place in the order in which gradients are ready.

Seconds come from the device, in this order: as measured (`times`), from samples a second (`samples`), from FLOP/s and memory
bandwidth. The first two say how long the whole takes. It is then shared among layers by the work that they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lowp.predict.cluster import Device, ModelTimes

# Where a device does not say how fast it is, layers share a step's time as on a device of this balance (an A100's, in
# practice).
_FLOPS, _BANDWIDTH = 1.2e14, 1.3e12


@dataclass(frozen=True)
class Work:
    """Floating-point operations of products; bytes that all other operations read and write."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.flops - other.flops, self.bytes - other.bytes)

    def __truediv__(self, count: float) -> "Work":
        return Work(self.flops / count, self.bytes / count)

    def seconds(self, flops: float, bandwidth: float) -> float:
        return self.flops / flops + self.bytes / bandwidth


@dataclass(frozen=True)
class ModelLayer:
    """One parameter. Work is of one sample."""

    name: str
    shape: tuple[int, ...]
    forward: Work
    backward: Work
    turn: int

    @cached_property
    def size(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size


@dataclass(frozen=True)
class StepCompute:
    """Seconds of forward, and of backward for each layer, in the order of the workload's layers.

    `overhead`: of the framework, on several ranks. `excess`: what whole steps took beyond their parts, by kind of wire.
    """

    forward: float
    backward: tuple[float, ...]
    overhead: float = 0.0
    excess: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.forward + sum(self.backward)


@dataclass(frozen=True)
class Workload:
    """Layers in the order in which the model has its parameters. `saved` bytes a sample are kept for backward, in float32."""

    name: str
    layers: tuple[ModelLayer, ...]
    saved: float | None = None
    unit: str = "sample"

    @cached_property
    def parameters(self) -> int:
        return sum(layer.size for layer in self.layers)

    @cached_property
    def forward(self) -> Work:
        return sum((layer.forward for layer in self.layers), Work())

    @cached_property
    def backward(self) -> Work:
        return sum((layer.backward for layer in self.layers), Work())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Layers in the order in which their gradients are ready."""
        return tuple(sorted(range(len(self.layers)), key=lambda i: self.layers[i].turn))

    def on(self, device: Device, batch: int) -> StepCompute:
        """How long a step of `batch` samples takes on a device."""
        if batch < 1:
            raise ValueError(f"batch: {batch} must be at least 1")
        if (times := device.times.get(self.name)) is not None:
            found = self._measured(times, batch)
            if not found.total:
                raise ValueError(f"device.times.{self.name}: forward and backward together must take more than 0 s")
            return found
        speeds = (device.flops or _FLOPS, device.bandwidth or _BANDWIDTH)
        forward, backward = self._seconds(batch, *speeds)
        if (seconds := device.step_seconds(self.name, batch)) is not None:
            factor = seconds / (forward + sum(backward))
            return StepCompute(forward * factor, tuple(own * factor for own in backward))
        if device.flops is None or device.bandwidth is None:
            known = ", ".join([*device.times, *device.samples]) or "none"
            raise ValueError(
                f"device {device.name}: it does not say how fast it runs {self.name}: neither samples of {self.name} (it has "
                f"{known}) nor flops and bandwidth"
            )
        return StepCompute(forward, backward)

    def _seconds(self, batch: int, flops: float, bandwidth: float) -> tuple[float, tuple[float, ...]]:
        backward = tuple(batch * layer.backward.seconds(flops, bandwidth) for layer in self.layers)
        return batch * self.forward.seconds(flops, bandwidth), backward

    def _measured(self, times: ModelTimes, batch: int) -> StepCompute:
        """Measured layers are taken as they are; where only totals were measured, layers share them by their work."""
        factor = batch / times.batch
        if times.layers:
            missing = [layer.name for layer in self.layers if layer.name not in times.layers]
            if missing:
                raise ValueError(f"device.times.{self.name}.layers: {missing[0]!r} is missing; calibrate this model again")
            backward: Mapping[str, float] = times.layers
            found = tuple(backward[layer.name] * factor for layer in self.layers)
            return StepCompute(times.forward * factor, found, times.overhead, times.excess)
        _, shares = self._seconds(batch, _FLOPS, _BANDWIDTH)
        whole = sum(shares)
        found = tuple(times.backward * factor * own / whole for own in shares)
        return StepCompute(times.forward * factor, found, times.overhead, times.excess)
