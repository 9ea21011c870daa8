"""States in few bits: their scales follow the gradients, nothing overflows or vanishes; norms of huge and tiny layers."""

import math

import numpy as np
import pytest
import torch
from reference_optimizers import TOP, lamb, lars
from torch import nn

import lowp
from lowp.formats import format as parse_format
from lowp.optim import LAMB, LARS, SGD, AdamW
from lowp.tensor.noise import Noise, draws, key_tensor

HALVES = [torch.float16, torch.bfloat16]
NARROW = ["dynamic8", "e4m3fn", "e5m2", "posit8", "posit16", "bnb_dynamic8", {"exp_avg": "e4m3fn", "exp_avg_sq": "fp16"}]


def randn(shape, seed, scale=1.0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def cosine(a, b):
    a, b = a.double().ravel(), b.double().ravel()
    return (a @ b / (a.norm() * b.norm())).item()


# Large, tiny and falling gradients


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("state", [None, "fp16", "bf16"])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e4])
def test_adamw_moves_as_in_float32(scale, state, dtype):
    """1e-7 squared is far below FP16, 1e4 squared far above."""
    weights, gradients = randn((8, 16), 0), [randn((8, 16), 1 + i) for i in range(6)]
    if scale == 1e-7:  # of FP16's subnormals: what is left of them is what both optimizers get
        gradients = [torch.where(g.abs() < 1, torch.sign(g), g) for g in gradients]
    p, q = nn.Parameter(weights.to(dtype)), nn.Parameter(weights.clone())
    own, torchs = (
        AdamW([p], lr=1e-3, eps=1e-12, weight_decay=0, state=state),
        torch.optim.AdamW([q], 1e-3, eps=1e-12, weight_decay=0),
    )
    for g in gradients:
        p.grad = (g * scale).to(dtype)
        q.grad = p.grad.float()
        before = q.detach().clone()
        intended = own.intended_update(p)
        own.step()
        torchs.step()
        wanted = q.detach() - before
        assert cosine(intended, wanted) > 0.9999
        assert (abs(intended - wanted) < 0.03 * wanted.abs().max()).all()


@pytest.mark.parametrize("kind", [SGD, LARS])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**13])
def test_momentum_of_large_and_tiny_gradients(scale, dtype, kind):
    p = nn.Parameter(randn((8, 16), 0, dtype=dtype))
    optimizer = kind([p], lr=2.0**-10, momentum=0.9, weight_decay=0.0)
    buffer = torch.zeros(8, 16, dtype=torch.float64)
    for i in range(6):
        p.grad = (randn((8, 16), 1 + i).sign() * scale).to(dtype)
        rate = 1.0
        if kind is LARS:
            rate = 2.0**-10 * 0.001 * p.detach().double().norm() / p.grad.double().norm()
        optimizer.step()
        buffer = 0.9 * buffer + p.grad.double() * rate
        decoded = optimizer.decoded_state(p)["momentum_buffer"].double()
        assert (abs(decoded - buffer) <= 2 * (i + 1) * torch.finfo(dtype).eps * buffer.abs().max()).all()


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("state", ["fp16", "e4m3fn"])
def test_scales_follow_a_falling_gradient(state, kind):
    """By 2^20, faster than the average forgets: within a few half-lives the state is resolved as finely as ever."""
    options = {"momentum": 0.8} if kind is SGD else {"betas": (0.8, 0.8), "eps": 1e-30}
    p = nn.Parameter(randn((64, 64), 0, dtype=torch.bfloat16))
    optimizer = kind([p], lr=1e-9, state=state, weight_decay=0.0, **options)
    signs = randn((64, 64), 3).sign()
    for step in range(200):
        p.grad = (signs * 2.0 ** -min(step, 20)).to(torch.bfloat16)
        optimizer.step()
        decoded = optimizer.decoded_state(p)
        assert all(numbers.isfinite().all() for numbers in decoded.values())
        if kind is AdamW:
            assert (decoded["exp_avg_sq"] > 0).all()
    wanted = {"momentum_buffer": 5 * 2.0**-20, "exp_avg": 2.0**-20, "exp_avg_sq": 2.0**-40}
    for name, numbers in decoded.items():
        expected = wanted[name] * (signs if name != "exp_avg_sq" else 1.0)
        error = abs(numbers / expected - 1)
        assert error.max() < (0.02 if state == "fp16" else 1.0), name
        assert error.mean() < (0.01 if state == "fp16" else 0.1), name


