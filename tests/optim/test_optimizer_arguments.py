"""torch's arguments: honoured, taken as hints, or refused by name; hyper-parameters are looked at wherever they come from."""

import copy
import math

import pytest
import torch
from test_optimizers import parameters, same, set_gradients
from torch import nn

import lowp
from lowp.optim import LAMB, LARS, SGD, AdamW

KINDS = [SGD, LARS, AdamW, LAMB]
HALF = torch.bfloat16


def half(*shape):
    return nn.Parameter(torch.ones(shape or (4, 4), dtype=HALF))


def trained(kind, steps=3, dtype=HALF, before=lambda optimizer, step: None, **options):
    params = parameters(dtype)
    optimizer = kind(params, **options)
    for step in range(steps):
        before(optimizer, step)
        set_gradients(params, step)
        optimizer.step()
    return [p.detach() for p in params]


def equal(ours, theirs):
    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_hints_change_nothing(kind):
    plain = trained(kind)
    for hints in ({"foreach": True}, {"foreach": False, "fused": False}, {"fused": True}, {"foreach": None, "fused": None}):
        assert equal(trained(kind, **hints), plain)
    assert equal(trained(kind, capturable=False, differentiable=False), plain)


@pytest.mark.parametrize("hints", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("ours", "torchs"), [(SGD, torch.optim.SGD), (AdamW, torch.optim.AdamW)])
def test_in_float32_hints_reach_torchs_own_functions(ours, torchs, hints):
    got = trained(ours, dtype=torch.float32, update="nearest", lr=0.01, **hints)
    assert equal(got, trained(torchs, dtype=torch.float32, lr=0.01, **hints))


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_is_refused_by_name(kind, name):
    with pytest.raises(ValueError, match=f"{name}=True is not supported by lowp.optim: a step"):
        kind([half()], **{name: True})
    optimizer = kind([half()])
    with pytest.raises(ValueError, match=f"{name}=True is not supported"):
        optimizer.add_param_group({"params": [half()], name: True})
    assert len(optimizer.param_groups) == 1


def test_other_arguments_that_are_refused():
    AdamW([half()], amsgrad=False)
    with pytest.raises(ValueError, match=r"amsgrad=True is not supported by lowp\.optim"):
        AdamW([half()], amsgrad=True)
    with pytest.raises(ValueError, match="foreach and fused cannot both be True"):
        SGD([half()], foreach=True, fused=True)
    with pytest.raises(ValueError, match="foreach is None, True or False, not 'yes'"):
        SGD([half()], foreach="yes")
    with pytest.raises(TypeError, match="unknown argument 'momentun'"):
        SGD([half()], momentun=0.9)
    with pytest.raises(TypeError, match="seed must be an integer"):
        SGD([half()], seed="zero")


