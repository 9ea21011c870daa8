"""LSTM, transformer, tied weights, compiled code: the same numbers as plain torch with the rounding put in from outside."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import lowp
from lowp.simulation import calibrate, restore, simulate, simulation_of

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
TOKENS = torch.tensor([[1, 4, 2, 6, 0], [3, 3, 5, 1, 2]])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.cells = kind(6, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.cells(self.embedding(tokens))[0])


class Transformer(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.place = nn.Parameter(torch.zeros(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens, padding=None):
        return self.head(self.blocks(self.embedding(tokens) + self.place, src_key_padding_mask=padding))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3)
        self.bn = nn.BatchNorm1d(3)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(9, 2)

    def forward(self, tokens):
        x = tokens.unsqueeze(1) / 3
        return self.fc(self.relu(self.bn(self.conv(x))).flatten(1))


MODELS = {"lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU), "transformer": Transformer}


def seeded(make):
    model, generator = make(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def run(model, forward):
    model.zero_grad()
    y = forward(TOKENS)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def reference(model, leaves):
    """Rounded weights by functional_call, rounded outputs by hooks, rounded gradients afterwards."""

    def rounded(module, arguments, output):
        tensors = output if isinstance(output, tuple) else (output,)
        found = [
            lowp.fake_quantize(tensor, "e4m3fn", "e5m2") if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors
        ]
        return tuple(found) if isinstance(output, tuple) else found[0]

    for module in model.modules():
        if isinstance(module, leaves):
            module.register_forward_hook(rounded)
    weights = {name: lowp.fake_quantize(parameter, "e4m3fn") for name, parameter in model.named_parameters()}
    y, *gradients = run(model, lambda tokens: torch.func.functional_call(model, weights, (tokens,)))
    return [y, *(lowp.quantize(gradient, "e5m2") for gradient in gradients)]


@pytest.mark.other_cpu
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    leaves = (nn.Embedding, nn.RNNBase, nn.Linear, nn.LayerNorm, nn.MultiheadAttention, nn.Dropout)
    plain, model = seeded(MODELS[name]), seeded(MODELS[name])
    before = [type(module) for module in model.modules()]
    want = run(plain, plain)
    simulate(model, **FORMATS)
    got = run(model, model)
    same(run(other := copy.deepcopy(model), other), got)
    same(got, reference(copy.deepcopy(plain), leaves))
    restore(model)
    same(run(model, model), want)
    assert [type(module) for module in model.modules()] == before


def test_recurrent_weights_stay_in_step():
    """The list that recurrent modules keep of their weights holds the parameters, through moves and replacements."""
    model = seeded(lambda: nn.LSTM(3, 4))
    simulate(model, weights="e5m2", activations="e5m2")
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3))
    y, _ = model(x)
    model.double().float()
    assert torch.equal(model(x)[0], y)
    packed, _ = model(pack_padded_sequence(x, [5, 3]))
    assert torch.equal(lowp.quantize(packed.data, "e5m2"), packed.data)
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()}, assign=True)
    assert not torch.equal(model(x)[0], y)
    restore(model)
    assert [id(weight) for weight in model._flat_weights] == [id(parameter) for parameter in model.parameters()]


@pytest.mark.other_cpu
def test_evaluation_rounds_as_training_does():
    """torch replaces encoder layers by one fused operation in evaluation, and uses nested tensors where there is padding."""
    model = seeded(Transformer)
    simulate(model, activations="e4m3fn")
    training = model(TOKENS).detach()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), training)
        padding = torch.zeros(2, 5, dtype=torch.bool)
        assert torch.equal(model(TOKENS, padding), training)


def test_a_weight_that_another_module_reads():
    model = seeded(lambda: nn.MultiheadAttention(4, 2))
    simulation = simulate(model, layers={"out_proj": {"weights": "e2m1fn"}})
    assert torch.equal(model.out_proj.weight, lowp.quantize(model.out_proj._parameters["weight"], "e2m1fn"))
    rows = {(row.layer, row.role) for row in simulation.formats() if row.layer == "out_proj"}
    assert rows == {("out_proj", "weights"), ("out_proj", "gradients")}  # it never returns anything


def small():
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(inplace=True))


@pytest.mark.other_cpu
@pytest.mark.parametrize(
    "options", [{}, {"rounding": "stochastic"}, {"scale": "tensor"}], ids=["nearest", "stochastic", "scaled"]
)
def test_compiled_equals_eager(options):
    torch._dynamo.reset()
    model = seeded(small)
    simulation = simulate(model, **FORMATS, **options)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for step in range(3):
        simulation.step, simulation.rank = step, 2 * step
        same(run(model, lambda tokens: compiled(tokens / 7)), run(model, lambda tokens: model(tokens / 7)))
    assert len(graphs) == 1  # and not one for every step


@pytest.mark.parametrize(
    "options", [{}, {"rounding": "stochastic"}, {"scale": "channel"}], ids=["nearest", "stochastic", "scaled"]
)
def test_one_call_in_the_graph_for_each_tensor(options):
    """Dynamo is not shown an autograd function: that it traces twice, and puts into the graph as two more graphs."""
    torch._dynamo.reset()
    model, calls = seeded(small), []
    simulate(model, **FORMATS, **options)

    def backend(graph, inputs):
        calls.extend(node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
        assert not list(graph.children())
        return graph

    torch.compile(model, fullgraph=True, backend=backend)(TOKENS / 7)
    assert len(calls) == 5  # product, ReLU; the weight and both results rounded


@pytest.mark.parametrize(
    ("options", "by_sample"),
    [({}, False), ({"rounding": "stochastic"}, True), ({"scale": "tensor"}, True)],
    ids=["nearest", "stochastic by sample", "scaled by sample"],
)
def test_compiled_transforms(options, by_sample):
    """Gradients by torch.func are rounded in compiled code as well, those of single samples too. (On numbers whose sums are
    exact.)"""
    torch._dynamo.reset()
    model = seeded(small)
    simulate(model, **FORMATS, **options)

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row,)).square().sum()

    parameters = dict(model.named_parameters())
    x = torch.randint(-8, 9, (6, 5), generator=torch.Generator().manual_seed(3)) / 8
    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0)) if by_sample else torch.func.grad(loss)
    want, got = gradient(parameters, x), torch.compile(gradient, backend="aot_eager", fullgraph=True)(parameters, x)
    same(got.values(), want.values())


def test_compiled_code_follows_changes():
    torch._dynamo.reset()
    model = seeded(small)
    simulation = simulate(model, activations="e4m3fn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name in ("e4m3fn", "e2m1fn", None):
        simulation.set(activations=name)
        same(run(model, lambda tokens: compiled(tokens / 7)), run(model, lambda tokens: model(tokens / 7)))


def test_compiled_code_counts_overflow():
    torch._dynamo.reset()
    model = seeded(small)
    simulation = simulate(model, errors="e2m1fn", activations="e2m1fn", count_overflow=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(run(model, lambda tokens: compiled(tokens * 1e-3)), run(model, lambda tokens: model(tokens * 1e-3)))
    assert simulation.overflowed() == {}
    want = run(model, lambda tokens: model(tokens * 1e3))
    found = simulation.overflowed()
    same(run(model, lambda tokens: compiled(tokens * 1e3)), want)
    assert simulation.overflowed() == found == {"0": {"activations"}, "1": {"errors"}}


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["none", "tensor", "channel", "aps", "block:3", "delayed:2", "calibrated"])
def test_compiled_by_inductor(scale):
    torch._dynamo.reset()
    model = seeded(lambda: nn.Linear(5, 4, bias=False))
    simulation = simulate(model, **FORMATS, scale=scale, count_overflow=True)
    if scale == "calibrated":
        with calibrate(model):
            run(model, lambda tokens: model(tokens / 7))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True)
    for step in range(3):
        simulation.step = simulation_of(other).step = step
        inputs = TOKENS * (1 + step) / 7
        same(run(other, lambda _, x=inputs: compiled(x)), run(model, lambda _, x=inputs: model(x)))
    assert torch.equal(simulation.overflow_counts(), simulation_of(other).overflow_counts())


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::UserWarning")
def test_on_a_gpu():
    """Recurrent weights that do not lie together, without a warning; what is remembered is where the numbers are."""
    model = seeded(lambda: nn.LSTM(3, 4, num_layers=2)).cuda()
    simulation = simulate(model, **FORMATS, scale="delayed", count_overflow=True)
    other = copy.deepcopy(model).cpu()
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3))
    for step in range(2):
        simulation.step = simulation_of(other).step = step
        model(x.cuda())[0].sum().backward()
        other(x)[0].sum().backward()
    tensors = [*simulation.layers[0].seen.values(), *simulation.layers[0].bounds.values(), simulation.overflow_counts()]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    ours, theirs = simulation.state_dict()["ranges"], simulation_of(other).state_dict()["ranges"]
    torch.testing.assert_close(ours["seen"], theirs["seen"], rtol=0.05, atol=1e-6)  # cuDNN's sums are not the CPU's


@pytest.mark.slow
@pytest.mark.parametrize("make", [Transformer, Convolutional])
def test_compiled_models(make):
    torch._dynamo.reset()
    model = seeded(make)
    simulation = simulate(model, **FORMATS, rounding="stochastic")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        simulation.step = step
        same(run(model, compiled), run(model, model))
    assert simulation_of(compiled) is simulation
