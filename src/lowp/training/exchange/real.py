"""One of several processes: buckets travel while backward goes on."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowp.training.exchange.base import Gradients, Seen
from lowp.training.world import named_failure
from lowp.wire.compressor import Compressor
from lowp.wire.exchange import State
from lowp.wire.naming import all_names
from lowp.wire.settings import Settings


class GradientBucket:
    """A stretch of memory in which some parameters' gradients lie side by side."""

    def __init__(self, names: list[str], parameters: Mapping[str, nn.Parameter]) -> None:
        first = parameters[names[0]]
        self.names = names
        self.flat = torch.zeros(sum(parameters[n].numel() for n in names), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([parameters[name].numel() for name in names])
        self.views = {n: piece.view(parameters[n].shape) for n, piece in zip(names, pieces, strict=True)}
        self.missing = len(names)


class GradientReducer(Protocol):
    """Takes a rank's buckets to the others and brings the means back."""

    @property
    def state(self) -> State:
        """What is remembered between steps."""
        ...

    def send(self, bucket: GradientBucket) -> Callable[[], None]:
        """Start; what is returned waits until the mean of all ranks is in the bucket."""

    def step_done(self) -> None:
        """All buckets of a step are sent."""

    def step_arrived(self, parameters: Iterable[nn.Parameter]) -> None:
        """All of them have arrived; raise what went wrong."""

    def bytes_sent(self) -> tuple[float, float]: ...

    def seconds(self) -> dict[str, float]:
        """Of a step, to encode, transfer and decode; empty where that is not known."""

    def close(self) -> None: ...


class Compressed:
    """By the wire's compressor, in its formats and its order of additions."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: Settings, device: torch.device, names: Mapping[str, str]
    ) -> None:
        self._device = device
        self._compressor = Compressor(parameters, settings, device=device, names=names)
        self.step_done = self._compressor.step_done
        self.step_arrived = self._compressor.step_arrived
        self.close = self._compressor.close

    @property
    def state(self) -> State:
        return self._compressor.state

    def send(self, bucket: GradientBucket) -> Callable[[], None]:
        future = self._compressor.submit(bucket.flat, bucket.names)

        def wait() -> None:
            future.wait()

        return wait

    def bytes_sent(self) -> tuple[float, float]:
        total = self._compressor.total()
        return total.bytes_sent, total.bytes_of_fp32

    def seconds(self) -> dict[str, float]:
        total = self._compressor.total()
        if self._device.type == "cuda" or not total.steps:  # there the seconds are of one step in 64
            return {}
        return {what: getattr(total, f"{what}_seconds") / total.steps for what in ("encode", "transfer", "decode")}


class Plain:
    """Float32 between two ranks, by torch's own all-reduce. A sum of two has one order, so the bits are those of the wire."""

    def __init__(self) -> None:
        self._state = State()
        self._sent = 0

    @property
    def state(self) -> State:
        return self._state

    def send(self, bucket: GradientBucket) -> Callable[[], None]:
        flat = bucket.flat
        self._sent += flat.numel() * flat.element_size()  # 2 (W - 1) / W times the bucket, for two ranks
        work: Any = dist.all_reduce(flat, async_op=True)

        def wait() -> None:
            with named_failure("adding up gradients"):
                work.wait()
            flat.mul_(0.5)

        return wait

    def step_done(self) -> None:
        self.state.step += 1

    def step_arrived(self, parameters: Iterable[nn.Parameter]) -> None: ...

    def bytes_sent(self) -> tuple[float, float]:
        return self._sent, self._sent

    def seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def carrier_for(
    parameters: Mapping[str, nn.Parameter], settings: Settings, device: torch.device, names: Mapping[str, str]
) -> GradientReducer:
    """Of the same kind on all ranks: it follows from what they have in common."""
    all_fp32 = settings.format == "fp32" and not settings.layers and str(settings.reduction) in ("two_shot", "one_shot")
    plain = all_fp32 and settings.sum_format is None and all(p.dtype == torch.float32 for p in parameters.values())
    if plain and dist.get_world_size() == 2:
        return Plain()
    return Compressed(parameters, settings, device, names)


class RealExchange:
    """One of several processes.

    1. Every gradient, when the last micro-batch has made it, is copied into its bucket (a hook on the parameter).
    2. A bucket that is full is handed to the carrier, in the order of buckets: all ranks must send alike.
    3. After backward: parameters that got no gradient count as zeros; wait for what is still under way.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[list[str]],
        settings: Settings,
        rank: int,
        device: torch.device,
    ) -> None:
        self.ranks = range(rank, rank + 1)
        self._parameters = parameters
        self._device = device
        self._carrier = carrier_for(parameters, settings, device, all_names(model))
        self._buckets = [GradientBucket(names, parameters) for names in buckets]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self.before_travel: Seen | None = None
        self._armed = False
        self._next = 0
        self._waits: list[Callable[[], None]] = []
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
            if self.before_travel is not None:
                self.before_travel(name, parameter.grad)
            view.copy_(parameter.grad)
        parameter.grad = view
        bucket.missing -= 1

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._waits.append(self._carrier.send(self._buckets[self._next]))
            self._next += 1

    def _arm(self) -> None:
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)

    def reduce(self, gradients: Gradients) -> None:
        self._before = self._carrier.state.snapshot()
        try:
            gradients(self.ranks.start, self._arm)
        finally:
            self._armed = False
        for name, parameter in self._parameters.items():
            if parameter.grad is not self._bucket_of[name].views[name]:
                self._put(name, parameter)
        self._send_full()
        self._carrier.step_done()
        for wait in self._waits:
            wait()
        self._waits.clear()
        self._carrier.step_arrived(self._parameters.values())

    def bytes_sent(self) -> tuple[float, float]:
        return self._carrier.bytes_sent()

    def seconds(self) -> dict[str, float]:
        return self._carrier.seconds()

    def undo(self) -> None:
        self._carrier.state.restore(self._before)

    def state_of_rank(self) -> list[dict[str, Any]]:
        return [self._carrier.state.state_dict()]

    def load_state_of_rank(self, saved: list[dict[str, Any]]) -> None:
        self._carrier.state.load_state_dict(saved[self.ranks.start], self._device)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._carrier.close()