def test_the_scale_is_close_to_what_the_state_needs():
    """A bound that is far too high would waste the format's range; one that is too low would overflow."""
    p = nn.Parameter(randn((32, 32), 0, dtype=torch.float16))
    optimizer = AdamW([p], lr=1e-3)
    for step in range(40):
        p.grad = randn((32, 32), step, 2.0 ** (-step / 4), torch.float16)
        optimizer.step()
        for name, number in optimizer.decoded_state(p).items():
            bound = int(optimizer.state[p][f"{name}_bound"]) / 65536
            largest = math.log2(number.abs().max().item())
            assert largest <= bound
            assert bound - largest < 12, (step, name)  # exp_avg_sq begins as a thousandth of the square
            assert optimizer.state[p][name].abs().max() <= 2.0 ** TOP[torch.float16]


@pytest.mark.parametrize("state", NARROW, ids=str)
@pytest.mark.parametrize("state_scale", ["tensor", "block"])
def test_a_second_moment_never_becomes_zero(state, state_scale):
    """Gradients over 60 powers of two side by side in one block."""
    p = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, state=state, state_scale=state_scale)
    powers = 2.0 ** torch.arange(-30, 34).repeat(128).view(64, 128)
    for step in range(3):
        p.grad = (randn((64, 128), step).sign() * powers).to(torch.bfloat16)
        optimizer.step()
        assert (optimizer.decoded_state(p)["exp_avg_sq"] > 0).all()
        assert p.isfinite().all()


# What a state stored in few bits is


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("state", ["dynamic8", "e4m3fn", "e5m2", "posit16", "posit8", "e5m10"])
def test_blocks_are_rounded_to_the_format(state, rounding):
    """One step of momentum: each block of 128 (what divides a row of 384, up to 256) has its own power of two."""
    p = nn.Parameter(torch.zeros(16, 384, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=1.0, momentum=0.9, state=state, state_scale="block", state_rounding=rounding)
    scales = 2.0 ** torch.randint(-20, 20, (16, 3, 1), generator=torch.Generator().manual_seed(1))
    p.grad = (randn((16, 3, 128), 2) * scales).view(16, 384).to(torch.bfloat16)
    optimizer.step()
    exponents = optimizer.state[p]["momentum_buffer_exponents"]
    width = 384 // exponents.shape[1]
    assert width in (192, 128)
    fmt = parse_format(state)
    blocks = p.grad.float().view(16, -1, width)
    assert (blocks.abs().amax(-1) < 2.0 ** exponents.double()).all()
    assert (blocks.abs().amax(-1) >= 2.0 ** (exponents.double() - 1)).all()
    top = 0 if "posit" in state else math.frexp(fmt.max)[1] - 2
    scaled = blocks * (2.0 ** (top - exponents.double())).float().unsqueeze(-1)
    decoded = optimizer.decoded_state(p)["momentum_buffer"].view(16, -1, width)
    found = decoded * (2.0 ** (top - exponents.double())).float().unsqueeze(-1)
    down, up = (lowp.quantize(scaled, fmt, way, saturate=True) for way in ("down", "up"))
    if rounding == "nearest":
        assert torch.equal(found, lowp.quantize(scaled, fmt, "nearest", saturate=True))
    else:
        assert ((found == down) | (found == up)).all()
        rose = ((found - down) / (up - down))[up > down].double()
        due = ((scaled - down) / (up - down))[up > down].double()
        if fmt.bits == 8:
            assert abs((rose - due).mean().item()) < 5 * 0.5 / math.sqrt(len(rose))
    assert torch.equal(lowp.quantize(found, fmt, "nearest", saturate=True), found)


def test_small_tensors_keep_the_weights_format():
    """A vector has too few elements for its own blocks to be worth it."""
    params = [nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in ((4096,), (16, 16), (64, 64), (128, 31))]
    optimizer = AdamW(params, state="e4m3fn")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert kept == [torch.bfloat16, torch.bfloat16, torch.uint8, torch.bfloat16]
    wide = AdamW(params, state="fp32")
    wide.step()
    assert {wide.state[p][name].dtype for p in params for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize(
    "state", ["e4m3fn", *(pytest.param(s, marks=pytest.mark.slow, id=str(s)) for s in NARROW if s != "e4m3fn")]
)
def test_training_with_narrow_states_is_close_to_float32(state):
    """A linear fit: the same loss as torch's AdamW in float32, within a factor of two and far below the start."""
    x, truth = randn((256, 64), 1), randn((64, 64), 2)
    losses = []
    for narrow in (True, False):
        p = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16 if narrow else torch.float32))
        optimizer = AdamW([p], 0.05, weight_decay=0, state=state) if narrow else torch.optim.AdamW([p], 0.05, weight_decay=0)
        for _ in range(60):
            error = x @ (p.detach().float() - truth)
            p.grad = (x.t() @ error / 256).to(p.dtype)
            optimizer.step()
        losses.append((error.square().mean() / (x @ truth).square().mean()).item())
    assert losses[1] < 0.05
    assert losses[0] < 2 * losses[1] + 0.01


