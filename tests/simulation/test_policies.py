"""Policies: decisions on constructed histories, the same after a save and a load, and applied to a model that trains."""

import copy
import math

import pytest
import torch
from torch import nn

from lowp.simulation import restore, simulate
from lowp.simulation.policies import GradientDiversity, MemoryBudget, OnOverflow, PerLayer, Schedule, Together, Uniform
from lowp.training.models import build_model

ROLES = ("weights", "activations", "errors", "gradients")


def test_schedule():
    schedule = Schedule(
        {5: {"weights": "posit16", "layers": {"last": {"weights": "fp32"}}}, 0: {"weights": "fp32"}, 8: {"errors": "e5m2"}}
    )
    assert schedule.at(0) == schedule.at(4) == {"weights": "fp32"}
    assert schedule.at(9) == {"weights": "posit16", "layers": {"last": {"weights": "fp32"}}, "errors": "e5m2"}
    assert Schedule({3: {"weights": "e4m3fn"}}).at(2) == {}
    simulation = simulate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for epoch, formats in ((0, ["fp32", "fp32"]), (6, ["posit16", "fp32"]), (1, ["fp32", "fp32"])):
        simulation.set(**({"layers": None} | schedule.at(epoch)))
        assert [row.format for row in simulation.formats() if row.role == "weights"] == formats
    schedule.load_state_dict(schedule.state_dict())


def test_promotion_on_overflow():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    simulation = simulate(model, weights="e4m3fn", activations="e4m3fn", count_overflow=True)
    policy = OnOverflow(to="fp16", after=2)
    promoted = []
    for _ in range(4):
        model(torch.tensor([[1000.0]]))
        due = policy.check(simulation.overflowed())
        for layer in due:
            simulation.promote(layer, policy.to)
        promoted.append(due)
        saved, policy = policy.state_dict(), OnOverflow(to="fp16", after=2)
        policy.load_state_dict(saved)
    assert promoted == [[], ["0"], [], ["1"]]  # the second layer overflows once the first gives it a finite number
    assert model(torch.tensor([[1000.0]])).item() == 1000
    assert policy.check({"0": {"weights"}, "1": set()}) == []


def orthogonal(step):
    return {"a": torch.eye(4)[step % 4], "b": 3 * torch.eye(4)[step % 4]}


def alike(step):
    return {"a": torch.ones(4), "b": torch.ones(4)}


def epochs(policy, gradients, steps=8):
    for epoch_gradients in gradients:
        for step in range(steps):
            policy.observe(epoch_gradients(step))
            saved = policy.state_dict()
            policy = GradientDiversity(**SETTINGS)
            policy.load_state_dict(saved)
        yield policy.epoch_done()


SETTINGS = {"ladder": ("e4m3fn", "fp16", "fp32"), "threshold": 2.0, "window": 4, "patience": 2, "roles": ("weights", "errors")}


def test_gradient_diversity_switches():
    policy = GradientDiversity(**SETTINGS)
    assert policy.changes() == {"weights": "e4m3fn", "errors": "e4m3fn"}
    # p is 1 while gradients are orthogonal (diversity 1), 4 when all four of a window are alike (diversity 1/4).
    history = [orthogonal, orthogonal, alike, orthogonal, alike, alike, alike, orthogonal, alike, alike]
    found = list(epochs(policy, history))
    fp16, fp32 = ({"weights": name, "errors": name} for name in ("fp16", "fp32"))
    assert found == [None, None, None, None, fp16, None, None, None, None, fp32]


