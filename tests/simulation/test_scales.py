"""Every scale against arithmetic by hand; what delayed and calibrated scales remember, in copies, checkpoints and ranks."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.simulation import calibrate, describe, simulate, simulation_of
from lowp.wire.scaling import aps_shifts, bound_bytes, emax_of

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

ROLES = ("weights", "activations", "errors", "gradients")
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(6, 5, generator=GENERATOR)


class Same(nn.Module):
    """Rounds what it is given."""

    def forward(self, x):
        return x.clone()


def rounded_at(x, name, maximum):
    """Rounded with the power of two that brings `maximum` just below the format's largest; in float64, by a logarithm."""
    exponent = math.floor(math.log2(lowp.format(name).scaled_max / maximum))
    return (lowp.quantize(x.double() * 2.0**exponent, name) * 2.0**-exponent).to(x.dtype)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.double().nan_to_num(7), b.double().nan_to_num(7))


def run(model, forward, x):
    model.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def linear(**options):
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(4, 5, generator=torch.Generator().manual_seed(6)) * 0.1)
    return model, simulate(model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "int8", "posit8", "e2m1fn"])
def test_aps_is_the_wires_with_one_rank(name, dtype):
    fmt = lowp.format(name)
    for factor in (1.0, 3e-7, 2e20, 1e-36):
        x = (X * factor).to(dtype)
        shift = aps_shifts(bound_bytes(x.abs().max().float(), 1), torch.tensor(emax_of(fmt))).item()
        model = Same()
        simulate(model, activations=name, scale="aps")
        same([model(x)], [(lowp.quantize(x.double() * 2.0**shift, name) * 2.0**-shift).to(dtype)])


def test_aps_of_zeros_powers_of_two_and_what_is_not_finite():
    model = Same()
    simulate(model, activations="e4m3fn", scale="aps")
    zeros = torch.tensor([0.0, -0.0])
    assert torch.equal(model(zeros).view(torch.int32), zeros.view(torch.int32))
    assert torch.equal(model(torch.tensor([4.0, 4.0 * 2**-17])), torch.tensor([4.0, 4.0 * 2**-17]))  # 4 goes to 256
    assert torch.equal(model(torch.tensor([4.5, 4.5 * 2**-16])), torch.tensor([4.5, 2.0**-14]))  # and so does 8
    assert torch.equal(model(torch.tensor([2.0**-149])), torch.zeros(1))  # too far down for float32's powers of two
    got = model(torch.tensor([math.nan, 449.0, 0.3]))  # as it is: the tensor is lost anyway
    assert got[0].isnan()
    assert torch.equal(got[1:], lowp.quantize(torch.tensor([449.0, 0.3]), "e4m3fn"))


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Conv2d(2, 3, 2), (4, 2, 5, 5), 1),
        (nn.Conv2d(2, 3, 2), (2, 5, 5), 0),
        (nn.ConvTranspose1d(2, 3, 2), (4, 2, 5), 1),
        (nn.BatchNorm1d(3), (4, 3), 1),
        (nn.BatchNorm1d(3), (4, 3, 5), 1),
        (nn.InstanceNorm2d(3), (3, 5, 5), 0),
        (nn.GroupNorm(1, 3), (4, 3, 5), 1),
        (nn.AdaptiveAvgPool2d(2), (3, 5, 5), 0),
        (nn.ReLU(), (2, 3, 5, 5), 1),
        (nn.ReLU(), (2, 3, 5), 2),
        (nn.Linear(5, 3), (2, 4, 4, 5), 3),
        (nn.LayerNorm(5), (2, 3, 4, 5), 3),
        (nn.Tanh(), (7,), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_channels_of_outputs(module, shape, axis):
    x = torch.randn(shape, generator=GENERATOR)
    want = module(x).detach()
    want = want * torch.logspace(-5, 5, want.shape[axis], 2.0).reshape([-1 if i == axis else 1 for i in range(want.dim())])
    module = copy.deepcopy(module)
    layer = simulate(module, activations="e3m2fn", errors="e3m2fn", scale="channel").layers[0]
    given = want.clone().requires_grad_()
    got = layer.output(given)  # of the module, had it computed that
    channels = [rounded_at(part, "e3m2fn", part.abs().max().item() or 1.0) for part in want.unbind(axis)]
    assert torch.equal(got, torch.stack(channels, axis))
    assert torch.equal(torch.autograd.grad(got, given, want)[0], got)
    assert not torch.equal(got, rounded_at(want, "e3m2fn", want.abs().max().item()))


def test_channels_of_parameters():
    model, _ = linear(weights="e3m2fn", gradients="e3m2fn", scale="channel")
    weight, plain = model[0]._parameters["weight"], nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU())
    rows = [rounded_at(row, "e3m2fn", row.abs().max().item()) for row in weight.detach()]
    assert torch.equal(model[0].weight, torch.stack(rows))
    plain[0].weight = nn.Parameter(torch.stack(rows))
    gradient = run(plain, plain, X)[1]
    want = torch.stack([rounded_at(row, "e3m2fn", row.abs().max().item()) for row in gradient])
    assert torch.equal(run(model, model, X)[1], want)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_blocks_are_the_block_format(rounding):
    formats = dict.fromkeys(ROLES, "e4m3fn")
    ours, _ = linear(**formats, scale="block:3", rounding=rounding)
    blocks, _ = linear(**dict.fromkeys(ROLES, "block(e4m3fn, 3, e8m0fnu)"), rounding=rounding)
    same(run(ours, ours, X), run(blocks, blocks, X))


