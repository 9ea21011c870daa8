"""A run that is saved and resumed goes on with the same bits; what does not fit is refused by name, and nothing is changed."""

import copy
import io
import pickle

import pytest
import torch
from test_optimizers import numbers, parameters, same, set_gradients
from torch import nn

from lowp.optim import LAMB, LARS, SGD, AdamW

KINDS = [SGD, LARS, AdamW, LAMB]
HALF = torch.bfloat16
OPTIONS = {SGD: {"momentum": 0.9}, LARS: {"exclude": ["1*"]}, AdamW: {}, LAMB: {"exclude": ["1*"]}}
BIG = ((64, 64), (11,), (3, 2, 2, 2), (1,))


def make(kind, params, **options):
    return kind([(f"{i}", p) for i, p in enumerate(params)], lr=0.1, **(OPTIONS[kind] | options))


def steps(optimizer, params, first, last):
    for step in range(first, last):
        set_gradients(params, step)
        if step % 2:
            params[2].grad = None  # a parameter with a step count of its own
        optimizer.step()


def all_same(optimizer, params, other, others):
    for p, q in zip(params, others, strict=True):
        assert same(p.data, q.data)
        mine, theirs = optimizer.state[p], other.state[q]
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert same(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", ["stochastic", "kahan", "nearest"])
@pytest.mark.parametrize("state", [None, "dynamic8"])
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_a_resumed_run_has_the_same_bits(kind, update, state, dtype):
    """Through torch.save with weights_only=True, into an optimizer with another seed and learning rate."""
    params = parameters(dtype, BIG)
    optimizer = make(kind, params, update=update, state=state, seed=4)
    steps(optimizer, params, 0, 3)
    room = io.BytesIO()
    torch.save({"model": [p.data for p in params], "optimizer": optimizer.state_dict()}, room)
    steps(optimizer, params, 3, 6)

    saved = torch.load(io.BytesIO(room.getvalue()), weights_only=True)
    resumed = [nn.Parameter(w) for w in saved["model"]]
    other = make(kind, resumed, update=update, state=state, seed=99)
    other.param_groups[0]["lr"] = 7.0
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["lr"] == 0.1
    steps(other, resumed, 3, 6)
    all_same(optimizer, params, other, resumed)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_resumed_float32_run_has_the_same_bits(kind):
    params = parameters()
    optimizer = make(kind, params, update="nearest")
    steps(optimizer, params, 0, 3)
    saved, resumed = copy.deepcopy((optimizer.state_dict(), params))
    steps(optimizer, params, 3, 6)
    other = make(kind, resumed, update="nearest")
    other.load_state_dict(saved)
    steps(other, resumed, 3, 6)
    all_same(optimizer, params, other, resumed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("taken", [0, 3])
def test_a_copy_goes_on_with_the_same_bits(kind, way, taken):
    params = parameters(HALF, BIG)
    optimizer = make(kind, params, state="dynamic8")
    steps(optimizer, params, 0, taken)
    both = (optimizer, params)
    other, others = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    steps(other, others, taken, taken + 3)
    steps(optimizer, params, taken, taken + 3)
    all_same(optimizer, params, other, others)


def test_saved_states_are_not_those_in_use():
    """Loading copies: two optimizers do not share a state."""
    params = parameters(HALF)
    optimizer = make(AdamW, params)
    steps(optimizer, params, 0, 2)
    others = copy.deepcopy(params)
    other = make(AdamW, others)
    other.load_state_dict(optimizer.state_dict())
    before = {name: value.clone() for name, value in optimizer.state[params[0]].items() if isinstance(value, torch.Tensor)}
    steps(other, others, 2, 4)
    assert all(same(value, optimizer.state[params[0]][name]) for name, value in before.items())


def test_a_state_dict_is_not_changed_by_loading_it():
    params = parameters(HALF)
    optimizer = make(AdamW, params)
    steps(optimizer, params, 0, 2)
    saved = optimizer.state_dict()
    copied = copy.deepcopy(saved)
    make(AdamW, copy.deepcopy(params)).load_state_dict(saved)
    assert saved["param_groups"] == copied["param_groups"]
    assert saved["state"].keys() == copied["state"].keys()


def test_another_learning_rate_after_loading_and_a_group_added_later():
    params, late = parameters(HALF), nn.Parameter(numbers(64, 5, HALF))
    optimizer = make(AdamW, params)
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.5, "update": "kahan"})
    late.grad = torch.ones_like(late)
    steps(optimizer, params, 0, 2)
    others, other_late = copy.deepcopy((params, late))
    other = make(AdamW, others)
    with pytest.raises(ValueError, match="2 parameter groups, the optimizer 1"):
        other.load_state_dict(optimizer.state_dict())
    other.add_param_group({"params": [("late", other_late)]})
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[1]["lr"] == 0.5
    assert other.param_groups[1]["update"] == "kahan"
    other_late.grad = torch.ones_like(other_late)
    steps(optimizer, params, 2, 4)
    steps(other, others, 2, 4)
    all_same(optimizer, [*params, late], other, [*others, other_late])


