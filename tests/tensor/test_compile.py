"""Inside `torch.compile(fullgraph=True)`: the same bits as eager, one node a quantizer, without recompiling for every seed."""

import subprocess
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

import lowp
import lowp.tensor.node  # the operators in graphs
from lowp.formats import format
from lowp.tensor.table import staircase

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

X = torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * 3  # 70: no multiple of any vector
X[0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 1e30])
E4M3FN = format("e4m3fn")


def same(got, want):
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert torch.equal(torch.signbit(a) & ~a.isnan(), torch.signbit(b) & ~b.isnan())


FUNCTIONS = {
    "quantize": lambda x: lowp.quantize(x * 2, "e5m2") + 1,
    "format object": lambda x: lowp.quantize(x, E4M3FN),
    "code round trip": lambda x: lowp.decode(lowp.encode(x, "e4m3fn"), "e4m3fn"),
    "stochastic": lambda x: lowp.quantize(x, "e5m2", "stochastic", seed=lowp.Noise(5, step=1)),
    "posit": lambda x: lowp.quantize(x, "posit8"),
    "codebook": lambda x: lowp.encode(x, "dynamic8", nan="zero"),
    "packed": lambda x: lowp.encode(x, "e2m1fn", pack=True),
    "blocks": lambda x: lowp.quantize(x, "mxfp4"),
    "blocks along columns": lambda x: lowp.decode(lowp.encode(x, "mxfp4", axis=0), "mxfp4", axis=0),
    "two-level blocks": lambda x: lowp.decode(lowp.encode(x, "nvfp4"), "nvfp4"),
    "bfloat16": lambda x: lowp.quantize(x.bfloat16(), "e4m3fn", "to_odd"),
    "float64": lambda x: lowp.quantize(x.double(), "e4m3fn", "up"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_bits(name):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    same(torch.compile(function, fullgraph=True)(X), function(X))


def test_a_table_that_the_compiler_asks_for_first():
    """A codebook's first call in a process may be a compiled one."""
    torch._dynamo.reset()
    staircase.cache_clear()
    codes = torch.compile(FUNCTIONS["codebook"], fullgraph=True, backend="aot_eager")(X)
    staircase.cache_clear()
    assert torch.equal(codes, FUNCTIONS["codebook"](X))


def test_gradients():
    torch._dynamo.reset()

    def loss(x):
        return (lowp.fake_quantize(x.sin(), "e4m3fn", "e5m2") * torch.linspace(0, 3, 70)).sum()

    eager, compiled = (X.clamp(-9, 9).clone().requires_grad_() for _ in range(2))
    loss(eager).backward()
    torch.compile(loss, fullgraph=True)(compiled).backward()
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-6, atol=0)


def operations(found):
    """A backend that runs graphs as they are, and keeps lowp's operators in the forward and the backward graph of each."""

    def compiler(graph, _):
        found.append([node.target for node in graph.graph.nodes if getattr(node.target, "namespace", None) == "lowp"])
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


ROUND, QUANTIZE = torch.ops.lowp.round.default, torch.ops.lowp.quantize.default
NODES = {
    "nearest": (ROUND, lambda x: lowp.quantize(x, "e5m2")),
    "saturates": (ROUND, lambda x: lowp.quantize(x, "e4m3fn", saturate=True)),
    "down": (ROUND, lambda x: lowp.quantize(x, E4M3FN, "down")),
    "posit": (ROUND, lambda x: lowp.quantize(x, "posit8")),
    "codebook": (ROUND, lambda x: lowp.quantize(x, "dynamic8")),
    "float64": (ROUND, lambda x: lowp.quantize(x.double(), "e5m2")),
    "into": (ROUND, lambda x: lowp.quantize(x, "e4m3fn", out=torch.empty_like(x))),
    "stochastic": (QUANTIZE, lambda x: lowp.quantize(x, "e5m2", "stochastic", seed=(1 << 64) - 1)),
    "all of the noise": (QUANTIZE, lambda x: lowp.quantize(x, "e4m3fn", "stochastic", seed=lowp.Noise(5, 6, 1 << 63, 8))),
    "a step that is a tensor": (
        QUANTIZE,
        lambda x: lowp.quantize(x, "e5m2", "stochastic", seed=lowp.Noise(5, torch.ones_like(x[0, :1], dtype=torch.int64))),
    ),
    "blocks": (QUANTIZE, lambda x: lowp.quantize(x, "mxfp4", saturate=True)),
    "blocks along columns": (QUANTIZE, lambda x: lowp.quantize(x, "nvfp4", axis=0)),
}


@pytest.mark.parametrize("name", NODES)
def test_one_node_for_each_quantize(name):
    """On a CPU inductor's C++ for the operations inside is slower, and takes longer to compile. Sizes may change."""
    torch._dynamo.reset()
    found = []
    operator, function = NODES[name]
    compiled = torch.compile(lambda x: function(function(x) * 2), fullgraph=True, dynamic=True, backend=operations(found))
    for x in (X, X[:5, :30].contiguous()):
        same(compiled(x), function(function(x) * 2))
    assert found == [[operator] * 2]


def test_a_seed_that_is_a_tensor_stays_inlined():
    torch._dynamo.reset()
    found = []

    def function(x, seed):
        return lowp.quantize(x, "e5m2", "stochastic", seed=seed)

    same(torch.compile(function, fullgraph=True, backend=operations(found))(X, torch.tensor(3)), function(X, 3))
    assert found == [[]]


def test_an_exported_program_does_without_lowp():
    class Model(torch.nn.Module):
        def forward(self, x):
            return lowp.fake_quantize(lowp.quantize(x, "e4m3fn"), "e5m2")

    program = torch.export.export(Model(), (X,), strict=True)
    assert not [node for node in program.graph.nodes if "lowp" in str(node.target)]
    same(program.module()(X), Model()(X))


FAKE = {
    "both": (ROUND, ROUND, {"forward": "e4m3fn", "backward": "e5m2"}),
    "saturates": (ROUND, ROUND, {"forward": E4M3FN, "backward": E4M3FN, "saturate": True}),
    "value": (ROUND, None, {"forward": "e4m3fn", "rounding": "up"}),
    "gradient": (None, ROUND, {"backward": "posit8"}),
    "stochastic": (QUANTIZE, QUANTIZE, {"forward": "e4m3fn", "backward": "e5m2", "rounding": "stochastic", "seed": 3}),
    "gradient stochastic": (
        ROUND, QUANTIZE,
        {"forward": "e5m2", "backward": "e5m2", "backward_rounding": "stochastic", "seed": lowp.Noise(3, 4)},
    ),
    "blocks": (QUANTIZE, QUANTIZE, {"forward": "mxfp4", "backward": "mxfp8_e5m2"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAKE)
def test_one_node_for_each_fake_quantize(name):
    """Forward and backward, with the bits of eager code."""
    torch._dynamo.reset()
    found, kept = [], []
    ahead, behind, how = FAKE[name]
    compiled = torch.compile(
        lambda x: lowp.fake_quantize(x * 2, **how), fullgraph=True, dynamic=True, backend=operations(found)
    )
    for x in (X.clamp(-400, 400), X[:5, :30].contiguous().clamp(-400, 400)):
        for function in (compiled, lambda x: lowp.fake_quantize(x * 2, **how)):
            leaf = x.clone().requires_grad_()
            value = function(leaf)
            value.backward(torch.linspace(-500, 500, x.numel()).view(x.shape))
            kept.append([value.detach(), leaf.grad])
    same(kept[::2], kept[1::2])
    assert found == [[ahead] if ahead else [], [behind] if behind else []]


def test_transforms_inside():
    """vmap and grad of `torch.func`, compiled."""
    torch._dynamo.reset()

    def loss(x):
        return (lowp.fake_quantize(x * 2, "e4m3fn", "e5m2") * torch.linspace(0, 3, 70)).sum()

    x = X.clamp(-9, 9)
    for function in (torch.func.grad(loss), torch.func.vmap(torch.func.grad(loss))):
        same(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
    rounded = torch.func.vmap(lambda x: lowp.quantize(x, "mxfp4"), in_dims=1)
    same(torch.compile(rounded, fullgraph=True, backend="aot_eager")(x), rounded(x))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"forward": "e4m3fm"}, "unknown format"),
        ({"backward": "e4m3fm"}, "unknown format"),
        ({"forward": "e5m2", "backward_rounding": "upp"}, "unknown rounding"),
        ({"forward": "e5m2", "rounding": "stochastic"}, "needs seed="),
        ({"forward": "e5m2", "seed": 3}, "draws nothing"),
    ],
    ids=str,
)
def test_mistakes_are_found_when_the_value_is_rounded(how, message):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: lowp.fake_quantize(x, **how), fullgraph=True, backend="aot_eager")(X)


