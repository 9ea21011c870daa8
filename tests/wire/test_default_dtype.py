"""torch.set_default_dtype says nothing about messages, and nothing of it stays behind."""

import pytest
import torch

import lowp


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("reduction", ["two_shot", "ring"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("format", "scale"), [("e4m3fn", "local"), ("e4m3fn", "aps"), ("fp32", None), ("mxfp4", None),
                                               ("topk:0.5", None), ("adaptive:5", None)])  # fmt: skip
def test_default_dtype(in_float64, format, scale, rounding, reduction, policy):
    lowp.set_kernel_policy(policy)
    sizes = iter(range(5001, 5003))  # a bucket of its own: what is kept of it is made in float64 here, and in float32 there
    found = []
    for own in (torch.float64, torch.float32):
        torch.set_default_dtype(own)
        size = next(sizes)
        gradients = [torch.linspace(-1, 1, size, dtype=torch.float32)[:5000].clone() * (r + 1) for r in range(2)]
        numbers = [torch.cat([g, torch.zeros(size - 5000, dtype=torch.float32)]) for g in gradients]
        how = {"scale": scale, "rounding": rounding, "reduction": reduction}
        got = lowp.VirtualWorld(2).all_reduce(numbers, format, **how)
        torch.set_default_dtype(torch.float32)
        again = lowp.VirtualWorld(2).all_reduce(numbers, format, **how)
        assert got.dtype == torch.float32
        assert torch.equal(got, again)
        found.append(got)
    assert found[0].any()
