"""Which numbers top-k keeps, where their positions lie in a message, and sums of what was kept.

Of a part of n numbers the k largest magnitudes are kept: exactly k, of equal magnitudes those with the lowest positions. NaN
counts as infinity, the largest. So every chip chooses the same.

Positions ascend. A position is counted in pieces of 65,536 numbers, and takes two bytes:

    2 bytes for each kept number        its position in its piece
    4 bytes for each piece but the last how many numbers are kept up to the end of the piece

The k-th largest magnitude is found without sorting. The bits of a magnitude, as an integer, are ordered as the magnitudes are.

1. Count the numbers by the upper 11 bits of their magnitude. From the top, find the bin that has the k-th.
2. Among the numbers of that bin, the same with the next 10 bits, and then with the last 10: that is the threshold.
3. Keep what is above the threshold, and of what is equal to it the first ones, until there are k.

All parts of a message are worked on at once. On a CPU a kernel does it (top_k_cpp.py), which estimates a lower threshold from
one vector in 16 to 64 first, so that one pass over all numbers leaves a few to be counted. Elsewhere some 90 operations of
torch do it, whatever the number of parts.

Sums: a number that was not kept counts as 0. In the order of messages each adds its numbers, in float32, to zeros. So zeros
have no sign here: -0.0 arrives as 0.0.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.carrier import F32
from lowp.wire.scaling import divide_
from lowp.wire.workspace import NEW_MEMORY, NewMemory

PIECE = 1 << 16  # numbers
DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the digits of a magnitude, from the top


def pieces_of(count: int) -> int:
    return -(-count // PIECE)


def ends_offset(kept: int) -> int:
    """Where the ends of pieces begin, in bytes from the first position."""
    return -(-2 * kept // 4) * 4


def position_bytes(kept: int, count: int) -> int:
    """What the positions of `kept` of `count` numbers take."""
    return ends_offset(kept) + 4 * (pieces_of(count) - 1)


class KeptRow(NamedTuple):
    """A part: its numbers, how many of them are kept, its layer; where its numbers begin, and its bytes in a message."""

    size: int
    kept: int
    layer: int
    start: int
    begin: int


class KeptTable:
    """The parts of some messages. `slots` counts the kept numbers of all parts, one part's after the other's."""

    def __init__(self, rows: Sequence[KeptRow]) -> None:
        self.rows = tuple(rows)
        self.elements = sum(row.size for row in self.rows)
        self.slots = sum(row.kept for row in self.rows)
        self._columns: dict[torch.device, Tensor] = {}
        self._ends_on: dict[torch.device, Tensor] = {}

    def columns(self, device: torch.device) -> Tensor:
        """int64 [9, parts]: size, kept, layer, start, begin; where the ends of its pieces begin; of all parts before it,
        how many numbers, kept numbers and ends of pieces they have."""
        if device not in self._columns:
            found, elements, slots, ends = [], 0, 0, 0
            for row in self.rows:
                found.append((*row, row.begin + ends_offset(row.kept), elements, slots, ends))
                elements, slots, ends = elements + row.size, slots + row.kept, ends + pieces_of(row.size) - 1
            self._columns[device] = torch.tensor(found, dtype=torch.int64).t().contiguous().to(device)
        return self._columns[device]

    def choose(self, numbers: Tensor, out: Tensor, factors: Tensor | None = None, workspace: NewMemory = NEW_MEMORY) -> Tensor:
        """Write the positions of the largest numbers, each times the factor of its layer, to the message `out` (uint8).

        Returns these numbers, without the factor: float32 [slots].
        """
        device = numbers.device
        if (kernel := self._kernel(_CHOOSE, device)) is not None:
            numbers = numbers.to(torch.float32)
            values = workspace.empty((self.slots,), torch.float32, device)
            room = workspace.scratch(3 * (self.elements + 16 * len(self.rows)), torch.int32, device)
            kernel(self, numbers, factors, out, values, room)
            return values
        return self._choose_plainly(numbers, out, factors)

    def add(
        self,
        source: Tensor,
        values: Tensor,
        out: Tensor,
        factors: Tensor | None = None,
        divisor: int = 1,
        messages: int = 1,
        stride: int = 0,
    ) -> None:
        """Write to `out` the sums of the `values` [messages, slots] that messages, `stride` bytes apart in `source`, keep.

        Sums are float32, then times the factor of their layer, then divided.
        """
        if (kernel := self._kernel(_ADD, out.device)) is None:
            self._add_plainly(source, values, out, factors, divisor, messages, stride)
        elif out.dtype == torch.float32:
            kernel(self, source, values, out, factors, divisor, messages, stride)
        else:
            sums = torch.empty(out.shape, dtype=torch.float32)
            kernel(self, source, values, sums, factors, divisor, messages, stride)
            if self._span is None:
                places = self._places(self._parts(out.device))
                out.index_copy_(0, places, sums[places].to(out.dtype))
            else:
                out[slice(*self._span)] = sums[slice(*self._span)]

    def _kernel(self, kind: str, device: torch.device) -> Any:
        return kernels.get_or_build(kind, device, self.elements, _build) if device.type == "cpu" else None

    @cached_property
    def _span(self) -> tuple[int, int] | None:
        """The first and the last number of all parts, if they lie one after the other."""
        position = self.rows[0].start
        for row in self.rows:
            if row.start != position:
                return None
            position += row.size
        return self.rows[0].start, position

    def _parts(self, device: torch.device, of_slots: bool = False) -> Tensor:
        """The part of each number, or of each kept one."""
        sizes, count = self.columns(device)[int(of_slots)], self.slots if of_slots else self.elements
        return torch.repeat_interleave(sizes, output_size=count)

    def _places(self, parts: Tensor) -> Tensor:
        """Where all numbers lie, for parts that do not lie one after the other; `parts` of each number."""
        _, _, _, starts, _, _, before, _, _ = self.columns(parts.device)
        return torch.arange(self.elements, device=parts.device) + (starts - before)[parts]

    def _words(self, parts: Tensor) -> Tensor:
        """Where positions lie in a message, then the lower and the upper halves of the pieces' ends: in words of 16 bits.

        `parts` of each kept number.
        """
        device = parts.device
        _, _, _, _, begins, ends, _, slots, _ = self.columns(device)
        low = torch.arange(self.slots, device=device) + (begins // 2 - slots)[parts]
        if not self._inner_ends:
            return low
        of_end, _, numbers = self._ends(device)
        lower = ends[of_end] // 2 + 2 * numbers
        return torch.cat([low, lower, lower + 1])

    @cached_property
    def _inner_ends(self) -> list[tuple[int, int, int]]:
        """Of the ends of pieces within parts: the part, the numbers before it in all parts, which piece of its part it ends."""
        found, elements = [], 0
        for part, row in enumerate(self.rows):
            found += [(part, elements + (p + 1) * PIECE, p) for p in range(pieces_of(row.size) - 1)]
            elements += row.size
        return found

    def _ends(self, device: torch.device) -> Tensor:
        """The same: int64 [3, ends]."""
        if device not in self._ends_on:
            self._ends_on[device] = torch.tensor(self._inner_ends, dtype=torch.int64).t().contiguous().to(device)
        return self._ends_on[device]

    def _choose_plainly(self, numbers: Tensor, out: Tensor, factors: Tensor | None) -> Tensor:
        device = numbers.device
        _, kept, layers, _, _, _, before, slots, _ = self.columns(device)
        part, part_of_slot = self._parts(device), self._parts(device, of_slots=True)
        own = numbers[self._places(part)] if self._span is None else numbers[slice(*self._span)]
        own = own.to(torch.float32)
        scaled = own if factors is None else own * factors.view(-1)[layers][part]
        keys = (scaled.view(torch.int32) & F32.magnitude).clamp_(max=F32.infinity)
        chosen = _chosen(keys, part, kept, before)
        places = torch.nonzero_static(chosen, size=self.slots).view(-1)
        words = places - before[part_of_slot]
        if self._inner_ends:
            of_end, edges, _ = self._ends(device)
            ends = torch.searchsorted(places, edges) - slots[of_end]
            words = torch.cat([words, ends, ends >> 16])
        out.view(torch.int16).index_copy_(0, self._words(part_of_slot), words.to(torch.int16))
        return own[places]

    def _add_plainly(
        self,
        source: Tensor,
        values: Tensor,
        out: Tensor,
        factors: Tensor | None,
        divisor: int,
        messages: int,
        stride: int,
    ) -> None:
        device, parts = out.device, None
        places = self._positions(source, messages, stride)
        total = torch.zeros(self.elements, dtype=torch.float32, device=out.device)
        for message in range(messages):  # one after the other: within one, no position comes twice
            place = places[message]  # (scatter_add_ on CUDA takes subnormal numbers for zero)
            total.scatter_(0, place, total.gather(0, place) + values.view(messages, -1)[message])
        if factors is not None or self._span is None:
            parts = self._parts(device)
        if factors is not None:
            total.mul_(factors.view(-1)[self.columns(device)[2]][parts])
        divide_(total, divisor)
        if self._span is None:
            assert parts is not None
            out.index_copy_(0, self._places(parts), total.to(out.dtype))
        else:
            out[slice(*self._span)] = total

    def _positions(self, source: Tensor, messages: int, stride: int) -> Tensor:
        """Of what messages keep, counted over all parts: int64 [messages, slots]."""
        device = source.device
        _, _, _, _, _, _, before, slots, earlier = self.columns(device)
        part = self._parts(device, of_slots=True)
        at = self._words(part)
        if messages > 1:
            at = at + torch.arange(0, messages * (stride // 2), stride // 2, device=device)[:, None]
        words = source.view(torch.int16)[at].view(messages, -1).to(torch.int64) & 0xFFFF
        places = words[:, : self.slots] + before[part]
        if not self._inner_ends:
            return places
        # A slot lies in as many pieces further as its part has ends at or before it. All ends of earlier parts are before it.
        lower, upper = words[:, self.slots :].chunk(2, 1)
        ends = slots[self._ends(device)[0]] + lower + (upper << 16)
        passed = torch.zeros(messages, self.slots + 1, dtype=torch.int64, device=device)
        passed.scatter_add_(1, ends, torch.ones_like(ends))
        return places + ((passed.cumsum(1)[:, : self.slots] - earlier[part]) << 16)


def _chosen(keys: Tensor, part: Tensor, kept: Tensor, before: Tensor) -> Tensor:
    """Of int32 keys, which are the `kept` largest of their part? `before`: how many keys the parts before have."""
    wanted, found = kept, torch.zeros_like(kept)
    for shift, bits in DIGITS:
        bins = 1 << bits
        place = part * bins + ((keys >> shift) & (bins - 1))
        here = ((keys >> (shift + bits)) == found[part]).to(torch.int32)
        counts = torch.zeros(len(kept) * bins, dtype=torch.int32, device=keys.device).scatter_add_(0, place, here)
        from_top = counts.view(-1, bins).flip(1).cumsum(1)
        above = (from_top < wanted[:, None]).sum(1, keepdim=True)  # bins in which all are kept
        in_these = torch.nn.functional.pad(from_top, (1, 0)).gather(1, above)
        wanted, found = wanted - in_these.view(-1), found * bins + (bins - 1) - above.view(-1)
    threshold = found[part]
    equal = keys == threshold
    number = torch.nn.functional.pad(equal.cumsum(0, dtype=torch.int32), (1, 0))  # of those that are equal, over all parts
    return (keys > threshold) | (equal & (number[1:] <= (number[before] + wanted)[part]))


_CHOOSE, _ADD = "kept: choose", "kept: add"  # kernels


def _build(kind: str, device: torch.device) -> Any:
    from lowp.wire import top_k_cpp  # what compiles is loaded when something is compiled

    return top_k_cpp.Choose() if kind == _CHOOSE else top_k_cpp.Add()
