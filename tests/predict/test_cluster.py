"""Clusters: read from TOML with every mistake named, written so that they are read again, ranks laid on them."""

import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowp.predict.cluster import Cluster, Device, LinkLevel, Stragglers, expected_maximum
from lowp.predict.cluster_file import cluster_from, cluster_here, cluster_of, cluster_toml, known_clusters, read_cluster
from lowp.predict.toml_keys import ClusterError

GOOD = """
name = "two levels"
source = "a test"
[device]
name = "chip"
memory = "80 GB"
bandwidth = "2 TB/s"
flops = "100 TFLOP/s"
efficiency = 0.5
samples = { resnet50 = 1000, gpt2 = [[8, 60], [16, 71]] }
[device.times.mine]
batch = 4
forward = "1 ms"
backward = "2 ms"
excess = { fp32 = "1 ms", compressed = "3 ms" }
layers = { weight = "1.5 ms", bias = "0.5 ms" }
[codecs."e5m2/aps"]
encode = "0.2 ns"
add = "0.1 ns"
decode = "0.2 ns"
[[levels]]
name = "node"
ranks = 8
bandwidth = "100 GB/s"
latency = [["4 kB", "3 us"], ["1 MB", "9 us"]]
[[levels]]
name = "network"
bandwidth = "100 Gbit/s"
efficiency = 0.8
latency = "5 us"
overhead = "1 us"
shared = 4
[stragglers]
variation = 0.02
"""


def read(text, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return read_cluster(path)


def test_everything_that_a_file_says(tmp_path):
    cluster = read(GOOD, tmp_path)
    assert cluster.device.flops == 50e12
    assert cluster.device.samples == {"resnet50": ((1, 1000.0),), "gpt2": ((8, 60.0), (16, 71.0))}
    assert cluster.device.times["mine"].layers["weight"] == pytest.approx(1.5e-3)
    assert cluster.device.times["mine"].excess == {"fp32": pytest.approx(1e-3), "compressed": pytest.approx(3e-3)}
    assert cluster.device.codecs["e5m2/aps"].add == pytest.approx(1e-10)
    assert cluster.levels[1].bandwidth == pytest.approx(10e9)
    assert cluster.levels[1].shared == 4
    assert cluster.stragglers.variation == 0.02
    assert cluster.name == "two levels"


def test_what_is_written_is_read_again(tmp_path):
    cluster = read(GOOD, tmp_path)
    assert cluster_from(tomllib.loads(cluster_toml(cluster))) == cluster


@pytest.mark.parametrize("name", known_clusters())
def test_known_clusters(name):
    cluster = cluster_of(name)
    assert cluster.name == name
    assert cluster.source
    assert cluster_from(tomllib.loads(cluster_toml(cluster))) == cluster
    assert cluster.arrange(4096 if cluster.levels[-1].ranks is None else 1).ranks


MISTAKES = [
    ('"100 Gbit/s"', '"-100 Gbit/s"', "levels[1].bandwidth: '-100 Gbit/s' must be above 0"),
    ('"100 Gbit/s"', "100", "levels[1].bandwidth: 100 has no unit; write a bandwidth as '100 Gbit/s' or '12.5 GB/s'"),
    ('"5 us"', '"-5 us"', "levels[1].latency: '-5 us' must be at least 0"),
    ("efficiency = 0.8", "efficiency = 1.5", "levels[1].efficiency: 1.5 must be at most 1"),
    ("shared = 4", "shared = 3", "levels[1].shared: 3 does not divide the 8 ranks of a node"),
    ("shared = 4", "shred = 4", "levels[1].shred: no such key; did you mean 'shared'?"),
    ("ranks = 8", "", "levels[0].ranks: is missing; only the outermost level joins any number of ranks"),
    ("ranks = 8", "ranks = 0", "levels[0].ranks: 0 must be at least 1"),
    ("ranks = 8", 'ranks = "8"', "levels[0].ranks: '8' is not a whole number"),
    ('bandwidth = "100 GB/s"', "", "levels[0].bandwidth: is missing"),
    ("variation = 0.02", "variation = 2", "stragglers.variation: 2 must be at most 1"),
    ("[stragglers]", "[straglers]", "straglers: no such key; did you mean 'stragglers'?"),
    ('memory = "80 GB"', "memory = 80", "device.memory: 80 has no unit"),
    ("resnet50 = 1000", 'resnet50 = "fast"', "device.samples.resnet50: 'fast' is neither samples a second nor a list"),
    ("resnet50 = 1000", "resnet50 = -1", "device.samples.resnet50: batches are at least 1 and samples a second above 0"),
    ('["1 MB", "9 us"]', '["1 kB", "9 us"]', "levels[0].latency: sizes must ascend, and latencies must not fall with them"),
    ('add = "0.1 ns"', "", "codecs.e5m2/aps.add: is missing"),
    ('name = "chip"', 'kind = "tpu"', "device.kind: 'tpu' is not one of cuda, cpu"),
    ('name = "chip"', 'nmae = "chip"', "device.nmae: no such key; did you mean 'name'"),
    ("[device]", "[devic]", "devic: no such key; did you mean 'device'?"),
    ("batch = 4", "", "device.times.mine.batch: is missing"),
    ("compressed =", "packed =", "device.times.mine.excess.packed: no such kind of wire; there are fp32, hook, compressed"),
    ('forward = "1 ms"', 'forward = "1e400 ms"', "device.times.mine.forward: '1e400 ms' is too large"),
    ('["1 MB", "9 us"]', '["1 MB", "1e400 s"]', "levels[0].latency: '1e400 s' is too large"),
    ("variation = 0.02", f"variation = 1{400 * '0'}", f"stragglers.variation: 1{79 * '0'}... is not a number"),
    ("batch = 4", f"batch = 1{400 * '0'}", f"device.times.mine.batch: 1{79 * '0'}... is not a whole number"),
    ("[16, 71]", "[8, 71]", "device.samples.gpt2: every batch has one rate"),
    ("[16, 71]", "[true, 71]", "device.samples.gpt2: [[8, 60], [True, 71]] is neither samples a second nor a list"),
    (
        'codecs."e5m2/aps"',
        'codecs."e5m2/apss"',
        "codecs.e5m2/apss: wire 'e5m2/apss': unknown scale 'apss'; did you mean 'aps'?",
    ),
    ('codecs."e5m2/aps"', 'codecs."torch fp17"', "codecs.torch fp17: wire 'fp17': unknown format 'fp17'; did you mean 'fp16'"),
    ('compressed = "3 ms"', 'compressed = "-3 ms"', "device.times.mine.excess.compressed: '-3 ms' must be at least 0"),
]


@pytest.mark.parametrize(
    ("old", "new", "said"), MISTAKES, ids=[said.split(":")[0] + f" {i}" for i, (_, _, said) in enumerate(MISTAKES)]
)
def test_every_mistake_is_one_line_that_names_the_file_and_the_key(old, new, said, tmp_path):
    assert old in GOOD
    with pytest.raises(ClusterError) as error:
        read(GOOD.replace(old, new, 1), tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'my.toml'}: {said}")
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ClusterError, match="No such file"):
        cluster_of(str(tmp_path / "none.toml"))
    with pytest.raises(ClusterError, match="is a directory"):
        cluster_of(tmp_path)
    with pytest.raises(ClusterError, match=r"my.toml: line 2, column 5: invalid value"):
        read("[a]\nb = ?\n", tmp_path)
    with pytest.raises(ClusterError, match=r"unknown cluster 'dgx-h10' .*; did you mean 'dgx-h100'"):
        cluster_of("dgx-h10")


