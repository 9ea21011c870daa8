"""`lowp::round` and `lowp::quantize`, a quantizer as one node of a compiled graph: the bits of eager code, and one node.

What inductor makes of the first on a CPU is one call of a C++ function into memory of its own.
"""

from functools import partial

import pytest
import torch

import lowp
from lowp.formats import FORMATS
from lowp.simulation.rounding import Target, passed
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.node import quantize_as_node
from lowp.tensor.number_kernels import round_into

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

X = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)) * 3
X[0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 1e30])
LAYOUTS = {
    "rows": X,
    "columns": X.t(),
    "slice": X[:, ::2],
    "channels last": X.view(6, 7, 2, 5).to(memory_format=torch.channels_last),
    "part of channels last": X.view(6, 14, 5)[:, 2:].unflatten(1, (4, 3)).permute(0, 3, 1, 2),
    "one row for all": X[1].expand(6, 70).t(),
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


def bits_of(x):
    return x.view(CARRIERS[x.dtype].storage)


def every_kind(dtype):
    """Any bits: NaN with payloads, infinities, subnormals, both zeros; and numbers near the formats', among them ties."""
    generator = torch.Generator().manual_seed(2)
    storage = CARRIERS[dtype].storage
    anything = torch.randint(torch.iinfo(storage).min, torch.iinfo(storage).max, (5000,), generator=generator, dtype=storage)
    near = torch.randn(5003, generator=generator) * torch.randint(-12, 12, (5003,), generator=generator).exp2()
    ties = torch.arange(-600, 600) / 16
    return torch.cat([anything.view(dtype), near.to(dtype), ties.to(dtype), torch.tensor([0.0, -0.0, 1e-40]).to(dtype)])


@pytest.mark.parametrize(
    ("fmt", "rounding", "dtype"),
    [
        ("e4m3fn", "nearest", torch.float32),  # by addition; overflows to NaN
        ("e5m2", "nearest", torch.float32),  # and to infinity
        ("e4m3fnuz", "nearest", torch.float32),  # no negative zero
        ("bf16", "nearest", torch.float32),  # in integers: no room above for addition
        ("e5m2", "down", torch.float32),
        ("e4m3fn", "nearest", torch.float64),
        ("e4m3fn", "nearest", torch.float16),
        ("e5m2", "nearest", torch.bfloat16),
        ("posit8", "nearest", torch.float32),  # looked up: not a function of its own
    ],
    ids=str,
)
def test_bits_of_the_function_in_c(fmt, rounding, dtype):
    x = every_kind(dtype)
    out = torch.empty_like(x)
    round_into(x, fmt, rounding, out)
    assert torch.equal(bits_of(out), bits_of(lowp.quantize(x, fmt, rounding)))


def test_threads_and_flushing_change_nothing():
    x = every_kind(torch.float32).repeat(8)
    want, threads = lowp.quantize(x, "e5m2"), torch.get_num_threads()
    out = torch.empty_like(x)
    try:
        torch.set_num_threads(3)
        torch.set_flush_denormal(True)
        round_into(x, "e5m2", "nearest", out)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(bits_of(out), bits_of(want))


def test_without_kernels_it_is_quantize():
    built = lowp.kernel_info()["built"]
    lowp.set_kernel_policy("never")
    try:
        x = every_kind(torch.float32)
        out = torch.empty_like(x)
        round_into(x, "e3m4", "nearest", out)
        assert torch.equal(bits_of(out), bits_of(lowp.quantize(x, "e3m4")))
    finally:
        lowp.set_kernel_policy("auto")
    assert lowp.kernel_info()["built"] == built


def test_what_inductor_writes():
    """One call for a tensor without gaps, whatever the order of its dimensions; the operator for others, blocks and noise."""
    import torch._inductor.lowering  # as when inductor compiles
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    inputs = [*LAYOUTS.values(), X[:0], X[1, 2]]

    def rounded(inputs, step):
        found = [torch.ops.lowp.round(x, "e4m3fn", "nearest") for x in inputs]
        found.append(torch.ops.lowp.quantize(X, "mxfp4", "nearest", None, 0, 0))
        return [*found, torch.ops.lowp.quantize(X, "e4m3fn", "stochastic", step, 1, 2)]

    quantize_as_node(X, lowp.format("e4m3fn"), "nearest", None)  # it is told
    with torch._inductor.config.patch(force_disable_caches=True):  # they do not know what inductor is told
        got, code = run_and_get_code(torch.compile(rounded), inputs, torch.tensor(3))
    for x, result in zip(inputs, got, strict=False):
        same(result, lowp.quantize(x, "e4m3fn"))
        assert result.stride() == torch.empty_like(x).stride() == lowp.quantize(x, "e4m3fn").stride()
    same(got[-2], lowp.quantize(X, "mxfp4"))
    same(got[-1], lowp.quantize(X, "e4m3fn", "stochastic", seed=lowp.Noise(1, 3, 2)))
    calls = [code[0].count(name) for name in ("round_into(", "lowp.round.default(", "lowp.quantize.default(")]
    assert calls == [5, 3, 2]


def test_the_gradient_of_patches():
    """As in a vision transformer: patches are a part of the tokens, so their gradient is a part of the tokens' memory."""
    import torch._inductor.lowering  # as when inductor compiles

    torch._dynamo.reset()
    errors = Target("e5m2", "nearest")

    def tokens(x, first):
        patches = passed(x.sin(), None, errors).flatten(2).transpose(1, 2)
        return torch.cat([first, patches], 1)

    x = torch.randn(2, 16, 2, 2, generator=torch.Generator().manual_seed(0))
    first, weight = torch.ones(2, 1, 16), torch.eye(16)
    found = []
    for function in (tokens, torch.compile(tokens)):
        leaf = x.clone().requires_grad_()
        (function(leaf, first) @ weight).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_sizes_that_change():
    """Compiled once for all sizes, still as one call."""
    import torch._inductor.lowering  # as when inductor compiles
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    quantize_as_node(X, lowp.format("e5m2"), "nearest", None)
    compiled = torch.compile(lambda x: torch.ops.lowp.round(x.transpose(0, 1), "e5m2", "nearest"), dynamic=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(compiled, X)
    assert code[0].count("round_into(") == 1
    same(compiled(X[:5, :30].contiguous()), lowp.quantize(X[:5, :30].t(), "e5m2"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, axis: lowp.quantize(x, "mxfp4", axis=axis),
        lambda x, axis: lowp.decode(lowp.encode(x, "mxfp8_e4m3", axis=axis), "mxfp8_e4m3", axis=axis),
    ],
)
def test_an_axis_that_changes(function):
    """torch's compiler makes a symbol of a number that changes, and a graph has one axis."""
    x = torch.randn(8, 32, 64)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for axis in (-1, 1, 2, 1, -2):
        assert torch.equal(compiled(x, axis), function(x, axis))


def test_rounding_is_repeated_rather_than_kept():
    """The sign of an activation, which its gradient needs, is had from what is kept anyway."""
    import torch._inductor.lowering  # as when inductor compiles

    torch._dynamo.reset()
    target, kept = Target("e4m3fn", "nearest"), []

    @torch.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    def loss(x, first, second):
        return (passed(passed((x @ first).sin(), target, None).relu(), target, None) @ second).sum()

    def pack(x):
        kept.append(x.dtype)
        return x

    weights = [torch.randn(size, requires_grad=True) for size in ((70, 20), (20, 5))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss(X, *weights)
    assert torch.bool not in kept
    assert torch.float32 in kept
