"""Activations and their gradients as bytes, and back.

A message is what `lowp.wire` makes of a stretch of numbers: codes, and the scale that they were multiplied by. Nothing is added
up on the way, so there is nothing to agree on: every message brings its own scale (`local`: one power of two; `block:<n>`: one
for every n numbers; `none`). What is not finite stays so: such a message arrives as NaN, in formats without NaN too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.formats import FormatLike
from lowp.formats import format as parse_format
from lowp.formats.floats import FP32
from lowp.wire.codec import Codec
from lowp.wire.scaling import NONFINITE, Scale, default_scale, largest, scale_of

SCALES = ("local", "block:<n>", "none")


@dataclass(frozen=True)
class TensorCodec:
    """How one tensor travels from rank to rank."""

    codec: Codec

    @classmethod
    def of(cls, format: FormatLike, scale: "str | Scale | None" = None) -> "TensorCodec":
        """From a format of up to 16 bits, or "fp32", and a scale; without one it is the format's own, `default_scale`."""
        chosen = parse_format(format)
        how = default_scale(chosen) if scale is None else scale_of(scale)
        if how.kind.startswith("aps"):
            raise ValueError(f"scale {str(how)!r} is for sums over ranks; activations take {', '.join(SCALES)}")
        return cls(Codec(chosen, scale=Scale("none") if chosen == FP32 else how))

    def __str__(self) -> str:
        return str(self.codec)

    def length(self, count: int) -> int:
        """The bytes of a message of `count` numbers."""
        return self.codec.wire_bytes(count)

    def encode(self, tensor: Tensor) -> Tensor:
        numbers = tensor.detach().to(torch.float32).reshape(-1)
        message = torch.zeros(self.length(numbers.numel()), dtype=torch.uint8, device=tensor.device)
        if numbers.numel():
            self.codec.encode(numbers, message, peak=self._mark(numbers))
        return message

    def decode(self, message: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        numbers = torch.empty(shape.numel(), dtype=torch.float32, device=message.device)
        if numbers.numel():
            mark = torch.zeros(1, dtype=torch.uint8, device=message.device)
            self.codec.decode(message, numbers, mark)
            if self._marks:
                numbers.masked_fill_(mark == NONFINITE, math.nan)
        return numbers.view(shape).to(dtype)

    @property
    def _marks(self) -> bool:
        """Does the header say whether anything was not finite? Scales that travel say it themselves, float32 needs no mark."""
        return self.codec.sends_peaks and self.codec.format != FP32

    def _mark(self, numbers: Tensor) -> Tensor | None:
        if not self._marks:
            return None
        return torch.where(largest(numbers).isfinite(), 0, NONFINITE).to(torch.uint8).reshape(1)
