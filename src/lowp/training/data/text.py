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

from lowp.training.data.base import Data, Key, Request, batches_on, generator_of
from lowp.training.regular_file import read_regular

LARGEST = 1 << 30  # bytes of a text: all of it is in memory


class ResidentText:
    def __init__(self, codes: Tensor, context: int, device: torch.device, *, shifting: bool) -> None:
        """`codes` (uint8) are places in the vocabulary. `shifting`: the windows move from epoch to epoch."""
        self._codes = codes.to(device)
        self._context = context
        self._shifting = shifting
        self._device = device
        self._shifted: tuple[Key, int] = (), 0  # by how much, in which epoch
        self._places = torch.arange(context + 1, device=device)

    def __len__(self) -> int:
        furthest = self._context - 1 if self._shifting else 0
        return max(len(self._codes) - 1 - furthest, 0) // self._context

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        return batches_on(self._device, self._plan, requests, self._batch)

    def _plan(self, request: Request) -> Tensor:
        """Where each sample begins."""
        return (request.indices * self._context + self._shift(request.key[:2]))[None]

    def _batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        windows = self._codes.take(plan[0][:, None] + self._places).to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _shift(self, epoch: Key) -> int:
        """The same for all requests of an epoch: their keys begin with (seed, epoch)."""
        if self._shifting and self._shifted[0] != epoch:
            self._shifted = epoch, int(torch.randint(self._context, (), generator=generator_of(epoch, "shift")))
        return self._shifted[1]


def open_text(name: str, path: Path, context: int, device: torch.device) -> Data:
    if context < 1:
        raise ValueError(f"data.context must be at least 1, not {context}")
    try:
        content = read_regular(path, LARGEST)
    except ValueError as error:
        raise ValueError(f"cannot read the text {error}") from None
    in_test = len(content) // 10
    if in_test < context + 1:
        raise ValueError(
            f"the text {path} has {len(content)} characters: too short for data.context = {context}; "
            f"its last tenth, the test split, must hold {context + 1}"
        )
    vocabulary = bytes(byte for byte in range(256) if byte in content)
    codes = torch.frombuffer(bytearray(content.translate(_places(vocabulary))), dtype=torch.uint8)
    train = ResidentText(codes[:-in_test], context, device, shifting=True)
    test = ResidentText(codes[-in_test:], context, device, shifting=False)
    return Data(name, train, test, shape=(context,), classes=len(vocabulary), kind="text")


def _places(vocabulary: bytes) -> bytes:
    """A table for `bytes.translate`: where each byte stands in the vocabulary."""
    return bytes(max(vocabulary.find(byte), 0) for byte in range(256))
