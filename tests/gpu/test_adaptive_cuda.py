"""Adaptive messages on a GPU: the sums of a CPU, bit for bit, in plain operations and in kernels."""

import pytest
import torch

import lowp

pytestmark = pytest.mark.gpu
SIZES = (70_001, 3, 64, 0, 30_000, 1025)


def layers(rank, device, nan=False):
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(size, generator=generator) * 10.0 ** (i - 3) for i, size in enumerate(SIZES)]
    found[2].zero_()
    if nan:
        found[4][17] = float("nan")
    return [layer.to(device) for layer in found]


@pytest.fixture(params=["never", "auto"])
def policy(request):
    lowp.set_kernel_policy(request.param)
    yield request.param
    lowp.set_kernel_policy("never")


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("reduction", ["two_shot", "one_shot", "ring", "hierarchical(2)"])
@pytest.mark.parametrize(
    ("name", "rounding"), [("adaptive:4.4", "nearest"), ("adaptive:2.4", "nearest"), ("adaptive:3", "stochastic")]
)
def test_sums_are_those_of_a_cpu(policy, name, rounding, reduction, nan):
    world = lowp.VirtualWorld(4)
    options = {"reduction": reduction, "rounding": rounding, "seed": 3, "chunk": 1 << 16}
    on_cpu, on_cuda = (
        world.all_reduce(lambda rank, device=device: layers(rank, device, nan), name, **options) for device in ("cpu", "cuda")
    )
    for ours, theirs in zip(on_cuda, on_cpu, strict=True):
        same = ours.cpu().view(torch.int32) == theirs.view(torch.int32)
        both_nan = ours.cpu().isnan() & theirs.isnan()
        assert bool((same | both_nan).all())
