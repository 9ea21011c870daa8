"""Master weights: on the grid after every step, bit for bit what `quantize` gives, the same after a resume and on all ranks."""

import pickle
import re

import pytest
import torch
from torch import nn

import lowp
from lowp.simulation import simulate
from lowp.simulation.master import MasterWeights
from lowp.tensor.noise import Domain, Noise

OPTIMIZERS = {
    "torch-sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lowp-sgd": lambda p: lowp.optim.SGD(p, lr=0.1, momentum=0.9, update="nearest"),
    "lowp-adamw": lambda p: lowp.optim.AdamW(p, lr=0.01, update="nearest", state="fp16"),
}


def model_of(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module, step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    model.zero_grad()
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", ["fixed1.14", "fp16", "e5m2", "posit8", "dynamic8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_the_optimizers_and_then_quantize(name, format, rounding):
    ours, theirs = model_of(), model_of()
    ours_optimizer, theirs_optimizer = (OPTIMIZERS[name](model.parameters()) for model in (ours, theirs))
    master = MasterWeights(ours_optimizer, format, rounding, seed=7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(lowp.quantize(parameter, format))
    assert equal(weights(ours), weights(theirs))
    for step in range(1, 4):
        for model, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
            backward(model, step)
            optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(theirs.parameters()):
                seed = Noise.of(Domain.MASTER, 7, step, number) if rounding == "stochastic" else None
                parameter.copy_(lowp.quantize(parameter, format, rounding, seed=seed))
        assert equal(weights(ours), weights(theirs))
    assert master.step == 3


def test_small_updates_arrive_on_average_or_never():
    """Steps of a hundredth of the format's: nearest stands still, stochastic rounding walks as far as it should."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.full((20_000,), 0.5))
        optimizer = torch.optim.SGD([weight], lr=2.0**-6 / 100)
        MasterWeights(optimizer, "fixed1.6", rounding)
        for _ in range(50):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = float((weight.detach() - 0.5).mean() / 2.0**-6)
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(0.5, abs=0.03)  # 5 standard deviations of sqrt(50 * .01 * .99 / 20,000)


def test_a_resumed_run_is_the_uninterrupted_one():
    def started(seed: int = 3):
        model = model_of()
        optimizer = OPTIMIZERS["lowp-adamw"](model.parameters())
        return model, optimizer, MasterWeights(optimizer, "fixed1.10", "stochastic", seed)

    whole, optimizer, master = started()
    saved = None
    for step in range(6):
        if step == 3:
            saved = pickle.dumps([whole.state_dict(), optimizer.state_dict(), master.state_dict()])
        backward(whole, step)
        optimizer.step()
    assert saved is not None
    resumed, optimizer, master = started()
    for part, state in zip((resumed, optimizer, master), pickle.loads(saved), strict=True):
        part.load_state_dict(state)
    for step in range(3, 6):
        backward(resumed, step)
        optimizer.step()
    assert equal(weights(resumed), weights(whole))
    other, optimizer, master = started(seed=4)
    for step in range(6):
        backward(other, step)
        optimizer.step()
    assert not equal(weights(other), weights(whole))


def test_steps_that_are_left_out_and_parameters_without_gradients():
    model = model_of()
    optimizer = lowp.optim.SGD(model.parameters(), lr=0.1, update="nearest")
    master = MasterWeights(optimizer, "e4m3fn", "stochastic")
    before, scale = weights(model), lowp.LossScale("dynamic")
    scale.scale(model(torch.full((1, 6), torch.inf)).sum()).backward()
    assert not scale.step(optimizer)
    with pytest.raises(lowp.NonFiniteGradient):
        optimizer.step()
    assert equal(weights(model), before)
    assert master.step == 0
    backward(model, 0)
    model[2].weight.grad = None
    optimizer.step()
    assert master.step == 1
    assert equal(weights(model)[2:3], before[2:3])
    assert not equal(weights(model)[:1], before[:1])


def test_groups_that_are_added_and_the_end_of_it():
    model, late = model_of(), nn.Parameter(torch.full((3,), 0.3))
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    master = MasterWeights(optimizer, "e3m0")
    optimizer.add_param_group({"params": [late]})
    backward(model, 0)
    optimizer.step()
    assert all(torch.equal(p, lowp.quantize(p, "e3m0")) for p in (*model.parameters(), late))
    master.remove()
    backward(model, 1)
    optimizer.step()
    assert not equal(weights(model), [lowp.quantize(p, "e3m0") for p in model.parameters()])
    assert master.step == 1


def test_with_simulated_weights():
    """What forward sees is rounded once more, from master weights that are wider."""
    model = model_of()
    simulate(model, weights="e5m2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MasterWeights(optimizer, "fp16", "stochastic")
    backward(model, 0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        layer, _, own = name.rpartition(".")
        assert torch.equal(parameter, lowp.quantize(parameter, "fp16"))
        assert torch.equal(getattr(model.get_submodule(layer), own), lowp.quantize(parameter, "e5m2"))


def test_a_compiled_step_is_rounded_too():
    weight = nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = lowp.optim.SGD([weight], lr=0.1, update="nearest")
    master = MasterWeights(optimizer, "e4m3fn", "stochastic")
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(1, 4):
        weight.grad = torch.ones_like(weight)
        compiled()
        assert master.step == step
        assert torch.equal(weight, lowp.quantize(weight, "e4m3fn"))


def test_16_bit_parameters_hold_what_they_can():
    model = model_of().bfloat16()
    optimizer = lowp.optim.SGD(model.parameters(), lr=0.1, update="stochastic")
    MasterWeights(optimizer, "e4m3fn", "stochastic")
    assert all(torch.equal(p, lowp.quantize(p, "e4m3fn")) for p in model.parameters())


def test_ranks_agree():
    """Replicas with the same reduced gradients stay replicas, whatever else each of them draws. (Real ones: tests/train.)"""
    replicas = [model_of(), model_of()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in replicas]
    for rank, optimizer in enumerate(optimizers):
        torch.randn(rank)
        MasterWeights(optimizer, "fixed1.8", "stochastic", seed=1)
    for step in range(3):
        for rank, model in enumerate(replicas):
            backward(model, step, rank)
        for ours, theirs in zip(*(model.parameters() for model in replicas), strict=True):
            ours.grad = theirs.grad = ours.grad + theirs.grad
        for optimizer in optimizers:
            optimizer.step()
    assert equal(*(weights(model) for model in replicas))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda o: MasterWeights(o, "e4m3fm"), ValueError, "unknown format 'e4m3fm'; did you mean 'e4m3fn'"),
        (lambda o: MasterWeights(o, "mxfp8_e4m3"), ValueError, "mxfp8_e4m3 has no room for master weights: a block's scale"),
        (lambda o: MasterWeights(o, "e8m0fnu"), ValueError, "e8m0fnu has no room for master weights"),
        (
            lambda o: MasterWeights(o, "fp16", "kahan"),
            ValueError,
            "updates are rounded to 'nearest' or 'stochastic', not 'kahan'",
        ),
        (lambda o: MasterWeights(o, "fp16", seed=0.5), TypeError, "seed must be an integer"),
        (
            lambda o: MasterWeights(nn.Linear(1, 1), "fp16"),
            TypeError,
            "MasterWeights takes a torch.optim.Optimizer, not Linear",
        ),
        (
            lambda o: MasterWeights(o, "fixed1.14"),
            TypeError,
            "a parameter of shape (3,) is bfloat16, which does not hold every number of fixed1.14: keep the model in float32",
        ),
        (lambda o: MasterWeights(o, "tf32"), TypeError, "is bfloat16, which does not hold every number of tf32"),
    ],
)
def test_what_cannot_be(make, error, said):
    narrow = nn.Parameter(torch.full((3,), 0.3, dtype=torch.bfloat16))
    with pytest.raises(error, match=re.escape(said)):
        make(torch.optim.SGD([narrow], lr=0.1))
    assert torch.equal(narrow, torch.full((3,), 0.3, dtype=torch.bfloat16))


def test_a_state_that_is_anothers_is_refused():
    optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
    master = MasterWeights(optimizer, "fp16", "stochastic")
    with pytest.raises(ValueError, match="the saved master weights have format 'bf16', these 'fp16'"):
        master.load_state_dict(master.state_dict() | {"format": "bf16"})
    with pytest.raises(ValueError, match="this is not the state of MasterWeights: it has no 'format'"):
        master.load_state_dict({})