# Norms


SIZES = [(6e4, 1e-3), (6e4, 6e4), (6e-8, 6e-8), (6e-8, 6e4), (1.0, 6e-8)]


@pytest.mark.parametrize(("weight", "gradient"), SIZES)
@pytest.mark.parametrize("state", [None, "fp32"])
def test_lars_ratio_of_huge_and_tiny_numbers(weight, gradient, state):
    """Squares of these leave FP16 on either side, and sums of squares float32."""
    p = nn.Parameter((randn((32, 40), 0).sign() * weight).half())
    p.grad = (randn((32, 40), 1).sign() * gradient).half()
    optimizer = LARS([p], lr=0.5, trust=0.01, momentum=0.9, weight_decay=1e-4, state=state)
    wanted, velocity = lars(p.detach(), p.grad, np.zeros((32, 40)), lr=0.5, trust=0.01, momentum=0.9, weight_decay=1e-4)
    change = optimizer.intended_update(p).double().numpy()
    np.testing.assert_allclose(change, wanted - p.detach().double().numpy(), rtol=1e-5)
    before = p.detach().double()
    optimizer.step()
    unit = np.maximum(before.abs().numpy() * 2.0**-10, 2.0**-24)
    assert (np.abs(p.detach().double().numpy() - before.numpy() - change) <= unit).all()
    np.testing.assert_allclose(optimizer.decoded_state(p)["momentum_buffer"].double().numpy(), velocity, rtol=1e-3)


