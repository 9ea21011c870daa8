"""Every registered format, every role, every scale and every policy, on a small CNN, LSTM and GPT, in float32 and bfloat16."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp.formats import BlockFormat
from lowp.simulation.layers import ROLES
from lowp.simulation.scales import fitting_shift

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

TOKENS = torch.tensor([[1, 4, 2, 6, 0], [3, 3, 5, 1, 2]])


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        return self.head(self.body(x))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(7, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 7)

    def forward(self, tokens):
        return self.head(self.cells(self.embedding(tokens))[0]).flatten(0, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        y = self.norm(x)
        future = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.norm = nn.Embedding(7, 8), Block(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.embedding(tokens)))).flatten(0, 1)


MODELS = {"cnn": CNN, "lstm": LSTM, "gpt": GPT}


def task(name, dtype=torch.float32):
    """A model, its input and its targets, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MODELS[name]().to(dtype)
    if name != "cnn":
        return model, TOKENS, TOKENS.flatten()
    return model, torch.randn(10, 1, 4, 4, generator=torch.Generator().manual_seed(2)).to(dtype), TOKENS.flatten()


def loss_of(model, x, targets):
    return F.cross_entropy(model(x).float(), targets)


def gradients_of(model, x, targets):
    model.zero_grad()
    loss = loss_of(model, x, targets)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())


def on_grid(x, fmt, scale):
    """Do the numbers lie on the format's grid, or, `scale`d, on that grid moved to where they are?"""
    x = x.detach()
    if scale == "none" or isinstance(fmt, BlockFormat):
        return is_kept(x, fmt)
    wide = x.double()
    fitting = int(fitting_shift(wide[wide.isfinite()].abs().amax(), fmt)) if bool((wide != 0).any()) else 0
    # What was the largest number may have been rounded up into the next binade, or to zero: the grid was one or some finer.
    moved = (wide * 2.0**shift for shift in (fitting, fitting + 1, fitting + 2))
    return any(is_kept(each, fmt) for each in moved)


def is_kept(x, fmt):
    """Does rounding leave every number as it is? (NaN comes of overflow in narrow formats, and stays.)"""
    rounded = lowp.quantize(x, fmt)
    return bool(((rounded == x) | (rounded.isnan() & x.isnan())).all())


def scale_for(model, fmt):
    """Formats that are coarser than the weights need a scale."""
    try:
        lowp.simulate(model, weights=fmt)
    except ValueError:
        lowp.simulate(model, weights=fmt, scale="tensor")
        return "tensor"
    else:
        return "none"
    finally:
        lowp.restore(model)


USABLE = [fmt for fmt in lowp.FORMATS if (fmt.element if isinstance(fmt, BlockFormat) else fmt).signed]


@pytest.mark.parametrize("fmt", [fmt for fmt in lowp.FORMATS if fmt not in USABLE], ids=str)
def test_formats_without_a_sign_have_no_room(fmt):
    with pytest.raises(ValueError, match="has no room for weights"):
        lowp.simulate(task("cnn")[0], weights=fmt)


@pytest.mark.parametrize("fmt", USABLE, ids=str)
def test_every_format(fmt):
    """All four roles are on the grid; afterwards the model computes and trains as before, bit for bit."""
    for name in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            model, x, targets = task(name, dtype)
            state = copy.deepcopy(model.state_dict())
            before = gradients_of(copy.deepcopy(model), x, targets)
            scale = scale_for(model, fmt)
            lowp.simulate(model, **dict.fromkeys(ROLES, fmt), scale=scale)
            seen = _outputs_seen(model)
            loss, gradients = gradients_of(model, x, targets)
            # A sum of embeddings' gradients, say, is rounded as bfloat16 first and may leave a 16-bit format's grid by that.
            grids = dtype == torch.float32 or (not isinstance(fmt, BlockFormat) and fmt.bits <= 8)
            if grids:
                assert all(on_grid(output, fmt, scale) for output in seen)
                assert all(on_grid(gradient, fmt, scale) for gradient in gradients.values())
                assert on_grid(model.head.weight, fmt, scale)
            assert loss.isnan() or loss.isfinite() or fmt.overflow in (float("inf"), float("-inf"))
            lowp.restore(model)
            model.load_state_dict(state)  # batch norm has moved on
            assert_same(gradients_of(model, x, targets), before)


