"""Text for character models, on the device whole, a byte a character.

The vocabulary is the bytes that occur, sorted. The last tenth of the text is the test split. A sample is `context` characters
and, as targets, the ones that follow each of them. Windows lie side by side, so that no character is predicted twice an epoch.
In training they are shifted each epoch by a random offset below one window, or the model would see the same beginnings for
ever.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lowp.train.data.base import Data, Key, Request, generator_of, to_device


class ResidentText:
    def __init__(self, codes: Tensor, context: int, device: torch.device, *, shifting: bool) -> None:
        """`codes` (uint8) are places in the vocabulary. `shifting`: the windows move from epoch to epoch."""
        self._codes = codes.to(device)
        self._context = context
        self._shifting = shifting
        self._device = device
        self._places = torch.arange(context + 1, device=device)

    def __len__(self) -> int:
        furthest = self._context - 1 if self._shifting else 0
        return max(len(self._codes) - 1 - furthest, 0) // self._context

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self._batch, requests)

    def _batch(self, request: Request) -> tuple[Tensor, Tensor]:
        starts = request.indices * self._context + self._shift(request.key)
        places = to_device(starts, self._device)[:, None] + self._places
        windows = self._codes.take(places).to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _shift(self, key: Key) -> int:
        """The same for all requests of an epoch: their keys begin with (seed, epoch)."""
        if not self._shifting:
            return 0
        return int(torch.randint(self._context, (), generator=generator_of(key[:2], "shift")))


def open_text(name: str, path: Path, context: int, device: torch.device) -> Data:
    if context < 1:
        raise ValueError(f"data.context must be at least 1, not {context}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from None
    in_test = len(content) // 10
    if in_test < context + 1:
        raise ValueError(
            f"the text {path} has {len(content)} characters: too short for data.context = {context}; "
            f"its last tenth, the test split, must hold {context + 1}"
        )
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    vocabulary, codes = torch.unique(text, return_inverse=True)
    codes = codes.to(torch.uint8)
    train = ResidentText(codes[:-in_test], context, device, shifting=True)
    test = ResidentText(codes[-in_test:], context, device, shifting=False)
    return Data(name, train, test, shape=(context,), classes=len(vocabulary), kind="text")
