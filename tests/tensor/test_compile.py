"""Inside `torch.compile(fullgraph=True)`: the same bits as eager, fused, without recompiling for every seed."""

import subprocess
import sys

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch.utils._pytree import tree_leaves

import lowp
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


def test_fuses_into_one_kernel():
    torch._dynamo.reset()
    metrics.reset()
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(lambda x: lowp.quantize(lowp.quantize(x.relu(), "e4m3fn") * 3, "e5m2") + 1, fullgraph=True)(X)
    assert metrics.generated_kernel_count == 1


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
want = [lowp.quantize(x, name).view(torch.int32) for name in names]
with config.patch({"cpp.enable_unsafe_math_opt_flag": True, "force_disable_caches": True}):
    got = torch.compile(lambda x: [lowp.quantize(x, name) for name in names], fullgraph=True)(x)
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
