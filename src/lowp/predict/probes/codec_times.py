"""How long a codec takes for a number: to encode it, to decode it and add it to a sum, to decode it.

One rank of two reduces a chunk, through the wire's own code, over a link on which its own messages come back. `one_shot`
encodes every number and adds it up twice; `two_shot` encodes every number, adds up and encodes half of them, and decodes all.
The times of both are those that the wire's meter sees. What a chunk takes beside its numbers (Python, mostly) is found with
chunks of a few numbers.

Where gradients travel in float16 or bfloat16 by torch's own hooks, torch casts them, and its all-reduce adds them up. How long
the casts take is measured; how long gloo adds is the difference in processor time between all-reduces of as many bytes.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.predict.cluster import CodecSpeed
from lowp.predict.probes.meeting import Meeting
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.codec import Codec
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.link import ChunkLink, GroupLink, Pending
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import Meter
from lowp.wire.settings import Settings
from lowp.wire.warm_up import warm_up

NUMBERS = {"cpu": 1 << 21, "cuda": 1 << 25}  # of a chunk
FEW = 1 << 12
ROUNDS = 9
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SLOWEST = 1e-6  # seconds a number, beyond which a figure is a mistake


class EchoLink(GroupLink):
    """Rank 0 of two ranks: what it sends comes back as the other's."""

    def __init__(self) -> None:
        self.rank, self.world, self.bytes_sent, self._taken = 0, 2, 0, 0

    def maximum(self, numbers: Tensor) -> list[Pending]:
        return []

    def for_chunk(self) -> ChunkLink:
        return _EchoChunk(self, self.take_number())


class _EchoChunk(ChunkLink):
    def send_receive(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        for sent, received in zip(sends.values(), receives.values(), strict=True):
            count = min(sent.numel(), received.numel())
            received[:count].copy_(sent[:count])
        return []

    def share(self, messages: Tensor, lengths: Sequence[int]) -> list[Pending]:
        messages[1].copy_(messages[0])
        return []


@dataclass
class CodecRun:
    """A chunk that can be reduced again and again."""

    settings: Settings
    reduction: Reduction
    numbers: Tensor

    def __post_init__(self) -> None:
        codec = self.settings.codec_at(self.settings.format, 0)
        self._bucket = Bucket.of((Layer("numbers", self.numbers.numel(), codec, 0),))
        self._state, self._link, self._room = State(), EchoLink(), self.numbers.clone()

    def __call__(self) -> Meter:
        meter, scheduler = Meter(), ChunkScheduler()
        self._room.copy_(self.numbers)
        exchange = BucketExchange(
            self._room, self._bucket, self.settings, self.reduction, self._link, self._state, meter, True, lambda marks: None
        )
        exchange.start(scheduler)
        scheduler.run()
        return meter


def codec_speed(meeting: Meeting, settings: Settings, seconds: float) -> tuple[CodecSpeed, float | None]:
    """Seconds a number, and seconds that a chunk takes beside its numbers.

    None on CUDA: there the wire launches what it has recorded, which takes as long on all devices (`HOST_SECONDS`).
    """
    numbers = torch.randn(_numbers(meeting, settings, seconds), device=meeting.device).mul_(1e-3)
    runs = {str(how): CodecRun(settings, how, numbers) for how in (OneShot(), TwoShot())}
    few = CodecRun(settings, TwoShot(), numbers[:FEW].clone())
    spent: dict[tuple[str, str], list[float]] = {(how, what): [] for how in runs for what in ("encode", "decode")}

    def metered(how: str) -> Callable[[], None]:
        def call() -> None:
            report = runs[how]().finish()
            spent[how, "encode"].append(report.encode_seconds)
            spent[how, "decode"].append(report.decode_seconds)

        return call

    calls: dict[str, Callable[[], object]] = {how: metered(how) for how in runs}
    calls["few"] = few
    for call in calls.values():
        call()
    times = meeting.in_turns(calls, seconds, ROUNDS)
    count = numbers.numel()
    encode, added, twice, rest = (
        statistics.median(meeting.mean(spent[kind][1:])) / count
        for kind in (("one_shot", "encode"), ("one_shot", "decode"), ("two_shot", "encode"), ("two_shot", "decode"))
    )
    add = added / 2
    decode = max(0.0, rest + twice - encode - (2 * add + encode) / 2)
    speed = CodecSpeed(*(min(value, _SLOWEST) for value in (encode, add, decode)))
    return speed, statistics.median(meeting.mean(times["few"])) if meeting.device.type == "cpu" else None


def _numbers(meeting: Meeting, settings: Settings, seconds: float) -> int:
    """Of a chunk: as usual, but fewer where a codec is slow (without kernels), so that some rounds fit into the time."""
    least = NUMBERS[meeting.device.type] >> 5
    run = CodecRun(settings, TwoShot(), torch.randn(least, device=meeting.device).mul_(1e-3))
    run()
    (took,) = meeting.largest([meeting.seconds(run)])
    count = least
    while count < NUMBERS[meeting.device.type] and 2 * took * (2 * count / least) * ROUNDS / 2 < seconds:
        count *= 2
    return count


def prepare(codecs: Sequence[Codec], device: torch.device) -> None:
    """Build what kernels these codecs need."""
    for codec in codecs:
        warm_up({codec}, device, reduction=TwoShot())
        warm_up({codec}, device, reduction=OneShot())


def cast_speed(meeting: Meeting, name: str, seconds: float) -> CodecSpeed:
    """Of torch's hooks: cast and divide, add (by gloo; on GPUs it is hidden in the transfer), cast back."""
    dtype, count = CASTS[name], NUMBERS[meeting.device.type]
    wide = torch.randn(count, device=meeting.device).mul_(1e-3)
    narrow = wide.to(dtype)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: wide.to(dtype).div_(2),
        "decode": lambda: wide.copy_(narrow),
    }
    for call in calls.values():
        call()
    found = meeting.in_turns(calls, seconds, ROUNDS)
    encode, decode = (statistics.median(meeting.mean(found[what])) / count for what in calls)
    return CodecSpeed(encode, addition_seconds(meeting, dtype, seconds), decode)


def addition_seconds(meeting: Meeting, dtype: torch.dtype, seconds: float) -> float:
    """Of gloo, for one number of a dtype; 0 where nobody can tell."""
    if meeting.ranks == 1 or meeting.device.type == "cuda":
        return 0.0
    count = 1 << 19
    kinds = {kind: torch.zeros(count * 4 // kind.itemsize, dtype=kind) for kind in (torch.float32, dtype)}
    spent: dict[torch.dtype, list[float]] = {kind: [] for kind in kinds}

    def reduced(kind: torch.dtype) -> Callable[[], None]:
        def call() -> None:
            began = time.process_time()
            dist.all_reduce(kinds[kind], group=meeting.group)
            spent[kind].append(time.process_time() - began)

        return call

    meeting.in_turns({kind: reduced(kind) for kind in kinds}, seconds, ROUNDS)
    usual, slower = (statistics.median(meeting.mean(times)) for times in spent.values())
    added = kinds[dtype].numel() * (meeting.ranks - 1) / meeting.ranks  # by this rank
    return max(0.0, slower - usual) / added
