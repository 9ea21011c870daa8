"""What would go around a quantizer is refused, by name and at once; what replaces a parameter is rounded as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import lowp
from lowp.simulation import restore, simulate, simulation_of

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")
FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e3m2fn"}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def seeded(model):
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def two():
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))


def gradient_is_rounded(model, parameter):
    parameter.grad = None
    model(X).square().sum().backward()
    return torch.equal(lowp.quantize(parameter.grad, "e3m2fn"), parameter.grad)


WRITES = {
    "init": lambda w: nn.init.normal_(w),
    "init by name": lambda w: nn.init.constant_(tensor=w, val=1.0),
    "in place": lambda w: w.mul_(2),
    "operator": lambda w: w.__iadd__(1),
    "item": lambda w: w.__setitem__(0, 0),
    "data": lambda w: w.data.copy_(torch.ones(4, 4)),
    "assigned data": lambda w: setattr(w, "data", torch.ones(4, 4)),
    "view": lambda w: w.view(-1)[:3].zero_(),
    "split": lambda w: w.split(2)[0].zero_(),
    "detached": lambda w: w.detach().t().fill_(1),
    "out": lambda w: torch.add(X, 1, out=w),
    "list": lambda w: torch._foreach_mul_([w], 2.0),
    "frozen": lambda w: setattr(w, "requires_grad", False),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_rounded_weight_cannot_be_written_to(write):
    model = two()
    simulate(model, weights="e4m3fn")
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"rounded copy, and what is written to it is lost.*named_parameters"),
    ):
        WRITES[write](model[0].weight)
    with pytest.raises(RuntimeError, match="uniform_: a simulated module's weight"):
        model[0].reset_parameters()


def test_a_rounded_weight_can_be_read():
    model = two()
    parameter = model[0].weight
    simulate(model, weights="e4m3fn")
    weight = model[0].weight
    assert torch.equal(weight.data.T @ weight, lowp.quantize(parameter, "e4m3fn").T @ lowp.quantize(parameter, "e4m3fn"))
    assert type(weight * 2) is type(X.add_(0 * weight.sum().detach())) is torch.Tensor
    assert torch.equal(torch.from_numpy(weight.detach().numpy()), weight)
    assert type(pickle.loads(pickle.dumps(weight.detach()))) is type(copy.deepcopy(weight.detach())) is torch.Tensor
    assert "RoundedWeight" in repr(weight)
    (weight.sum() * 3).backward()
    assert torch.equal(parameter.grad, torch.full((4, 4), 3.0))
    simulation_of(model).set(weights=None)
    nn.init.ones_(model[0].weight)  # what is not rounded is the parameter itself
    assert torch.equal(parameter, torch.ones(4, 4))


class Clamps(nn.Module):
    """Rewrites its weights when it is called, as some do to constrain them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        self.weight.data.clamp_(-1, 1)
        return x @ self.weight


def test_a_forward_pass_that_writes_its_weights():
    model = nn.Sequential(Clamps())
    simulate(model, weights="e4m3fn")
    with pytest.raises(RuntimeError, match="clamp_: a simulated module's weight"):
        model(X)


def test_parameters_that_are_replaced():
    model = two()
    simulate(model, **FORMATS)
    fresh = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(8)))
    model[0].weight = fresh
    assert torch.equal(model[0].weight, lowp.quantize(fresh, "e4m3fn"))
    assert gradient_is_rounded(model, fresh)
    model.load_state_dict(two().state_dict(), assign=True)
    assert gradient_is_rounded(model, model[0]._parameters["weight"])
    model[2]._parameters["weight"] = fresh  # behind everybody's back
    assert gradient_is_rounded(model, fresh)
    model.to(torch.float64).to(torch.float32)
    assert gradient_is_rounded(model, model[0]._parameters["weight"])
    old = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.to(torch.float64).to(torch.float32)
    torch.__future__.set_overwrite_module_params_on_conversion(old)
    assert gradient_is_rounded(model, model[0]._parameters["weight"])
    restore(model)
    assert not any(parameter._backward_hooks for parameter in (*model.parameters(), fresh))


def test_ties_that_change():
    model = two()
    model[2].weight = model[0].weight
    simulate(model, **FORMATS)
    fresh = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(8)))
    with pytest.raises(ValueError, match="layer '2' shared 'weight' with another layer"):
        model[2].weight = fresh
    model[0].weight = fresh
    model[2].weight = fresh
    assert gradient_is_rounded(model, fresh)
    assert len(fresh._backward_hooks) == 1
    with pytest.raises(TypeError, match=r"layer '2' is simulated: weight must be an nn\.Parameter.*to tie weights"):
        model[2].weight = model[0].weight


