"""Policies: decisions on constructed histories, the same after a save and a load, and applied to a model that trains."""

import math

import pytest
import torch
from torch import nn

from lowp.simulation import GradientDiversity, OnOverflow, Schedule, simulate


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


def test_mistakes():
    for make, message in (
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
