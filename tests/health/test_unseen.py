"""The audit looks where a dispatch mode alone does not (operators' bodies, what is held), and says what it cannot see."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowp
from lowp.formats import BlockFormat, Rounding
from lowp.formats.registry import FORMATS
from lowp.health import bodies
from lowp.health.audit import ForbiddenTensor, audit
from lowp.training.reading import read_recipe
from lowp.training.run import run

HALF = torch.float16
LIBRARY = torch.library.Library("lowp_audit_test", "DEF")
OPS = torch.ops.lowp_audit_test


def half(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=HALF).view(shape)


@torch.library.custom_op("lowp_audit_test::widen", mutates_args=())
def widen(x: Tensor) -> Tensor:
    return x.float().half()


@torch.library.custom_op("lowp_audit_test::widen_backward", mutates_args=())
def widen_backward(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("lowp_audit_test::narrow", mutates_args=("x",))
def narrow(x: Tensor) -> None:
    x.mul_(2)


widen.register_autograd(lambda ctx, gradient: gradient)
widen_backward.register_autograd(lambda ctx, gradient: torch.ops.lowp_audit_test.widen(gradient))
LIBRARY.define("on_cpu(Tensor x) -> Tensor")
LIBRARY.impl("on_cpu", lambda x: x.double().half(), "CPU")
LIBRARY.define("composed(Tensor x) -> Tensor")
LIBRARY.impl("composed", lambda x: x.float().half(), "CompositeImplicitAutograd")
LIBRARY.define("made(int n) -> Tensor")
LIBRARY.impl("made", lambda n: torch.ones(n).half(), "CompositeExplicitAutograd")
LIBRARY.define("calls_widen(Tensor x) -> Tensor")
LIBRARY.impl("calls_widen", lambda x: torch.ops.lowp_audit_test.widen(x), "CPU")


def found_by(action, **arguments) -> set[tuple[str, torch.dtype]]:
    with audit(mode="report", **arguments) as report:
        action()
    assert report.unseen == []
    return {(found.operation, found.dtype) for found in report.findings}


# --- bodies of operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: OPS.widen(x), torch.float32),
        (lambda x: OPS.on_cpu(x), torch.float64),
        (lambda x: OPS.composed(x), torch.float32),
        (lambda x: OPS.made(3), torch.float32),
        (lambda x: OPS.calls_widen(x), torch.float32),
    ],
    ids=["custom_op", "impl", "composite", "no tensors", "one in another"],
)
@pytest.mark.parametrize("guard", [ExitStack, torch.no_grad, torch.inference_mode])
def test_the_body_of_an_operator_in_python_is_seen(call, dtype, guard):
    with guard():
        assert ("aten._to_copy", dtype) in found_by(lambda: call(half(4)))


def test_the_body_of_an_operator_in_backward_is_seen():
    x = half(4).requires_grad_()
    with audit(mode="report") as report:
        OPS.widen_backward(x).sum().backward()
    assert {(found.operation, found.dtype, found.phase) for found in report.findings} == {
        ("aten._to_copy", torch.float32, "backward")
    }
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_body_that_is_fine_is_clean_and_gives_the_same():
    x = half(4)
    expected = x * 2
    with audit() as report:
        OPS.narrow(x)
    assert report.clean
    assert report.operations == 2  # the operator and what is in it
    assert torch.equal(x, expected)


def test_the_line_is_that_of_the_body():
    with pytest.raises(ForbiddenTensor) as caught, audit():
        OPS.widen(half(4))
    assert caught.value.line.endswith(f"test_unseen.py:{widen._init_fn.__code__.co_firstlineno + 2}")


def test_each_of_two_audits_sees_a_body_once():
    with audit(torch.float32, mode="report") as outer, audit(torch.float64, mode="report") as inner:
        OPS.widen(half(4))
        OPS.on_cpu(half(4))
    assert [(found.dtype, found.count) for found in outer.findings] == [(torch.float32, 2)]
    assert [(found.dtype, found.count) for found in inner.findings] == [(torch.float64, 2)]
    assert outer.operations == inner.operations


def test_a_mode_below_sees_the_operator_and_the_audit_its_body():
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = half(4)
    with audit(mode="report") as report, Names() as names:
        OPS.widen(x)
    assert names.seen == ["lowp_audit_test.widen.default"]
    assert report.findings


def test_compositions_of_torch_in_inference_mode():
    """Nothing takes them apart there before a mode sees them."""
    with torch.inference_mode():
        assert ("aten.pow", torch.float32) in found_by(lambda: F.rms_norm(half(2, 4), (4,)))
        with audit() as report:
            F.linear(half(2, 4), half(3, 4), half(3)).true_divide(2)
        assert report.clean


def test_branches_of_higher_order_operators():
    x = half(3)
    branches = (lambda x: (x.float().half(),)), (lambda x: (x.cos(),))
    for first in (True, False):
        found = found_by(lambda first=first: torch.cond(torch.tensor(first), *branches, (x,)))
        assert (("aten._to_copy", torch.float32) in found) is first
    with pytest.raises(ForbiddenTensor), audit():
        torch.cond(torch.tensor(True), *branches, (x,))
    gradient = found_by(lambda: torch.cond(torch.tensor(False), *branches, (x.clone().requires_grad_(),))[0].sum().backward())
    assert gradient == set()


def test_lowps_own_products_are_seen():
    """They convert their operands: no 16-bit arithmetic is free of FP32 because it is ours."""
    model = nn.Linear(8, 8).half()
    lowp.simulate(model, accumulate="fp16")
    with audit(mode="report") as report:
        model(half(2, 8))
    assert torch.float32 in {found.dtype for found in report.findings}
    assert ("aten._to_copy", torch.float32) in found_by(lambda: lowp.matmul(half(2, 8), half(8, 2)))


def test_an_operator_that_cannot_be_seen_is_said(monkeypatch):
    """An operator in C++ that is not torch's: here one of torch's that counts as another library's."""
    monkeypatch.setattr(bodies, "_TORCHS_OWN", bodies._TORCHS_OWN - {"mkldnn"})
    x, weight = torch.ones(2, 3), torch.ones(4, 3)

    def call():
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    with audit(torch.float64, mode="report") as report:
        call()
        call()
    assert not report.clean
    assert report.findings == []
    (unseen,) = report.unseen
    assert unseen.startswith("the inside of mkldnn._linear_pointwise, which is no operator of torch's")
    assert f"not seen: {unseen}" in str(report)
    assert report.verdict == f"cannot see {unseen}"
    message = r"cannot see the inside of mkldnn.*allow=\['op:mkldnn._linear_pointwise'\]"
    with pytest.raises(RuntimeError, match=message), audit(torch.float64):
        call()
    with audit(torch.float64, allow=["op:mkldnn.*"]) as report:
        call()
    assert report.clean
    assert "allowed: op:mkldnn.* (1 tensors" in str(report)


