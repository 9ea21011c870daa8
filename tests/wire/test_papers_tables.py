"""docs/PAPERS.md, section 1: why summing in low precision is the weak spot. Relative L2 errors of sums of Gaussian gradients.

Fixed here: N(0, 1), one layer, rank r's generator seeded with 1000 + r, errors against the float64 sum. Where nothing under- or
overflows, scale="aps" and scale="none" give the same figures.

A virtual world takes time in proportion to ranks * shards, and most reductions have as many shards as ranks. One node of all
ranks and sum_format=format is the sequential sum with a single shard (`test_one_node_is_sequential`), so 256 ranks are quick.

Where we differ from the tables:
- "decode and sum in fp32" has one rounding, of the addends: .052 and .027. `two_shot` rounds the sum once more, because it
  travels: sqrt(2) times as much, .074 and .037. `test_one_rounding` gets the table's figures without the second.
"""

import functools
import subprocess
import sys

import pytest
import torch

import lowp

SIZE = 2048


@pytest.fixture(autouse=True)
def _kernels(_plain_operations):
    """256 ranks take seconds in plain operations; the bits are the same (test_part_kernels.py)."""
    lowp.set_kernel_policy("always")


@functools.cache
def gradient(rank: int, size: int = SIZE, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 + rank)) * scale


def error(world: int, format: str, size: int = SIZE, times: float = 1.0, **settings) -> float:
    exact = sum(gradient(rank, size, times).double() for rank in range(world))
    total = lowp.VirtualWorld(world).all_reduce(lambda rank: gradient(rank, size, times), format, **settings)
    return float((total.double() - exact).norm() / exact.norm())


def one_node(world: int, format: str) -> dict:
    return {"reduction": f"hierarchical({world}, leaders)", "sum_format": format, "scale": "aps"}


@pytest.mark.parametrize("kahan", [False, True])
def test_one_node_is_sequential(kahan):
    def sums(**settings):
        return lowp.VirtualWorld(8).all_reduce(gradient, "e5m2", kahan=kahan, **settings)

    assert torch.equal(sums(**one_node(8, "e5m2")), sums(reduction="sequential", scale="aps"))


TABLE = {  # sequential, Kahan, tree, decode and sum in fp32
    (8, "e5m2"): (0.128, 0.087, 0.111, 0.052),
    (256, "e5m2"): (0.566, 0.098, 0.168, 0.052),
    (256, "e4m3"): (0.298, 0.046, 0.085, 0.027),
}


@pytest.mark.parametrize(("world", "format"), TABLE)
def test_orders(world, format):
    sequential, kahan, tree, fp32 = TABLE[world, format]
    assert error(world, format, **one_node(world, format)) == pytest.approx(sequential, rel=0.06)
    assert error(world, format, kahan=True, **one_node(world, format)) == pytest.approx(kahan, rel=0.06)
    assert error(world, format, reduction="tree", scale="aps") == pytest.approx(tree, rel=0.06)
    few = SIZE if world == 8 else 256  # 32 shards: seconds
    assert error(world, format, few, reduction="two_shot", scale="aps") == pytest.approx(fp32 * 2**0.5, rel=0.1)


@pytest.mark.parametrize(("world", "format"), TABLE)
def test_one_rounding(world, format):
    exact = sum(gradient(rank).double() for rank in range(world))
    rounded = sum(lowp.quantize(gradient(rank), format) for rank in range(world))
    assert float((rounded - exact).norm() / exact.norm()) == pytest.approx(TABLE[world, format][3], rel=0.06)


# e4m3 + APS, by the size of groups: a minimum near sqrt(ranks), less than half of what one group of all ranks has.
GROUPS = {256: 0.290, 64: 0.164, 32: 0.130, 16: 0.116, 8: 0.132, 4: 0.162}


@pytest.mark.parametrize("group", [256, 64, 16, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (32, 8))])
def test_groups(group):
    size = 1024 if group > 8 else 256 if group == 8 else 128  # many nodes take long
    found = error(256, "e4m3", size, reduction=f"hierarchical({group}, leaders)", sum_format="e4m3", scale="aps")
    assert found == pytest.approx(GROUPS[group], rel=0.1)


def test_headroom_for_256_ranks_leaves_e3m0_nothing():
    def total(**settings):
        return lowp.VirtualWorld(256).all_reduce(lambda rank: gradient(rank, 32), "e3m0", **settings)

    assert not total(scale="aps").any()
    assert not total(scale="aps", reduction="tree").any()
    assert error(256, "e3m0", 32, scale="local") < 0.35


@pytest.mark.parametrize(("format", "sequential", "two_shot"), [("e5m2", 0.126, 0.075), ("e4m3fn", 0.063, 0.039)])
def test_small_gradients_need_scaling(format, sequential, two_shot):
    """Like for like: the addends are rounded with APS and without. 1e-6 underflows in both formats."""
    for reduction, expected in (("sequential", sequential), ("two_shot", two_shot)):
        assert error(8, format, times=1e-6, scale="none", reduction=reduction) == 1
        for scale in ("aps", "local"):
            assert error(8, format, times=1e-6, scale=scale, reduction=reduction) == pytest.approx(expected, rel=0.06)
            assert error(8, format, scale=scale, reduction=reduction) == pytest.approx(expected, rel=0.06)


_PEAK = """
import resource, sys, torch, lowp
lowp.set_kernel_policy("never")
torch.set_num_threads(1)
world, size, reduction, scale = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def gradient(rank): return torch.full((size,), 1.0 + rank)
lowp.VirtualWorld(2).all_reduce(gradient, "e5m2", scale=scale, reduction=reduction)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lowp.VirtualWorld(world).all_reduce(gradient, "e5m2", scale=scale, reduction=reduction)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def growth(world: int, size: int, reduction: str, scale: str = "local") -> float:
    """By how many gradients the peak grows from 2 ranks to `world` ranks; resident memory, in a process of its own."""
    command = [sys.executable, "-c", _PEAK, str(world), str(size), reduction, scale]
    before, after = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return (after - before) * 1024 / (4 * size)


def test_memory_does_not_grow_with_the_world():
    assert growth(32, 1 << 20, "two_shot") < 4  # all ranks' gradients would be 32, their codes 8


@pytest.mark.slow
def test_memory_does_not_grow_with_1024_ranks():
    assert growth(1024, 1 << 16, "two_shot", "aps") < 64  # their codes would be 256


@pytest.mark.slow
@pytest.mark.parametrize(("world", "reduction"), [(256, "two_shot"), (1024, "tree"), (256, "hierarchical(16)")])
def test_memory_does_not_grow_with_large_worlds(world, reduction):
    """Trees keep one sum for each level, and one of 2^18 numbers is 1 MB: the rest of the limit is slack of the allocator."""
    assert growth(world, 1 << 18, reduction) < 32