def test_block_formats_keep_their_own_scales():
    plain, _ = linear(**dict.fromkeys(ROLES, "mxfp8_e4m3"))
    want = run(plain, plain, X)
    for scale in ("tensor", "channel", "aps", "block:3", "delayed", "calibrated"):
        model, _ = linear(**dict.fromkeys(ROLES, "mxfp8_e4m3"), scale=scale)
        same(run(model, model, X), want)
        assert {row.scale for row in describe(model)} == {"none"}


def test_scales_by_role_and_layer():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    simulation = simulate(
        model,
        **dict.fromkeys(ROLES, "e4m3fn"),
        scale={"weights": "channel", "errors": "delayed:4"},
        layers={
            "1": {"scale": {"weights": "aps"}},
            nn.Linear: {"activations": "e5m2", "scale": "tensor"},
            "0": {"scale": "none"},
        },
    )
    found = {(row.layer, row.role): (row.format, row.scale) for row in simulation.formats()}
    assert found == {
        ("0", "weights"): ("e4m3fn", "tensor"),
        ("0", "activations"): ("e5m2", "tensor"),
        ("0", "errors"): ("e4m3fn", "tensor"),
        ("0", "gradients"): ("e4m3fn", "tensor"),
        ("1", "weights"): ("e4m3fn", "aps"),
        ("1", "activations"): ("e5m2", "tensor"),
        ("1", "errors"): ("e4m3fn", "tensor"),
        ("1", "gradients"): ("e4m3fn", "tensor"),
    }
    simulation.set(layers=None)
    assert [row.scale for row in simulation.formats()][:4] == ["channel", "none", "delayed:4", "none"]
    simulation.set(scale={"errors": "block:8"})
    assert [row.scale for row in simulation.formats()][:4] == ["channel", "none", "block:8", "none"]


def test_delayed_goes_by_the_last_steps():
    model = Same()
    simulation = simulate(model, activations="e4m3fn", scale="delayed:2", count_overflow=True)

    def at(step, *factors):
        """The step's passes, and the maximum that it was scaled by."""
        simulation.step = step
        return [model((X * factor).requires_grad_()).detach() for factor in factors]

    top = X.abs().max().item()
    same(at(0, 1.0, 0.1), [rounded_at(X, "e4m3fn", top), rounded_at(X * 0.1, "e4m3fn", (X * 0.1).abs().max().item())])
    same(at(1, 0.01, 0.7), [rounded_at(X * 0.01, "e4m3fn", top), rounded_at(X * 0.7, "e4m3fn", top)])
    with torch.no_grad():  # an evaluation is scaled by the same, and not remembered
        same(at(1, 0.2), [rounded_at(X * 0.2, "e4m3fn", top)])
        at(1, 1000.0)
    simulation.overflowed()
    same(at(2, 0.001), [rounded_at(X * 0.001, "e4m3fn", top)])  # the largest of steps 0 and 1
    same(at(3, 0.001), [rounded_at(X * 0.001, "e4m3fn", 0.7 * top)])  # of 1 and 2
    assert simulation.overflowed() == {}
    (got,) = at(4, 1.0)  # two steps of a thousandth are behind it: it saturates, as does hardware that scales like this
    largest = 448 * 2.0 ** -math.floor(math.log2(448 / (0.001 * top)))
    assert torch.equal(got, rounded_at(X.clamp(-largest, largest), "e4m3fn", 0.001 * top))
    assert got.abs().max() == largest < 0.1 * top
    assert simulation.overflowed() == {"Same": {"activations"}}
    assert torch.equal(at(4, math.nan, math.inf)[1].isnan(), torch.ones(6, 5).bool())  # e4m3fn has no infinity