def test_without_levels_there_is_one_device():
    alone = cluster_from({"device": {}, "levels": []})
    assert alone == cluster_from({"device": {}})
    assert alone.arrange(1).ranks == 1
    with pytest.raises(ValueError, match=r"ranks: 2 need links, and cluster cluster has none \(\[\[levels\]\]"):
        alone.arrange(2)


def test_levels_must_divide():
    levels = (LinkLevel("a", 1e9, 0, ranks=8), LinkLevel("b", 1e9, 0, ranks=12), LinkLevel("c", 1e9, 0))
    with pytest.raises(ValueError, match=r"levels\[1\].ranks: 12 ranks do not divide into groups of 8 \(level 'a'\)"):
        Cluster("x", Device("d"), levels)


def test_ranks_are_laid_on_nodes():
    levels = (LinkLevel("node", 1e9, 0, ranks=8), LinkLevel("rack", 1e9, 0, ranks=32), LinkLevel("hall", 1e9, 0, ranks=64))
    cluster = Cluster("x", Device("d"), levels)
    assert cluster.arrange(3).sizes == (3,)
    assert cluster.arrange(32).sizes == (8, 32)
    assert cluster.arrange(64).sizes == (8, 32, 64)
    laid = cluster.arrange(64)
    assert [laid.level(0, other) for other in (1, 7, 8, 31, 32, 63)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"ranks: 12 do not divide into groups of 8 \(level 'node'\) of cluster x"):
        cluster.arrange(12)
    with pytest.raises(ValueError, match="ranks: 128 need a level of links beyond 'hall', which joins 64"):
        cluster.arrange(128)
    with pytest.raises(ValueError, match="ranks: 0 must be at least 1"):
        cluster.arrange(0)


def test_latency_by_size():
    level = LinkLevel("x", 1e9, 1e-6, latencies=((1e3, 1e-6), (1e6, 5e-6)))
    assert [level.latency_of(size) for size in (0, 1e3, 500_500, 1e6, 1e9)] == pytest.approx([1e-6, 1e-6, 3e-6, 5e-6, 5e-6])


def test_the_slowest_rank():
    """The expected maximum of normal numbers: known values, and drawn ones."""
    assert [expected_maximum(n) for n in (1, 2, 3, 10, 1000)] == pytest.approx(
        [0, 1 / math.sqrt(math.pi), 0.8463, 1.5388, 3.2414], abs=1e-4
    )
    drawn = np.random.default_rng(0).standard_normal((20_000, 64)).max(1).mean()
    assert expected_maximum(64) == pytest.approx(drawn, abs=0.02)
    assert Stragglers(0.1).slowest(2) == pytest.approx(1 + 0.1 / math.sqrt(math.pi))


def test_samples_by_batch():
    device = Device("d", samples={"one": ((64, 100.0),), "two": ((32, 80.0), (64, 100.0))})
    assert device.step_seconds("one", 32) == 0.32
    assert [device.step_seconds("two", batch) for batch in (32, 64)] == pytest.approx([0.4, 0.64])
    assert device.step_seconds("two", 128) == pytest.approx(0.64 + 2 * 0.24)
    assert device.step_seconds("two", 1) > 0.1
    assert device.step_seconds("three", 1) is None
    falling = replace(device, samples={"x": ((32, 100.0), (64, 80.0))})  # larger batches are slower: no part is fixed
    assert falling.step_seconds("x", 1) > 0


def test_a_plan_for_these_ranks_wants_a_cluster_of_their_kind():
    cpu = torch.device("cpu")
    assert cluster_here("cpu-1g", cpu).name == "cpu-1g"
    with pytest.raises(ClusterError, match="cluster 'dgx-h100' is of cuda devices, and gradients are on cpu"):
        cluster_here("dgx-h100", cpu)
