"""Mistakes are told in the user's words, at once, and change nothing."""

import copy
import math

import pytest
import torch
from test_optimizers import parameters, same, set_gradients
from torch import nn

import lowp
from lowp.optim import LAMB, LARS, SGD, AdamW
from lowp.optim.family import Chosen

KINDS = [SGD, LARS, AdamW, LAMB]
HALF = torch.bfloat16


def half(*shape):
    return nn.Parameter(torch.ones(shape or (4, 4), dtype=HALF))


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_float32_weights_have_no_updates_to_save(update):
    model = nn.Sequential(nn.Linear(2, 2).to(HALF), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=rf"'1.weight' is float32, and update='{update}'.*model.half\(\).*leave update out"):
        SGD(model.named_parameters(), update=update)
    with pytest.raises(TypeError, match=r"parameter 2 of group 0, of shape \(2, 2\), is float32"):
        SGD(model.parameters(), update=update)


def test_other_dtypes_are_no_weights():
    with pytest.raises(TypeError, match="float64; weights are float16, bfloat16 or float32"):
        SGD([nn.Parameter(torch.ones(2, dtype=torch.float64))], update="nearest")


@pytest.mark.parametrize(("state", "message"), [
    ("int4", "too narrow"), ("e2m1fn", "too narrow"), ("nvfp4", "state_scale='block'"), ("mxfp8_e4m3", "state_scale='block'"),
    ("e4m3fm", "did you mean 'e4m3fn'"), ("e8m0fnu", "no sign|too narrow"), ("e8m23", None), ("tf32", "up to 16"),
    ({"exp_avg": "e4m3fn", "velocity": "fp16"}, "state= names velocity"),
])  # fmt: skip
def test_formats_that_hold_no_state(state, message):
    if message is None:
        AdamW([half()], state=state)
        return
    with pytest.raises(ValueError, match=message):
        AdamW([half(64, 64)], state=state)


def test_a_second_moment_needs_range():
    """int8 spans seven powers of two: good enough for a momentum, not for squares."""
    SGD([half(64, 64)], momentum=0.9, state="int8")
    AdamW([half(64, 64)], state={"exp_avg": "int8"})
    for kind in (AdamW, LAMB):
        with pytest.raises(ValueError, match=r"int8 is too narrow: it spans .* exp_avg_sq"):
            kind([half(64, 64)], state="int8")


