"""A codec turns a stretch of numbers into bytes and back: a format, a rounding, a scale, and how many of the numbers to keep.

A message part, for n float32 numbers of one layer:

    payload   codes of the (scaled) numbers; with top-k, the indices of those kept, then their codes
    header    one byte: the exponent of the scale (`local`), one a block (`block:<n>`), or the peak of what was summed
              (`none`, `aps_delayed`); none for `aps`, whose exponents were agreed before
    padding   to a multiple of 8 bytes, so that the next part may be of any dtype

`wire_bytes(n)` is the length of that, and the only place where it is computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat, Rounding
from lowp.formats import format as parse_format
from lowp.tensor.kernels import fused
from lowp.tensor.noise import Noise
from lowp.tensor.ops import quantize
from lowp.wire import scaling, swift
from lowp.wire.payload import aligned, check_format, get, payload_bytes, put
from lowp.wire.scaling import NONFINITE, Scale, scale_of
from lowp.wire.scratch import scratch

_PIECE = 1 << 16  # elements; an index of a kept number is counted in pieces of this length and takes two bytes


@dataclass(frozen=True)
class Codec:
    """How numbers travel. `keep` below 1 sends the largest numbers only: that fraction of each layer."""

    format: AnyFormat
    rounding: str = "nearest"
    scale: Scale = Scale("local")  # noqa: RUF009  # frozen
    keep: float = 1.0
    ranks: int = 1  # of how many ranks' choices there is room for: sums of top-k have numbers wherever one rank kept one

    def __post_init__(self) -> None:
        check_format(self.format)
        if self.rounding not in tuple(Rounding):
            raise ValueError(f"unknown rounding {self.rounding!r}; it is one of {', '.join(Rounding)}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"top-k keeps a fraction of the numbers above 0 and up to 1, not {self.keep}")

    def __str__(self) -> str:
        kept = "" if self.keep == 1 else f"topk:{self.keep:g}:"
        return f"{kept}{self.format}/{self.scale}" + ("" if self.rounding == "nearest" else f"/{self.rounding}")

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def sends_peaks(self) -> bool:
        """Is the header a byte that says how large the rank's own numbers were?"""
        return self.scale.kind in ("none", "aps_delayed")

    @property
    def elementwise(self) -> bool:
        """Is every number rounded by itself, whatever travels with it?"""
        return self.scale.shared and self.keep == 1 and not isinstance(self.format, BlockFormat)

    @property
    def merges(self) -> bool:
        """Can neighbouring layers be encoded as one? Not if each draws its own noise, or has a header."""
        return self.elementwise and self.scale.agreed and not self.stochastic

    def kept(self, count: int) -> int:
        """How many of `count` numbers are sent."""
        return count if self.keep == 1 else min(count, self.ranks * math.ceil(self.keep * count))

    def header_bytes(self, count: int) -> int:
        if self.scale.kind == "block":
            return -(-self.kept(count) // self.scale.block)
        return 0 if self.scale.agreed else 1

    def wire_bytes(self, count: int) -> int:
        """How many bytes `count` numbers take in one message part."""
        if count == 0:
            return 0
        kept = self.kept(count)
        return aligned(self._index_bytes(count) + payload_bytes(self.format, kept) + self.header_bytes(count))

    def _index_bytes(self, count: int) -> int:
        return 0 if self.keep == 1 else aligned(self.kept(count) * (2 if count <= _PIECE else 4))

    def encode(self, numbers: Tensor, out: Tensor, noise: Noise | None = None, peak: Tensor | None = None) -> None:
        """Write flat float32 `numbers` to `out` (uint8). `peak` is the header of scales that do not compute their own."""
        count = numbers.numel()
        if self.keep < 1:
            indices = _indices_of_largest(numbers, self.kept(count))
            room = out[: self.kept(count) * (2 if count <= _PIECE else 4)]
            room.copy_(indices.to(torch.int16 if count <= _PIECE else torch.int32).view(torch.uint8))
            numbers, out = numbers[indices], out[self._index_bytes(count) :]
        length = payload_bytes(self.format, numbers.numel())
        header = out[length : length + self.header_bytes(count)]
        factor = None
        if self.scale.kind == "local" and numbers.device.type == "cpu":
            byte = scaling.fitting_byte(scaling.largest(numbers).item(), self.format)
            header.fill_(byte)
            self._put_shifted(numbers, scaling.shift_of(byte), noise, out[:length])
            return
        if self.scale.kind == "local":
            byte, factor = fused(_local_scale(self.format), *torch.aminmax(numbers))
            header.copy_(byte)
        elif self.scale.kind == "block":
            numbers = self._scaled_blocks(numbers, header)
        elif peak is not None:
            header.copy_(peak)
        if numbers.device.type == "cpu":
            self._put_shifted(numbers, 0, noise, out[:length])
        elif swift.can_encode(self.format, self.rounding) and self.format.bits == 4:
            one = torch.ones(1, device=numbers.device) if factor is None else factor
            swift.pack_scaled(numbers, self.format, one, out[:length])  # type: ignore[arg-type]  # no block format
        else:
            put(numbers, self.format, self.rounding, noise if self.stochastic else None, out[:length], factor)

    def adds(self, device: torch.device) -> bool:
        """Can `decode` add what it reads to what is there, in one pass?"""
        return self.keep == 1 and self.scale.kind != "block" and device.type == "cpu" and swift.can_decode(self.format)

    def decode(self, message: Tensor, out: Tensor, peak: Tensor | None = None, add: bool = False) -> None:
        """Read a message part into flat float32 `out`; `peak` receives its header (255 if anything is not finite).

        With `add` (where `adds` says so), the numbers are added to those in `out`.
        """
        if self.adds(out.device):
            length = payload_bytes(self.format, out.numel())
            header = message[length : length + self.header_bytes(out.numel())]
            unit = _unit_of(int(header)) if self.scale.kind == "local" else 1.0
            swift.decode_scaled(message[:length], self.format, unit, out, add)  # type: ignore[arg-type]  # no block format
            if peak is not None and header.numel():
                peak.copy_(header)
            return
        assert not add
        if self.keep == 1:
            self._decode_dense(message, out, self.header_bytes(out.numel()), peak)
            return
        count = out.numel()
        width = torch.int16 if count <= _PIECE else torch.int32
        indices = message[: self.kept(count) * width.itemsize].view(width).to(torch.int64)
        values = out.new_empty(self.kept(count))
        self._decode_dense(message[self._index_bytes(count) :], values, self.header_bytes(count), peak)
        out.zero_()
        out[indices & 0xFFFF if count <= _PIECE else indices] = values

    def _decode_dense(self, message: Tensor, out: Tensor, header_bytes: int, peak: Tensor | None) -> None:
        length = payload_bytes(self.format, out.numel())
        header = message[length : length + header_bytes]
        local = self.scale.kind == "local"
        on_cpu = message.device.type == "cpu"
        unit = fused(_units, header)[0] if local and not on_cpu else None
        if not on_cpu and swift.can_decode(self.format) and self.format.bits == 4:
            one = torch.ones(1, device=out.device) if unit is None else unit
            swift.decode_scaled(message[:length], self.format, one, out)  # type: ignore[arg-type]  # no block format
        else:
            get(message[:length], self.format, out, unit)
        if local and on_cpu:
            out.mul_(_unit_of(int(header)))
        elif self.scale.kind == "block":
            whole = out.numel() // self.scale.block * self.scale.block
            units = _unit(header)
            out[:whole].view(-1, self.scale.block).mul_(units[: whole // self.scale.block, None])
            out[whole:].mul_(units[-1])
        if peak is not None and header_bytes:
            peak.copy_(header if header_bytes == 1 else header.amax(0, keepdim=True))

    def round_(self, numbers: Tensor, noise: Noise | None = None) -> None:
        """What sending and receiving would make of the numbers, in place."""
        if self.elementwise:
            seed = noise if self.stochastic else None
            quantize(numbers, self.format, self.rounding, saturate=True, seed=seed, out=numbers)
            return
        message = numbers.new_empty(self.wire_bytes(numbers.numel()), dtype=torch.uint8)
        self.encode(numbers, message, noise)
        self.decode(message, numbers)

    def factor(self, message: Tensor, count: int) -> "float | Tensor":
        """By what the first of `count` numbers in a message part was multiplied here, not counting what all ranks share."""
        if self.scale.shared:
            return 1.0
        header = message[self._index_bytes(count) + payload_bytes(self.format, self.kept(count)) :][:1]
        if header.device.type == "cpu":
            return 2.0 ** scaling.shift_of(int(header))
        return scaling.power_of_two(scaling.shifts_of(header))

    def _put_shifted(self, numbers: Tensor, shift: int, noise: Noise | None, out: Tensor) -> None:
        """Codes of `numbers * 2^shift`, on a CPU: in one pass where that can be."""
        swiftly = swift.can_encode(self.format, self.rounding)
        if shift and not (swiftly and abs(shift) <= swift.LIMIT):
            numbers, shift = torch.mul(numbers, 2.0**shift, out=scratch(numbers.numel(), torch.float32)), 0
        if swiftly:
            swift.encode_shifted(numbers, self.format, shift, out)  # type: ignore[arg-type]  # no block format
        else:
            put(numbers, self.format, self.rounding, noise if self.stochastic else None, out)

    def _scaled_blocks(self, numbers: Tensor, header: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(numbers, (0, -numbers.numel() % self.scale.block)).view(-1, self.scale.block)
        header.copy_(scaling.fitting_bytes(filled.abs().amax(1), self.format))
        factors = scaling.power_of_two(scaling.shifts_of(header))
        return (filled * factors[:, None]).view(-1)[: numbers.numel()]


@lru_cache(maxsize=256)
def _local_scale(fmt: AnyFormat) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """From the smallest and the largest number: the header byte, and the factor that it stands for."""

    def scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        byte = scaling.fitting_bytes(torch.maximum(-low, high).reshape(1), fmt)
        return byte, scaling.power_of_two(scaling.shifts_of(byte))

    return scale


def _units(header: Tensor) -> tuple[Tensor]:
    return (_unit(header),)


def _unit_of(byte: int) -> float:
    return math.nan if byte == NONFINITE else 2.0 ** -scaling.shift_of(byte)


def _unit(header: Tensor) -> Tensor:
    """What codes count in: 2^-shift, or NaN where something was not finite."""
    unit = scaling.power_of_two(-scaling.shifts_of(header))
    return torch.where(header == NONFINITE, torch.full_like(unit, math.nan), unit)


def _indices_of_largest(numbers: Tensor, count: int) -> Tensor:
    """Ascending; of equal magnitudes the first ones, so that every chip chooses the same. NaN counts as the largest."""
    magnitude = numbers.abs().nan_to_num(math.inf, math.inf)
    threshold = torch.topk(magnitude, count, sorted=False).values.amin()
    above = magnitude > threshold
    ties = magnitude == threshold
    chosen = above | (ties & (ties.cumsum(0) <= count - above.sum()))
    return torch.nonzero_static(chosen, size=count).view(-1)


def codec_of(text: "str | AnyFormat | Codec", rounding: str = "nearest", scale: "str | Scale" = "local") -> Codec:
    """A codec from a format ("e5m2"), or "topk:<fraction>" with an optional format for the values ("topk:.01:e4m3fn")."""
    if isinstance(text, Codec):
        return text
    keep = 1.0
    if isinstance(text, str) and text.startswith("topk:"):
        _, fraction, *rest = text.split(":")
        try:
            keep = float(fraction)
        except ValueError:
            raise ValueError(f"top-k is written topk:<fraction>[:<format>], say topk:0.01:e4m3fn, not {text!r}") from None
        text = rest[0] if rest else "fp32"
    return Codec(parse_format(text), rounding, scale_of(scale), keep)


@lru_cache(maxsize=1024)
def partial_codec(codec: Codec, accumulate: AnyFormat, world: int) -> Codec:
    """For sums on the way: the codec in the format of sums. What top-k kept on several ranks is kept."""
    return replace(total_codec(codec, world), format=accumulate)


@lru_cache(maxsize=1024)
def total_codec(codec: Codec, world: int) -> Codec:
    """For the sum of all ranks: with top-k, room for everything that any of them kept."""
    if codec.keep == 1:
        return codec
    wider = replace(codec, ranks=world)
    dense = replace(codec, keep=1.0)
    return dense if dense.wire_bytes(_PIECE) <= wider.wire_bytes(_PIECE) else wider
