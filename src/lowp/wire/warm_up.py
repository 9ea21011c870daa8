"""Kernels are compiled before the first message, not while the other ranks wait for it."""

from collections.abc import Iterable

import torch

from lowp.tensor.kernels import SMALL, kernel_info
from lowp.tensor.noise import Domain, Noise
from lowp.wire.codec import Codec


def warm_up(codecs: Iterable[Codec], device: torch.device) -> None:
    """Encode and decode something as large as the real thing will be."""
    for codec in codecs:
        if kernel_info()["policy"] != "never" and (codec, device) not in _warm:
            numbers = torch.zeros(SMALL, device=device)
            message = torch.empty(codec.wire_bytes(SMALL), dtype=torch.uint8, device=device)
            noise = Noise.of(Domain.WIRE, 0, 0, 0, 0, 0, 0) if codec.stochastic else None  # what it rounds is thrown away
            codec.encode(numbers, message, noise, torch.zeros(1, dtype=torch.uint8, device=device))
            codec.decode(message, numbers)
            if codec.adds(device):
                codec.decode(message, numbers, add=True)
            _warm.add((codec, device))


_warm: set[tuple[Codec, torch.device]] = set()