def test_gradients_of_functional_calls():
    model = two()
    plain = copy.deepcopy(model)
    simulate(model, **FORMATS)
    given = {name: parameter.detach().clone().requires_grad_() for name, parameter in plain.named_parameters()}
    for _ in range(2):  # with hooks that are put there once
        loss = torch.func.functional_call(model, given, (X,)).square().sum()
        gradients = torch.autograd.grad(loss, list(given.values()))
        model.zero_grad()
        model(X).square().sum().backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad)


def test_gradients_under_torch_func():
    """Where hooks are unknown: of each use, which here is the only one."""
    model = two()
    simulate(model, **FORMATS)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model(X).square().sum().backward()
    got = torch.func.grad(lambda given: torch.func.functional_call(model, given, (X,)).square().sum())(parameters)
    for gradient, parameter in zip(got.values(), model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    counting = two()
    simulate(counting, activations="e4m3fn", count_overflow=True)
    with pytest.raises(ValueError, match="under vmap nothing can be remembered or counted"):
        torch.func.vmap(counting)(X)


def test_symbolic_tracing():
    model = two()
    simulate(model, **FORMATS)
    assert torch.equal(torch.fx.symbolic_trace(model)(X), model(X))


def test_what_would_hide_the_simulation():
    model = two()
    before = [type(module) for module in model.modules()]
    simulate(model, **FORMATS)
    want = model(X)
    for action, error, message in (
        (lambda: setattr(model[0], "forward", lambda x: x), AttributeError, "layer '0' is simulated: a forward of its own"),
        (lambda: parametrizations.weight_norm(model[0]), RuntimeError, "weight is a rounded copy.*restore.model. first"),
        (lambda: parametrizations.orthogonal(model[0]), AttributeError, "weight can be neither removed nor parametrized"),
        (lambda: prune.l1_unstructured(model[0], "weight", amount=1), ValueError, "takes no further parameters .'weight_orig'"),
        (lambda: model[0].register_parameter("extra", nn.Parameter(X)), ValueError, "takes no further parameters .'extra'"),
        (lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(4, dtype=torch.complex64))), ValueError, "it is complex64"),
        (lambda: delattr(model[0], "bias"), AttributeError, "bias can be neither removed"),
    ):
        with pytest.raises(error, match=message):
            action()
        assert torch.equal(model(X), want)
    restore(model)
    assert [type(module) for module in model.modules()] == before
    parametrizations.weight_norm(model[0])
    assert parametrize.is_parametrized(model[0])


def test_a_class_that_has_changed_since():
    model = two()
    simulate(model, **FORMATS)
    simulated = type(model[2])
    model[2].__class__ = type("FSDPLinear", (simulated,), {})
    with pytest.raises(ValueError, match="'2' has become a FSDPLinear since it was simulated"):
        restore(model)
    assert "Simulated" in type(model[0]).__name__  # nothing half done
    model[2].__class__ = simulated
    restore(model)


def quantized():
    with torch.no_grad():
        return torch.ao.nn.quantized.Linear(2, 2)


def hidden(model):
    model.forward = lambda x: x
    return model


def integers():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    return model


def spread():
    model = nn.Linear(2, 2)
    model.weight.to_local = None  # as a DTensor, without the process group that one needs
    return model


REFUSED = {
    "forward": (lambda: hidden(nn.Linear(2, 2)), "'inner' cannot be simulated: it has a forward of its own"),
    "lazy": (lambda: nn.LazyLinear(3), "has no weights yet .LazyLinear.: run the model once"),
    "max_norm": (lambda: nn.Embedding(3, 3, max_norm=1.0), "it has max_norm"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "it is parametrized; .*makes it plain"),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(2, 2)), "makes its weights anew for every pass"),
    "script": (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "it is TorchScript"),
    "compiled": (
        lambda: torch.compile(nn.Linear(2, 2)),
        "'inner' cannot be simulated: it is compiled: simulate the model first",
    ),
    "quantized": (quantized, "it computes in integers already .Linear."),
    "replicated": (lambda: nn.DataParallel(nn.Linear(2, 2)), "take DistributedDataParallel"),
    "integers": (integers, "parameter 'inner.weight' cannot be simulated: it is int8"),
    "spread": (spread, "parameter 'inner.weight' cannot be simulated: it is spread over ranks"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_cannot_be_simulated(kind):
    make, message = REFUSED[kind]
    model = nn.Sequential()
    model.add_module("outer", nn.Linear(2, 2))
    model.add_module("inner", make())
    with pytest.raises(ValueError, match=message):
        simulate(model, weights="e4m3fn")
    assert type(model.outer) is nn.Linear