# What does not fit


def drop(saved, name):
    del saved["state"][0][name]


def change(saved, name, to):
    saved["state"][0][name] = to(saved["state"][0][name])


BREAKS = {
    "a missing state": (lambda s: drop(s, "exp_avg"), "'0' is truncated: exp_avg missing"),
    "a missing step": (lambda s: drop(s, "step"), "'0' is truncated: step missing"),
    "a missing bound": (lambda s: drop(s, "exp_avg_sq_bound"), "'0' is truncated: exp_avg_sq_bound missing"),
    "a missing parameter": (lambda s: s["state"].pop(3), "truncated: it had states of 4 parameters, 3 are left"),
    "another shape": (lambda s: change(s, "exp_avg", lambda x: x[:3]), "exp_avg of parameter '0' is .* of shape"),
    "another dtype": (lambda s: change(s, "exp_avg", torch.Tensor.float), "exp_avg of parameter '0' is torch.float32"),
    "no tensor": (lambda s: change(s, "exp_avg", lambda x: None), "exp_avg of parameter '0' is NoneType"),
    "no step count": (lambda s: change(s, "step", lambda x: "three"), "step of parameter '0'"),
    "one more state": (lambda s: s["state"][0].update(velocity=torch.ones(1)), "other settings: it also has velocity"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), "group 0 had 3 of them, now 4"),
    "renamed parameters": (lambda s: s["param_groups"][0]["param_names"].__setitem__(1, "w"), "saved 'w', now '1'"),
    "another order": (lambda s: s["param_groups"][0]["param_names"].reverse(), "have changed"),
    "no groups": (lambda s: s.pop("param_groups"), "no optimizer's state_dict"),
    "another state format": (lambda s: s["param_groups"][0].update(state="posit16"), "exp_avg of parameter '0' is"),
    "an unknown state format": (lambda s: s["param_groups"][0].update(state="e4m3fm"), "did you mean"),
    "another update": (lambda s: s["param_groups"][0].update(update="kahan"), "compensation missing"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(name):
    damage, message = BREAKS[name]
    params = parameters(HALF)
    optimizer = make(AdamW, params)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    saved, others = copy.deepcopy((optimizer.state_dict(), params))
    twin = make(AdamW, others)
    twin.load_state_dict(copy.deepcopy(saved))
    damage(saved)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(saved)
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for own, those in ((optimizer, params), (twin, others)):
        set_gradients(those, 2)
        own.step()
    all_same(optimizer, params, twin, others)


@pytest.mark.parametrize(("ours", "theirs"), [(SGD, torch.optim.SGD), (AdamW, torch.optim.AdamW), (AdamW, torch.optim.SGD)])
def test_states_of_other_optimizers(ours, theirs):
    params = parameters(HALF)
    other = theirs(params, lr=0.1)
    set_gradients(params, 0)
    other.step()
    with pytest.raises(ValueError, match="another optimizer's: group 0 has no update, state, seed"):
        ours(params).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="no optimizer's state_dict"):
        ours(params).load_state_dict({})


def test_an_own_state_of_another_kind():
    params = parameters(HALF)
    optimizer = SGD(params, momentum=0.9)
    set_gradients(params, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"missing|betas"):
        AdamW(params).load_state_dict(optimizer.state_dict())