def test_gradient_diversity_is_exact_and_ignores_what_says_nothing():
    policy = GradientDiversity(threshold=1.0, window=2, patience=1)
    first, second = {"a": torch.tensor([3.0, 0.0]), "b": torch.zeros(2)}, {"a": torch.tensor([0.0, 4.0]), "b": torch.zeros(2)}
    policy.observe(first)
    policy.observe(second)
    policy.observe(first)  # a window goes on in the next epoch
    assert policy.epoch_done() is None
    assert policy.state_dict()["largest"] == 1.0  # (9 + 16) / 25; b says nothing
    assert policy.epoch_done() is None  # no window ended
    policy.observe({"a": torch.tensor([math.nan, 0.0]), "b": torch.zeros(2)})
    assert policy.epoch_done() is None  # nor does one with a NaN
    policy.observe(first)
    policy.observe(first)
    assert policy.epoch_done() == dict.fromkeys(("weights", "activations", "errors", "gradients"), "fp16")
    policy.observe({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="had none when the window began"):
        policy.observe({"c": torch.ones(1)})


def test_the_top_of_the_ladder_is_the_end():
    policy = GradientDiversity(ladder=("e4m3fn", "fp32"), threshold=1.5, window=4, patience=1)
    for gradients in (orthogonal, alike, orthogonal, alike):
        for step in range(4):
            policy.observe(gradients(step))
        policy.epoch_done()
    assert policy.level == 1


def two_layers():
    model, generator = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def formats(simulation, role):
    return {row.layer: row.format for row in simulation.formats() if row.role == role}


def test_uniform_and_per_layer():
    model = two_layers()
    simulation = simulate(model)
    Uniform(weights="e4m3fn", errors="e5m2").start(simulation, model)
    assert set(formats(simulation, "weights").values()) == {"e4m3fn"}
    assert set(formats(simulation, "errors").values()) == {"e5m2"}
    assert set(formats(simulation, "gradients").values()) == {"fp32"}
    PerLayer({"2": {"weights": "posit16"}, "Linear": {"weights": "fp16"}}, default={"activations": "bf16"}).start(
        simulation, model
    )
    assert formats(simulation, "weights") == {"0": "fp16", "2": "posit16"}
    assert formats(simulation, "activations") == dict.fromkeys("012", "bf16")
    assert set(formats(simulation, "errors").values()) == {"e5m2"}  # as it was
    PerLayer({"2": {"weights": "fp32"}}, default="e4m3fn").start(simulation, model)
    assert {row.format for row in simulation.formats() if row.layer != "2" or row.role != "weights"} == {"e4m3fn"}


def test_what_matches_nothing():
    model = two_layers()
    simulation = simulate(model, weights="fp16")
    for policy, message in (
        (PerLayer({"3": {"weights": "fp16"}}), "'3' matches nothing"),
        (PerLayer({"0": {"weights": "e5m2"}, "ReLU": {"weights": "fp16"}}), "'ReLU' matches nothing that has weights"),
        (Schedule({0: {"weights": "e5m2"}, 9: {"layers": {"head": {"weights": "fp16"}}}}), "'head' matches nothing"),
        (OnOverflow(), "nobody counts them"),
        (MemoryBudget(0.5, torch.zeros(1, 3), threshold=None), "'0' has weights in fp16 already"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.start(simulation, model)
        assert set(formats(simulation, "weights").values()) == {"fp16"}  # nothing changed
    relu = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match="has no weights to round"):
        Uniform(weights="fp16").start(simulate(relu), relu)


def test_schedule_by_step():
    model = two_layers()
    simulation = simulate(model)
    schedule = Schedule({2: {"weights": "fp16"}, 0: {"errors": "e5m2"}, 5: {"layers": {"0": {"weights": "e4m3fn"}}}}, by="step")
    schedule.start(simulation, model)
    seen = []
    for step in range(7):
        said = schedule.before_step(simulation, step, epoch=step // 2)
        if step == 3:  # somebody else's change stays, and a resumed schedule does not begin anew
            simulation.set(errors="fp16")
            saved, schedule = schedule.state_dict(), Schedule(schedule.phases, by="step")
            schedule.load_state_dict(saved)
        seen.append((formats(simulation, "weights")["0"], formats(simulation, "errors")["0"], bool(said)))
    assert seen[:3] == [("fp32", "e5m2", False), ("fp32", "e5m2", False), ("fp16", "e5m2", True)]
    assert seen[3:] == [("fp16", "fp16", False)] * 2 + [("e4m3fn", "fp16", True), ("e4m3fn", "fp16", False)]
    late = Schedule({0: {"errors": "e5m2"}, 3: {"weights": "bf16"}})
    assert late.before_step(simulation, 40, epoch=4) == ["from here on: errors in e5m2, weights in bf16"]


def test_overflow_by_step_and_after_a_failure():
    model = two_layers()
    simulation = simulate(model, weights="e4m3fn", count_overflow=True)
    by_step, by_epoch = OnOverflow("fp16", after=2, by="step"), OnOverflow("bf16")
    by_step.start(simulation, model)
    with torch.no_grad():
        dict(model.named_parameters())["2.weight"].fill_(1000.0)
    answers = []
    for _ in range(3):
        model(torch.ones(1, 3))
        answers.append(by_step.after_step(simulation, {}))
    assert answers == [[], ["layer 2 overflowed and is promoted to fp16"], []]
    assert by_step.after_epoch(simulation) == by_epoch.after_step(simulation, {}) == []
    assert formats(simulation, "weights") == {"0": "e4m3fn", "2": "fp16"}
    with torch.no_grad():
        dict(model.named_parameters())["0.weight"].fill_(1000.0)
    model(torch.ones(1, 3))
    assert by_step.after_failure(simulation, lambda counts: 2 * counts) == ["layer 0 overflowed and is promoted to fp16"]
    assert by_step.after_failure(simulation) == []


def test_together():
    model = two_layers()
    simulation = simulate(model, count_overflow=True)
    settings = {**SETTINGS, "roles": ("weights",), "patience": 1}

    def fresh():
        return Together(Schedule({0: {"errors": "e5m2"}, 1: {"errors": "fp16"}}), GradientDiversity(**settings), OnOverflow())

    policy = fresh()
    assert policy.count_overflow
    policy.start(simulation, model)
    said = []
    for epoch, gradients in enumerate((orthogonal, alike)):
        for step in range(4):
            said += policy.before_step(simulation, 4 * epoch + step, epoch)
            said += policy.after_step(simulation, gradients(step))
            saved, policy = policy.state_dict(), fresh()
            policy.load_state_dict(saved)
        said += policy.after_epoch(simulation)
    assert said == ["from here on: errors in fp16", "gradients are no longer diverse; from here on: weights in fp16"]
    with pytest.raises(ValueError, match="whoever asks first resets the counts"):
        Together(OnOverflow(), OnOverflow())
    with pytest.raises(ValueError, match="is of 3 policies, and here are 1"):
        Together(OnOverflow()).load_state_dict(saved)


def small_network():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def test_groups_are_those_of_the_paper():
    """Sizes by hand: 5 images of 4 x 4. Weights and gradients are with what their layer reads."""
    model = small_network()
    policy = MemoryBudget(1.0, torch.ones(5, 1, 4, 4), threshold=None)
    policy.start(simulate(model), model)
    groups = {tuple(f"{place.layers[0]} {place.role[0]}" for place in group.places): group.elements for group in policy.groups}
    conv = (
        2 * (5 * 2 * 16) * 3 + 2 * 4 + 2 * (32 * 8 + 8)
    )  # outputs of conv, norm and ReLU; the norm; the linear layer's weights
    linear = 2 * (5 * 8) * 2 + 2 * (8 * 3 + 3)
    assert list(groups.items()) == [
        (("0 a", "0 e", "1 w", "1 a", "1 e", "1 g", "2 a", "2 e", "4 w", "4 g"), conv),
        (("4 a", "4 e", "5 a", "5 e", "6 w", "6 g"), linear),
        (("0 w", "0 g"), 2 * 20),
        (("6 a", "6 e"), 2 * 15),
    ]


def test_the_largest_group_is_demoted_first():
    model = small_network()
    x = torch.ones(5, 1, 4, 4)
    high = MemoryBudget(1.0, x, threshold=None)
    simulation = simulate(model)
    high.start(simulation, model)
    assert {row.format for row in simulation.formats()} == {"e6m9"}
    restore(model)
    low = MemoryBudget(0.99, x, threshold=None)
    simulation = simulate(model)
    low.start(simulation, model)
    assert [group.rung for group in low.groups] == [1, 0, 0, 0]
    demoted = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e6m9"}
    places = {(layer, place.role) for place in low.groups[0].places for layer in place.layers}
    for row in simulation.formats():
        assert row.format == (demoted[row.role] if (row.layer, row.role) in places else "e6m9"), row
    assert low.bytes == high.bytes - (low.groups[0].elements - (4 + 32 * 8 + 8))  # one byte less for all but the gradients


def built(name):
    torch.manual_seed(0)  # weights are drawn from torch's own generator
    shape, options = {
        "cnn": ((1, 8, 8), {"channels": (2, 3), "hidden": 8}),
        "lstm": ((6,), {"width": 8, "layers": 1}),
        "gpt": ((6,), {"width": 8, "layers": 2, "heads": 2, "tied": True}),
    }[name]
    x = torch.ones(2, 1, 8, 8) if name == "cnn" else torch.randint(0, 7, (2, 6))
    return build_model(name, shape=shape, classes=7, options=options), x


@pytest.mark.parametrize("name", ["cnn", "lstm", "gpt"])
def test_budgets_are_met(name):
    model, x = built(name)
    ladder = ("fp32", "fp16", "e4m3fn", "e2m1fn")
    previous = math.inf
    for budget in (1.0, 0.9, 0.5, 0.45, 0.3, 0.2, 0.125, 60):
        simulation = simulate(model)
        policy = MemoryBudget(budget, x, ladder, roles=("weights", "activations"), threshold=None)
        if budget == 60:
            with pytest.raises(ValueError, match=r"a budget of 60 bytes cannot be met.*, 0\.125 of what the first"):
                policy.start(simulation, model)
        else:
            policy.start(simulation, model)
            high = sum(group.elements for group in policy.groups) * 4
            assert policy.bytes <= min(budget * high, previous)
            rungs = [group.rung for group in policy.groups]
            assert rungs == sorted(rungs, reverse=True)  # the largest are the lowest
            assert max(rungs) - min(rungs) <= 1
            previous = policy.bytes
        restore(model)


def test_a_shared_parameter_has_one_format():
    model, x = built("gpt")
    simulation = simulate(model)
    policy = MemoryBudget(0.4, x, ("fp32", "e4m3fn"), roles=("weights", "activations"), threshold=None)
    policy.start(simulation, model)
    shared = [place for group in policy.groups for place in group.places if place.layers == ("embedding.tokens", "head")]
    assert [(place.role, place.elements) for place in shared] == [("weights", 7 * 8)]
    found = formats(simulation, "weights")
    assert found["embedding.tokens"] == found["head"]


def test_measuring_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[2].eval()
    model(torch.ones(4, 3)).sum().backward()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], [m.training for m in model.modules()]))
    random = torch.get_rng_state()

    def example(model):
        model.train()
        torch.rand(3)
        model(torch.randn(4, 3))

    policy = MemoryBudget(0.8, example, threshold=None)
    policy.start(simulate(model), model)
    restore(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key]), key
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before[1], strict=True))
    assert [m.training for m in model.modules()] == before[2]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def overflowing(part):
    """A linear layer of 100 weights, so many of which do not fit into e4m3fn."""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0**-10)
        model[0].weight.view(-1)[: round(part * 100)] = 1000.0
    return model


