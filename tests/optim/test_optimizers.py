"""What a step computes: torch's own in float32, a numpy reference in 16 bits, bit for bit; noise; small updates."""

import copy
import math
import weakref

import numpy as np
import pytest
import torch
from reference_optimizers import AdamWReference, Reference, SGDReference, lamb, lars, shift_of
from torch import nn

import lowp
from lowp.optim import LAMB, LARS, SGD, AdamW
from lowp.optim.schedules import poly

HALVES = [torch.float16, torch.bfloat16]
UPDATES = ["nearest", "stochastic", "kahan"]
SGDS = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.03},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03},
    "dampening": {"lr": 0.1, "momentum": 0.7, "dampening": 0.3, "weight_decay": 0.03},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "maximize": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03, "maximize": True},
}
ADAMS = {
    "default": {"lr": 1e-2},
    "no decay": {"lr": 1e-2, "weight_decay": 0.0},
    "betas": {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.1},
    "maximize": {"lr": 1e-2, "maximize": True},
}


def numbers(count, seed, dtype=torch.float32, scale=1.0):
    """Signed, over many powers of two, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-8, 3, (count,), generator=generator) * scale
    found[: count // 16] = 0.0
    found[: count // 32] *= -1
    return found.to(dtype)


def parameters(dtype=torch.float32, shapes=((7, 5), (11,), (3, 2, 2, 2), (1,))):
    return [nn.Parameter(numbers(math.prod(s), i, dtype).view(s)) for i, s in enumerate(shapes)]


def set_gradients(params, step, scale=1.0):
    for i, p in enumerate(params):
        p.grad = numbers(p.numel(), 1000 * step + i, p.dtype, scale).view(p.shape)


def same(one, other):
    """The same bits; tensors of the same dtype and shape."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


# Float32: torch's own


@pytest.mark.other_cpu
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "options"), [
    *((SGD, torch.optim.SGD, options) for options in SGDS.values()),
    *((AdamW, torch.optim.AdamW, options) for options in ADAMS.values()),
])  # fmt: skip
def test_float32_is_torchs(ours, theirs, options, foreach):
    """Two groups, a schedule, a parameter that gets its first gradient at step 7 and none at steps 12 and 13."""
    runs = []
    for kind, more in ((ours, {"update": "nearest", "state": "fp32" if foreach else None}), (theirs, {"foreach": foreach})):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.2}]
        optimizer = kind(groups, **options, **more)
        schedule = poly(optimizer, 25, warmup=4)
        for step in range(20):
            set_gradients(params, step)
            if step < 7 or step in (12, 13):
                params[1].grad = None
            optimizer.step()
            schedule.step()
        runs.append((params, optimizer))
    (mine, own), (others, torchs) = runs
    for p, q in zip(mine, others, strict=True):
        assert same(p.data, q.data)
        for name in torchs.state[q].keys() - {"step"}:
            if torchs.state[q][name] is not None:
                assert same(own.state[p][name], torchs.state[q][name])


def test_closures_return_their_loss():
    results = []
    for optimizer_of in (lambda p: SGD([p], lr=0.1, update="nearest"), lambda p: torch.optim.SGD([p], lr=0.1)):
        p = nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = optimizer_of(p)

        def closure(optimizer=optimizer, p=p):
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        results.append((losses, p.tolist()))
    assert results[0] == results[1]