def _outputs_seen(model):
    """A list that fills with the outputs of modules that compute."""
    seen = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ReLU, nn.LayerNorm, nn.GELU, nn.Embedding)):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_every_role_alone(name):
    """A role changes what it is about, and nothing before it: gradients of weights leave the loss and the other roles alone."""
    model, x, targets = task(name)
    plain = gradients_of(copy.deepcopy(model), x, targets)
    for role in (*ROLES, "accumulate"):
        fresh = copy.deepcopy(model)
        lowp.simulate(fresh, **{role: "e5m2"})
        loss, gradients = gradients_of(fresh, x, targets)
        assert torch.equal(loss, plain[0]) == (role in ("errors", "gradients"))
        if role == "gradients":
            assert all(torch.equal(gradients[key], lowp.quantize(plain[1][key], "e5m2")) for key in gradients)
        else:
            assert any(not torch.equal(gradients[key], plain[1][key]) for key in gradients)


POLICIES = {
    "uniform": lambda x: lowp.Uniform(weights="e4m3fn", activations="e4m3fn", scale="tensor"),
    "per layer": lambda x: lowp.PerLayer({"head": {"weights": "fp16"}}, default={"weights": "e4m3fn"}),
    "schedule": lambda x: lowp.Schedule({0: {"weights": "fp32"}, 1: {"weights": "posit8"}}, by="step"),
    "overflow": lambda x: lowp.Together(
        lowp.Uniform(weights="e2m1fn", activations="e2m1fn", errors="e5m2"), lowp.OnOverflow("fp16")
    ),
    "diversity": lambda x: lowp.GradientDiversity(("e4m3fn", "fp16"), window=2, patience=1, threshold=1.0),
    "memory": lambda x: lowp.MemoryBudget(0.8, x),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy(kind, name):
    """A few steps of training under it: formats are set, numbers stay finite, and the model is given back as it is then."""
    model, x, targets = task(name)
    policy = POLICIES[kind](x)
    simulation = lowp.simulate(model, policy=policy)
    for step in range(4):
        simulation.step = step
        policy.before_step(simulation, step, step // 2)
        loss, gradients = gradients_of(model, x, targets)
        assert loss.isfinite()
        policy.after_step(simulation, gradients)
        if step % 2:
            policy.after_epoch(simulation)
    assert any(row.format != "fp32" for row in simulation.formats())
    parameters = {key: p.detach().clone() for key, p in model.named_parameters()}
    lowp.restore(model)
    assert type(model) is MODELS[name]
    assert all(torch.equal(p, parameters[key]) for key, p in model.named_parameters())


def assert_compiled_equals_eager(name, dtype, backend="aot_eager", **options):
    """Forward and backward, over three steps, in one graph."""
    model, x, targets = task(name, dtype)
    simulation = lowp.simulate(model, **options)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    for step in range(3):
        simulation.step = lowp.simulation_of(other).step = step
        assert_same(gradients_of(model, x, targets), loss_of_compiled(compiled, other, x, targets))


def loss_of_compiled(compiled, model, x, targets):
    model.zero_grad()
    loss = loss_of(compiled, x, targets)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def _recurrent_layers_compile():
    """torch's switch: without it, its compiler does not look into an LSTM."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


# torch computes an LSTM otherwise when it is compiled (no oneDNN): by itself it does not give the same bits. Narrow sums do.
SUMS = {"cnn": {}, "lstm": {"accumulate": "fp16"}, "gpt": {}}

MIXTURES = [
    ("cnn", torch.float32, {"weights": "posit8", "activations": "e4m3fn", "errors": "int8", "gradients": "mxfp4",
                            "scale": {"errors": "tensor"}, "accumulate": "fp16"}),
    ("lstm", torch.bfloat16, {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2",
                              "rounding": "stochastic", **SUMS["lstm"]}),
    ("gpt", torch.float32, {"weights": "dynamic8", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2",
                            "scale": {"weights": "channel", "activations": "delayed:2"}}),
]  # fmt: skip


@pytest.mark.other_cpu
@pytest.mark.usefixtures("_recurrent_layers_compile")
@pytest.mark.parametrize(("name", "dtype", "options"), MIXTURES, ids=[mixture[0] for mixture in MIXTURES])
def test_compiled_equals_eager(name, dtype, options):
    assert_compiled_equals_eager(name, dtype, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("_recurrent_layers_compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", USABLE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_format_compiled(name, fmt, dtype):
    assert_compiled_equals_eager(name, dtype, **dict.fromkeys(ROLES, fmt), scale="tensor", **SUMS[name])
