"""Each role against a forward pass written by hand; formats by layer; what stays as it was; mistakes."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp.simulation import restore, simulate, simulation_of

ROLES = ("weights", "activations", "errors", "gradients")
X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Convolution, BN, an in-place activation, a pool, a parameter of its own, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.gain = nn.Parameter(torch.ones(36) * 1.1)
        self.fc = nn.Linear(36, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.bn(self.conv(x))))
        return self.fc(x.flatten(1) * self.gain)


class Same(nn.Module):
    """A leaf that "computes" its own input."""

    def forward(self, x):
        return x


def seeded(make, seed=0):
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def by_hand(net, x, weights=None, activations=None, errors=None):
    def w(parameter):
        return lowp.fake_quantize(parameter, weights)

    def a(output):
        return lowp.fake_quantize(output, activations, errors)

    x = a(F.conv2d(x, w(net.conv.weight), w(net.conv.bias)))
    x = a(F.batch_norm(x, None, None, w(net.bn.weight), w(net.bn.bias), training=True))
    x = a(F.relu(x))
    x = F.max_pool2d(x, 2).flatten(1) * w(net.gain)
    return a(F.linear(x, w(net.fc.weight), w(net.fc.bias)))


def run(model, forward, x=X):
    """Output and gradients of a loss that is not linear."""
    model.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.other_cpu
@pytest.mark.parametrize("roles", [*([role] for role in ROLES), ROLES], ids="+".join)
@pytest.mark.parametrize("name", ["e4m3fn", "posit8", "mxfp8_e4m3"])
def test_roles_by_hand(roles, name):
    plain, model = seeded(Net), seeded(Net)
    formats = dict.fromkeys(roles, name)
    simulate(model, **formats)
    inner = {role: name for role in formats if role != "gradients"}
    y, *gradients = run(plain, lambda x: by_hand(plain, x, **inner))
    if "gradients" in roles:
        gradients = [lowp.quantize(gradient, name) for gradient in gradients]
    same(run(model, model), [y, *gradients])
    assert not torch.equal(run(plain, plain)[-1], gradients[-1])  # the role does something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_brings_the_largest_number_just_below_the_formats(dtype):
    x = (torch.randn(200, generator=torch.Generator().manual_seed(2)) * 1e-5).to(dtype)
    for name, factors in (("e4m3fn", (1, 300, 1e9)), ("int8", (1, 77)), ("posit8", (1,))):
        for factor in factors:
            model = Same()
            simulate(model, activations=name, scale="tensor")
            numbers = x * factor
            exponent = math.floor(math.log2(lowp.format(name).scaled_max / numbers.abs().max().item()))
            want = lowp.quantize(numbers.double() * 2.0**exponent, name) * 2.0**-exponent
            assert torch.equal(model(numbers), want.to(dtype))


def test_scale_of_nothing_zeros_and_what_is_not_finite():
    model = Same()
    simulate(model, activations="e4m3fn", scale="tensor")
    assert model(torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(model(torch.tensor([0.0, -0.0])).view(torch.int32), torch.tensor([0, -(1 << 31)], dtype=torch.int32))
    got = model(torch.tensor([math.inf, math.nan, 1.0, 1 / 3, -1e-42]))
    assert got[:2].isnan().all()  # e4m3fn has no infinity
    assert torch.equal(got[2:], torch.tensor([1.0, lowp.quantize(torch.tensor(1 / 3), "e4m3fn").item(), -0.0]))
    smallest = torch.tensor([2.0**-130, 1.3 * 2.0**-118])  # which 2^126 still brings to the top of the range
    assert torch.equal(model(smallest), torch.tensor([2.0**-130, 1.25 * 2.0**-118]))


def test_layers():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.Softmax(-1)
    )
    rules = {
        "1": {"weights": "fp16"},
        "first": {"activations": None},
        "LayerNorm": {"weights": "bf16", "activations": "bf16"},
        "last": {"weights": "fp32", "activations": "fp32"},
        "2": {"activations": "e5m10", "errors": "posit16"},
    }
    simulation = simulate(model, weights="e4m3fn", activations="e4m3fn", layers=rules)
    found = {(row.layer, row.role): row.format for row in simulation.formats()}
    assert found == {
        **{("0.0", role): f for role, f in zip(ROLES, ("e4m3fn", "fp32", "fp32", "fp32"), strict=True)},
        ("0.1", "activations"): "e4m3fn",
        ("0.1", "errors"): "fp32",
        **{("1", role): f for role, f in zip(ROLES, ("fp16", "bf16", "fp32", "fp32"), strict=True)},
        **{("2.0", role): f for role, f in zip(ROLES, ("fp32", "fp32", "posit16", "fp32"), strict=True)},
        ("3", "activations"): "e4m3fn",
        ("3", "errors"): "fp32",
    }


def test_set_promote_and_state():
    model = seeded(Net)
    simulation = simulate(model, weights="e4m3fn", layers={"fc": {"weights": "e5m2"}})
    simulation.promote("conv", "fp16")
    simulation.set(activations="e4m3fn")

    def formats(name):
        return {row.role: row.format for row in simulation.formats() if row.layer == name}

    assert formats("conv") == {"weights": "fp16", "activations": "fp16", "errors": "fp32", "gradients": "fp32"}
    assert formats("fc")["weights"] == "e5m2"
    before = simulation.formats()
    with pytest.raises(ValueError, match="matches nothing"):
        simulation.set(weights="e5m2", layers={"nobody": {"weights": "fp16"}})
    assert simulation.formats() == before  # nothing half-applied
    other = simulate(seeded(Net), errors="e5m2")
    other.load_state_dict(simulation.state_dict())
    assert other.formats() == before
    simulation.set(weights=None, layers=None)
    assert formats("fc")["weights"] == formats("conv")["weights"] == "fp32"
    assert torch.equal(model.fc.weight, dict(model.named_parameters())["fc.weight"])


def test_what_others_see_stays_and_restore_is_exact():
    model = seeded(Net)
    reference = copy.deepcopy(model)
    classes = [type(module) for module in model.modules()]
    own = {name: id(parameter) for name, parameter in model.named_parameters()}
    simulate(model, "e4m3fn", "e4m3fn", "e5m2", "e5m2")
    assert list(model.state_dict()) == list(reference.state_dict())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == own
    assert isinstance(model.conv, nn.Conv2d)
    run(model, model)
    model.load_state_dict(reference.state_dict())
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in reference.modules()]
    same(run(model, model), run(reference, reference))


def saved_and_loaded(model):
    torch.save(model, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
@pytest.mark.parametrize("scale", ["none", "delayed"])
def test_copies_are_simulated_on_their_own(again, scale):
    model = seeded(Net)
    simulation = simulate(model, "e4m3fn", "e4m3fn", "e5m2", "e5m2", scale=scale)
    other = again(model)
    same(run(other, other), run(model, model))
    simulation_of(other).set(weights=None)
    assert simulation.formats()[0].format == "e4m3fn"
    restore(model)
    assert simulation_of(other) is not simulation
    with pytest.raises(ValueError, match="not simulated"):
        simulation_of(model)


def test_a_model_that_was_saved_before_changes_were_counted():
    saved = simulate(seeded(Net), "e4m3fn")
    loaded = type(saved).__new__(type(saved))
    loaded.__setstate__({name: value for name, value in saved.__getstate__().items() if name != "changes"})
    loaded.set(weights="e5m2")
    assert loaded.changes == 1


def test_stochastic_is_keyed_by_seed_step_and_rank():
    def outcome(step=0, rank=0, seed=3):
        model = seeded(Net)
        simulation = simulate(model, "e4m3fn", "e4m3fn", "e5m2", "e5m2", rounding="stochastic", seed=seed)
        simulation.step, simulation.rank = step, rank
        return run(model, model)

    first = outcome()
    same(outcome(), first)
    for other in (outcome(step=1), outcome(rank=1), outcome(seed=4)):
        assert not torch.equal(other[0], first[0])
        assert not torch.equal(other[-2], first[-2])
    weights = seeded(Net)
    parameter = weights.fc.weight.detach().clone()
    simulate(weights, weights="e4m3fn", rounding="stochastic")
    assert not torch.equal(weights.fc.weight, lowp.quantize(parameter, "e4m3fn"))
    assert torch.equal(lowp.quantize(weights.fc.weight, "e4m3fn"), weights.fc.weight)


def test_rounding_by_role():
    model, nearest, stochastic = seeded(Net), seeded(Net), seeded(Net)
    simulate(model, weights="e4m3fn", activations="e4m3fn", rounding={"activations": "stochastic"}, seed=3)
    simulate(nearest, weights="e4m3fn", activations="e4m3fn")
    simulate(stochastic, activations="e4m3fn", rounding="stochastic", seed=3)
    assert torch.equal(model.conv.weight, nearest.conv.weight)
    assert torch.equal(model.relu(X), stochastic.relu(X))
    assert not torch.equal(model.relu(X), nearest.relu(X))


def test_gradients_are_rounded_once():
    """Of a tied weight used twice: the sum of both uses, not each of them. A frozen parameter is rounded when it thaws."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model).requires_grad_(True)
    model.requires_grad_(False)
    simulation = simulate(model, gradients="e3m2fn")
    model.requires_grad_(True)
    x = X[0, 0, :, :4]
    want = run(plain, plain, x)
    same(run(model, model, x), [want[0], lowp.quantize(want[1], "e3m2fn")])
    assert [row.layer for row in simulation.formats() if row.role == "gradients"] == ["0"]


