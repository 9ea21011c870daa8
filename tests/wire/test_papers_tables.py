"""PAPERS.md, section 1: why summing in low precision is the weak spot. Relative L2 errors of sums of Gaussian gradients.

Fixed here: N(0, 1), one layer, rank r's generator seeded with 1000 + r, errors against the float64 sum. Where nothing under- or
overflows, scale="aps" and scale="none" give the same figures.

A virtual world takes time in proportion to ranks * shards, and most reductions have as many shards as ranks. One node of all
ranks and accumulate=format is the sequential sum with a single shard (`test_one_node_is_sequential`), so 256 ranks are quick.

Where we differ from the tables:
- "decode and sum in fp32" has one rounding, of the addends: .052 and .027. `two_shot` rounds the sum once more, because it
  travels: sqrt(2) times as much, .074 and .037. `test_one_rounding` gets the table's figures without the second.
- the table by group size says (4,3), but its k=256 (.569) is the sequential sum in e5m2 (.566), where e4m3 has .298 in the table
  above it. See GROUPS.
"""

import functools
import subprocess
import sys

import pytest
import torch

import lowp

SIZE = 2048


@functools.lru_cache(maxsize=None)
def gradient(rank: int, size: int = SIZE, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 + rank)) * scale


def error(world: int, format: str, size: int = SIZE, times: float = 1.0, **settings) -> float:
    exact = sum(gradient(rank, size, times).double() for rank in range(world))
    total = lowp.VirtualWorld(world).all_reduce(lambda rank: gradient(rank, size, times), format, **settings)
    return float((total.double() - exact).norm() / exact.norm())


def one_node(world: int, format: str) -> dict:
    return {"reduction": f"hierarchical({world}, leaders)", "accumulate": format, "scale": "aps"}


@pytest.mark.parametrize("kahan", [False, True])
def test_one_node_is_sequential(kahan):
    def sums(**settings):
        return lowp.VirtualWorld(8).all_reduce(gradient, "e5m2", kahan=kahan, **settings)

    assert torch.equal(sums(**one_node(8, "e5m2")), sums(reduction="sequential", scale="aps"))


#        ranks, format:  sequential, Kahan, tree, fp32
TABLE = {(8, "e5m2"): (0.128, 0.087, 0.111, 0.052), (256, "e5m2"): (0.566, 0.098, 0.168, 0.052), (256, "e4m3"): (0.298, 0.046, 0.085, 0.027)}


@pytest.mark.parametrize(("world", "format"), TABLE)
def test_orders(world, format):
    sequential, kahan, tree, fp32 = TABLE[world, format]
    assert error(world, format, **one_node(world, format)) == pytest.approx(sequential, rel=0.06)
    assert error(world, format, kahan=True, **one_node(world, format)) == pytest.approx(kahan, rel=0.06)
    assert error(world, format, reduction="tree", scale="aps") == pytest.approx(tree, rel=0.06)
    few = SIZE if world == 8 else 128  # 16 shards: seconds
    assert error(world, format, few, reduction="two_shot", scale="aps") == pytest.approx(fp32 * 2**0.5, rel=0.1)


@pytest.mark.parametrize(("world", "format"), TABLE)
def test_one_rounding(world, format):
    exact = sum(gradient(rank).double() for rank in range(world))
    rounded = sum(lowp.quantize(gradient(rank), format) for rank in range(world))
    assert float((rounded - exact).norm() / exact.norm()) == pytest.approx(TABLE[world, format][3], rel=0.06)


PUBLISHED_GROUPS = {256: 0.569, 64: 0.295, 32: 0.201, 16: 0.201, 8: 0.227, 4: 0.327}
