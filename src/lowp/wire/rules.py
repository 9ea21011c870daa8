"""What the order of additions leaves open: the codec of every stage, how sums are rounded, which noise is drawn.

Real and virtual worlds share this file, so that they can differ in nothing but who holds the numbers.

Stages of a gradient's way:
- ADDEND: a rank's own numbers, rounded to the wire's format;
- INSIDE: a rank's own numbers on the way within a node, in the format of sums;
- NODE: the sum of a node, rounded to the wire's format;
- PARTIAL: a sum on the way, rounded to the format of sums after every addition;
- TOTAL: the sum of all ranks, rounded once more to the wire's format. Every rank decodes the same bytes.
- HANDED_OUT: the sum of all ranks on its way within a node, in the format of sums, where every node has computed it. Top-k has
  room for all of it.

With error feedback, what is lost at any of them is kept by the rank that rounds (feedback.py).
"""

import enum
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowp.formats import AnyFormat
from lowp.formats.floats import FP32
from lowp.tensor.carrier import F32
from lowp.tensor.noise import Domain, Noise
from lowp.wire.codec import Codec, partial_codec, total_codec
from lowp.wire.codec_group import PartNoise
from lowp.wire.feedback import Feedback
from lowp.wire.messages import Messages
from lowp.wire.plan import Part, Shard
from lowp.wire.report import Meter
from lowp.wire.scaling import NONFINITE
from lowp.wire.workspace import NEW_MEMORY, NewMemory


class Stage(enum.IntEnum):
    ADDEND = 0
    INSIDE = 1
    NODE = 2
    PARTIAL = 3
    TOTAL = 4
    # What follows are further roundings of partial sums: each has noise of its own.
    FIRST = 5  # the first addend as a sum
    SENT = 6  # a partial sum in its message
    SENT_LOST = 7  # its compensation in its message
    KAHAN_LOST_THERE = 8  # an addend, less what its own sum has lost
    KAHAN_ADDEND = 9
    KAHAN_DIFFERENCE = 10
    KAHAN_LOST = 11
    HANDED_OUT = 12


@dataclass
class Load:
    """The numbers of one shard (float32, scaled where ranks share a scale) and the largest header byte of each part.

    `lost` is Kahan's compensation: what rounding has taken from the numbers so far. `maxima` is what is known of the numbers
    (see `Messages.measure`), where it was found while they were added up.
    """

    numbers: Tensor
    peaks: Tensor
    lost: Tensor | None = None
    maxima: "Sequence[Tensor | None] | None" = None


