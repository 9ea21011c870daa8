"""Topologies: one conformance test over the registry, the textbook's formulas, and a second computation rank by rank."""

from dataclasses import replace
from functools import lru_cache
from math import ceil, log2

import pytest
import rank_by_rank
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowp.predict.architectures import workload_of
from lowp.predict.cluster import Cluster, Device, LinkLevel
from lowp.predict.exchange_cost import bucket_costs
from lowp.predict.prediction import bucketed
from lowp.predict.topologies import TOPOLOGIES, topology_of
from lowp.predict.topologies.base import routes
from lowp.predict.topologies.counted import CountedReduction, counted_pattern
from lowp.predict.wires import wire_of
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions import REDUCTIONS, reduction_of
from lowp.wire.rules import Stage
from lowp.wire.settings import Parameters
from lowp.wire.traffic import bytes_of_bucket, waits_of

A, B, N = 1e-5, 1e9, 8e7  # seconds, bytes a second, bytes
BY_NAME = {str(topology): topology for topology in TOPOLOGIES}
# What does not know of nodes takes as long on nodes with equal links as without nodes.
FLAT = ("all_reduce(ring)", "two_shot", "one_shot", "ring", "tree", "sequential", "halving_doubling")


def flat(latency=A, bandwidth=B, overhead=0.0):
    return Cluster("flat", Device("d"), (LinkLevel("network", bandwidth, latency, overhead),))


def nodes(size=4, inside=None, between=None):
    inside = inside or LinkLevel("node", B, A, ranks=size)
    return Cluster("nodes", Device("d"), (replace(inside, ranks=size), between or LinkLevel("network", B, A)))


def taken(topology, cluster, ranks, size=N):
    """Seconds of messages, for so many bytes in float32."""
    found = []
    for route in routes(topology.of_size(1 << 30), cluster.arrange(ranks)):
        length = size / route.shards
        found.append(sum(leg.times * (leg.latency(length) + leg.busy(length)[0]) for leg in route.legs))
    return min(found)


