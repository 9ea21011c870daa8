"""A simulation after other settings, and after a pass on fake tensors."""

import torch
from torch._subclasses import FakeTensorMode

import lowp


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


def test_steps_go_on_where_scales_do_not_remember_any_more() -> None:
    model = _model()
    simulation = lowp.simulate(model, weights="e4m3fn", scale="delayed")
    simulation.step = 1
    simulation.set(weights=None)
    simulation.step = 2
    simulation.set(weights="e4m3fn", scale="tensor")
    simulation.step = 3


def test_a_rotation_made_of_fake_tensors_is_not_kept() -> None:
    def gradient() -> torch.Tensor:
        model = _model()
        lowp.simulate(model, products="mxfp4, hadamard 64", seed=17)
        model(torch.ones(64, 32)).sum().backward()
        return model[0]._parameters["weight"].grad

    with FakeTensorMode():
        gradient()
    assert type(gradient()) is torch.Tensor