@pytest.mark.parametrize(("kind", "options", "message"), [
    (SGD, {"update": "sloppy"}, "unknown update='sloppy'; it is one of stochastic, kahan, nearest"),
    (SGD, {"nonfinite": "skip"}, "unknown nonfinite='skip'; it is one of raise, propagate"),
    (AdamW, {"state_scale": "row"}, "unknown state_scale='row'"),
    (AdamW, {"state_rounding": "up"}, "unknown state_rounding='up'"),
    (SGD, {"lr": -1.0}, "lr must be at least 0, not -1"),
    (SGD, {"lr": math.nan}, "lr must be at least 0, not nan"),
    (SGD, {"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
    (SGD, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
    (SGD, {"nesterov": True}, "Nesterov momentum requires"),
    (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov momentum requires"),
    (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and below 1"),
    (AdamW, {"eps": -1e-8}, "eps must be at least 0"),
    (LARS, {"trust": -1.0}, "trust must be at least 0"),
    (LARS, {"momentum": -0.5}, "momentum must be at least 0"),
    (LAMB, {"betas": (-0.1, 0.9)}, r"betas\[0\]"),
    (LARS, {"exclude": ["*.bias"]}, "named_parameters"),
    (LAMB, {"exclude": ["*.bias"]}, "named_parameters"),
])  # fmt: skip
def test_hyper_parameters(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([half()], **options)


def test_a_bad_group_is_not_added():
    optimizer = SGD([half()], update="stochastic")
    for bad, error in (({"update": "sloppy"}, ValueError), ({"state": "int4", "momentum": 0.9}, ValueError)):
        with pytest.raises(error):
            optimizer.add_param_group({"params": [half()], **bad})
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("dtype", "update"), [(torch.float32, "nearest"), (HALF, "stochastic")])
def test_sparse_gradients(dtype, update):
    p = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    p.grad = torch.eye(4, dtype=dtype).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        SGD([p], update=update).step()
    assert (p == 1).all()


@pytest.mark.parametrize("scale", [0.0, -2.0, math.nan])
def test_gradient_scales(scale):
    p = half()
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="gradient_scale must be positive"):
        SGD([p]).step(gradient_scale=scale)
    assert (p == 1).all()


def test_intentions_need_a_gradient_and_a_parameter():
    p = half()
    optimizer = SGD([p])
    with pytest.raises(ValueError, match="has no gradient"):
        optimizer.intended_update(p)
    stranger = half()
    stranger.grad = torch.ones_like(stranger)
    with pytest.raises(ValueError, match="not one of the optimizer's"):
        optimizer.intended_update(stranger)


def test_parameters_with_holes_are_refused():
    p = nn.Parameter(torch.ones(8, 8, dtype=HALF)[:, ::2])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="not dense"):
        SGD([p]).step()


# Gradients that are not finite


def everything(optimizer, params):
    kept = [p.detach().clone() for p in params]
    for p in params:
        kept += [v.clone() if isinstance(v, torch.Tensor) else torch.tensor(v) for v in optimizer.state[p].values()]
    return kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", ["stochastic", "kahan", "nearest"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad, update):
    """In the last element of the last group; other groups, other dtypes and plain float32 ones come before it."""
    params = parameters(HALF)
    whole = parameters(torch.float32)[:1]
    groups = [
        {"params": whole, "update": "nearest"},
        {"params": params[:2]}, {"params": params[2:], "state": "fp32"},
    ]  # fmt: skip
    optimizer = kind(groups, lr=0.1, update=update)
    params = [*whole, *params]
    set_gradients(params, 0)
    optimizer.step()
    twin = copy.deepcopy((optimizer.state_dict(), params))
    before = everything(optimizer, params)
    set_gradients(params, 1)
    params[3].grad.view(-1)[-1] = bad
    with pytest.raises(lowp.NonFiniteGradient, match=r"the gradient of parameter 0 of group 2, of shape \(3, 2, 2, 2\),"):
        optimizer.step()
    assert all(same(x, y) for x, y in zip(before, everything(optimizer, params), strict=True))
    # What follows is what would have followed without it.
    set_gradients(params, 2)
    optimizer.step()
    state, others = twin
    again = kind(
        [{**g, "params": ps} for g, ps in zip(groups, (others[:1], others[1:3], others[3:]), strict=True)], update=update
    )
    again.load_state_dict(state)
    set_gradients(others, 2)
    again.step()
    assert all(same(p.data, q.data) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_parameters_name_is_told(dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    optimizer = AdamW(model.named_parameters(), update="nearest")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].bias.grad[0] = math.nan
    with pytest.raises(lowp.NonFiniteGradient, match=r"parameter '1\.bias' is not finite; nothing was changed"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_finite_gradients_whose_sum_is_not_pass(dtype):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = SGD([("weight", p)], lr=1e-38, update="nearest")
    p.grad = torch.full_like(p, torch.finfo(dtype).max)
    optimizer.step()
    p.grad = torch.tensor([math.inf, -math.inf, 0, 0], dtype=dtype)
    with pytest.raises(lowp.NonFiniteGradient, match="'weight' is not finite"):
        optimizer.step()


def test_an_overflow_of_the_unscaled_gradient_is_not_finite():
    """2^15 / 2^-120 leaves float32: the gradient that the optimizer would use is infinite."""
    p = half()
    p.grad = torch.full_like(p, 2.0**15)
    optimizer = SGD([p])
    with pytest.raises(lowp.NonFiniteGradient):
        optimizer.step(gradient_scale=2.0**-120)
    assert (p == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_propagate_means_propagate(kind):
    p = half(8, 8)
    p.grad = torch.ones_like(p)
    p.grad[0, 0] = math.nan
    kind([p], nonfinite="propagate").step()
    assert p[0, 0].isnan()


@pytest.mark.parametrize(
    ("kind", "options", "looks", "at_weights"),
    [
        (SGD, {"momentum": 0.9, "weight_decay": 0.01}, True, True),  # a state of 16 bits has a scale for the tensor
        (
            SGD,
            {"momentum": 0.9, "weight_decay": 0.01, "state": "dynamic8"},
            False,
            False,
        ),  # one of 8 bits a scale for each block
        (AdamW, {}, True, False),
        (AdamW, {"state": "dynamic8"}, False, False),
        (LARS, {}, True, True),
    ],
)
def test_unchecked_gradients_are_looked_at_where_a_norm_or_a_scale_needs_it(kind, options, looks, at_weights, monkeypatch):
    """And the steps are the same, also where the loss scale changes."""
    looked = []
    measure = Chosen.measure
    monkeypatch.setattr(Chosen, "measure", lambda chosen, *more: (looked.append(chosen.layout), measure(chosen, *more)))

    def weights_after(nonfinite):
        p = nn.Parameter(torch.linspace(-1, 1, 4096).view(16, 256).half())
        optimizer = kind([p], lr=0.1, nonfinite=nonfinite, **options)
        for step in range(3):
            p.grad = torch.linspace(-2, 4, 4096).view(16, 256).half() * 2**step
            optimizer.step(gradient_scale=2.0**step)
        return p.detach()

    checked = weights_after("raise")
    assert len(looked) == 3
    assert all(layout.measures_weights == at_weights for layout in looked)
    looked.clear()
    assert torch.equal(weights_after("propagate"), checked)
    assert bool(looked) == looks
