"""What of a rank's gradients arrives: numbers before they travel, beside what others read of them.

For numeric health (`log.health`), in sampled steps. The scale is what this rank's own numbers ask for; where ranks agree on one
(APS), the largest of all decides, which may be a power of two or two more. Later roundings, of sums, are not part of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.health.watch import Watch
from lowp.tensor.noise import Domain, Noise
from lowp.wire.codec import Codec
from lowp.wire.scaling import aps_shifts, bound_bytes, emax_of, largest, power_of_two
from lowp.wire.settings import Parameters

_NOISE = Noise(0, domain=Domain.WIRE)  # of stochastic codecs: any will do, since nothing that is drawn here is sent


class SentGradients:
    """Shows a watch each gradient before it travels: `exchange.before_travel`."""

    def __init__(self, watch: Watch, parameters: Parameters, ranks: int, step: Callable[[], int]) -> None:
        self._watch, self._parameters, self._ranks, self._step = watch, parameters, ranks, step

    def __call__(self, name: str, gradient: Tensor) -> None:
        if not self._watch.sampling or not gradient.numel():
            return
        codec = self._parameters.codec(name, self._step(), gradient.dtype)
        numbers = gradient.detach().to(torch.float32).reshape(-1)
        limit = codec.format.max if codec.scale.kind == "none" and not codec.adaptive else None
        self._watch.observe("sent", name, numbers, as_sent(numbers, codec, self._ranks), str(codec), limit)


def as_sent(numbers: Tensor, codec: Codec, ranks: int) -> Tensor:
    """What `ranks` ranks would read of one rank's numbers, flat and float32, if these decided the scale."""
    factor = torch.ones((), dtype=torch.float32, device=numbers.device)
    if codec.scale.agreed or codec.scale.kind == "aps_delayed":
        bound = bound_bytes(largest(numbers).reshape(1), ranks)
        shift = aps_shifts(bound, torch.tensor([emax_of(codec.format)], dtype=torch.int32, device=numbers.device))
        factor = power_of_two(shift)
    message = torch.zeros(codec.wire_bytes(numbers.numel()), dtype=torch.uint8, device=numbers.device)
    found = torch.zeros_like(numbers)
    codec.encode(numbers * factor, message, _NOISE)
    codec.decode(message, found)
    return found / factor