# A learning rate that is a tensor


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_may_be_a_tensor(kind, shape):
    rate = 2.0**-7
    assert equal(trained(kind, lr=torch.full(shape, rate)), trained(kind, lr=rate))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_in_float32_a_tensor_is_given_to_torch(kind):
    theirs = getattr(torch.optim, kind.__name__)
    for options in ({}, {"foreach": True}):
        ours = trained(kind, dtype=torch.float32, update="nearest", lr=torch.tensor(0.01), **options)
        assert equal(ours, trained(theirs, dtype=torch.float32, lr=torch.tensor(0.01)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_changed_in_place(kind):
    rate = torch.tensor(2.0**-6)

    def fall(optimizer, step):
        rate.fill_(2.0 ** (-6 - step))

    def assign(optimizer, step):
        optimizer.param_groups[0]["lr"] = 2.0 ** (-6 - step)

    assert equal(trained(kind, lr=rate, before=fall), trained(kind, before=assign))


def test_schedules_move_a_tensor():
    def scheduled(rate):
        params = parameters(HALF)
        optimizer = AdamW(params, lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
            schedule.step()
        return params, optimizer.param_groups[0]["lr"]

    ours, rate = scheduled(torch.tensor(2.0**-6))
    others, _ = scheduled(2.0**-6)
    assert equal(ours, others)
    assert isinstance(rate, torch.Tensor)
    assert float(rate) == 2.0**-9


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")  # torch's own
def test_a_compiled_step_reads_the_tensor_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    rate, params = torch.tensor(2.0**-6), parameters(HALF)
    optimizer, count = SGD(params, lr=rate), CompileCounterWithBackend("aot_eager")
    step_of = torch.compile(optimizer.step, backend=count)
    frames = []
    for step in range(4):
        rate.fill_(2.0 ** (-6 - step))
        set_gradients(params, step)
        step_of()
        frames.append(count.frame_count)
    torch._dynamo.reset()
    assert frames[-1] == frames[1] > 0

    def assign(optimizer, step):
        optimizer.param_groups[0]["lr"] = 2.0 ** (-6 - step)

    assert equal([p.detach() for p in params], trained(SGD, steps=4, before=assign))


def test_tensors_that_are_no_learning_rate():
    with pytest.raises(ValueError, match=r"lr is a number or a tensor of one element, not a tensor of shape \(2,\)"):
        SGD([half()], lr=torch.ones(2))
    with pytest.raises(TypeError, match="lr is a number or a tensor of one element, not 'fast'"):
        SGD([half()], lr="fast")


# Hyper-parameters out of range: given, in a group, in a saved state, or set later

BAD_RATES = [math.nan, math.inf, 1e308, -1.0, torch.tensor(math.nan)]
MESSAGE = "^lr must be at (least 0|most 3.4e.38, the largest float32), not"


@pytest.mark.parametrize("rate", BAD_RATES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_learning_rates_that_cannot_be(kind, rate):
    with pytest.raises(ValueError, match=MESSAGE):
        kind([half()], lr=rate)
    with pytest.raises(ValueError, match=MESSAGE):
        kind([{"params": [half()], "lr": rate}])


@pytest.mark.parametrize(("dtype", "update"), [(torch.float32, "nearest"), (HALF, "stochastic")])
def test_a_rate_that_goes_bad_changes_nothing(dtype, update):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = SGD([p], update=update)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr must be at least 0, not nan"):
        optimizer.step()
    assert (p == 1).all()


@pytest.mark.parametrize("kind", [AdamW, LAMB])
def test_betas(kind):
    for betas in ((2, 2), [2, 2], (0.9, 1.0), (math.nan, 0.9), (0.9,), 0.9):
        with pytest.raises(ValueError, match=r"^betas(\[\d\])? (must be at least 0 and below 1|are two numbers)"):
            kind([half()], betas=betas)
        with pytest.raises(ValueError, match=r"^betas"):
            kind([{"params": [half()], "betas": betas}])
    kind([half()], betas=(torch.tensor(0.5), torch.tensor(0.75)))


@pytest.mark.parametrize(("change", "message"), [
    ({"update": "sloppy"}, "group 0 of the saved state: unknown update='sloppy'; it is one of stochastic, kahan, nearest"),
    ({"lr": 1e308}, "group 0 of the saved state: lr must be at most"),
    ({"lr": math.nan}, "group 0 of the saved state: lr must be at least 0, not nan"),
    ({"betas": (2, 2)}, r"group 0 of the saved state: betas\[0\] must be at least 0 and below 1, not 2"),
    ({"seed": "x"}, "group 0 of the saved state: seed must be an integer"),
    ({"capturable": True}, "group 0 of the saved state: capturable=True is not supported"),
    ({"nonfinite": "hide"}, "group 0 of the saved state: unknown nonfinite='hide'"),
])  # fmt: skip
def test_saved_settings_that_cannot_be(change, message):
    p = half()
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    saved["param_groups"][0] |= change
    with pytest.raises(ValueError, match=f"^{message}"):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert all(torch.equal(now["state"][0][k], before["state"][0][k]) for k in ("exp_avg", "exp_avg_sq"))


def test_a_loaded_tensor_is_a_copy():
    optimizer = SGD([half()], lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert float(saved["param_groups"][0]["lr"]) == 0.5


# The ends of the range


@pytest.mark.parametrize("policy", ["never", "always"])
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_noise_alone_makes_no_weight_infinite(dtype, policy):
    """Just above the largest number, where rounding to nearest gives that number; and above that, infinity."""
    lowp.set_kernel_policy(policy)
    largest, unit = torch.finfo(dtype).max, torch.finfo(dtype).max * torch.finfo(dtype).eps / 2
    for sign in (1, -1):
        p = nn.Parameter(torch.full((1 << 12,), sign * largest, dtype=dtype))
        p.grad = torch.full_like(p, -sign * unit * 0.49)
        SGD([p], lr=1.0).step()
        assert (p == sign * largest).all()
    p = nn.Parameter(torch.full((1 << 12,), largest, dtype=dtype))
    p.grad = torch.full_like(p, -unit if dtype == torch.float16 else -unit / 2 * 1.5)
    SGD([p], lr=1.0).step()
    assert p.isinf().any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (2, 2)), ("betas", (0.9, 1.0)), ("lr", float("nan")), ("weight_decay", -1.0), ("eps", -1.0)],
    ids=str,
)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_set_later_is_checked_at_the_next_step(name, value, steps):
    parameter = nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = lowp.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    before = parameter.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert torch.equal(parameter, before)