# --- dtypes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forbid", "dtype"), [("fp32", torch.complex64), ("fp64", torch.complex128), ("fp16", torch.complex32)]
)
def test_complex_numbers_are_made_of_real_ones(forbid, dtype):
    with pytest.raises(ForbiddenTensor) as caught, audit(forbid):
        torch.zeros(3, dtype=dtype)
    assert caught.value.dtype == dtype


# --- what is held ----------------------------------------------------------------------------------------------------------


def test_a_parameter_that_nothing_touches():
    model, wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half(), torch.zeros(4, 4)

    def swap():
        model(half(2, 4))
        model[1].weight.data = wide

    with pytest.raises(ForbiddenTensor) as caught, audit():
        swap()
    assert (caught.value.operation, caught.value.module) == ("parameter weight", "1")
    assert "audit: parameter weight is a float32 tensor of shape (4, 4), in 1, at " in str(caught.value)


def test_what_a_layer_holds_that_is_never_called():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4).half(), nn.Linear(4, 4)
            self.register_buffer("table", torch.zeros(7))

        def forward(self, x):
            return self.used(x)

    model = Net()
    model.unused.weight.grad = torch.zeros(4, 4)
    with audit(mode="report") as report:
        model(half(2, 4))
        model(half(2, 4))
    assert {(found.operation, found.module, found.touched, found.count) for found in report.findings} == {
        ("parameter weight", "unused", 64, 1),
        ("parameter bias", "unused", 16, 1),
        ("gradient of weight", "unused", 64, 1),
        ("buffer table", "Net", 28, 1),
    }
    with audit(allow=["module:unused", "op:buffer table"]) as report:
        model(half(2, 4))
    assert report.clean