@dataclass
class Rules:
    """`sum_format` is the format of sums; None stands for float32 in `two_shot` and for the wire's own format elsewhere.

    `rank` is the one that does the work, and keeps what it loses; None stands for the owner of each element.
    """

    world: int
    domain: Domain  # of the noise
    sum_format: AnyFormat | None = None
    kahan: bool = False
    seed: int = 0
    step: int = 0
    rank: int | None = 0
    feedback: Feedback | None = None
    meter: Meter | None = None
    factors: Tensor | None = None  # by which each layer was multiplied (float32); None: by 1
    level: int = 0  # 1 between nodes, whose numbers are not those of ranks: each level has noise of its own
    workspace: NewMemory = NEW_MEMORY  # for what is needed on the way
    addends: int | None = None  # messages of the wire's format that are added up; None: one of each rank

    @property
    def choices(self) -> int:
        """How many choices of top-k a sum consists of."""
        return self.world if self.addends is None else self.addends

    def at(self, rank: int | None) -> "Rules":
        """The same rules for the work of another rank."""
        return self if self.feedback is None else replace(self, rank=rank)

    def codec(self, part: Part, stage: Stage) -> Codec:
        match stage:
            case Stage.ADDEND | Stage.NODE:
                return part.codec
            case Stage.TOTAL:
                return total_codec(part.codec, self.choices)
            case Stage.INSIDE:
                return replace(part.codec, format=self.sum_format or FP32, keep=1.0)
            case Stage.HANDED_OUT:
                return total_codec(replace(part.codec, format=self.sum_format or FP32, room=None), self.choices)
            case Stage.PARTIAL:
                return partial_codec(part.codec, self.sum_format or part.codec.format, self.choices)
            case _:  # in memory, where top-k drops nothing
                return self.codec(part, Stage.PARTIAL).of_kept

    def messages(self, shard: Shard, stage: Stage) -> Messages:
        """Where each part of a shard lies in a message. Worked out once for each kind."""
        kind = self._kind(stage)
        if kind not in shard.messages:
            shard.messages[kind] = Messages([shard], lambda part: self.codec(part, stage))
        return shard.messages[kind]

    def _kind(self, stage: Stage) -> tuple:
        return (stage, self.sum_format, self.choices)

    def length(self, shard: Shard, stage: Stage) -> int:
        """Bytes of a shard's message; twice as many where Kahan's compensation travels along."""
        return self.messages(shard, stage).length * (2 if self.kahan and stage == Stage.PARTIAL else 1)

    def buffer(self, shard: Shard, stage: Stage, device: torch.device) -> Tensor:
        """For a message to be received."""
        return torch.empty(self.length(shard, stage), dtype=torch.uint8, device=device)

    def write(self, load: Load, shard: Shard, stage: Stage, actor: int, out: Tensor | None = None) -> Tensor:
        """A shard's message, in `out` where that is given. `actor` is the rank or node that rounds; each has its own noise."""
        messages = self.messages(shard, stage)
        message = self.buffer(shard, stage, load.numbers.device) if out is None else out
        noisy = Stage.SENT if stage == Stage.PARTIAL else stage
        if stage in (Stage.TOTAL, Stage.HANDED_OUT):
            load = self.marked(load, messages)
        self.encode(messages, load.numbers, message[: messages.length], noisy, actor, None, load.peaks, load.maxima)
        if load.lost is not None and stage == Stage.PARTIAL:
            self.encode(messages, load.lost, message[messages.length :], Stage.SENT_LOST, actor, None, load.peaks)
        if self.feedback is not None and self.loses(load, shard, stage):
            self._keep(_value(load), self.read(message, shard, stage), shard, stage not in (Stage.ADDEND, Stage.INSIDE))
        return message

    def encode(
        self,
        messages: Messages,
        numbers: Tensor,
        out: Tensor,
        stage: Stage,
        actor: int,
        factors: Tensor | None = None,
        peaks: Tensor | None = None,
        maxima: "Sequence[Tensor | None] | None" = None,
        peaks_of: int = 0,
    ) -> None:
        """All messages at once."""
        with self.timed("encode", numbers.device):
            messages.encode(numbers, out, factors, peaks, self._noises(stage, actor), maxima, self.workspace, peaks_of)
            if stage in (Stage.ADDEND, Stage.NODE) and self.meter is not None:
                self.meter.see(messages, numbers, out, factors)

    def marked(self, load: Load, messages: Messages) -> Load:
        """A total in float32 may have overflowed, which no header would say."""
        if not any(overflow_unseen(group.codec) for group in messages.groups):
            return load
        maxima = load.maxima or messages.measure(load.numbers, wanted_of_total)
        peaks = load.peaks.clone()
        for group, found in zip(messages.groups, maxima, strict=True):
            if overflow_unseen(group.codec) and found is not None:
                bad = torch.where(found[0] >= F32.infinity, NONFINITE, 0).to(peaks.dtype)
                peaks.scatter_reduce_(0, group.indices(peaks.device), bad, "amax")
        return replace(load, peaks=peaks)

    def loses(self, load: Load, shard: Shard, stage: Stage) -> bool:
        """May a message say less than the load? Of a rank's own numbers, nothing is a loss too: the last one is over."""
        if stage in (Stage.ADDEND, Stage.INSIDE):
            return True
        if stage == Stage.PARTIAL:
            return self._rounds_again(shard)
        codecs = (self.codec(part, stage) for part in shard.parts)
        return load.lost is not None or any(codec.format != FP32 or codec.keep < 1 for codec in codecs)

    def _keep(self, before: Tensor, after: Load, shard: Shard, of_sum: bool) -> None:
        assert self.feedback is not None
        self.feedback.keep(self.rank, shard, before.sub_(_value(after)), self.factors, of_sum)

    def read(self, message: Tensor, shard: Shard, stage: Stage, out: Tensor | None = None) -> Load:
        """What a message says, in `out` where that is given."""
        messages = self.messages(shard, stage)
        with self.timed("decode", message.device):
            numbers = torch.empty(shard.size, dtype=torch.float32, device=message.device) if out is None else out
            messages.decode(message, numbers)
            load = Load(numbers, messages.peaks(message[: messages.length]))
            if self.kahan and stage == Stage.PARTIAL:
                load.lost = torch.empty_like(numbers)
                messages.decode(message[messages.length :], load.lost)
            return load

    def timed(self, what: str, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.timed(what, device)

    def addend(self, load: Load, shard: Shard, actor: int) -> Load:
        """A rank's own numbers as they would arrive elsewhere.

        Where every number is rounded by itself there is no need to write a message and read it. (This is the virtual world's,
        which has many ranks to go through.)
        """
        if self.feedback is not None or not all(part.codec.elementwise for part in shard.parts):
            return self.read(self.write(load, shard, Stage.ADDEND, actor), shard, Stage.ADDEND)
        if all(part.codec.format == FP32 for part in shard.parts):
            return Load(load.numbers.clone(), load.peaks.clone())
        messages = self.messages(shard, Stage.ADDEND)
        numbers = messages.round_(load.numbers.clone(), self._noises(Stage.ADDEND, actor))
        return Load(numbers, load.peaks.clone())

    def sent_on(self, total: Load, shard: Shard, actor: int) -> Load:
        """A partial sum as it would arrive elsewhere. It is rounded already, but a scale of its own may round it again."""
        if not self._rounds_again(shard):
            return total
        return self.read(self.write(total, shard, Stage.PARTIAL, actor), shard, Stage.PARTIAL)

    def _rounds_again(self, shard: Shard) -> bool:
        return not all(part.codec.scale.shared and part.codec.keep == 1 for part in shard.parts)

    def noise(self, part: Part, stage: Stage, actor: int) -> Noise:
        return self._noises(stage, actor)(part)

    def round_(self, numbers: Tensor, shard: Shard, stage: Stage, actor: int) -> Tensor:
        """Round to the format of sums, in place. (Adaptive sums are rounded when they are sent, all of a shard together.)"""
        codecs = [self.codec(part, Stage.FIRST) for part in shard.parts]
        if all(codec.format == FP32 or codec.adaptive for codec in codecs):
            return numbers
        if all(codec.elementwise for codec in codecs):
            return self.messages(shard, Stage.FIRST).round_(numbers, self._noises(stage, actor))
        for part, codec in zip(shard.parts, codecs, strict=True):
            if codec.format != FP32 and not codec.adaptive:
                codec.round_(numbers[part.offset : part.offset + part.size], self.noise(part, stage, actor))
        return numbers

    def begin(self, load: Load, shard: Shard, actor: int) -> Load:
        """The first addend as a sum. It takes over the load."""
        before = _value(load) if self._keeps_sums(shard) else None
        self.round_(load.numbers, shard, Stage.FIRST, actor)
        begun = Load(load.numbers, load.peaks, torch.zeros_like(load.numbers) if self.kahan else None)
        if before is not None:
            self._keep(before, begun, shard, of_sum=True)
        return begun

    def add(self, total: Load, load: Load, shard: Shard, actor: int) -> Load:
        """`total + load`, rounded to the format of sums; with Kahan, y = Q(x - c); t = Q(r + y); c = Q(Q(t - r) - y).

        It takes over both. `load` may itself be a sum with a compensation. `actor` names the addition: a rank that adds several
        times takes another number each time, or its roundings would all draw the same.
        """
        before = _value(total).add_(_value(load)) if self._keeps_sums(shard) else None
        whole = self._add(total, load, shard, actor)
        if before is not None:
            self._keep(before, whole, shard, of_sum=True)
        return whole

    def _keeps_sums(self, shard: Shard) -> bool:
        return self.feedback is not None and any(self.codec(part, Stage.PARTIAL).format != FP32 for part in shard.parts)

    def _add(self, total: Load, load: Load, shard: Shard, actor: int) -> Load:
        peaks = torch.maximum(total.peaks, load.peaks)
        if total.lost is None:
            return Load(self.round_(total.numbers.add_(load.numbers), shard, Stage.PARTIAL, actor), peaks)
        addend = load.numbers
        if load.lost is not None:
            addend = self.round_(addend.sub_(load.lost), shard, Stage.KAHAN_LOST_THERE, actor)
        addend = self.round_(addend.sub_(total.lost), shard, Stage.KAHAN_ADDEND, actor)
        numbers = self.round_(total.numbers + addend, shard, Stage.PARTIAL, actor)
        difference = self.round_(numbers - total.numbers, shard, Stage.KAHAN_DIFFERENCE, actor)
        return Load(numbers, peaks, self.round_(difference.sub_(addend), shard, Stage.KAHAN_LOST, actor))

    def fold_messages(
        self, messages: Tensor, shard: Shard, stage: Stage, actors: Iterable[int], out: Tensor | None = None
    ) -> Load:
        """The sum of messages [ranks, bytes], in their order; in `out`, or in memory that the next call may use again. A row
        may be longer than its message."""
        layout = self.messages(shard, stage)
        if not self.adds_plainly(shard):
            total = self.fold((self.read(message, shard, stage) for message in messages), shard, actors)
            return total if out is None else replace(total, numbers=out.copy_(total.numbers))
        with self.timed("decode", messages.device):
            flat, count, stride = messages.view(-1), len(messages), messages.shape[1]
            numbers = self.workspace.scratch(shard.size, torch.float32, messages.device) if out is None else out
            same = all(total_codec(group.codec, self.choices) == group.codec for group in layout.groups)
            wanted = wanted_of_total if same else None  # what is known of the sum is for the total's encoder
            maxima = layout.decode(flat, numbers, None, 1, count, stride, wanted, self.workspace)
            # What is not finite makes the sum so; only peaks that were sent along must be known.
            peaks = layout.no_peaks(messages.device)
            if layout.sends_peaks:
                peaks = layout.peaks(flat, count, stride, self.workspace)
            return Load(numbers, peaks, maxima=maxima if same else None)

    def fold_to_total(self, messages: Tensor, shard: Shard, actors: Iterable[int], out: Tensor) -> None:
        """The sum of messages [ranks, bytes] of addends, as the message that everybody gets: in one pass where that can be."""
        layout, total = self.messages(shard, Stage.ADDEND), self.messages(shard, Stage.TOTAL)
        plain = self.feedback is None and self.adds_plainly(shard)
        if plain and all(group.codec == other.codec and not overflow_unseen(group.codec)
                         for group, other in zip(layout.groups, total.groups, strict=False)):  # fmt: skip
            with self.timed("decode", messages.device):
                noises = self._noises(Stage.TOTAL, 0)
                if layout.fold(messages.view(-1), out, len(messages), messages.shape[1], noises, self.workspace):
                    return
        self.write(self.fold_messages(messages, shard, Stage.ADDEND, actors), shard, Stage.TOTAL, 0, out)

    def _noises(self, stage: Stage, actor: int) -> PartNoise:
        level = 0 if stage in (Stage.TOTAL, Stage.HANDED_OUT) else self.level  # the total is the same for all ranks
        return PartNoise(self.domain, self.seed, self.step, level, stage, actor)

    def adds_plainly(self, shard: Shard) -> bool:
        """Are sums float32, without a compensation?"""
        return not self.kahan and all(group.codec.format == FP32 for group in self.messages(shard, Stage.PARTIAL).groups)

    def end(self, total: Load, shard: Shard) -> Load:
        """A sum that is not rounded to be sent: its compensation goes."""
        if self.feedback is not None and total.lost is not None:
            self.feedback.keep(self.rank, shard, -total.lost, self.factors, of_sum=True)
        return Load(total.numbers, total.peaks)

    def fold(self, loads: Iterable[Load], shard: Shard, actors: Iterable[int]) -> Load:
        """Add one after the other."""
        total: Load | None = None
        for load, actor in zip(loads, actors, strict=True):
            total = self.begin(load, shard, actor) if total is None else self.add(total, load, shard, actor)
        assert total is not None
        return total


def _value(load: Load) -> Tensor:
    """What a load stands for, in memory of its own: its numbers less their compensation."""
    return load.numbers.clone() if load.lost is None else load.numbers - load.lost


def overflow_unseen(codec: Codec) -> bool:
    """May a total be infinite without a header that says so?"""
    return codec.sends_peaks and codec.format == FP32


def wanted_of_total(codec: Codec) -> tuple[bool, bool]:
    """What must be known of a sum before it is encoded."""
    return (True, False) if overflow_unseen(codec) else codec.measures
