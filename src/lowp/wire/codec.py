"""From numbers to bytes and back: a codec is a format, a rounding, a scale, and how many of the numbers to keep.

A message part has the bytes of n float32 numbers of one layer:

    positions with top-k: which numbers were kept (top_k.py); what follows is of these alone
    payload   the codes of the (scaled) numbers
    high      formats of 9 to 15 bits: what of each code goes beyond its first byte
    scales    block formats: one code a block; then one float32 for the whole part, where the format has one (nvfp4)
    header    one byte: the exponent of the scale (`local`), one a block (`block:<n>`), or the peak of what was summed
              (`none`, `aps_delayed`); none for `aps`, whose exponents were agreed before
    padding   to a multiple of 8 bytes, so that the next part may be of any dtype

Codes of less than a byte are packed in groups of g * 16 codes, where g codes fill whole bytes (2 of 4 bits, 8 of 3 bits): byte
t of a group has bits of its codes t, 16 + t, 32 + t ... So vectors of 16 numbers become vectors of 16 bytes without a shuffle.

`adaptive:<bits>` has messages of its own, one for all of its parts in a shard (adaptive.py).

`PartLayout` says where each of these lies, `wire_bytes` how long a part is: nothing else computes that. `encode` and `decode`
here are plain torch operations on one part. part_kernels.py does the same to all parts of a message at once, with equal bytes.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat, Format, FormatLike, Rounding, reference
from lowp.formats import format as parse_format
from lowp.formats.floats import BF16, FP16, FP32
from lowp.tensor.block import BlockCodes
from lowp.tensor.lists.parts import LANES
from lowp.tensor.noise import Noise
from lowp.tensor.ops import decode, encode, quantize
from lowp.tensor.packing import group
from lowp.wire import adaptive, scaling
from lowp.wire.adaptive import Adaptive, AdaptiveLayout, parse_adaptive
from lowp.wire.adaptive_tables import LEAST_UNBIASED
from lowp.wire.scaling import Scale, scale_of
from lowp.wire.top_k import PIECE, KeptRow, KeptTable, position_bytes

ROOM, EVERY = 2, "all"
"""Sums of top-k have room for so many ranks' choices, and the largest numbers of a sum are sent. A sum has numbers wherever one
rank has kept one: room for every rank's choice (`EVERY`) takes the bytes of one message times the number of ranks."""


