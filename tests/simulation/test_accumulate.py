"""The role "accumulate": sums inside layers are those of lowp.matmul, linear and conv2d, whoever asks for them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves

import lowp

NARROW = lowp.Arithmetic(accumulate="e5m2", chunk=3)


def seeded(make, *args, **options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make(*args, **options)


def batch(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def on_grid(x, fmt="e5m2"):
    return torch.equal(lowp.quantize(x, fmt), x)


class Scores(nn.Module):
    """A leaf of the user's own: products in every spelling, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.weight, x.matmul(self.weight), torch.addmm(self.bias, x, self.weight), F.linear(x, self.weight.t())


@pytest.mark.other_cpu
def test_linear_and_conv_are_those_of_lowp():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.Flatten(), nn.Linear(16, 3)))
    x = batch(2, 2, 4, 4)
    conv, linear = model[0], model[2]
    expected = lowp.conv2d(x, conv.weight, conv.bias, 2, 1, groups=2, accumulate="fp16")
    expected = lowp.linear(expected.flatten(1), linear.weight, linear.bias, accumulate="e5m2", chunk=3)
    gradients = torch.autograd.grad(expected.sum(), [conv.weight, linear.weight])
    lowp.simulate(model, accumulate="fp16", layers={"last": {"accumulate": NARROW}})
    found = model(x)
    assert torch.equal(found, expected)
    parameters = dict(model.named_parameters())
    ours = torch.autograd.grad(found.sum(), [parameters["0.weight"], parameters["2.weight"]])
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients, strict=True))


def test_modules_of_ones_own():
    model = seeded(Scores)
    lowp.simulate(model, accumulate=NARROW)
    product, method, with_bias, linear = model(batch(3, 4))
    weight, bias = (p.detach() for p in model.parameters())
    assert torch.equal(product, lowp.matmul(batch(3, 4), weight, **NARROW.options))
    assert torch.equal(method, product)
    assert torch.equal(linear, product)
    assert torch.equal(with_bias, lowp.linear(batch(3, 4), weight.t(), bias, **NARROW.options))
    assert not torch.equal(product, batch(3, 4) @ weight)


RECURRENT = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 2, "bias": False}),
    (nn.GRU, {"bidirectional": True}),
    (nn.GRU, {"bias": False, "batch_first": True}),
    (nn.RNN, {"num_layers": 2}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


def close(found, expected):
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def flat(output):
    return (output[0].data, output[1]) if isinstance(output[0], PackedSequence) else output


@pytest.mark.other_cpu
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent_layers_taken_apart_are_torchs(kind, options):
    """With sums that lose (next to) nothing: batches, single and packed sequences of different lengths."""
    model = seeded(kind, 4, 3, **options)
    packed = pack_sequence([batch(n, 4) for n in (2, 5, 3)], enforce_sorted=False)
    inputs = [batch(5, 2, 4), batch(5, 4), packed]
    expected = [flat(model(x)) for x in inputs]
    simulation = lowp.simulate(model, accumulate="e8m22")
    for x, output in zip(inputs, expected, strict=True):
        close(flat(model(x)), output)
    simulation.set(accumulate="e5m2")
    assert any(not torch.equal(a, b) for a, b in zip(tree_leaves(model(inputs[0])), tree_leaves(expected[0]), strict=True))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    model = seeded(kind, 4, 3)
    expected = model(batch(5, 4))
    lowp.simulate(model, accumulate="e8m22")
    close(model(batch(5, 4)), expected)


CALLS = [
    {},
    {"need_weights": False},
    {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "average_attn_weights": False},
    {"key_padding_mask": torch.tensor([[False] * 4 + [True]] * 3)},
]


@pytest.mark.other_cpu
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention_taken_apart_is_torchs(options):
    model = seeded(nn.MultiheadAttention, 8, 2, **options)
    inputs = batch(5, 3, 8), batch(5, 3, options.get("kdim", 8)), batch(5, 3, options.get("vdim", 8))
    expected = [model(*inputs, **call) for call in CALLS]
    alone = model(*(x[:, 0] for x in inputs))
    lowp.simulate(model, accumulate="e8m22")
    for call, output in zip(CALLS, expected, strict=True):
        close([x for x in model(*inputs, **call) if x is not None], [x for x in output if x is not None])
    close(model(*(x[:, 0] for x in inputs)), alone)


def test_attention_in_narrow_sums():
    model = seeded(nn.MultiheadAttention, 8, 2, batch_first=True)
    x = batch(2, 5, 8).requires_grad_()
    lowp.simulate(model, accumulate="e5m2")
    output, _ = model(x, x, x)
    assert on_grid(output)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, x, x)[0], output)


def test_functional_attention_with_shared_keys():
    class Shared(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    model, q, k = Shared(), batch(2, 4, 5, 8), batch(2, 2, 5, 8)
    expected = model(q, k)
    lowp.simulate(model, accumulate="e8m22")
    close(model(q, k), expected)


def test_stochastic_sums_go_by_the_step():
    model = seeded(nn.Linear, 16, 8)
    simulation = lowp.simulate(model, accumulate=lowp.Arithmetic(accumulate="e4m3fn", rounding="stochastic"), seed=3)
    x = batch(4, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for step in range(3):
        simulation.step = step
        results.append(model(x))
        assert torch.equal(model(x), results[-1])
        assert torch.equal(compiled(x), results[-1])
    assert not torch.equal(results[0], results[1])


def test_described_saved_and_restored():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = batch(3, 4)
    expected = model(x)
    simulation = lowp.simulate(model, accumulate="e5m2", layers={"last": {"accumulate": "posit8 quire"}})
    sums = {row.layer: row.format for row in lowp.describe(model) if row.role == "accumulate"}
    assert sums == {"0": "e5m2", "2": "posit8 quire"}
    narrow, saved = model(x), simulation.state_dict()
    simulation.set(accumulate=None, layers=None)
    assert torch.equal(model(x), expected)
    simulation.load_state_dict(saved)
    assert torch.equal(model(x), narrow)
    lowp.restore(model)
    assert torch.equal(model(x), expected)


def test_mistakes():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 1, 3)))
    with pytest.raises(ValueError, match="nothing there multiplies matrices"):
        lowp.simulate(model, layers={"ReLU": {"accumulate": "fp16"}})
    with pytest.raises(ValueError, match="did you mean 'accumulate'"):
        lowp.simulate(model, layers={"0": {"accumulator": "fp16"}})
    with pytest.raises(ValueError, match="did you mean 'fp16'"):
        lowp.simulate(model, accumulate="fp17")
    lowp.simulate(model, accumulate="fp16")
    with pytest.raises(ValueError, match=r"layer '2' sums products in conv_transpose2d.*'accumulate': None"):
        model(batch(1, 1, 5, 5))
    lowp.simulation_of(model).set(layers={"2": {"accumulate": None}})
    model(batch(1, 1, 5, 5))
