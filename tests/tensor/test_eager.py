"""Eager calls on a CPU: one that was made before goes to its kernel at once; what kernels do in floats has the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.tensor import kernels as kernels_module
from lowp.tensor import number_kernels, ops

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture
def kernels():
    lowp.set_kernel_policy("always")
    yield
    lowp.set_kernel_policy("never")


@pytest.fixture
def only_ready(kernels, monkeypatch):
    """A function after whose call the long way is closed."""

    def refuse(*_, **__):
        raise AssertionError("the call was made in full")

    return lambda: monkeypatch.setattr(number_kernels, "run", refuse)


def plain(function):
    lowp.set_kernel_policy("never")
    try:
        return function()
    finally:
        lowp.set_kernel_policy("always")


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got.view(BITS[got.itemsize]), want.view(BITS[want.itemsize]))


def awkward_numbers(format: str, dtype: torch.dtype) -> torch.Tensor:
    """All 16-bit numbers; else values, the middles between them and their neighbours, and any bit patterns."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    fmt, generator = lowp.format(format), torch.Generator().manual_seed(3)
    values = torch.tensor(sorted(v for v in fmt.values if abs(v) < float("inf")), dtype=torch.float64)
    near = torch.cat([values, (values[1:] + values[:-1]) / 2, 2 * values]).float().view(torch.int32)
    anything = torch.randint(-(1 << 31), (1 << 31) - 1, (60_000,), generator=generator, dtype=torch.int32)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, 3e38]).view(torch.int32)
    moderate = torch.randn(20_000, generator=generator).view(torch.int32)
    return torch.cat([near - 1, near, near + 1, anything, moderate, special, special - 1]).view(dtype)


NOISE = {"seed": lowp.Noise(3, offset=7)}
CASES = [
    ("encode", "e4m3fn", torch.float32, {}),
    ("encode", "e3m0", torch.float32, {"nan": "saturate"}),
    ("encode", "int8", torch.float32, {"nan": "zero", "saturate": True}),
    ("encode", "e5m2", torch.float32, {"rounding": "stochastic", **NOISE}),
    ("encode", "e4m3fnuz", torch.bfloat16, {}),
    ("quantize", "e4m3fn", torch.float32, {"rounding": "stochastic", **NOISE}),
    ("quantize", "fixed3.4", torch.float32, {"rounding": "stochastic", **NOISE}),
    ("quantize", "e4m3fn", torch.bfloat16, {"rounding": "stochastic", **NOISE}),
    ("quantize", "e4m3fn", torch.float16, {}),
    ("quantize", "int8", torch.bfloat16, {}),
    ("quantize", "posit8", torch.float32, {}),
    ("quantize", "posit8_0", torch.float32, {"rounding": "down", "saturate": True}),
]


@pytest.mark.parametrize(("name", "format", "dtype", "how"), CASES, ids=lambda value: str(value)[:30])
def test_kernels_have_the_bits_of_the_plain_operations(kernels, name, format, dtype, how):
    x = awkward_numbers(format, dtype)
    function = getattr(lowp, name)
    assert_same(function(x, format, **how), plain(lambda: function(x, format, **how)))


# Calls that were made before