@pytest.mark.other_cpu
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's compiler warns about itself
def test_a_layer_called_twice_adds_up_rounded_gradients():
    """As each call's backward pass computes them, compiled and not; no parameter needs a hook for it."""
    model = nn.Linear(4, 4, bias=False)
    x = X[0, 0, :, :4]
    first, second = (x * scale for scale in (1.0, 0.3))
    each = [torch.autograd.grad(model(part).square().sum(), model.weight)[0] for part in (first, second)]
    simulate(model, gradients="e3m2fn")
    assert not model._parameters["weight"]._backward_hooks

    def loss():
        return model(first).square().sum() + model(second).square().sum()

    want = sum(lowp.quantize(gradient, "e3m2fn") for gradient in each)
    for run_it in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run_it().backward()
        assert torch.equal(model._parameters["weight"].grad, want)


def test_overflow_is_counted():
    model = nn.Sequential(Same(), nn.Linear(1, 1, bias=False))
    model[1].weight = nn.Parameter(torch.ones(1, 1))
    simulation = simulate(model, "e4m3fn", "e4m3fn", "e4m3fn", "int8", count_overflow=True)
    x = torch.tensor([[464.0]])  # rounds down to 448
    model(x).backward()
    assert simulation.overflowed() == {"1": {"gradients"}}  # 448 in int8
    assert simulation.overflowed() == {}
    model(x * 1.01)
    assert simulation.overflowed() == {"0": {"activations"}}  # 1's input is no finite number any more
    model(torch.tensor([[math.inf]]))
    assert simulation.overflowed() == {}
    (model(x.sign()) * 1e4).backward()
    assert simulation.overflowed() == {"1": {"errors"}}
    assert simulation.overflowed(lambda counts: counts + 1)["1"] == set(ROLES)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's compiler warns about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_run_without_gradients_is_not_counted(compiled):
    """A test between two steps of training. (Hooks of gradients run so too: that of a shared parameter counts.)"""
    torch._dynamo.reset()
    model = nn.Sequential(Same(), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[2].weight = nn.Parameter(torch.ones(1, 1))
    simulation = simulate(model, "e4m3fn", "e4m3fn", "e4m3fn", "int8", count_overflow=True)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    large, small = (torch.tensor([[number]], requires_grad=True) for number in (500.0, 400.0))
    with torch.no_grad():
        call(large)
    assert simulation.overflowed() == {}
    call(large)
    assert simulation.overflowed() == {"0": {"activations"}}
    call(small).backward()
    assert simulation.overflowed() == {"1": {"gradients"}}


@pytest.mark.other_cpu
def test_function_transforms():
    """Gradients of every sample at once, through the same rounding.

    On multiples of 1/4, whose sums are exact: vmap makes products of other shapes, which torch may add up in another order.
    """
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    x = (4 * X[0, 0, :, :4]).round() / 4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((4 * parameter).round() / 4)
    simulate(model, "e4m3fn", "e4m3fn", "e5m2")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, sample):
        return torch.func.functional_call(model, parameters, (sample,)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for place, sample in enumerate(x):
        _, *alone = run(model, model, sample)
        assert all(torch.equal(together[name][place], each) for name, each in zip(parameters, alone, strict=True))
    assert any(gradient.any() for gradient in together.values())


def test_mistakes():
    model = seeded(Net)
    for arguments, message in (
        ({"weights": "e8m0fnu"}, "e8m0fnu has no room for weights: it holds no negative numbers"),
        ({"weights": "e4m3fm"}, "did you mean 'e4m3fn'"),
        ({"rounding": "neerest"}, "unknown rounding 'neerest'"),
        ({"rounding": {"errors": "neerest"}}, "unknown rounding 'neerest'"),
        ({"rounding": {"error": "nearest"}}, "unknown role 'error' in rounding"),
        ({"layers": {"fd": {"weights": "fp16"}}}, "'fd' matches nothing; did you mean 'fc'"),
        ({"layers": {"fc": {"weight": "fp16"}}}, "unknown role 'weight' in layers\\['fc'\\]; did you mean 'weights'"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(model, **arguments)
    simulate(model, weights="e4m3fn")
    with pytest.raises(ValueError, match="simulated already"):
        simulate(model, weights="e4m3fn")
    with pytest.raises(ValueError, match="nothing to simulate"):
        simulate(nn.Sequential(nn.Flatten()), weights="e4m3fn")
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        simulate(lambda x: x)