def test_seeds_do_not_recompile():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, step: lowp.quantize(x, "e5m2", "stochastic", seed=lowp.Noise(1, step=step)), fullgraph=True
    )
    for step in range(7):
        with torch._dynamo.config.patch(error_on_recompile=step > 2):
            got = compiled(X, step)
        same(got, lowp.quantize(X, "e5m2", "stochastic", seed=lowp.Noise(1, step=step)))


FAST_MATH = """
import torch, lowp
from torch._inductor import config
lowp.set_kernel_policy("never")
x = torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * 3
x[0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 1e30])
names = ("e4m3fn", "e5m2", "bf16", "int8", "posit8")
def rounded(x, name):
    return lowp.decode(lowp.encode(x, name, nan="zero"), name)  # which are inlined
want = [rounded(x, name).view(torch.int32) for name in names]
with config.patch({"cpp.enable_unsafe_math_opt_flag": True, "force_disable_caches": True}):
    got = torch.compile(lambda x: [rounded(x, name) for name in names], fullgraph=True)(x)
for name, a, b in zip(names, got, want):
    nan = a.isnan()
    assert torch.equal(nan, b.view(torch.float32).isnan()), name
    assert torch.equal(a.view(torch.int32)[~nan], b[~nan]), name
print("the same")
"""


@pytest.mark.slow
def test_fast_math_changes_nothing():
    """With associative math a compiler may fold (x + c) - c, the usual way of rounding.

    In a process of its own: a library built so switches denormals off for whoever loads it.
    """
    done = subprocess.run([sys.executable, "-c", FAST_MATH], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "the same", done.stderr[-2000:]


def test_nan_is_refused_in_compiled_code():
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="has none"):
        torch.compile(lambda x: lowp.encode(x, "int8"), fullgraph=True)(torch.tensor([1.0, float("nan")]))
