"""The virtual world against a reference that was written without seeing it: equal in every bit."""

import itertools

import numpy as np
import pytest
import reference_sums
import torch

import lowp

WORLDS = (1, 2, 3, 5, 8)
CUTS = (([1], 48), ([7], 4), ([65], 48), ([40, 3, 156, 1], 96))  # layers' sizes, chunk
SCALES = ("none", "aps", "local")
REDUCTIONS = {
    "two_shot": {},
    "sequential": {},
    "sequential, kahan": {"reduction": "sequential", "kahan": True},
    "ring": {},
    "ring, kahan": {"reduction": "ring", "kahan": True},
    "tree": {},
    "hierarchical(2)": {},
    "hierarchical(3)": {},
    "hierarchical(2, leaders)": {},
    "hierarchical(3, leaders)": {},
}


def gradients(world: int, sizes: list[int], spread: float = 2.0, size: float = 1.0) -> list[list[np.ndarray]]:
    """Numbers of many magnitudes, so that scales matter."""
    rng = np.random.default_rng([world, *sizes])

    def layer(count):
        return (rng.standard_normal(count) * 10 ** rng.uniform(-spread, spread, count) * size).astype(np.float32)

    return [[layer(count) for count in sizes] for _ in range(world)]


def virtual(ranks: list[list[np.ndarray]], format: str, **settings) -> list[np.ndarray]:
    tensors = [[torch.from_numpy(layer.copy()) for layer in layers] for layers in ranks]
    return [total.numpy() for total in lowp.VirtualWorld(len(ranks)).all_reduce(tensors, format, **settings)]


def check(ranks, format, lowest_bound=-115, **settings):
    found = virtual(ranks, format, **settings)
    expected = reference_sums.all_reduce(ranks, format, lowest_bound=lowest_bound, **settings)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        bits, other = ours.view(np.uint32), theirs.view(np.uint32)
        assert (bits == other).all(), (
            f"world {len(ranks)}, layer {number}, {(bits != other).sum()} of {bits.size}: "
            f"{ours[bits != other][:4]} instead of {theirs[bits != other][:4]}"
        )
    return found


def check_sums(name, scale, worlds_and_cuts):
    settings = {"reduction": name, "scale": scale, **REDUCTIONS[name]}
    for world, (sizes, chunk) in worlds_and_cuts:
        check(gradients(world, sizes), "e5m2" if len(sizes) == 1 else "e4m3fn", chunk=chunk, **settings)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_sums(name, scale):
    """Every world; cuts take turns, so that each meets every reduction, every scale and every world."""
    first = list(REDUCTIONS).index(name) + SCALES.index(scale)
    check_sums(name, scale, [(world, CUTS[(first + i) % len(CUTS)]) for i, world in enumerate(WORLDS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_sums_with_every_cut(name, scale):
    check_sums(name, scale, itertools.product(WORLDS, CUTS))


@pytest.mark.parametrize("format", ["e3m0", "e2m1fn", "int8", "fp16", "bf16", "posit8"])
@pytest.mark.parametrize("scale", SCALES)
def test_other_formats(format, scale):
    for reduction in ("two_shot", "ring", "tree"):
        check(gradients(5, [40, 9]), format, scale=scale, reduction=reduction, chunk=32)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_means(op):
    for reduction in ("two_shot", "sequential", "hierarchical(2)"):
        for scale in SCALES:
            for world in (3, 5):
                check(gradients(world, [30, 20]), "e5m2", op=op, scale=scale, reduction=reduction)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name != "hierarchical(3, leaders)"])
@pytest.mark.parametrize("sum_format", ["fp32", "fp16", "e4m3fn", "e3m0"])
def test_formats_of_sums(name, sum_format):
    settings = {"reduction": name, "sum_format": sum_format, **REDUCTIONS[name]}
    for scale in ("aps", "local"):
        check(gradients(5, [40, 9]), "e4m3fn", scale=scale, chunk=32, **settings)


@pytest.mark.parametrize("reduction", ["two_shot", "ring", "sequential", "tree", "hierarchical(2)", "hierarchical(2, leaders)"])
@pytest.mark.parametrize("format", ["e5m2", "e4m3fn"])
@pytest.mark.parametrize("scale", ["aps", "local"])
def test_zero_tiny_and_huge_layers(reduction, format, scale):
    for world in (1, 3, 8):
        ranks = gradients(world, [9, 17, 5, 17], spread=0.5)
        for layers in ranks:
            layers[0][:] = 0
            layers[1] *= np.float32(1e-38)
            layers[2] *= np.float32(1e-43)
            layers[3][:] = 0
        ranks[0][3][:3] = 3e38, -3e38, 1e37
        found = check(ranks, format, scale=scale, reduction=reduction, chunk=24)
        assert (found[0] == 0).all()
        assert all(np.isfinite(layer).all() for layer in found)
        assert np.abs(found[3][:2] / 3e38).min() > 0.9
        exact = sum(layers[1].astype(np.float64) for layers in ranks)
        assert np.linalg.norm(found[1] - exact) < 0.3 * np.linalg.norm(exact)


def test_signs_of_zeros():
    for reduction in ("two_shot", "ring", "sequential", "tree"):
        for world in (1, 2, 3):
            ranks = [[np.array([-0.0, 0.0, -1e-30, 1e-30], np.float32)] for _ in range(world)]
            check(ranks, "e5m2", scale="none", reduction=reduction)


def test_a_tensor_and_a_function_are_the_same_as_a_list_of_layers():
    ranks = gradients(5, [65])
    expected = reference_sums.all_reduce(ranks, "e5m2")[0]
    tensors = [torch.from_numpy(layers[0]) for layers in ranks]
    for given in (tensors, lambda rank: tensors[rank]):
        assert (lowp.VirtualWorld(5).all_reduce(given, "e5m2").numpy() == expected).all()