@pytest.mark.parametrize(("part", "promoted"), [(0.01, False), (0.02, True)])
def test_promotion_is_of_the_tensor_that_overflows(part, promoted):
    model = overflowing(part)
    policy = MemoryBudget(0.5, torch.ones(2, 10), ("fp16", "e4m3fn"), threshold=0.02)
    simulation = simulate(model, count_overflow=True)
    policy.start(simulation, model)
    assert {row.format for row in simulation.formats()} == {"e4m3fn"}
    low = policy.bytes
    model(torch.full((2, 10), 2.0**-10))
    said = policy.after_step(simulation, {})
    wide = {(row.layer, row.role) for row in simulation.formats() if row.format == "fp16"}
    assert wide == ({("0", "weights")} if promoted else set())
    assert said == (["weights of 0 overflowed and are promoted to fp16"] if promoted else [])
    assert policy.bytes == low + 100 * promoted
    assert policy.after_step(simulation, {}) == []  # counts are reset
    if not promoted:
        model(torch.full((2, 10), 2.0**-10))
        assert policy.after_failure(simulation) == ["weights of 0 overflowed and are promoted to fp16"]


def test_ranks_and_several_steps_count_on_average():
    """Two ranks: on one, 3 % of the weights overflow, on the other none; checked every second step."""
    model = overflowing(0.03)
    policy = MemoryBudget(0.5, torch.ones(2, 10), ("fp16", "e4m3fn"), threshold=0.02, every=2)
    simulation = simulate(model, count_overflow=True)
    policy.start(simulation, model)

    def step(other_ranks_counts):
        model(torch.full((2, 10), 2.0**-10))
        return policy.after_step(simulation, {}, lambda counts: counts + torch.tensor([*other_ranks_counts, 1]))

    quiet, loud = [0] * 8, [0] * 8
    loud[[(row.layer, row.role) for row in simulation.formats()].index(("0", "weights"))] = 2
    assert [step(quiet), step(quiet)] == [[], []]  # 1.5 % on average
    assert [step(loud), step(loud)] == [[], ["weights of 0 overflowed and are promoted to fp16"]]  # (6 + 2) / 2 / 2 = 2 %


