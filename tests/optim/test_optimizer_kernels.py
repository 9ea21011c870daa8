"""The same bits from C++ kernels and from plain operations, on one thread and on two, for parameters of every shape and
order."""

import itertools
import math

import pytest
import torch
from test_optimizers import numbers, same
from torch import nn

import lowp
from lowp.optim import LAMB, LARS, SGD, AdamW

KINDS = {"sgd": SGD, "lars": LARS, "adamw": AdamW, "lamb": LAMB}
STATES = {
    "own": None, "dynamic8": "dynamic8", "e4m3fn": "e4m3fn", "mixed": {"exp_avg": "e4m3fn", "exp_avg_sq": "fp16"},
    "posit16": "posit16",
}  # fmt: skip
SHAPES = [(1,), (3,), (17,), (65,), (64, 128), (8, 3, 3, 3), (0,), (5, 0, 3), ()]
BLOCKS = [(64, 128), (33, 129), (40, 3, 7, 7), (3, 4096)]  # rows of states in blocks, with and without tails
# Every optimizer, update, dtype and state, in few combinations: each new kernel costs a second of g++.
SAMPLED = [
    ("sgd", "nesterov", "stochastic", torch.float16, "own"),
    ("lars", "clip", "kahan", torch.bfloat16, "own"),
    ("adamw", "default", "stochastic", torch.bfloat16, "mixed"),
    ("adamw", "default", "nearest", torch.float16, "posit16"),
    ("lamb", "default", "kahan", torch.float16, "dynamic8"),
]
EVERYTHING = [
    (kind, "default", update, dtype, state)
    for kind, update, dtype, state in itertools.product(
        KINDS, ("nearest", "stochastic", "kahan"), (torch.float16, torch.bfloat16), STATES
    )
    if state != "mixed" or kind in ("adamw", "lamb")
]
OPTIONS = {
    "nesterov": {"momentum": 0.9, "nesterov": True}, "decay": {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    "clip": {"clip": True, "trust": 0.5, "nesterov": True}, "default": {},
}  # fmt: skip


def parameters(dtype, blocks_only):
    """Shapes with tails, nothing at all, other orders in memory, the ends of FP16's range; or what has states in blocks."""
    shapes = BLOCKS if blocks_only else [*SHAPES, (64, 128)]
    found = [numbers(math.prod(s), i, dtype).view(s) for i, s in enumerate(shapes)]
    found.append(numbers(96 * 64, 51, dtype).view(96, 64).t())
    if not blocks_only:
        found.append(numbers(8 * 4 * 3 * 3, 50, dtype).view(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
        found.append(torch.tensor([0.0, -0.0, 6e4, -6e4, 6e-8, -6e-8, 1.0, 2.0**-14]).repeat(24).to(dtype))
    return [nn.Parameter(x) for x in found]


def gradients(params, step):
    for i, p in enumerate(params):
        g = numbers(p.numel(), 1000 * step + i, p.dtype).view(p.shape)
        p.grad = torch.empty_like(p).copy_(g) if i % 2 else g  # in the parameter's order, or in its own


def bits_after(kind, options, update, dtype, state, steps=3, policy="never", whole=False):
    """Weights and everything that is kept, after a few steps; one parameter misses the second."""
    lowp.set_kernel_policy(policy)
    params = parameters(dtype, state in ("dynamic8", "mixed") and not whole)
    more = dict(OPTIONS[options])
    if kind == "sgd" and "momentum" not in more:
        more["momentum"] = 0.9
    optimizer = KINDS[kind](params, lr=0.01, update=update, state=STATES[state], seed=9, **more)
    for step in range(steps):
        gradients(params, step)
        if step == 1:
            params[3].grad = None
        optimizer.step(gradient_scale=2.0)
    kept = [value for p in params for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return [p.data for p in params] + kept


def compared(case, **policies):
    one, other = (bits_after(*case, **settings) for settings in policies.values())
    assert len(one) == len(other)
    for place, (x, y) in enumerate(zip(one, other, strict=True)):
        assert x.stride() == y.stride()
        assert same(x, y), place


def name_of(case):
    return "-".join(str(part).removeprefix("torch.") for part in case)


@pytest.mark.parametrize("case", SAMPLED, ids=name_of)
def test_kernels_and_plain_operations_have_the_same_bits(case):
    compared(case, plain={"policy": "never"}, compiled={"policy": "always"})
    assert lowp.kernel_info()["built"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=name_of)
def test_everything_has_the_same_bits(case):
    compared(case, plain={"policy": "never", "whole": True}, compiled={"policy": "always", "whole": True})


@pytest.mark.parametrize("case", [SAMPLED[0], SAMPLED[4]], ids=name_of)
def test_threads_do_not_matter(case):
    """Enough elements for two threads, uneven chunks; norms and largest numbers are taken over both threads' parts."""
    kind, options, update, dtype, state = case
    before, found = torch.get_num_threads(), []
    try:
        for policy, threads in (("never", 1), ("always", 1), ("always", 2)):
            torch.set_num_threads(threads)
            lowp.set_kernel_policy(policy)
            params = [nn.Parameter(numbers(n * 384, n, dtype).view(n, 384)) for n in (333, 67)]
            optimizer = KINDS[kind](params, lr=0.01, update=update, state=STATES[state], **OPTIONS[options])
            for step in range(2):
                for i, p in enumerate(params):
                    p.grad = numbers(p.numel(), 10 * step + i, dtype).view(p.shape)
                optimizer.step()
            kept = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
            found.append([p.data for p in params] + kept)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(same(x, y) for x, y in zip(found[0], other, strict=True))


def test_a_nan_changes_nothing_in_kernels_either():
    lowp.set_kernel_policy("always")
    params = parameters(torch.float16, False)
    optimizer = SGD(params, lr=0.01, momentum=0.9, nesterov=True, seed=9)
    gradients(params, 0)
    optimizer.step()
    kept = [p.detach().clone() for p in params] + [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    gradients(params, 1)
    params[4].grad[-1, -1] = math.nan
    with pytest.raises(lowp.NonFiniteGradient, match=r"parameter 4 of group 0, of shape \(64, 128\)"):
        optimizer.step()
    after = [p.data for p in params] + [optimizer.state[p]["momentum_buffer"] for p in params]
    assert all(same(x, y) for x, y in zip(kept, after, strict=True))
    assert {optimizer.state[p]["step"] for p in params} == {1}


def test_flushing_subnormals_changes_nothing():
    """Squares of 2^-70 are subnormal in float32. torch.set_flush_denormal is the calling thread's; others share the work."""
    lowp.set_kernel_policy("always")
    found = []
    for flush in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(300, 300, generator=generator).bfloat16())
        parameter.grad = (torch.randn(300, 300, generator=generator) * 2.0**-70).bfloat16()
        optimizer = lowp.optim.AdamW([parameter])
        assert torch.set_flush_denormal(flush) or not flush
        try:
            optimizer.step()
        finally:
            torch.set_flush_denormal(False)
        found.append([parameter.detach(), *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(plain, flushed) for plain, flushed in zip(*found, strict=True))
    assert found[0][2].count_nonzero() == found[0][2].numel()