@pytest.mark.parametrize(("weight", "gradient"), SIZES)
def test_lamb_ratio_of_huge_and_tiny_numbers(weight, gradient):
    p = nn.Parameter((randn((32, 40), 0).sign() * weight).half())
    optimizer = LAMB([p], lr=1e-3, eps=1e-12)
    m = v = np.zeros((32, 40))
    for step in range(3):
        p.grad = (randn((32, 40), 1 + step).sign() * gradient).half()
        before = p.detach().double().numpy()
        wanted, *_ = lamb(before, p.grad, m, v, step + 1, lr=1e-3, eps=1e-12)
        change = optimizer.intended_update(p).double().numpy()
        np.testing.assert_allclose(change, wanted - before, rtol=2e-3, atol=1e-5 * np.abs(change).max())
        optimizer.step()
        m, v = (optimizer.decoded_state(p)[name].numpy() for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_norm_of_zero_means_the_global_rate(kind):
    for zero in ("weight", "gradient"):
        p = nn.Parameter(torch.zeros(8, 8, dtype=torch.float16) if zero == "weight" else torch.ones(8, 8, dtype=torch.float16))
        p.grad = torch.ones_like(p) if zero == "weight" else torch.zeros_like(p)
        change = kind([p], lr=0.25, weight_decay=0.0).intended_update(p)
        wanted = -0.25 if zero == "weight" else 0.0
        assert (abs(change - wanted) < 1e-6).all()


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize(("exclude", "excluded"), [
    (None, {"0.bias", "1.weight", "1.bias"}), (["*.bias"], {"0.bias", "1.bias"}), ([], set()),
    (lambda p: p.dim() == 2, {"0.weight"}),
], ids=["default", "patterns", "nothing", "function"])  # fmt: skip
def test_exclude(kind, exclude, excluded):
    """Excluded parameters take the global rate and do not decay."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = kind(model.named_parameters(), update="nearest", exclude=exclude, **options)
    for i, (name, p) in enumerate(model.named_parameters()):
        p.data.copy_(randn(p.shape, i) + 2)
        p.grad = randn(p.shape, 10 + i)
        zeros = np.zeros(p.shape)
        if kind is LARS:
            wanted, _ = lars(p.detach(), p.grad, zeros, excluded=name in excluded, trust=0.001, momentum=0.9, **options)
        else:
            wanted, *_ = lamb(p.detach(), p.grad, zeros, zeros, 1, excluded=name in excluded, **options)
        np.testing.assert_allclose(optimizer.intended_update(p), wanted - p.detach().numpy(), rtol=1e-4, atol=1e-7)


# Draws


@pytest.mark.parametrize("seed", [0, 7, 2**50])
def test_draws_are_uniform_and_unrelated(seed):
    count, classes = 1 << 18, 256
    numbers = draws(key_tensor(Noise(seed, 3, 5), 0, torch.device("cpu")), torch.empty(1, count), 4)
    uniform = torch.stack([n.number.view(-1).double() / 2.0**30 for n in numbers])
    assert uniform.min() >= 0
    assert uniform.max() < 1
    for row in uniform:
        found = torch.histc(row, classes, 0, 1)
        chi_square = ((found - count / classes) ** 2 / (count / classes)).sum().item()
        assert abs(chi_square - (classes - 1)) < 5 * math.sqrt(2 * (classes - 1))
    shifted = torch.cat([uniform, uniform.roll(1, 1), uniform.roll(1024, 1)])
    related = torch.corrcoef(shifted) - torch.eye(len(shifted), dtype=torch.float64)
    assert related.abs().max().item() < 5 / math.sqrt(count)


def test_draws_of_neighbouring_keys_are_unrelated():
    count = 1 << 16
    rows = []
    for seed, step, stream in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (1, 0, 1), (0, 0, 1)]:
        key = key_tensor(Noise(seed, step, stream), 0, torch.device("cpu"))
        rows += [n.number.view(-1).double() for n in draws(key, torch.empty(1, count), 3)]
    related = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert related.abs().max().item() < 5.5 / math.sqrt(count)


def test_the_joint_distribution_of_two_draws_is_flat():
    """The second draw is the first with its halves exchanged: the upper bits, which round to 16 bits, must not be related."""
    count, side = 1 << 18, 16
    first, second, third, _ = draws(key_tensor(Noise(11, 3, 5), 0, torch.device("cpu")), torch.empty(1, count), 4)
    for one, other in ((first, second), (first, third), (second, third)):
        cell = (one.number.view(-1) >> 26) * side + (other.number.view(-1) >> 26)
        found = torch.bincount(cell, minlength=side * side).double()
        expected = count / side**2
        chi_square = ((found - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (side**2 - 1)) < 5 * math.sqrt(2 * (side**2 - 1))


def test_the_second_draw_is_the_first_with_its_halves_exchanged():
    first, second = draws(key_tensor(Noise(11, 3, 5), 0, torch.device("cpu")), torch.empty(1, 1 << 12), 2)
    number = first.number
    assert torch.equal(second.number, ((number & 0x7FFF) << 15) + (number >> 15))
    assert torch.equal(second.upper, second.number >> 14)