def test_a_resumed_policy_decides_what_the_uninterrupted_one_does():
    def run(interrupted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        generator = torch.Generator().manual_seed(1)

        def begin():
            policy = MemoryBudget(0.7, torch.ones(4, 6), ("fp16", "e2m1fn"), threshold=0.1, every=3)
            simulation = simulate(model, count_overflow=True)
            policy.start(simulation, model)
            return simulation, policy

        simulation, policy = begin()
        said, losses = [], []
        for step in range(12):
            if step in interrupted:
                saved = copy.deepcopy((simulation.state_dict(), policy.state_dict(), simulation.overflow_counts()))
                restore(model)
                simulation, policy = begin()
                simulation.load_state_dict(saved[0])
                policy.load_state_dict(saved[1])
                simulation.load_overflow_counts(saved[2])
            said += policy.before_step(simulation, step, 0)
            loss = model(torch.randn(4, 6, generator=generator) * (1 + step)).square().mean()
            parameters = dict(model.named_parameters())
            gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            said += policy.after_step(simulation, gradients)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter -= 0.1 * gradients[name]
            losses.append(loss.item())
        return losses, said, policy.assignment, [row.format for row in simulation.formats()]

    want = run(())
    assert want[1]  # something was promoted
    assert run((4, 5, 9)) == want


def test_mistakes():
    for make, message in (
        (lambda: Uniform(), "names a format for at least one"),
        (lambda: Uniform(weigths="fp16"), "did you mean 'weights'"),
        (lambda: PerLayer({}), "needs an entry"),
        (lambda: Schedule({0: {}}, by="day"), "by epoch or by step, not by 'day'"),
        (lambda: Schedule({-1: {}}, by="step"), "counts steps from 0"),
        (lambda: Schedule({0: {}}).load_state_dict({"begun": 2}), "in phase 2, and this one has 1"),
        (lambda: Uniform(weights="fp16").load_state_dict({"level": 1}), "has no state, but was given level"),
        (lambda: OnOverflow(by="day"), "by epoch or by step"),
        (lambda: Together(), "needs a policy"),
        (lambda: MemoryBudget(1.5, 0), "1.5 is neither"),
        (lambda: MemoryBudget(0, 0), "0 is neither"),
        (lambda: MemoryBudget(0.5), "needs an example"),
        (lambda: MemoryBudget(0.5, 0, ("fp16",)), "two rungs or more"),
        (lambda: MemoryBudget(0.5, 0, ("e4m3fn", "fp16")), "has more bits than e4m3fn before it"),
        (lambda: MemoryBudget(0.5, 0, threshold=2), "from 0 to 1, not 2"),
        (lambda: MemoryBudget(0.5, 0, every=0), "at least 1, not 0"),
        (lambda: Schedule({}), "at least one phase"),
        (lambda: Schedule({-1: {}}), "counts epochs from 0"),
        (lambda: Schedule({0: {"weigths": "fp16"}}), "did you mean 'weights'"),
        (lambda: OnOverflow(after=0), "at least 1"),
        (lambda: OnOverflow(to="fp17"), "unknown format 'fp17'"),
        (lambda: GradientDiversity(ladder=("fp16",)), "two formats or more"),
        (lambda: GradientDiversity(window=1), "a window of at least 2"),
        (lambda: GradientDiversity(roles=("weight",)), "unknown role 'weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    policy = GradientDiversity(ladder=("e4m3fn", "fp32"))
    with pytest.raises(ValueError, match="on step 2 of a ladder that has 2"):
        policy.load_state_dict(policy.state_dict() | {"level": 2})