def check_format(fmt: AnyFormat) -> AnyFormat:
    """A format that gradients can travel in, and be summed in."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if not element.signed:
        raise ValueError(f"gradients have signs, and {fmt} has none")
    if element.bits > 16 and fmt != FP32:
        raise ValueError(f"formats on the wire have up to 16 bits (or are fp32); {fmt} has {element.bits}")
    return fmt


def _aligned(size: int) -> int:
    """Room for `size` bytes such that what follows may be of any dtype."""
    return -(-size // 8) * 8


def _check_adaptive(fmt: Adaptive, rounding: str) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{fmt} rounds to 'nearest' or 'stochastic', not {rounding!r}")
    if rounding == "stochastic" and fmt.budget < LEAST_UNBIASED:
        raise ValueError(f"adaptive with stochastic rounding has at least {LEAST_UNBIASED:g} bits, not {fmt.budget:g}")


def packed_bytes(count: int, bits: int) -> int:
    """Of `count` codes of less than a byte."""
    codes, width = group(bits)
    return -(-count // (codes * LANES)) * width * LANES


@dataclass(frozen=True)
class PartLayout:
    """Where the pieces of a message part begin, in bytes from its first; `end` is its length."""

    payload: int
    high: int
    scales: int
    tensor_scale: int
    header: int
    end: int

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def of(codec: "Codec", count: int) -> "PartLayout":
        fmt, kept = codec.format, codec.kept(count)
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        blocks = -(-kept // fmt.size) * -(-fmt.scale.bits // 8) if isinstance(fmt, BlockFormat) else 0
        payload = 0 if codec.keep == 1 else _aligned(position_bytes(kept, count))
        high = payload + (packed_bytes(kept, element.bits) if element.bits < 8 else kept * (element.bits // 8))
        scales = high
        if 8 < element.bits < 16:
            high = _aligned(high)
            scales = high + packed_bytes(kept, element.bits - 8)
        scales = _aligned(scales) if blocks else scales
        tensor_scale = scales + blocks
        header = tensor_scale
        if blocks and fmt.tensor_scale:  # type: ignore[union-attr]  # only block formats have blocks
            tensor_scale = _aligned(tensor_scale)
            header = tensor_scale + 4
        return PartLayout(payload, high, scales, tensor_scale, header, _aligned(header + codec.header_bytes(count)))


@dataclass(frozen=True)
class Codec:
    """How numbers travel. `keep` below 1 sends the largest numbers only: that fraction of each layer."""

    format: AnyFormat
    rounding: str = "nearest"
    scale: Scale = Scale("local")  # noqa: RUF009  # frozen
    keep: float = 1.0
    ranks: int = 1  # of how many ranks' choices there is room for, in sums of top-k
    room: int | None = ROOM  # the largest `ranks` of a sum; None: every rank's

    def __post_init__(self) -> None:
        if self.rounding not in tuple(Rounding):
            raise ValueError(f"unknown rounding {self.rounding!r}; it is one of {', '.join(Rounding)}")
        check_format(self.format)
        if isinstance(self.format, Adaptive):
            _check_adaptive(self.format, self.rounding)
        if not 0 < self.keep <= 1:
            raise ValueError(f"top-k keeps a fraction of the numbers above 0 and up to 1, not {self.keep}")
        if self.room is not None and self.room < 1:
            raise ValueError(f"sums of top-k have room for at least one rank's choice, not {self.room}")

    def __str__(self) -> str:
        kept = "" if self.keep == 1 else f"topk:{self.keep:g}:"
        room = "" if self.keep == 1 or self.room == ROOM else f":{self.room or EVERY}"
        scale = "" if self.adaptive else f"/{self.scale}"
        return f"{kept}{self.format}{room}{scale}" + ("" if self.rounding == "nearest" else f"/{self.rounding}")

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def adaptive(self) -> bool:
        """Do all of its parts in a shard share one message, whose scales are its own?"""
        return isinstance(self.format, Adaptive)

    @property
    def sends_peaks(self) -> bool:
        """Is the header a byte that says how large the rank's own numbers were?"""
        return self.scale.kind in ("none", "aps_delayed")

    @property
    def measures(self) -> tuple[bool, bool]:
        """What must be known of a part before it is encoded: its largest magnitude; its largest finite one."""
        return self.scale.kind == "local" and not self.adaptive, isinstance(
            self.format, BlockFormat
        ) and self.format.tensor_scale

    @property
    def elementwise(self) -> bool:
        """Is every number rounded by itself, whatever travels with it?"""
        return self.scale.shared and self.keep == 1 and not isinstance(self.format, BlockFormat)

    @property
    def bits(self) -> float:
        """What a number takes on average, with its share of a block's scale byte: shards are balanced by it."""
        if isinstance(self.format, Adaptive):
            return self.format.budget
        return self.keep * (self.format.bits + (8 / self.scale.block if self.scale.block else 0))

    def kept(self, count: int) -> int:
        """How many of `count` numbers are sent."""
        return count if self.keep == 1 else min(count, self.ranks * math.ceil(self.keep * count))

    @property
    def of_kept(self) -> "Codec":
        """With top-k, the codec of the numbers that are kept: their bytes follow the positions."""
        return replace(self, keep=1.0, ranks=1)

    def header_bytes(self, count: int) -> int:
        if self.scale.kind == "block":
            return -(-self.kept(count) // self.scale.block)
        return 0 if self.scale.agreed else 1

    def wire_bytes(self, count: int) -> int:
        """How many bytes `count` numbers take in one message part."""
        if self.adaptive:
            return self.adaptive_layout(count).length
        return PartLayout.of(self, count).end if count else 0

    def adaptive_layout(self, count: int) -> AdaptiveLayout:
        """Of the message of one part."""
        return AdaptiveLayout.of([count], [count], [self.bits], self.stochastic)

    def encode(self, numbers: Tensor, out: Tensor, noise: Noise | None = None, peak: Tensor | None = None) -> None:
        """Write flat float32 `numbers` to `out` (uint8). `peak` is the header of scales that do not compute their own.

        What is too large saturates.
        """
        count = numbers.numel()
        if self.adaptive:
            adaptive.encode([numbers], self.adaptive_layout(count), out, None if noise is None else [noise])
            return
        layout = PartLayout.of(self, count)
        if self.keep < 1:
            kept = self._table(count).choose(numbers, out)
            self.of_kept.encode(kept, out[layout.payload :], noise, peak)
            return
        header = out[layout.header : layout.header + self.header_bytes(count)]
        if self.scale.kind == "local":
            header.copy_(scaling.fitting_bytes(scaling.largest(numbers).reshape(1), self.format))
            numbers = numbers * scaling.power_of_two(scaling.shifts_of(header))
        elif self.scale.kind == "block":
            filled = torch.nn.functional.pad(numbers, (0, -numbers.numel() % self.scale.block)).view(-1, self.scale.block)
            header.copy_(scaling.fitting_bytes(filled.abs().amax(1), self.format))
            factors = scaling.power_of_two(scaling.shifts_of(header))
            numbers = (filled * factors[:, None]).view(-1)[: numbers.numel()]
        elif peak is not None:
            header.copy_(peak)
        self._put(numbers, layout, out, noise if self.stochastic else None)

    def _put(self, numbers: Tensor, layout: PartLayout, out: Tensor, noise: Noise | None) -> None:
        fmt = self.format
        if fmt == FP32:
            out[layout.payload : layout.payload + 4 * numbers.numel()] = numbers.view(torch.uint8)
            return
        codes = encode(numbers, fmt, self.rounding, saturate=True, seed=noise, nan="zero")
        if not isinstance(fmt, BlockFormat) and fmt.bits % 8:  # the last group is filled up with zeros
            codes = torch.nn.functional.pad(codes, (0, -codes.numel() % (8 * LANES)), value=_code_of_zero(fmt))
        if isinstance(fmt, BlockFormat):
            scales = codes.scales.view(torch.uint8)
            out[layout.scales : layout.scales + scales.numel()] = scales
            if fmt.tensor_scale:
                out[layout.tensor_scale : layout.tensor_scale + 4] = codes.tensor_scale.reshape(1).view(torch.uint8)
            fmt, codes = fmt.element, codes.elements
        _put_codes(codes, numbers.numel(), fmt, layout, out)

    def decode(self, message: Tensor, out: Tensor, peak: Tensor | None = None) -> None:
        """Read a message part into flat float32 `out`; `peak` receives its header (255 if anything is not finite)."""
        count = out.numel()
        if self.adaptive:
            adaptive.decode(message, self.adaptive_layout(count), [out])
            if peak is not None and count:
                peak.copy_(message[:1])
            return
        layout = PartLayout.of(self, count)
        if self.keep < 1:
            kept = out.new_empty(self.kept(count))
            self.of_kept.decode(message[layout.payload :], kept, peak)
            self._table(count).add(message, kept, out)
            return
        self._get(message, layout, out)
        header = message[layout.header : layout.header + self.header_bytes(count)]
        if self.scale.kind == "local":
            out.mul_(scaling.units_of(header))
        elif self.scale.kind == "block":
            whole = count // self.scale.block * self.scale.block
            units = scaling.units_of(header)
            out[:whole].view(-1, self.scale.block).mul_(units[: whole // self.scale.block, None])
            out[whole:].mul_(units[-1])
        if peak is not None and header.numel():
            peak.copy_(header if header.numel() == 1 else header.amax(0, keepdim=True))

    def _table(self, count: int) -> KeptTable:
        return KeptTable([KeptRow(count, self.kept(count), 0, 0, 0)])

    def _get(self, message: Tensor, layout: PartLayout, out: Tensor) -> None:
        fmt, count = self.format, out.numel()
        if fmt == FP32:
            out.copy_(message[layout.payload : layout.payload + 4 * count].view(torch.float32))
        elif isinstance(fmt, BlockFormat):
            scales = message[layout.scales : layout.scales + -(-count // fmt.size) * -(-fmt.scale.bits // 8)]
            scales = scales if fmt.scale.bits <= 8 else scales.clone().view(torch.int16)
            whole = None
            if fmt.tensor_scale:
                whole = message[layout.tensor_scale : layout.tensor_scale + 4].clone().view(torch.float32).reshape(())
            codes = BlockCodes(_get_codes(message, fmt.element, layout, count), scales, whole)
            decode(codes, fmt, out=out)
        else:
            decode(_get_codes(message, fmt, layout, count), fmt, out=out)

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
        begin = PartLayout.of(self, count).header
        return scaling.power_of_two(scaling.shifts_of(message[begin : begin + 1]))


@lru_cache(maxsize=256)
def _code_of_zero(fmt: Format) -> int:
    return reference.encode(0.0, fmt)


def _put_codes(codes: Tensor, count: int, fmt: Format, layout: PartLayout, out: Tensor) -> None:
    """Codes as `encode` gives them: uint8 or int16. There may be more than `count`, to fill up the last group."""
    if fmt.bits in (8, 16):
        stored = codes.view(torch.uint8)
        out[layout.payload : layout.payload + stored.numel()] = stored
        return
    if fmt.bits < 8:
        length = packed_bytes(count, fmt.bits)
        out[layout.payload : layout.payload + length] = pack_codes(codes, fmt.bits)[:length]
        return
    out[layout.payload : layout.payload + count] = (codes[:count] & 0xFF).to(torch.uint8)
    length = packed_bytes(count, fmt.bits - 8)
    out[layout.high : layout.high + length] = pack_codes(((codes >> 8) & 0xFF).to(torch.uint8), fmt.bits - 8)[:length]


def _get_codes(message: Tensor, fmt: Format, layout: PartLayout, count: int) -> Tensor:
    if fmt.bits == 8:
        return message[layout.payload : layout.payload + count]
    if fmt.bits == 16:
        return message[layout.payload : layout.payload + 2 * count].view(torch.int16)
    if fmt.bits < 8:
        return unpack_codes(message[layout.payload : layout.high], fmt.bits, count)
    high = unpack_codes(message[layout.high : layout.high + packed_bytes(count, fmt.bits - 8)], fmt.bits - 8, count)
    return message[layout.payload : layout.payload + count].to(torch.int16) | (high.to(torch.int16) << 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8, flat; the low `bits` bits count) in groups of vectors, as said above."""
    per_group, width = group(bits)
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % (per_group * LANES)))
    vectors = (filled & ((1 << bits) - 1)).view(-1, per_group, LANES).to(torch.int16)
    packed = torch.zeros(vectors.shape[0], width, LANES, dtype=torch.int16, device=codes.device)
    for byte, vector, shift in placed_bits(bits):
        packed[:, byte] |= vectors[:, vector] << shift if shift >= 0 else vectors[:, vector] >> -shift
    return (packed & 0xFF).to(torch.uint8).view(-1)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse."""
    per_group, width = group(bits)
    stored = packed.view(-1, width, LANES).to(torch.int16)
    codes = torch.zeros(stored.shape[0], per_group, LANES, dtype=torch.int16, device=packed.device)
    for byte, vector, shift in placed_bits(bits):
        codes[:, vector] |= stored[:, byte] >> shift if shift >= 0 else stored[:, byte] << -shift
    return (codes & ((1 << bits) - 1)).to(torch.uint8).view(-1)[:count]


@lru_cache(maxsize=8)
def placed_bits(bits: int) -> tuple[tuple[int, int, int], ...]:
    """(byte, vector, shift) of a group: that byte has bits of that vector's codes, shifted to the left by so many."""
    per_group, width = group(bits)
    every = ((byte, vector, bits * vector - 8 * byte) for byte in range(width) for vector in range(per_group))
    return tuple((byte, vector, shift) for byte, vector, shift in every if -bits < shift < 8)


def codec_of(text: "FormatLike | Codec", rounding: str = "nearest", scale: "str | Scale | None" = None) -> Codec:
    """A codec from a format ("e5m2"), or from top-k's notation: "topk:.01", "topk:.01:e4m3fn", "topk:.01:e4m3fn:all".

    Top-k's last word says for how many ranks' choices a sum has room: a number, or "all". Without a scale it is the format's
    own, `default_scale`. "adaptive:<bits>" has scales of its own: `scale` says nothing about it.
    """
    if isinstance(text, Codec):
        return text
    if isinstance(text, str) and text.startswith("adaptive"):
        return Codec(parse_adaptive(text), rounding)
    if not isinstance(text, str) or not text.startswith("topk:"):
        fmt = parse_format(text)
        return Codec(fmt, rounding, scaling.default_scale(fmt, 1.0) if scale is None else scale_of(scale))
    _, fraction, *more = text.split(":")
    try:
        if len(more) > 2:
            raise ValueError
        keep, room = float(fraction), None if more[1:] == [EVERY] else int(more[1]) if more[1:] else ROOM
    except ValueError:
        how = "topk:<fraction>[:<format>[:<room>]], say topk:0.01, topk:0.01:e4m3fn or topk:0.01:e4m3fn:all"
        raise ValueError(f"top-k is written {how}, not {text!r}") from None
    fmt = parse_format(more[0] if more else "fp32")
    return Codec(fmt, rounding, scaling.default_scale(fmt, keep) if scale is None else scale_of(scale), keep, room=room)


_STORED = {torch.bfloat16: Codec(BF16, scale=scale_of("none")), torch.float16: Codec(FP16, scale=scale_of("local"))}


def codec_for(codec: Codec, dtype: torch.dtype) -> Codec:
    """What a codec is for numbers of a dtype.

    `fp32` means uncompressed. Numbers of 16 bits then travel in their own 16 bits, as DistributedDataParallel and FSDP2 send
    them. In float32 they would be the same numbers in twice the bytes.

    The sum of many ranks may exceed float16's range where their mean does not. So messages of float16 have a scale.
    """
    return _STORED.get(dtype, codec) if codec.format == FP32 and codec.keep == 1 else codec


@lru_cache(maxsize=1024)
def partial_codec(codec: Codec, sum_format: AnyFormat, world: int) -> Codec:
    """For sums on the way: the codec in the format of sums, with as much room as the sum of all."""
    return replace(total_codec(codec, world), format=sum_format)


@lru_cache(maxsize=1024)
def total_codec(codec: Codec, world: int) -> Codec:
    """For the sum of all ranks: with top-k, as much of it as there is room for; all of it where that takes fewer bytes."""
    if codec.keep == 1:
        return codec
    wider = replace(codec, ranks=world if codec.room is None else min(world, codec.room))
    dense = replace(codec, keep=1.0)
    return dense if dense.wire_bytes(PIECE) <= wider.wire_bytes(PIECE) else wider
