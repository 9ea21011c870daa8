"""`lowp::quantize`, a quantizer as one node of a graph that is compiled for a CPU: the bits of eager code, and one node."""

from functools import partial

import pytest
import torch

import lowp
from lowp.formats import FORMATS
from lowp.tensor.node import quantize_as_node

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

X = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)) * 3
X[0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 1e30])
LAYOUTS = {
    "rows": X,
    "columns": X.t(),
    "slice": X[:, ::2],
    "channels last": X.view(6, 7, 2, 5).to(memory_format=torch.channels_last),
}


def same(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(torch.signbit(got) & ~got.isnan(), torch.signbit(want) & ~want.isnan())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bits_of_every_format(fmt):
    same(quantize_as_node(X, fmt, "nearest", None), lowp.quantize(X, fmt))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fmt", [lowp.format("e4m3fn"), lowp.format("mxfp4")], ids=str)
@pytest.mark.parametrize("step", [None, 3])
def test_layouts(name, fmt, step):
    """The memory of the result is laid out as the compiler was told."""
    x = LAYOUTS[name]
    noise = None if step is None else lowp.Noise(5, torch.tensor(step), 2)
    rounding = "nearest" if noise is None else "stochastic"
    got = quantize_as_node(x, fmt, rounding, noise)
    same(got, lowp.quantize(x, fmt, rounding, seed=None if step is None else lowp.Noise(5, step, 2)))
    assert got.stride() == quantize_as_node(x.to("meta"), fmt, rounding, noise and lowp.Noise(5, step, 2)).stride()


def test_one_node_in_the_graph():
    """No other operation; a step that changes compiles nothing again."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    fmt = lowp.format("e5m2")

    @torch.compile(backend=backend, fullgraph=True)
    def rounded(x, step):
        return torch.ops.lowp.quantize(x, "e5m2", "stochastic", step, 7, 1)

    for step in (1, 2):
        same(rounded(X, torch.tensor(step)), lowp.quantize(X, fmt, "stochastic", seed=lowp.Noise(7, step, 1)))
    assert graphs == [[torch.ops.lowp.quantize]]


def test_a_batch_rounds_as_its_elements():
    noise = lowp.Noise(1, torch.tensor(2), 3)
    for fmt, rounding, seed in ((lowp.format("e4m3fn"), "nearest", None), (lowp.format("mxfp4"), "stochastic", noise)):
        rounded = partial(quantize_as_node, format=fmt, rounding=rounding, noise=seed)
        same(torch.func.vmap(rounded, in_dims=1)(X), torch.stack([rounded(column) for column in X.t()]))