def test_the_states_of_an_optimizer():
    parameter = nn.Parameter(half(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["mine"] = {"list": [torch.zeros(3)]}
    with audit(mode="report") as report:
        parameter.grad = half(3)
        optimizer.step()
    assert [(f.operation, f.module, f.phase) for f in report.findings] == [
        ("state mine.list", "optimizer step (SGD)", "optimizer")
    ]


# --- threads ---------------------------------------------------------------------------------------------------------------


def test_a_thread_that_uses_torch_unseen_is_said():
    def work(*modes):
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            half(2).float()

    def idle():
        sorted([3, 1, 2])

    def run_all(*threads):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with audit(mode="report") as report:
        modes = _get_current_dispatch_mode_stack()
        run_all(threading.Thread(target=idle), threading.Thread(target=work, args=modes))
    assert (len(report.findings), report.unseen) == (1, [])
    with audit(mode="report") as report:
        run_all(threading.Thread(target=work, name="loader"))
    assert report.findings == []
    assert len(report.unseen) == 1
    assert report.unseen[0].startswith("the operations of thread 'loader'")
    with pytest.raises(RuntimeError, match="cannot see the operations of thread 'loader'"), audit():
        run_all(threading.Thread(target=work, name="loader"))
    assert threading.getprofile() is None


# --- lowp's own operations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)], ids=str)
def test_lowp_rounds_16_bits_without_wider_floats(format, dtype):
    """As plain operations: the very tensors that it makes where it has no kernel."""
    x = torch.tensor([-1.3, 0.0, -0.0, 6e-8, 0.7, 200.0, 6e4, float("inf"), float("nan")]).to(dtype)
    with audit() as report:
        for mode in Rounding:
            how = {"rounding": mode.value, "seed": 1} if mode is Rounding.STOCHASTIC else {"rounding": mode.value}
            lowp.quantize(x, format, **how)
            lowp.decode(lowp.encode(x, format, nan="zero", **how), format, dtype=dtype)
            y = x.clone().requires_grad_()
            lowp.fake_quantize(y, format, format, **how).backward(x)
    assert report.clean


@pytest.mark.parametrize("options", [{"state": "dynamic8", "state_scale": "tensor"}, {"state": "posit8"}], ids=str)
def test_states_in_codebooks_and_posits_are_clean(options):
    lowp.set_kernel_policy("auto")
    model = nn.Linear(64, 64).half()
    optimizer = lowp.optim.AdamW(model.named_parameters(), lr=1e-3, **options)
    x = half(2, 64)
    with audit() as report:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert report.clean


# --- the command -----------------------------------------------------------------------------------------------------------


def test_without_a_compiler_pure16_names_the_cause(tmp_path, monkeypatch):
    lowp.set_kernel_policy("auto")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    recipe = read_recipe("pure16", ["device=cpu"])
    with pytest.raises(
        ValueError, match=r"^precision.audit: no C\+\+ compiler .* without kernels lowp.optim runs as plain operations.*\)$"
    ):
        run(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()  # before anything began


def test_the_line_is_lowps_where_only_its_command_is_further_out():
    """Typer calls lowp.cli, which calls the trainer: nobody's line is to blame but lowp's."""
    root = Path(lowp.__file__).parent
    inner, outer = {}, {}
    exec(compile("def step(x):\n    return x.float()\n", str(root / "optim" / "plain.py"), "exec"), inner)
    exec(compile("def train(step, x):\n    return step(x)\n", str(root / "cli" / "train.py"), "exec"), outer)
    with pytest.raises(ForbiddenTensor) as caught, audit():
        outer["train"](inner["step"], half(3))
    assert caught.value.line.endswith("lowp/optim/plain.py:2")
    with pytest.raises(ForbiddenTensor) as caught, audit():
        inner["step"](half(3))
    assert "test_unseen.py:" in caught.value.line
