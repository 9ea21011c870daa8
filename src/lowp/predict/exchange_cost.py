"""What the exchange of one bucket costs: bytes, messages, and the seconds of every step of its chunks.

The topology says how many messages of how many shards there are (topologies/base.py). How long a shard's message is at every
stage is the codec's to say: `Rules.codec` names the codec of a stage, `Codec.wire_bytes` its bytes. A chunk's shards are taken
to have the same number of numbers and of parts, which they have but for the ends of layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lowp.predict.cluster import Arrangement, Device
from lowp.predict.codec_speed import HOST_SECONDS, speed_of, torch_speed
from lowp.predict.topologies.all_reduce import AllReduce
from lowp.predict.topologies.base import Amount, Route, Topology, routes
from lowp.predict.topologies.counted import CountedReduction
from lowp.predict.wires import WireChoice
from lowp.tensor.noise import Domain
from lowp.wire.adaptive import AdaptiveLayout
from lowp.wire.codec import Codec
from lowp.wire.link import agreement_bytes
from lowp.wire.plan import CPU_CUTS, CUDA_CUTS, Bucket, Part
from lowp.wire.reductions.hierarchical import Hierarchical
from lowp.wire.rules import Rules, Stage

CUTS = {"cpu": CPU_CUTS, "cuda": CUDA_CUTS}


@dataclass(frozen=True)
class ChunkStep:
    """Work of the processor, then messages: seconds for which the link is taken, and seconds until they are there.

    Numbers are encoded, after what came before has been decoded and added. `handling`: seconds of the processor for the
    messages, while they travel. `overhead`: what messages take of `busy` whatever their length.
    """

    decode: float
    encode: float
    busy: float = 0.0
    latency: float = 0.0
    handling: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.decode + self.encode + self.busy + self.latency


@dataclass(frozen=True)
class ChunkCost:
    """The last step has work alone."""

    steps: tuple[ChunkStep, ...]
    bytes_sent: float  # by the busiest rank
    messages: float
    waits: int  # one after the other

    @property
    def seconds(self) -> float:
        """Alone, from beginning to end."""
        return sum(step.seconds for step in self.steps)


@dataclass(frozen=True)
class Kin:
    """The numbers of a bucket that have the same codec: how many there are, in how many layers, with how many bits each."""

    codec: Codec
    numbers: int
    layers: int
    budget: float


@lru_cache(maxsize=4096)  # buckets are compared by identity
def kin_of(bucket: Bucket) -> tuple[Kin, ...]:
    found: dict[Codec, list[tuple[int, float]]] = {}
    for layer in bucket.layers:
        found.setdefault(layer.codec, []).append((layer.size, (layer.budget or layer.codec.bits) * layer.size))
    return tuple(
        Kin(codec, count, len(layers), sum(bits for _, bits in layers) / max(1, count))
        for codec, layers in found.items()
        for count in (sum(size for size, _ in layers),)
    )


def bucket_costs(bucket: Bucket, wire: WireChoice, arrangement: Arrangement, device: Device) -> list[ChunkCost]:
    """A cost for every chunk of the bucket, in order."""
    topology = wire.topology(arrangement.node).of_size(bucket.size)
    if topology == AllReduce():
        topology = _torchs(device)
    kin, cuts = kin_of(bucket), CUTS[device.kind]
    chunks = [chunk.size for chunk in bucket.chunks(1, cuts)] if not wire.plain else [bucket.size]
    known: dict[int, ChunkCost] = {}
    for size in set(chunks):
        parts = _Parts(kin, size / max(1, bucket.size), topology, wire, arrangement.ranks, cuts[1])
        costs = (_cost(route, parts, wire, device) for route in routes(topology, arrangement))
        known[size] = min(costs, key=lambda cost: cost.seconds)
    found = [known[size] for size in chunks]
    agreed = sum(each.layers for each in kin if each.codec.scale.agreed)
    if agreed and found and not wire.plain:
        found[0] = _after_agreement(found[0], agreed, arrangement, _torchs(device))
    return found


def _torchs(device: Device) -> AllReduce:
    """torch's own all-reduce: gloo has no trees."""
    return AllReduce("ring" if device.kind == "cpu" else "")