def test_delayed_zeros_say_nothing():
    model = Same()
    simulation = simulate(model, activations="e4m3fn", scale="delayed")
    for step in range(3):
        simulation.step = step
        model(torch.zeros(3, requires_grad=True))
    simulation.step = 3
    same([model(X)], [rounded_at(X, "e4m3fn", X.abs().max().item())])


def delayed_model():
    return linear(**dict.fromkeys(ROLES, "e5m2"), scale="delayed:3")


def train(model, simulation, steps, ranks=2):
    """What each pass gives; weights change a little in between."""
    found = []
    for step in steps:
        simulation.step = step
        for rank in range(ranks):
            simulation.rank = rank
            found += run(model, model, X * (1 + step) * (1 + rank))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.sign() * 0.01)
    return found


@pytest.mark.other_cpu
@pytest.mark.parametrize("way", ["pickle", "state"])
def test_delayed_scales_resume(way):
    model, simulation = delayed_model()
    want = train(model, simulation, range(6))
    model, simulation = delayed_model()
    train(model, simulation, range(3))
    if way == "state":
        other, resumed = delayed_model()
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(simulation.state_dict()))
    else:
        other = pickle.loads(pickle.dumps(model))
        resumed = simulation_of(other)
    train(model, simulation, range(7, 9))  # which is no concern of the copy's
    same(train(other, resumed, range(3, 6)), want[len(want) // 2 :])


def all_reduce_max(all_ranks, rank, maxima):
    assert torch.equal(maxima, all_ranks[rank])
    return all_ranks.amax(0)


@pytest.mark.other_cpu
def test_delayed_scales_of_real_ranks_are_those_of_virtual_ones():
    model, simulation = delayed_model()
    virtual = []
    for step in range(4):
        simulation.step = step
        for rank in range(3):
            virtual += run(model, model, X * 4.0**rank / (1 + step))
    processes = [delayed_model() for _ in range(3)]
    real = []
    for step in range(4):
        for rank, (model, simulation) in enumerate(processes):
            simulation.step, simulation.rank = step, rank
            real += run(model, model, X * 4.0**rank / (1 + step))
        seen = torch.stack([simulation.state_dict()["ranges"]["seen"] for _, simulation in processes])
        for rank, (_, simulation) in enumerate(processes):
            simulation.agree(partial(all_reduce_max, seen, rank))
    same(real, virtual)
    states = [simulation.state_dict()["ranges"] for _, simulation in processes]
    assert torch.equal(states[0]["history"], states[2]["history"])
    assert torch.equal(states[0]["seen"], states[2]["seen"])


@pytest.mark.other_cpu
def test_calibrated_scales_are_fixed():
    model, _ = linear(**dict.fromkeys(ROLES, "e5m2"), scale="calibrated")
    with pytest.raises(ValueError, match=r"scale of the weights of layer '0' has not been calibrated.*lowp.calibrate"):
        model(X)
    with calibrate(model):
        model(X * 0.5)
        model(X)
    y = model(X * 0.1)
    with torch.no_grad():
        product = (X * 0.1) @ model[0].weight.T
        full = rounded_at(X @ model[0].weight.T, "e5m2", (X @ model[0].weight.T).abs().max().item())
    hidden = rounded_at(product, "e5m2", (X @ model[0].weight.T).abs().max().item())
    assert torch.equal(y, rounded_at(hidden.relu(), "e5m2", full.relu().max().item()))
    with pytest.raises(
        ValueError, match=r"scale of the errors of layer '1' has not been calibrated: run the model, and backward"
    ):
        y.sum().backward()


def test_calibration_with_a_backward_pass_and_its_state():
    model, simulation = linear(**dict.fromkeys(ROLES, "e4m3fn"), scale="calibrated", count_overflow=True)
    with calibrate(model):
        run(model, model, X)
    want = run(model, model, X * 0.3)
    other, resumed = linear(**dict.fromkeys(ROLES, "e4m3fn"), scale="calibrated")
    resumed.load_state_dict(simulation.state_dict())
    same(run(other, other, X * 0.3), want)
    same(run(copied := copy.deepcopy(model), copied, X * 0.3), want)
    assert simulation.overflowed() == {}
    run(model, model, X * 50)
    assert simulation.overflowed()["0"] >= {"activations"}
    simulation.set(activations="e5m2")  # a scale for each format
    assert not torch.equal(model(X).isnan(), torch.ones(6, 4).bool())
    with pytest.raises(RuntimeError, match=r"[Ss]izes|shapes"), calibrate(model):
        model(torch.cat([X * 1e6, model(X * 1e6)]))
    simulation.set(activations="e4m3fn")
    same(run(model, model, X * 0.3), want)  # nothing came of it


def test_a_calibration_of_zeros_and_agreement():
    model = Same()
    simulate(model, activations="e4m3fn", scale="calibrated")
    with calibrate(model):
        model(torch.zeros(3))
    same([model(X)], [rounded_at(X, "e4m3fn", X.abs().max().item())])
    with calibrate(model, agree=lambda maxima: maxima * 64):
        model(X)
    same([model(X)], [rounded_at(X, "e4m3fn", 64 * X.abs().max().item())])


def test_recomputed_activations_are_the_same():
    """Checkpointing runs a part of the forward pass again, in the backward pass: with the same noise and the same scale."""
    models = [linear(**dict.fromkeys(ROLES, "e4m3fn"), scale="delayed", rounding="stochastic") for _ in range(2)]
    results = []
    for step in range(3):
        x = (X * (1 + step)).requires_grad_()
        for _, simulation in models:
            simulation.step = step
        results.append(run(models[0][0], models[0][0], x))
        results.append(run(models[1][0], lambda x: checkpoint(models[1][0], x, use_reentrant=False), x))
        same(results[-1], results[-2])


MIXTURES = {
    "delayed": {"weights": "channel", "activations": "delayed:2", "errors": "delayed:2"},
    "calibrated": {"weights": "block:3", "activations": "calibrated", "errors": "aps"},
}


@pytest.mark.other_cpu
@pytest.mark.parametrize(("mixture", "dtype"), [("delayed", torch.float32), ("calibrated", torch.bfloat16)], ids=str)
def test_compiled_equals_eager(mixture, dtype):
    torch._dynamo.reset()
    options = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
    if dtype == torch.bfloat16:
        options["rounding"] = "stochastic"
    model = nn.Linear(5, 4, bias=False, dtype=dtype)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(7))
    simulation = simulate(model, **options, scale=MIXTURES[mixture], count_overflow=True)
    if mixture == "calibrated":
        with calibrate(model):
            model(X.to(dtype))
    other = copy.deepcopy(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(other, fullgraph=True, backend=backend)
    for step in range(4):
        for simulated in (simulation, simulation_of(other)):
            simulated.step = step
        for rank in range(2):
            x = (X * (2.0 + step) ** rank).to(dtype)
            same(run(other, compiled, x), run(model, model, x))
    assert len(graphs) == 1  # and not one for every step
    assert simulation.overflowed() == simulation_of(other).overflowed()
    ours, theirs = simulation.state_dict()["ranges"], simulation_of(other).state_dict()["ranges"]
    if mixture == "delayed":
        assert torch.equal(ours["history"], theirs["history"])
        assert ours["history"].any()


def test_mistakes():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    nn.init.constant_(model[0].weight, 0.4)
    for arguments, message in (
        ({"scale": "tensors"}, "unknown scale 'tensors'; did you mean 'tensor'"),
        ({"scale": "per row"}, "unknown scale 'per row'; it is one of none, tensor, channel, aps"),
        ({"scale": "block:0"}, "block:<n> takes n from 1 to 65536"),
        ({"scale": "block"}, "unknown scale 'block'; did you mean 'block:<n>'"),
        ({"scale": "delayed:x"}, "delayed:<n> takes n from 1 to 1024"),
        ({"scale": "aps:3"}, "unknown scale 'aps:3'"),
        ({"scale": {"weight": "aps"}}, "unknown role 'weight' in scale; roles are weights, activations"),
        ({"layers": {"0": {"scale": {"weight": "aps"}}}}, r"unknown role 'weight' in layers\['0'\]\['scale'\]"),
        (
            {"weights": "tf32", "scale": "block:8"},
            "tf32 has no room for the weights of '0': numbers that share a block's scale",
        ),
        ({"weights": "int8"}, "int8 has no room for the weights of '0': weight would be all zeros.*try scale='tensor'"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(model, **arguments)
        assert type(model[0]) is nn.Linear
    simulate(model, weights="int8", scale="tensor")
    with pytest.raises(ValueError, match="nothing to calibrate"), calibrate(model):
        pass
    with pytest.raises(ValueError, match="Linear is not simulated"), calibrate(nn.Linear(2, 2)):
        pass
    saved = delayed_model()[1].state_dict()
    with pytest.raises(ValueError, match="the saved simulation remembers"):
        simulate(nn.Linear(2, 2), scale="delayed").load_state_dict(saved)