def calls(x: torch.Tensor, codes: torch.Tensor, out: torch.Tensor):
    return [
        lambda: lowp.quantize(x, "e5m2"),
        lambda: lowp.quantize(x, lowp.format("e5m2")),
        lambda: lowp.quantize(x, "e5m2", out=out),
        lambda: lowp.quantize(x, "e5m2", "stochastic", seed=lowp.Noise(1, 2, 3, 4)),
        lambda: lowp.encode(x, "e5m2", "stochastic", seed=5),
        lambda: lowp.encode(x, "e5m2"),
        lambda: lowp.encode(x, "int8"),
        lambda: lowp.decode(codes, "e5m2"),
        lambda: lowp.decode(codes, "e5m2", dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_made_before_goes_to_its_kernel(only_ready, requires_grad):
    codes, out = torch.arange(256).to(torch.uint8), torch.empty(3, 5)
    for call in calls(torch.randn(100), codes, torch.empty(100)):
        call()
    x = torch.nn.Parameter(torch.randn(3, 5)) if requires_grad else torch.randn(3, 5)
    want = plain(lambda: [call().clone() for call in calls(x, codes.view(16, 16), out)])
    for call in calls(x.detach()[:1], codes[:1], out[:1]):
        call()  # the policy was changed: taken down once more
    only_ready()
    for call, right in zip(calls(x, codes.view(16, 16), out), want, strict=True):
        version, got = out._version, call()
        assert_same(got, right)
        assert not got.requires_grad
        assert out._version == version + (got is out)


@pytest.mark.parametrize("offset", [0, 2**30 - 70, 2**30 - 3, 2**33 + 1])
def test_noise_of_a_call_made_before(kernels, offset):
    """Whatever it is made of, and where it crosses into another block of indices."""
    x = torch.randn(64)
    lowp.quantize(x, "e5m2", "stochastic", seed=1)
    for noise in (lowp.Noise(7, 8, 9, offset), lowp.Noise(torch.tensor(7), 8, 9, offset), lowp.Noise(2**63, -1, 0, offset)):
        want = plain(lambda noise=noise: lowp.quantize(x, "e5m2", "stochastic", seed=noise))
        lowp.quantize(x, "e5m2", "stochastic", seed=1)
        assert_same(lowp.quantize(x, "e5m2", "stochastic", seed=noise), want)


def test_in_place(only_ready):
    x = torch.randn(1000)
    lowp.quantize(x.clone(), "e5m2", out=torch.empty(1000))
    want = lowp.quantize(x, "e5m2")
    only_ready()
    assert lowp.quantize(x, "e5m2", out=x) is x
    assert_same(x, want)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_is_not_plain_data_is_seen_in_full(kernels):
    """Nothing of the following may be taken for the call that it looks like."""
    x = torch.randn(64)
    want = lowp.quantize(x, "e5m2")
    lowp.quantize(x, "e5m2", out=torch.empty(64))
    with Seen() as seen:
        assert_same(lowp.quantize(x, "e5m2"), want)
    assert seen.count > 3
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    assert_same(lowp.quantize(negated, "e5m2"), lowp.quantize(-x, "e5m2"))
    assert_same(torch.func.vmap(lambda row: lowp.quantize(row, "e5m2"))(x.view(4, 16)), want.view(4, 16))
    assert_same(lowp.quantize(x.view(8, 8).t(), "e5m2").contiguous(), want.view(8, 8).t().contiguous())
    memory = torch.cat([x, torch.zeros(3)])
    lowp.quantize(memory[:64], "e5m2", out=memory[3:])
    assert_same(memory[3:], want)
    assert lowp.quantize(x.to("meta"), "e5m2").is_meta
    assert lowp.quantize(x[:0], "e5m2").shape == (0,)
    into_neg = torch.complex(x, x).conj().imag
    assert_same(lowp.quantize(x, "e5m2", out=into_neg).resolve_neg(), want)
    wide = torch.empty(64, dtype=torch.float64)
    assert torch.equal(lowp.quantize(x, "e5m2", out=wide), want.double())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": ["e5m2"]}, TypeError, "a format is a name"),
        ({"axis": 0}, ValueError, "axis is for block formats"),
        ({"axis": -1.0}, TypeError, "axis is a dimension's number"),
        ({"rounding": "stochastic"}, ValueError, "stochastic rounding needs seed="),
        ({"seed": 1}, ValueError, "seed is for stochastic rounding"),
        ({"out": 3}, TypeError, "out must be a tensor"),
        ({"out": torch.empty(5)}, ValueError, "out must be"),
        ({"out": torch.empty(64, requires_grad=True)}, ValueError, "does not support tensors that require a gradient"),
        ({"x": torch.zeros(64, dtype=torch.int32)}, TypeError, "takes float64"),
        ({"x": torch.zeros(64).to_sparse()}, TypeError, "dense tensors"),
        ({"x": [1.0]}, TypeError, "takes a tensor"),
    ],
)
def test_mistakes_are_found_in_a_call_made_before(kernels, arguments, error, message):
    right = {"x": torch.randn(64), "format": "e5m2"}
    lowp.quantize(**right)
    lowp.quantize(**right, out=torch.empty(64))
    lowp.quantize(**right, rounding="stochastic", seed=1)
    with pytest.raises(error, match=message):
        lowp.quantize(**right | arguments)


def test_nan_is_refused_by_the_kernel_alone(kernels, monkeypatch):
    looked = []
    refuse = ops._refuse_nan
    monkeypatch.setattr(ops, "_refuse_nan", lambda *a, **k: (looked.append(1), refuse(*a, **k)))
    for dtype in (torch.float32, torch.bfloat16):
        for count in (100, 100_003):
            x = torch.randn(count).to(dtype)
            for _ in range(2):  # in full, then ready
                want = plain(lambda x=x: lowp.encode(x, "e3m0", nan="zero"))
                looked.clear()
                assert_same(lowp.encode(x, "e3m0"), want)
                assert not looked, "one pass over the data is enough"
            for place in (0, count // 2, count - 1):
                bad = x.clone()
                bad[place] = float("nan")
                with pytest.raises(ValueError, match="x holds NaN and e3m0 has none"):
                    lowp.encode(bad, "e3m0")


def test_the_policy_never_holds_for_calls_made_before(kernels):
    x = torch.randn(64)
    want = lowp.quantize(x, "e5m2")
    lowp.set_kernel_policy("never")
    assert not kernels_module.ready
    assert_same(lowp.quantize(x, "e5m2"), want)
    assert not kernels_module.ready


def test_building_a_kernel_does_not_load_torchs_compiler(tmp_path):
    """It takes two seconds, of which the first call of a new process would be half."""
    code = """
import sys, torch, lowp
lowp.quantize(torch.randn(70_000), "e5m2", "stochastic", seed=1)
assert lowp.kernel_info()["built"] == 1
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    paths = [str(Path(lowp.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LOWP_CACHE": str(tmp_path / "cache"),
        "LOWP_KERNELS": "auto",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_kernel_that_is_first_wanted_in_inference_mode_is_built(kernels):
    """Operations on tensors of inference mode are not taken apart by torch, and could not be printed. A warning is an error."""
    with torch.inference_mode():
        x = torch.randn(300)
        found = lowp.quantize(x, "e6m4")
    assert_same(found, plain(lambda: lowp.quantize(x, "e6m4")))