FORMULAS = {
    "ring": lambda p: 2 * (p - 1) * A + 2 * (p - 1) / p * N / B,
    "all_reduce(ring)": lambda p: 2 * (p - 1) * A + 2 * (p - 1) / p * N / B,
    "tree": lambda p: 2 * ceil(log2(p)) * (A + N / B),
    "all_reduce(tree)": lambda p: 2 * ceil(log2(p)) * A + 2 * N / B,
    "halving_doubling": lambda p: 2 * log2(p) * A + 2 * (p - 1) / p * N / B,
    "two_shot": lambda p: 2 * A + 2 * (p - 1) / p * N / B,
    "one_shot": lambda p: A + (p - 1) * N / B,
}


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_textbooks_formulas(name, ranks):
    assert taken(BY_NAME[name], flat(), ranks) == pytest.approx(FORMULAS[name](ranks), rel=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_the_formula_of_two_levels(size):
    """2 (G - 1) a1 + 2 (G - 1) / G n / B1 + 2 (N - 1) a2 + 2 (N - 1) / N (n / G) / B2, for a torus whose rows are nodes."""
    count, slow = 8, LinkLevel("network", B / 10, 5 * A)
    inside = 2 * (size - 1) * A + 2 * (size - 1) / size * N / B
    between = 2 * (count - 1) * 5 * A + 2 * (count - 1) / count * N / size / (B / 10)
    cluster = nodes(size, between=slow)
    assert taken(BY_NAME["torus"], cluster, size * count) == pytest.approx(inside + between, rel=1e-9)
    # lowp's own sends as many bytes in fewer waits.
    own = 2 * A + 2 * (size - 1) / size * N / B + 2 * 5 * A + 2 * (count - 1) / count * N / size / (B / 10)
    assert taken(topology_of(f"hierarchical({size})"), cluster, size * count) == pytest.approx(own, rel=1e-9)


def test_masters_send_everything_between_nodes():
    """Reduce / ring / broadcast: the leader hears from all others of its node, and the ring has the whole message."""
    slow = LinkLevel("network", B / 10, 5 * A)
    expected = 2 * (A + 3 * N / B) + 2 * 7 * 5 * A + 2 * 7 / 8 * N / (B / 10)
    assert taken(topology_of("hierarchical(4, leaders)"), nodes(4, between=slow), 32) == pytest.approx(expected, rel=1e-9)


RANK_BY_RANK = [
    pytest.param(reduction, ranks, id=f"{reduction}-{ranks}")
    for reduction in (*(each.of_size(1 << 20) for each in REDUCTIONS), reduction_of("hierarchical(4)"))
    for ranks in (2, 3, 5, 8, 9)
    if ranks % getattr(reduction, "size", 1) == 0  # a smaller last node has other rounds
]


@pytest.mark.parametrize(("reduction", "ranks"), RANK_BY_RANK)
def test_every_reduction_rank_by_rank(reduction, ranks):
    """All ranks, message by message, come to the same time as the rounds of one of them."""
    shards = reduction.shards(ranks)
    lengths = dict.fromkeys(Stage, N / shards)
    found = rank_by_rank.seconds(reduction, ranks, lengths.__getitem__, A, B)
    # Where a tree is not full, a branch may come early, and its latency is hidden.
    exact = str(reduction) != "tree" or ranks in (2, 8)
    assert taken(CountedReduction(reduction), flat(), ranks) == pytest.approx(found, rel=1e-9 if exact else 1e-3)


@pytest.mark.parametrize("name", BY_NAME)
def test_conformance(name):
    """Of every topology: nothing on one rank is asked; more bandwidth, less latency and fewer bytes are never slower; times are
    finite; and the links of a cluster count."""
    topology = BY_NAME[name]
    for cluster, ranks in ((flat(), 2), (flat(), 8), (nodes(4), 16), (nodes(8), 8), (nodes(4), 64)):
        usual = taken(topology, cluster, ranks)
        assert 0 < usual < 1e4
        assert taken(topology, cluster, ranks, N / 2) <= usual
        for level in range(len(cluster.levels)):
            for better in ({"bandwidth": 2 * B}, {"latency": A / 2}):
                levels = list(cluster.levels)
                levels[level] = replace(levels[level], **better)
                assert taken(topology, replace(cluster, levels=tuple(levels)), ranks) <= usual * (1 + 1e-12)
        shared = replace(cluster, levels=(*cluster.levels[:-1], replace(cluster.levels[-1], shared=2)))
        assert taken(topology, shared, ranks) >= usual * (1 - 1e-12)


def test_messages_from_rank_to_rank_are_slower_than_collectives():
    """By how much, a level says: NCCL's all-gather and all-reduce are half again as fast as its messages."""
    slower = replace(flat(), levels=(replace(flat().levels[0], latency=0.0, point_to_point=0.5),))
    usual = replace(flat(), levels=(replace(flat().levels[0], latency=0.0),))
    for name, times in {"all_reduce": 1.0, "one_shot": 1.0, "ring": 2.0, "two_shot": 1.5}.items():
        assert taken(BY_NAME[name], slower, 8, 1e9) == pytest.approx(times * taken(BY_NAME[name], usual, 8, 1e9), rel=1e-6)
    with pytest.raises(ValueError, match="point_to_point: 0 must be above 0"):
        replace(flat().levels[0], point_to_point=0.0)


@settings(max_examples=40)
@given(
    st.sampled_from(FLAT),
    st.sampled_from([(2, 2), (2, 8), (4, 4), (8, 4)]),
    st.floats(1e-7, 1e-2),
    st.floats(1e6, 1e12),
    st.floats(0, 1e-3),
    st.floats(1, 1e9),
)
def test_two_levels_with_equal_links_are_one(name, shape, latency, bandwidth, overhead, size):
    per_node, count = shape
    link = LinkLevel("x", bandwidth, latency, overhead)
    two, one = nodes(per_node, link, link), Cluster("one", Device("d"), (link,))
    there, here = (taken(BY_NAME[name], cluster, per_node * count, size) for cluster in (two, one))
    assert there == pytest.approx(here, rel=1e-9)


SCALED = ("two_shot", "one_shot", "ring", "tree", "sequential", "hierarchical(8)", "hierarchical(4)", "hierarchical(3)",
          "hierarchical(8, gather)", "hierarchical(16, leaders)")  # fmt: skip


@pytest.mark.parametrize("ranks", [48, 96, 256])
@pytest.mark.parametrize("name", SCALED)
def test_what_is_scaled_is_what_would_be_counted(name, ranks):
    """Patterns of many nodes come from those of few: they are the ones that counting all ranks gives."""
    arrangement = nodes(8, between=LinkLevel("network", B, A, shared=4)).arrange(ranks)
    topology = topology_of(name)
    (found,), counted = topology.patterns(arrangement), counted_pattern(topology.reduction, False, arrangement)
    assert found.shards == counted.shards
    assert found.last_work == counted.last_work
    assert [(r.times, r.stage, r.work) for r in found.rounds] == [(r.times, r.stage, r.work) for r in counted.rounds]
    assert all((a.loads == b.loads).all() for a, b in zip(found.rounds, counted.rounds, strict=True))


def test_steps_of_thousands_of_ranks():
    (ring,) = routes(topology_of("ring"), flat().arrange(1024))
    assert ring.waits == 2046
    (shots,) = routes(topology_of("two_shot"), flat().arrange(4096))
    assert [leg.messages for leg in shots.legs] == [4095, 4095]


def test_every_message_is_sent_and_received():
    """What a rank says it receives is what the others say they send to it."""
    for reduction in REDUCTIONS:
        reduction = reduction.of_size(1 << 20)
        sent, received = {}, {}
        for rank in range(6):
            for wait in waits_of(reduction, rank, 6):
                for parcel in wait.sent:
                    sent.setdefault((rank, parcel.peer), []).append((parcel.stage, parcel.shards))
                for parcel in wait.received:
                    received.setdefault((parcel.peer, rank), []).append((parcel.stage, parcel.shards))
        assert sent == received, str(reduction)


CODECS = ("e5m2/none", "e4m3fn/local", "e2m1fn/block:32", "nvfp4", "adaptive:4.4", "topk:0.01", "e5m2/aps_delayed")
COUNTED = ("two_shot", "one_shot", "ring", "hierarchical(4)", "hierarchical(4, gather)", "hierarchical(4, leaders)", "tree")


@lru_cache(maxsize=8)
def layers_of(text):
    workload, wire = workload_of("resnet18-cifar"), wire_of(text)
    parameters = Parameters({layer.name: torch.Size(layer.shape) for layer in workload.layers}, wire.settings)
    return [parameters.bucket(names, 0) for names in bucketed(workload, 25)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("reduction", COUNTED)
def test_bytes_are_those_that_the_counting_link_counts(reduction, kind):
    """On real buckets, whose layers end anywhere, to .2 % (top-k, whose parts have headers of their own: 1 %)."""
    from lowp.predict.exchange_cost import CUTS

    for codec in CODECS:
        wire = wire_of(f"{codec}@{reduction}")
        own = wire.topology(1).reduction
        for bucket in layers_of(codec)[:2]:
            for ranks in (2, 8):
                arrangement = flat().arrange(ranks)
                found = sum(cost.bytes_sent for cost in bucket_costs(bucket, wire, arrangement, Device("d", kind)))
                sums = wire.settings.sums(own)
                counted = bytes_of_bucket(bucket, own, 0, ranks, sums, False, CUTS[kind])
                assert found == pytest.approx(counted, rel=0.01 if "topk" in codec else 0.002), (codec, ranks)


@given(st.integers(1, 64), st.sampled_from([2, 4, 8]), st.sampled_from(["two_shot", "ring", "one_shot", "tree"]))
@settings(max_examples=20)
def test_bytes_of_equal_shards_are_exact(units, ranks, reduction):
    wire = wire_of(f"e4m3fn/local@{reduction}")
    codec = wire.settings.codecs()[0]
    bucket = Bucket.of((Layer("x", 64 * ranks * units, codec, 0),))
    (cost,) = bucket_costs(bucket, wire, flat().arrange(ranks), Device("d"))
    own = wire.topology(1).reduction
    assert cost.bytes_sent == bytes_of_bucket(bucket, own, 0, ranks, wire.settings.sums(own), False, (1 << 28, 1 << 28))


def test_names():
    assert str(topology_of("hierarchical", node=8)) == "hierarchical(8)"
    assert str(topology_of("hierarchical(leaders)", node=4)) == "hierarchical(4, leaders)"
    with pytest.raises(ValueError, match="unknown reduction 'two_shoot'; did you mean 'two_shot'"):
        topology_of("two_shoot")
    with pytest.raises(ValueError, match="a node has at least one rank, not 0"):
        topology_of("hierarchical(0)")