class _Parts:
    """A shard of a chunk, as the mean of all: the numbers that it has of every codec, and the lengths of its messages."""

    def __init__(
        self, kin: Iterable[Kin], share: float, topology: Topology, wire: WireChoice, ranks: int, longest: int
    ) -> None:
        self.kin, self._share, self._longest = tuple(kin), share, longest
        reduction = topology.reduction if isinstance(topology, CountedReduction) else None
        sums = wire.settings.sum_format if reduction is None else wire.settings.sums(reduction)
        self._rules = Rules(ranks, Domain.WIRE, sums, wire.settings.kahan, addends=topology.addends(ranks))
        self._between = reduction.between(self._rules) if isinstance(reduction, Hierarchical) else self._rules

    def numbers(self, each: Kin, shards: float) -> float:
        return each.numbers * self._share / shards

    def codec(self, each: Kin, stage: Stage) -> Codec:
        rules = self._between if stage == Stage.PARTIAL else self._rules
        return rules.codec(Part(0, each.codec, 0, 0, 0, 0), stage)

    def length(self, stage: Stage, shards: float) -> float:
        """Bytes of a shard's message."""
        total = 0.0
        for each in self.kin:
            numbers = self.numbers(each, shards)
            parts = max(1, round(each.layers * self._share / shards), -(-int(numbers) // self._longest))
            total += parts * _wire_bytes(self.codec(each, stage), -(-numbers // parts), each.budget)
        return total


@lru_cache(maxsize=1 << 15)
def _wire_bytes(codec: Codec, numbers: float, budget: float) -> int:
    count = int(numbers)
    if codec.adaptive:
        return AdaptiveLayout.of([count], [count], [budget], codec.stochastic).length
    return codec.wire_bytes(count)


def _cost(route: Route, parts: _Parts, wire: WireChoice, device: Device) -> ChunkCost:
    steps, sent, messages = [], 0.0, 0.0
    begin, end = _casts(parts, wire, device)
    for leg in route.legs:
        length = parts.length(leg.stage, route.shards)
        decode, encode = _work(leg.work, parts, route.shards, wire, device)
        # Equal rounds in a row are one step: the work between them is waited for.
        waiting = leg.times * leg.latency(length) + (leg.times - 1) * (decode + encode)
        handling = leg.times * leg.handling * length
        busy, overhead = (leg.times * each for each in leg.busy(length))
        steps.append(ChunkStep(decode, encode + begin, busy, waiting, handling, overhead))
        sent += leg.times * leg.sent * length
        messages += leg.times * leg.messages
        begin = 0.0
    decode, encode = _work(route.last_work, parts, route.shards, wire, device)
    return ChunkCost((*steps, ChunkStep(decode + end, encode)), sent, messages, route.waits)


def _work(work: Iterable[Amount], parts: _Parts, shards: float, wire: WireChoice, device: Device) -> tuple[float, float]:
    """Seconds to decode and add, and to encode.

    Of torch's own reductions nobody encodes; on GPUs additions are hidden in the transfer's bandwidth.
    """
    seconds = {"encode": 0.0, "add": 0.0, "decode": 0.0}
    for what, stage, count in work:
        if wire.plain and (what != "add" or device.kind == "cuda"):
            continue
        for each in parts.kin:
            codec = parts.codec(each, stage)
            speed = torch_speed(str(wire.settings.format), device) if wire.plain else speed_of(codec, device)
            seconds[what] += count * parts.numbers(each, shards) * getattr(speed, what)
    return seconds["add"] + seconds["decode"], seconds["encode"]


def _casts(parts: _Parts, wire: WireChoice, device: Device) -> tuple[float, float]:
    """Seconds before and after that are no matter of the reduction: the host's for every bucket; casts of torch's hooks."""
    if wire.plain and wire.settings.format == "fp32":
        return 0.0, 0.0
    if wire.plain:
        speed = torch_speed(str(wire.settings.format), device)
        numbers = sum(parts.numbers(each, 1) for each in parts.kin)
        return HOST_SECONDS[device.kind] + numbers * speed.encode, numbers * speed.decode
    return HOST_SECONDS[device.kind] if device.chunk_overhead is None else device.chunk_overhead, 0.0


def _after_agreement(cost: ChunkCost, layers: int, arrangement: Arrangement, torchs: AllReduce) -> ChunkCost:
    """One byte a layer, the largest of all ranks, by torch: before anything can be encoded."""
    ways = []
    for route in routes(torchs, arrangement):
        length = layers / route.shards
        taken = [(leg.times, *leg.busy(length)) for leg in route.legs]
        busy, overhead = sum(n * own for n, own, _ in taken), sum(n * own for n, _, own in taken)
        latency = sum(leg.times * leg.latency(length) for leg in route.legs)
        ways.append((ChunkStep(0.0, 0.0, busy, latency, overhead=overhead), route.waits))
    step, waits = min(ways, key=lambda way: way[0].seconds)
    sent = agreement_bytes(layers, arrangement.ranks)
    return ChunkCost((step, *cost.steps), cost.bytes_sent + sent, cost.messages + waits, cost.waits + waits)
