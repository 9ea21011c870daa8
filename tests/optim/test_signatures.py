"""Optimizers take what torch's take: the same names, accepted, or refused with a reason in one line."""

import inspect

import pytest
import torch

import lowp

PAIRS = [(lowp.optim.SGD, torch.optim.SGD), (lowp.optim.AdamW, torch.optim.AdamW)]
REFUSED = {"capturable", "differentiable", "amsgrad"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_argument_of_torch_is_known(ours, theirs):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    arguments = dict(inspect.signature(theirs.__init__).parameters)
    for name in ("self", "params"):
        arguments.pop(name)
    defaults = {name: argument.default for name, argument in arguments.items()}
    group = ours([weight], **defaults).param_groups[0]
    assert all(group[name] == value for name, value in defaults.items() if name not in REFUSED)
    for name in REFUSED & defaults.keys():
        with pytest.raises(ValueError, match=rf"^{name}=True is not supported by lowp.optim: .+"):
            ours([weight], **{name: True})
    positional = [name for name, argument in arguments.items() if argument.kind is argument.POSITIONAL_OR_KEYWORD]
    assert list(inspect.signature(ours.__init__).parameters)[2 : 2 + len(positional)] == positional


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_float32_models_are_taken_as_they_are(ours, theirs):
    """Without a word about `update`, as a trainer makes optimizers; and beside 16-bit weights."""
    torch.manual_seed(0)
    one = torch.nn.Linear(8, 8)
    other = torch.nn.Linear(8, 8)
    other.load_state_dict(one.state_dict())
    for model, kind in ((one, ours), (other, theirs)):
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 8), 1.0 + step)).square().sum().backward()
            optimizer.step()
    assert torch.equal(one.weight, other.weight)
    mixed = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    for weight in mixed:
        weight.grad = torch.ones_like(weight)
    ours(mixed, lr=0.1).step()
    assert all((weight < 1).all() for weight in mixed)
    with pytest.raises(TypeError, match="update='kahan' is for 16-bit weights"):
        ours(mixed, update="kahan")