@pytest.mark.other_cpu
@pytest.mark.parametrize("options", [{}, {"clip": True, "trust": 3.0}, {"nesterov": True}, {"eps": 0.1}, {"momentum": 0.0}])
def test_float32_lars_is_its_formula(options):
    settings = {"lr": 0.5, "trust": 0.02, "momentum": 0.9, "weight_decay": 0.05} | options
    params = parameters()
    optimizer = LARS(params, update="nearest", **settings)
    wanted = [(p.detach().double().numpy(), np.zeros(p.shape)) for p in params]
    for step in range(8):
        set_gradients(params, step)
        optimizer.step()
        wanted = [
            lars(w, p.grad.numpy(), v, excluded=p.dim() <= 1, **settings) for p, (w, v) in zip(params, wanted, strict=True)
        ]
    for p, (w, v) in zip(params, wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(optimizer.state[p]["momentum_buffer"].numpy(), v, rtol=2e-5, atol=2e-6)


@pytest.mark.other_cpu
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_float32_lamb_is_its_formula(options):
    settings = {"lr": 0.05} | options
    params = parameters()
    optimizer = LAMB(params, update="nearest", **settings)
    wanted = [(p.detach().double().numpy(), np.zeros(p.shape), np.zeros(p.shape)) for p in params]
    for step in range(8):
        set_gradients(params, step)
        optimizer.step()
        wanted = [
            lamb(w, p.grad.numpy(), m, v, step + 1, excluded=p.dim() <= 1, **settings)
            for p, (w, m, v) in zip(params, wanted, strict=True)
        ]
    for p, (w, m, v) in zip(params, wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(optimizer.state[p]["exp_avg"].numpy(), m, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(optimizer.state[p]["exp_avg_sq"].numpy(), v, rtol=2e-5, atol=2e-6)


# 16 bits: a numpy reference


def compare(optimizer, reference: list[Reference], params, steps=6, scale=1.0):
    """Steps of both, and all bits after each of them."""
    for step in range(steps):
        set_gradients(params, step, scale)
        optimizer.step()
        for p, own in zip(params, reference, strict=True):
            state = optimizer.state[p]
            own.step(p.grad.float().numpy().ravel(), {name: shift_of(state[f"{name}_bound"], p.dtype) for name in own.names})
            assert same(p.data.float().ravel(), torch.from_numpy(own.weight)), (step, p.shape)
            decoded = optimizer.decoded_state(p)
            assert decoded.keys() == set(own.names)
            for name in own.names:
                np.testing.assert_array_equal(decoded[name].numpy().ravel(), own.states[name], err_msg=f"{name} {step}")
            if optimizer.defaults["update"] == "kahan":
                larger = 2.0 ** (10 + 1 if p.dtype == torch.float16 else 7 + 1)
                wanted = torch.from_numpy(own.weight + own.lost / np.float32(larger)).view(p.shape)
                assert torch.equal(optimizer.full_weight(p), wanted)


@pytest.mark.other_cpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("options", SGDS.values(), ids=SGDS)
def test_sgd_in_16_bits_is_the_reference(options, update, dtype):
    params = parameters(dtype)
    reference = [SGDReference(p.detach().float().numpy().ravel(), dtype, update, options, 5, i) for i, p in enumerate(params)]
    compare(SGD(params, update=update, seed=5, **options), reference, params)


@pytest.mark.other_cpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_adamw_in_16_bits_is_the_reference(options, update, dtype):
    params = parameters(dtype)
    reference = [AdamWReference(p.detach().float().numpy().ravel(), dtype, update, options, 5, i) for i, p in enumerate(params)]
    compare(AdamW(params, update=update, seed=5, **options), reference, params)


@pytest.mark.parametrize("scale", [2.0**-16, 2.0**12])
@pytest.mark.parametrize("dtype", HALVES)
def test_large_and_tiny_gradients_are_the_references(dtype, scale):
    params = parameters(dtype)
    options = {"lr": 1e-2}
    reference = [
        AdamWReference(p.detach().float().numpy().ravel(), dtype, "stochastic", options, 2**40 + 3, i)
        for i, p in enumerate(params)
    ]
    compare(AdamW(params, seed=2**40 + 3, **options), reference, params, 4, scale)


def test_an_update_beyond_fp16_is_infinite():
    """As in every optimizer: nothing is clamped behind the user's back."""
    for update in UPDATES:
        p = nn.Parameter(torch.full((2,), 6e4, dtype=torch.float16))
        optimizer = SGD([p], lr=1.0, update=update)
        p.grad = torch.tensor([-6e4, 6e4], dtype=torch.float16)
        optimizer.step()
        assert p[0].item() == math.inf
        assert p[1].item() == 0.0


def test_gradients_in_another_memory_order_are_the_same_gradients():
    found = []
    for transpose in (False, True):
        p = nn.Parameter(numbers(24, 1, torch.bfloat16).view(4, 6))
        optimizer = AdamW([p], lr=0.1)
        g = numbers(24, 2, torch.bfloat16).view(4, 6)
        p.grad = g.t().contiguous().t() if transpose else g
        optimizer.step()
        found.append(p.detach().clone())
    assert same(*found)


# What small updates come to


@pytest.mark.parametrize(("dtype", "lr"), [(torch.float16, 2.0**-8), (torch.bfloat16, 2.0**-5)])
def test_nearest_stalls_and_the_others_arrive(dtype, lr):
    """Minimise (w - 1)^2 / 2. At 1 - w = 1/16 an update is half a unit in the last place: nearest stays there for good."""
    steps, reached = int(2 / lr), {}
    for update in UPDATES:
        p = nn.Parameter(torch.full((256,), 0.75, dtype=dtype))
        optimizer = SGD([p], update=update, lr=lr)
        for step in range(steps):
            p.grad = (p.detach().float() - 1).to(dtype)
            if update == "nearest" and step > 0.9 * steps:
                assert (optimizer.intended_update(p) != 0).all()
                assert (p == reached["nearest"]).all()
            optimizer.step()
            reached[update] = optimizer.full_weight(p)
    left = 0.25 * (1 - lr) ** steps  # in exact arithmetic
    assert left < 0.035
    assert (abs(reached["nearest"] - 0.9375) < 2 * torch.finfo(dtype).eps).all()
    assert abs(reached["stochastic"].mean() - (1 - left)) < 0.002
    assert (abs(reached["kahan"] - (1 - left)) < 0.001).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_below_half_a_unit(dtype):
    """From one, sixteen steps of a sixteenth of a unit: nearest does not move, Kahan moves by a unit, stochastic on average."""
    unit = torch.finfo(dtype).eps
    moved = {}
    for update in UPDATES:
        p = nn.Parameter(torch.ones(1 << 14, dtype=dtype))
        optimizer = SGD([p], lr=unit / 16, update=update)
        p.grad = -torch.ones_like(p)
        for _ in range(16):
            optimizer.step()
        moved[update] = (p.detach().double() - 1) / unit
    assert (moved["nearest"] == 0).all()
    assert (moved["kahan"] == 1).all()
    # Binomial(16, 1/16), whatever the unit above one: variance 15/16 an element.
    assert abs(moved["stochastic"].mean().item() - 1) < 5 * math.sqrt(15 / 16 / (1 << 14))
    assert moved["stochastic"].var().item() == pytest.approx(15 / 16, rel=0.1)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_watch_sees_lost_updates(dtype):
    for update in UPDATES:
        model = nn.Linear(64, 64, bias=False).to(dtype)
        nn.init.constant_(model.weight, 1.0)
        optimizer = SGD(model.parameters(), lr=torch.finfo(dtype).eps / 8, update=update)
        with lowp.health.watch(model, optimizer, every=1, roles=["updates"]) as health:
            for _ in range(8):
                model.weight.grad = -torch.ones_like(model.weight)
                optimizer.step()
            lost = [record["lost_updates"] for record in health.records if record["role"] == "updates"]
        assert len(lost) == 8
        if update == "nearest":
            assert lost == [1.0] * 8
        elif update == "kahan":
            assert max(map(abs, lost)) < 1e-6
        else:
            assert abs(sum(lost) / 8) < 5 * math.sqrt(7 / (64 * 64) / 8)  # of one element, p (1 - p) / p^2 with p = 1/8


@pytest.mark.parametrize("dtype", HALVES)
def test_decay_alone_survives(dtype):
    """AdamW, gradient zero: decay is 2^-14 a step, lost to nearest, kept by the others."""
    left = {}
    for update in UPDATES:
        p = nn.Parameter(torch.ones(1 << 14, dtype=dtype))
        optimizer = AdamW([p], lr=2.0**-7, weight_decay=2.0**-7, update=update)
        for _ in range(32):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        left[update] = optimizer.full_weight(p).double()
    wanted = (1 - 2.0**-14) ** 32
    assert (left["nearest"] == 1).all()
    assert (abs(left["kahan"] - wanted) < 1e-5).all()
    unit = torch.finfo(dtype).eps / 2  # below one
    assert abs(left["stochastic"].mean().item() - wanted) < 5 * math.sqrt(32 * 2.0**-14 * unit / (1 << 14))


# Noise


def one_run(seed=0, dtype=torch.bfloat16, steps=3, params=None, kind=SGD, **options):
    params = params or parameters(dtype)
    optimizer = kind(params, seed=seed, **({"lr": 1e-3} | options))
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params


def test_a_seed_repeats_and_another_differs():
    first, again, other = one_run(1), one_run(1), one_run(2)
    assert all(same(p.data, q.data) for p, q in zip(first, again, strict=True))
    assert not same(first[0].data, other[0].data)
    wide, narrow = one_run(2**40 + 1), one_run(1)
    assert not same(wide[0].data, narrow[0].data)


def test_every_step_and_parameter_has_its_own_noise():
    params = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = SGD(params, lr=2.0**-9)
    moved = []
    for _ in range(2):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        optimizer.step()
        moved += [p.detach().float() < 1 for p in params]
    for i in range(4):
        for j in range(i):
            together = torch.corrcoef(torch.stack([moved[i].float(), moved[j].float()]))[0, 1].item()
            assert abs(together) < 5 / math.sqrt(4096), (i, j)


def test_the_mean_over_seeds_is_the_exact_weight():
    w, g = torch.tensor(1.2734375, dtype=torch.bfloat16), torch.tensor(0.7109375, dtype=torch.bfloat16)
    exact = w.double() - 0.003 * g.double()
    rounded = []
    for seed in range(64):
        p = nn.Parameter(w.repeat(1024))
        p.grad = g.repeat(1024)
        SGD([p], lr=0.003, seed=seed).step()
        rounded.append(p.detach().double())
    rounded = torch.stack(rounded)
    assert rounded.unique().numel() == 2
    assert abs(rounded.mean() - exact).item() < 5 * rounded.std().item() / math.sqrt(rounded.numel())
    # Each seed is unbiased by itself, and seeds are unrelated: their means spread as those of independent numbers do.
    assert rounded.mean(1).std().item() == pytest.approx(rounded.std().item() / 32, rel=0.35)


def test_adding_a_group_later_leaves_the_noise_of_the_first_alone():
    alone = one_run(3)
    params, more = parameters(torch.bfloat16), [nn.Parameter(numbers(40, 77, torch.bfloat16))]
    optimizer = SGD(params, lr=1e-3, seed=3)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": more, "lr": 0.5})
            more[0].grad = torch.ones_like(more[0])
        set_gradients(params, step)
        optimizer.step()
    assert all(same(p.data, q.data) for p, q in zip(alone, params, strict=True))
    assert not same(more[0].data, numbers(40, 77, torch.bfloat16))


# Which parameters take part


@pytest.mark.parametrize("kind", [SGD, LARS, AdamW, LAMB])
def test_parameters_without_gradients_are_left_alone(kind):
    params = parameters(torch.bfloat16)
    before = copy.deepcopy(params)
    optimizer = kind(params, lr=0.5)
    optimizer.step()
    assert all(same(p.data, q.data) for p, q in zip(params, before, strict=True))
    set_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert same(params[1].data, before[1].data)
    assert not optimizer.state.get(params[1])
    assert not same(params[0].data, before[0].data)
    optimizer.zero_grad()
    assert params[0].grad is None
    moved = params[0].detach().clone()
    optimizer.step()
    assert same(params[0].data, moved)
    set_gradients(params, 1)
    optimizer.zero_grad(set_to_none=False)
    assert not params[0].grad.any()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_new_memory_for_a_parameter_is_used(kind):
    """`p.data = ...` (model.to, loading with assign=True) between steps."""
    runs = []
    for replaced in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = kind(params, lr=0.1)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
            if replaced:
                for p in params:
                    p.data = p.data.clone()
        runs.append(params)
    assert all(same(p.data, q.data) for p, q in zip(*runs, strict=True))


# Scaled gradients


@pytest.mark.parametrize("kind", [SGD, LARS, AdamW, LAMB])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_power_of_two_on_the_gradients_changes_nothing(kind, dtype):
    runs = []
    for scales in ([1.0] * 4, [2.0**10] * 4, [2.0**10, 2.0**-3, 0.5, 8.0]):
        params = parameters(dtype)
        optimizer = kind(params, lr=0.1)
        for step in range(3):
            for i, (p, scale) in enumerate(zip(params, scales, strict=True)):
                g = numbers(p.numel(), step * 10 + i).clamp(-4, 4)
                g[g.abs() < 2.0**-6] = 0  # far from the ends of FP16 under all of the scales
                p.grad = (g.to(dtype).float() * scale).to(dtype).view(p.shape)
            if len(set(scales)) == 1:
                optimizer.step(gradient_scale=scales[0])
            else:
                optimizer.step(gradient_scale=dict(zip(params, scales, strict=True)))
        runs.append([(p.data, *optimizer.decoded_state(p).values()) for p in params])
    for other in runs[1:]:
        for one, another in zip(runs[0], other, strict=True):
            assert all(same(x, y) for x, y in zip(one, another, strict=True))


def test_float32_gradients_are_scaled_too():
    weights = []
    for scale in (1.0, 3.0):
        p = nn.Parameter(torch.ones(4))
        p.grad = torch.full((4,), 0.75 * scale)
        SGD([p], lr=0.5, update="nearest").step(gradient_scale=scale)
        weights.append(p.tolist())
    assert weights[0] == weights[1] == [0.625] * 4


@pytest.mark.parametrize("kind", ["dynamic", "per_layer"])
def test_loss_scale_keeps_what_fp16_would_lose(kind):
    """Gradients near 2^-26, which FP16 does not have; FP16 model, AdamW, against float32."""
    losses = {}
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-12, update="nearest" if dtype == torch.float32 else "stochastic")
        scale = lowp.LossScale(kind, model=model)
        x, y = numbers(32, 1, dtype).view(8, 4), numbers(16, 2, dtype).view(8, 2)
        for _ in range(25):
            optimizer.zero_grad()
            loss = (model(x) - y).float().square().mean()
            scale.scale(loss * 2.0**-20).backward()
            scale.step(optimizer)
        losses[dtype] = loss.item()
    assert losses[torch.float16] == pytest.approx(losses[torch.float32], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_momentum_and_decay_can_be_switched_on_later(dtype):
    """What a group says counts when the step is taken, as in torch."""
    update = "nearest"
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 8).to(dtype))
    wide = nn.Parameter(parameter.detach().double())
    ours, theirs = SGD([parameter], lr=0.125, update=update), torch.optim.SGD([wide], lr=0.125)
    for step in range(4):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["momentum"], group["weight_decay"] = (0.5, 0.25) if step >= 2 else (0.0, 0.0)
        parameter.grad = torch.randn(8, 8).to(dtype)
        wide.grad = parameter.grad.double()
        ours.step()
        theirs.step()
    assert (parameter.double() - wide).abs().max() < 4e-3
    assert "momentum_buffer" in ours.state[parameter]


@pytest.mark.parametrize("policy", ["never", "always"])
def test_gradients_are_the_users_to_free(policy):
    """After a step nobody else holds them: with set_to_none the next ones take their place in memory."""
    lowp.set_kernel_policy(policy)
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    held = weakref.ref(p.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert held() is None
    p.grad = torch.full_like(p, torch.nan)
    held = weakref.ref(p.grad)
    with pytest.raises(lowp.NonFiniteGradient):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert held() is None


def test_states_that_were_replaced_are_used():
    """`optimizer.state` is anybody's to change, as torch's is."""
    runs = []
    for replaced in (False, True):
        p = nn.Parameter(numbers(64, 1, torch.bfloat16))
        optimizer = SGD([p], lr=0.1, momentum=0.9)
        for i in range(3):
            p.grad = numbers(64, 10 + i, torch.bfloat16)
            if replaced and i == 2:
                optimizer.state[p] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
            optimizer.step()
        runs.append((p.data, optimizer.state[p]["momentum_buffer"], optimizer.state[p]["step"]))
    assert same(runs[0][0], runs[1][0])
    assert same(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2] == 3


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the parameter's dtype in this torch")
def test_gradients_may_change_their_dtype():
    runs = []
    for wide in (False, True):
        p = nn.Parameter(numbers(64, 1, torch.bfloat16))
        optimizer = AdamW([p], lr=0.1)
        for i in range(3):
            gradient = numbers(64, 10 + i, torch.bfloat16)
            p.grad = None
            if wide and i == 1:
                p.grad_dtype = torch.float32
            p.grad = gradient.float() if wide and i else gradient
            optimizer.step()
        runs.append(p.data)
    assert same(*runs)
