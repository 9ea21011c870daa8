"""The audit sees every forbidden tensor, says where it was, and lets pass only what it was told to."""

import inspect
import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.health.allowances import _FUSED_ATTENTION, _STATISTICS, ALLOWANCES, Sighting, parse_allowances
from lowp.health.audit import ForbiddenTensor, audit
from lowp.health.places import OperationPlace

HALF = torch.float16


def half(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=HALF).view(shape)


# --- models ---------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(Residual(width), Residual(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self, width: int, fused: bool):
        super().__init__()
        self.norm1, self.norm2, self.fused = nn.LayerNorm(width), nn.LayerNorm(width), fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mixed = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, fused: bool, width: int = 16):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(5, width), nn.Sequential(*(Block(width, fused) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens)))).flatten(0, 1)


def train(model, x, labels, optimizer=None, steps=2):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


# --- pure FP16 training passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "x", "labels", "allow"),
    [
        (ResNet, half(2, 3, 8, 8), torch.tensor([0, 2]), []),
        (Recurrent, half(2, 3, 4), torch.tensor([0, 2]), []),
        (lambda: GPT(fused=False), torch.tensor([[0, 1, 2, 3]]), torch.tensor([1, 2, 3, 4]), []),
        (lambda: GPT(fused=True), torch.tensor([[0, 1, 2, 3]]), torch.tensor([1, 2, 3, 4]), ["attention logsumexp"]),
    ],
    ids=["resnet", "lstm", "gpt", "gpt-fused"],
)
def test_pure_fp16_training_is_clean(make, x, labels, allow):
    model = make().to(HALF)
    with audit(allow=allow) as report:
        train(model, x, labels)
    assert report.clean
    assert report.findings == []
    assert report.operations > 100
    assert all(tensors > 0 and bytes > 0 for tensors, bytes in report.allowed.values())


def test_fused_attention_needs_its_allowance():
    model = GPT(fused=True).to(HALF)
    with pytest.raises(ForbiddenTensor) as caught, audit():
        train(model, torch.tensor([[0, 1, 2, 3]]), torch.tensor([1, 2, 3, 4]))
    assert (caught.value.operation, caught.value.module) == ("aten._scaled_dot_product_flash_attention_for_cpu", "blocks.0")
    assert caught.value.shape == (1, 2, 4)


def test_watching_changes_no_bit():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = ResNet().to(HALF)
        with audit(mode="report") if watched else ExitStack():
            train(model, half(2, 3, 8, 8), torch.tensor([0, 2]))
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))


def test_operations_are_counted_one_by_one():
    x = half(3)
    with audit() as report:
        assert report.operations == 0
        x + x
        x * x
    assert report.operations == 2
    x + x
    assert report.operations == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.0, 6e-8, 65504.0])
def test_values_do_not_matter(bad):
    x = torch.full((3,), bad, dtype=HALF)
    with audit() as report:
        (x * x - x).sum()
    assert report.clean
    with pytest.raises(ForbiddenTensor), audit():
        x.float()


# --- what is counted -------------------------------------------------------------------------------------------------------


def only(report):
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


def test_a_made_tensor_and_a_touched_one():
    x, wide = half(2, 3), torch.zeros(5)
    with audit(mode="report") as report:
        x.double()
    found = only(report)
    assert (found.operation, found.dtype, found.count, found.bytes, found.touched) == ("aten._to_copy", torch.float64, 1, 48, 0)
    with audit(mode="report") as report:
        wide.half()
    found = only(report)
    assert (found.operation, found.dtype, found.count, found.bytes, found.touched) == ("aten._to_copy", torch.float32, 1, 0, 20)


def test_views_and_in_place_results_are_not_made_again():
    wide = torch.zeros(4, 4)
    with audit(mode="report") as report:
        wide.view(16)
        wide.add_(1)
        wide.detach()
    assert [(f.bytes, f.touched, f.count) for f in report.findings] == [(0, 64, 1)] * 3


def test_lists_and_repeated_tensors_are_counted_once_each():
    a, b = torch.zeros(2), torch.zeros(3)
    with audit(mode="report") as report:
        torch.cat([a, b, a])
        torch._foreach_add([a, b], 1.0)
    by_operation = {found.operation: (found.bytes, found.touched, found.count) for found in report.findings}
    assert by_operation == {"aten.cat": (28, 20, 1), "aten._foreach_add": (20, 20, 1)}


def test_out_arguments_are_touched():
    x, wide = half(3), torch.zeros(3)
    with audit(mode="report") as report:
        torch.add(x, x, out=wide)
    assert (only(report).bytes, only(report).touched) == (0, 12)


def test_scalars_integers_empty_and_meta_tensors_are_not_counted():
    with audit() as report:
        torch.zeros(()) + 1
        torch.tensor(1.5)
        torch.arange(4) * 2
        torch.zeros(0, 3)
        torch.zeros(4, device="meta") + 1
        half(3).sum(dtype=torch.float32)
    assert report.clean
    assert report.operations > 6


def test_factories_and_literals_are_made():
    with audit(mode="report") as report:
        torch.ones(3)
        torch.tensor([1.0, 2.0])
    assert sorted((f.operation, f.bytes, f.touched) for f in report.findings) == [
        ("aten.lift_fresh", 8, 0),
        ("aten.ones", 12, 0),
    ]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, at the first sparse tensor
def test_sparse_tensors():
    with pytest.raises(ForbiddenTensor), audit():
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), half(2), (4,), check_invariants=True).float()


def test_calls_at_one_place_are_merged():
    x = half(4)
    with audit(mode="report") as report:
        for _ in range(3):
            x.float()
        x.float()
    assert [(found.count, found.bytes) for found in report.findings] == [(3, 48), (1, 16)]


@pytest.mark.parametrize(
    ("forbid", "dtypes"),
    [
        (torch.float32, (torch.float32,)),
        ("fp32", (torch.float32,)),
        (["fp64", "float32", torch.float32], (torch.float64, torch.float32)),
        (("bf16", torch.complex64), (torch.bfloat16, torch.complex64)),
    ],
)
def test_forbidden_dtypes(forbid, dtypes):
    with audit(forbid, mode="report") as report:
        for dtype in (HALF, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            torch.zeros(2, dtype=dtype)
    assert report.forbidden == dtypes
    pairs = {torch.complex64} if torch.float32 in dtypes else set()
    assert {found.dtype for found in report.findings} == set(dtypes) | pairs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"forbid": ()}, ValueError, "forbid is empty"),
        ({"forbid": "fp33"}, ValueError, "unknown dtype 'fp33'"),
        ({"forbid": "Tensor"}, ValueError, "unknown dtype 'Tensor'"),
        ({"forbid": [32]}, TypeError, "forbid takes dtypes, not int: 32"),
        ({"forbid": 32}, TypeError, "forbid takes dtypes"),
        ({"forbid": torch.int8}, ValueError, "integers are never counted"),
        ({"mode": "warn"}, ValueError, "unknown mode='warn'; it is 'raise' or 'report'"),
        ({"allow": ["norm statistic"]}, ValueError, "unknown allowance 'norm statistic'; did you mean 'norm statistics'"),
        ({"allow": ["xyzzy"]}, ValueError, "known are 'batch_norm running stats'"),
        ({"allow": "wire sums"}, TypeError, r"allow=\['wire sums'\]"),
        ({"allow": [3]}, TypeError, "allow takes names, not int: 3"),
        ({"allow": ["module:"]}, ValueError, "lacks a pattern, such as 'module:layer1"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, error, message):
    with pytest.raises(error, match=message):
        audit(**arguments)


# --- where: a planted FP32 tensor is found in each place -------------------------------------------------------------------


class Widens(nn.Module):
    def forward(self, x):
        return x.float().half()


class WidensBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.double().half()


class WidensInBackward(nn.Module):
    def forward(self, x):
        return WidensBackward.apply(x)


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*extra), nn.Linear(4, 3)).to(HALF)


def caught_while(action, **arguments):
    with pytest.raises(ForbiddenTensor) as caught, audit(**arguments):
        action()
    return caught.value


def step(model, optimizer=None):
    train(model, half(2, 4), torch.tensor([0, 2]), optimizer, steps=1)


def line_of(function, needle: str) -> str:
    lines, start = inspect.getsourcelines(function)
    number = start + next(i for i, line in enumerate(lines) if needle in line)
    return f"{inspect.getsourcefile(function).removeprefix(os.getcwd() + os.sep)}:{number}"


def test_in_a_submodules_forward():
    model = network(nn.Identity(), Widens())
    error = caught_while(lambda: step(model))
    assert (error.operation, error.module, error.phase) == ("aten._to_copy", "1.1", "forward")
    assert (error.dtype, error.shape, error.line) == (torch.float32, (2, 4), line_of(Widens.forward, "float()"))
    assert str(error) == (
        "audit: aten._to_copy made a float32 tensor of shape (2, 4), in 1.1, "
        f"at {error.line}; forbidden are float32 and float64"
    )


def test_in_an_autograd_functions_backward():
    model = network(WidensInBackward())
    error = caught_while(lambda: step(model))
    assert (error.module, error.phase, error.dtype) == ("1.0", "backward", torch.float64)
    assert error.line == line_of(WidensBackward.backward, "double()")
    assert "made a float64 tensor of shape (2, 4), in 1.0 (backward, WidensBackwardBackward), at" in str(error)


def test_in_a_plain_operations_backward_the_line_is_that_of_the_call():
    """An FP32 leaf behind a cast: its gradient is made by torch itself, in the engine."""
    model = network()
    scale = torch.ones(2, 4, requires_grad=True)
    narrow = scale.half()
    loss = model(half(2, 4) * narrow).sum()
    with pytest.raises(ForbiddenTensor) as caught, audit():
        loss.backward()
    expected = line_of(test_in_a_plain_operations_backward_the_line_is_that_of_the_call, "loss.backward()")
    assert (caught.value.operation, caught.value.phase, caught.value.line) == ("aten._to_copy", "backward", expected)
    assert caught.value.module == ""  # forward ran before the audit


def test_in_a_backward_hook():
    model = network()
    model[2].register_full_backward_hook(lambda module, grads, outputs: (grads[0].float().half(),))
    error = caught_while(lambda: step(model))
    assert (error.operation, error.phase) == ("aten._to_copy", "backward")
    assert error.line == line_of(test_in_a_backward_hook, "register_full")
    assert error.module == "2"


def test_in_a_gradient_hook():
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient.float().half())
    error = caught_while(lambda: step(model))
    assert (error.module, error.phase, error.line) == ("0", "backward", line_of(test_in_a_gradient_hook, "register_hook"))


def test_in_a_hook_after_the_gradient_was_accumulated():
    model = network()
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.double())
    error = caught_while(lambda: step(model))
    assert (error.module, error.phase) == ("2", "backward")


def test_in_the_optimizers_state():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step(model, optimizer)
    state = optimizer.state[model[2].weight]
    state["momentum_buffer"] = state["momentum_buffer"].float()
    error = caught_while(lambda: step(model, optimizer))
    assert (error.operation, error.module, error.phase) == ("aten.mul_", "optimizer step (SGD)", "optimizer")
    assert error.shape == (3, 4)
    assert error.line == line_of(train, "optimizer.step()")
    assert "aten.mul_ touched a float32 tensor of shape (3, 4), in optimizer step (SGD), at" in str(error)


def test_in_the_loss():
    model = network()
    with pytest.raises(ForbiddenTensor) as caught, audit(allow=["wire sums"]) as report:
        F.cross_entropy(model(half(2, 4)).float(), torch.tensor([0, 1]))
    assert (report.operations > 4, len(report.findings), report.clean) == (True, 1, False)
    assert "allowed but never needed: wire sums" in str(report)
    assert (caught.value.module, caught.value.phase) == ("", "other")
    assert caught.value.line == line_of(test_in_the_loss, "cross_entropy")
    assert "of shape (2, 3), outside any module, at" in str(caught.value)


def test_the_backward_of_a_wide_loss_belongs_to_no_module():
    model = network()
    with audit(mode="report") as report:
        F.cross_entropy(model(half(2, 4)).float(), torch.tensor([0, 1])).backward()
    assert {found.module for found in report.findings} == {""}
    assert {found.phase for found in report.findings} == {"other", "backward"}


def test_wide_modules_are_named_in_forward_and_backward():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x.float()).half()

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": Wide()}).to(HALF)
    model["b"].inner.float()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x))

    net = Both()
    with audit(mode="report") as report:
        net(half(2, 4)).sum().backward()
    where = {(found.operation, found.module, found.phase) for found in report.findings}
    assert where == {
        ("aten._to_copy", "parts.b", "forward"),
        ("aten.t", "parts.b.inner", "forward"),
        ("aten.addmm", "parts.b.inner", "forward"),
        ("aten._to_copy", "parts.b", "backward"),
        ("aten.t", "parts.b.inner", "backward"),
        ("aten.mm", "parts.b.inner", "backward"),
        ("aten.sum", "parts.b.inner", "backward"),
        ("aten.view", "parts.b.inner", "backward"),
        ("aten.detach", "parts.b.inner", "backward"),
        *(
            (f"{what}{name}", "parts.b.inner", "other")
            for what in ("parameter ", "gradient of ")
            for name in ("weight", "bias")
        ),
    }


def test_a_second_models_modules_carry_its_class():
    first, second = network(Widens()), nn.Sequential(nn.Identity(), Widens())
    with audit(mode="report") as report:
        first(half(2, 4))
        second(half(2))
        Widens()(half(2))
        second[1](half(2))
    assert {found.module for found in report.findings} == {"1.0", "Sequential.1", "Widens"}


# --- modes of running -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), WidensInBackward(), Widens())

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    model = Net().to(HALF)
    with audit(mode="report", allow=["module:nothing"]) as report:
        model(half(2, 4)).sum().backward()
    where = {(found.module, found.phase) for found in report.findings}
    assert where == {("second.2", "forward"), ("second.2", "backward"), ("second.1", "backward")}
    with audit(allow=["module:second.[12]"]) as report:
        model(half(2, 4)).sum().backward()
    assert report.clean


def test_no_grad_and_inference_mode():
    model = network(Widens())
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            error = caught_while(lambda: model(half(2, 4)))
        assert error.module == "1.0"


def test_autocast_is_caught():
    """Autocast to FP16 turns FP16 into FP32 for the operations on its list."""

    def run():
        with torch.autocast("cpu", dtype=HALF):
            F.mse_loss(half(4), half(4))

    error = caught_while(run)
    assert (error.operation, error.dtype, error.shape) == ("aten._to_copy", torch.float32, (4,))
    assert error.line == line_of(test_autocast_is_caught, "mse_loss")


def test_nested_audits_each_see_everything():
    x = half(3)
    with audit(torch.float32, mode="report") as outer, audit(torch.float64, mode="report") as inner:
        x.float()
        x.double()
    assert [found.dtype for found in outer.findings] == [torch.float32]
    assert [found.dtype for found in inner.findings] == [torch.float64]
    assert outer.operations == inner.operations == 2


def test_an_audit_that_begins_inside_a_module():
    class Inside(nn.Module):
        def forward(self, x):
            with audit(mode="report") as self.report:
                Widens()(x)
                x.float()
            return x

    module = nn.Sequential(Inside())
    with audit(mode="report") as outer:
        module(half(2))
    assert {(found.module, found.phase) for found in module[0].report.findings} == {("Widens", "forward"), ("", "other")}
    assert {found.module for found in outer.findings} == {"Widens", "0"}


def hooks() -> tuple[int, ...]:
    module, optim = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    return (
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks),
        len(module._global_forward_hooks_always_called),
        len(optim._global_optimizer_pre_hooks),
        len(optim._global_optimizer_post_hooks),
        torch._C._len_torch_dispatch_stack(),
    )


def test_everything_is_undone_also_after_an_exception():
    before = hooks()
    with audit():
        assert hooks() != before
    assert hooks() == before
    caught_while(lambda: step(network(Widens())))
    assert hooks() == before
    with pytest.raises(KeyError), audit():
        raise KeyError
    assert hooks() == before
    with pytest.raises(ValueError, match="unknown mode"):
        audit(mode="nothing")
    assert hooks() == before


def test_places_survive_exceptions_inside_the_audit():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError

    class FailingSGD(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError

    model = network(Fails())
    optimizer = FailingSGD(model.parameters(), lr=0.1)
    with audit(mode="report") as report:
        with pytest.raises(KeyError):
            model(half(2, 4))
        half(2).float()
        with pytest.raises(KeyError):
            optimizer.step()
        half(3).float()
    assert {(found.module, found.phase) for found in report.findings} == {("", "other")}
    assert len(report.findings) == 2


def test_a_closure_inside_an_optimizer_step():
    model = network(Widens())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(half(2, 4)).sum()
        loss.backward()
        return loss

    with audit(mode="report") as report:
        optimizer.step(closure)
    assert {(found.module, found.phase) for found in report.findings if found.operation == "aten._to_copy"} == {
        ("1.0", "forward"),
        ("1.0", "backward"),
    }


def test_an_optimizer_in_a_backward_hook():
    model = network()
    optimizer = torch.optim.SGD([model[2].bias], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [half(2).float()].clear())
    model[2].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with audit(mode="report") as report:
        model(half(2, 4)).sum().backward()
    assert {(found.module, found.phase) for found in report.findings} == {("optimizer step (SGD)", "optimizer")}


def test_wrapper_tensors_are_judged_by_what_they_wrap():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return Wrapper(func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {})))

    narrow, wide = Wrapper(half(3)), Wrapper(torch.zeros(3))
    with audit() as report:
        narrow + narrow
    assert (report.clean, report.operations) == (True, 1)
    with pytest.raises(ForbiddenTensor), audit():
        wide + wide


def test_higher_order_operators():
    wide = torch.zeros(3)
    with audit(mode="report") as report:
        torch.cond(torch.tensor(True), torch.sin, torch.cos, (wide,))
    assert "cond" in {found.operation for found in report.findings}


def test_lowp_rounds_fp16_to_floats_without_fp32():
    x = torch.tensor([-1.3, 0.0, -0.0, 6e-8, 6e4, float("nan"), float("inf")], dtype=HALF)
    with audit() as report:
        for format in ("e5m2", "e4m3fn", "e3m2fn"):
            lowp.quantize(x, format)
        lowp.quantize(x, "e5m2", "stochastic", seed=1)
        lowp.decode(lowp.encode(x, "e5m2"), "e5m2", dtype=HALF)
    assert report.clean
    assert report.operations > 10


def test_kernels_can_be_built_while_an_audit_watches():
    """Their builder runs on fake tensors, which are no tensors."""
    gradients = [half(3000), half(3000)]
    lowp.set_kernel_policy("always")
    with audit(allow=["wire sums"]) as report:
        built = lowp.kernel_info()["built"]
        lowp.VirtualWorld(2).all_reduce(gradients, "e6m1", scale="none")
        assert lowp.kernel_info()["built"] > built
    assert report.clean


def test_fake_tensors_are_not_counted():
    with audit() as report, FakeTensorMode():
        torch.zeros(3) + torch.ones(3)
    assert (report.clean, report.operations) == (True, 0)


def test_views_of_integers_are_touched():
    """Floats that an operation gives back on memory it was given are not memory that it made."""
    bits = torch.zeros(4, dtype=torch.int32)
    with audit(mode="report") as report:
        bits.view(torch.float32)
    assert {found.operation: (found.bytes, found.touched) for found in report.findings}["aten.view"] == (0, 16)


def test_lowp_has_no_privilege():
    """Its products convert their operands to FP32."""
    x = half(5)
    error = caught_while(lambda: lowp.matmul(x, x))
    assert error.line == line_of(test_lowp_has_no_privilege, "matmul(x")


# --- threads --------------------------------------------------------------------------------------------------------------


def test_a_thread_is_seen_if_it_takes_the_modes_along():
    def work(modes):
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            for _ in range(200):
                half(2).float()

    with audit(mode="report") as report:
        modes = _get_current_dispatch_mode_stack()
        threads = [threading.Thread(target=work, args=(m,)) for m in (modes, modes, [])]
        for thread in threads:
            thread.start()
        work([])
        for thread in threads:
            thread.join()
        assert _get_current_dispatch_mode_stack() == modes
    by_count = [(f.operation, f.count, f.bytes) for f in report.findings]
    assert by_count == [("aten._to_copy", 600, 4800)]  # two threads and this one; the third thread took nothing along
    assert [what for what in report.unseen if "thread" in what] == report.unseen != []
    assert report.operations == 600 * (report.operations // 600) > 600
    assert _get_current_dispatch_mode_stack() == []


def test_an_error_in_a_thread_is_raised_there():
    caught = []

    def work(mode):
        with mode:
            try:
                half(2).float()
            except ForbiddenTensor as error:
                caught.append(error)

    with audit() as report:
        thread = threading.Thread(target=work, args=_get_current_dispatch_mode_stack())
        thread.start()
        thread.join()
    assert caught[0].line == line_of(test_an_error_in_a_thread_is_raised_there, "half(2).float()")
    assert not report.clean


def test_nothing_is_added_to_a_report_after_the_audit():
    with audit(mode="report") as report:
        (mode,) = _get_current_dispatch_mode_stack()
    with mode:
        half(2).float()
    assert (report.operations, report.clean) == (0, True)


def test_a_training_step_in_a_thread_finds_its_modules():
    """The numbers of autograd's nodes start again in each thread."""
    first, model = network(), network(WidensInBackward())
    with audit(mode="report") as report:
        first(half(2, 4)).sum().backward()
        (mode,) = _get_current_dispatch_mode_stack()

        def work():
            with mode:
                model(half(2, 4)).sum().backward()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {found.module for found in report.findings if found.phase == "backward"} == {"Sequential.1.0"}


# --- torch.compile --------------------------------------------------------------------------------------------------------


def test_compiled_functions_run_eagerly_and_compiled_again_afterwards():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def widen(x):
        return x.float().sin().half()

    for _ in range(2):
        error = caught_while(lambda: widen(half(3)))
        assert error.line == line_of(test_compiled_functions_run_eagerly_and_compiled_again_afterwards, "x.float()")
    assert compilations == []
    widen(half(3))
    assert len(compilations) == 1
    with audit(mode="report") as report:
        widen(half(3))
    assert report.operations >= 3
    widen(half(3))
    assert len(compilations) == 1
    torch._dynamo.reset()


def test_a_backward_that_was_compiled_before_the_audit_is_refused():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    @torch.compile(backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward)))
    def f(x):
        return x.sin().sum()

    x = half(3).requires_grad_()
    loss = f(x)
    assert type(loss.grad_fn).__name__ == "CompiledFunctionBackward"
    with audit(mode="report") as report:
        loss.backward(retain_graph=True)
    assert not report.clean
    assert re.search("not seen: a backward pass whose forward ran compiled before the audit began", str(report))
    with pytest.raises(RuntimeError, match="begin the audit before the forward pass"), audit():
        loss.backward()
    torch._dynamo.reset()


# --- allowances -----------------------------------------------------------------------------------------------------------


def test_patterns_allow_and_are_printed():
    model = network(Widens())
    with audit(allow=["module:1.*", "op:aten.mul", "wire sums"]) as report:
        model(half(2, 4))
        torch.mul(half(3), 2.0)
    assert report.allowed == {"module:1.*": (2, 64), "op:aten.mul": (0, 0), "wire sums": (0, 0)}
    assert str(report).splitlines()[1:] == [
        "nothing found",
        "allowed: module:1.* (2 tensors, 64 bytes)",
        "allowed but never needed: op:aten.mul",
        "allowed but never needed: wire sums",
    ]
    with audit(allow=["op:aten._to_*"]) as report:
        half(3).float()
    assert report.clean
    with pytest.raises(ForbiddenTensor), audit(allow=["op:aten._to_*"]):
        half(3).float() + 1


def test_batch_norm_in_fp32_needs_two_allowances_and_its_parameters_none():
    """Batch norm with FP32 parameters and FP16 activations: what CUDA does with FP16 ones too."""
    model = nn.BatchNorm2d(3, affine=False)
    x = half(2, 3, 4, 4)
    with audit(allow=["norm statistics", "batch_norm running stats"]) as report:
        model(x.requires_grad_()).sum().backward()
    assert report.clean
    assert report.allowed == {"norm statistics": (4, 48), "batch_norm running stats": (6, 72)}  # also as buffers
    for allow, slot in ((["norm statistics"], "touched"), (["batch_norm running stats"], "made")):
        error = caught_while(lambda: model(x), allow=allow)
        assert (error.operation, error.shape) == ("aten.native_batch_norm", (3,))
        assert f"native_batch_norm {slot} a float32" in str(error)


def test_an_allowance_excuses_its_tensors_not_the_operation():
    with pytest.raises(ForbiddenTensor) as caught, audit(allow=["norm statistics"]):
        F.layer_norm(torch.zeros(2, 4), (4,))
    assert caught.value.shape == (2, 4)


def test_saved_statistics_may_be_detached():
    """Group norm with FP32 parameters saves FP32 statistics, which autograd detaches to keep them."""
    x = half(2, 4, 3).requires_grad_()
    weight = torch.ones(4)
    with audit(mode="report", allow=["norm statistics"]) as report:
        torch.native_group_norm(x, weight, weight, 2, 4, 3, 2, 1e-5)[0].sum().backward()
    assert {found.operation for found in report.findings} == {"aten.native_group_norm", "aten.native_group_norm_backward"}
    assert all(found.bytes == 0 for found in report.findings)  # the parameters alone were touched
    assert report.allowed["norm statistics"][0] > 2


def sighting(operation: str, slot: str) -> Sighting:
    place = OperationPlace("", "other", "x.py:1", "", frozenset())
    return Sighting(operation, slot, torch.zeros(3), True, lambda: place)


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("norm statistics", [("aten.native_layer_norm", "out1"), ("aten._fused_rms_norm_backward", "rstd")], "out0"),
        ("attention logsumexp", [("aten._scaled_dot_product_flash_attention_backward", "logsumexp")], "out"),
        ("attention logsumexp", [("aten._scaled_dot_product_cudnn_attention", "out1")], "logsumexp"),
        ("attention logsumexp", [("aten._flash_attention_backward", "logsumexp")], "out1"),
        ("batch_norm running stats", [("aten.cudnn_batch_norm", "running_var")], "weight"),
    ],
)
def test_slots(name, yes, no):
    (allowance,) = parse_allowances([name])
    for operation, slot in yes:
        assert allowance.matches(sighting(operation, slot))
        assert not allowance.matches(sighting(operation, no))
        assert not allowance.matches(sighting("aten.mm", slot))


def test_slots_exist_in_torch():
    """A torch that renames an operation or an argument is noticed."""
    checked = 0
    for operation, slots in _STATISTICS.items():
        schema = getattr(torch.ops.aten, operation.removeprefix("aten.")).default._schema
        known = {argument.name for argument in schema.arguments} | {f"out{i}" for i in range(len(schema.returns))}
        assert set(slots) <= known, operation
        checked += 1
    for operation in _FUSED_ATTENTION:
        schema = getattr(torch.ops.aten, operation.removeprefix("aten.")).default._schema
        names = [argument.name for argument in schema.arguments] + [result.name for result in schema.returns]
        assert any("log" in name and "sum" in name for name in names), operation
        checked += 1
    assert checked > 20


def test_every_known_allowance_explains_itself():
    assert len({allowance.name for allowance in ALLOWANCES}) == len(ALLOWANCES)
    assert all(len(allowance.why) > 40 for allowance in ALLOWANCES)
    assert parse_allowances([allowance.name for allowance in ALLOWANCES]) == ALLOWANCES


def test_wire_sums_are_those_of_lowp_wire():
    path = Path(lowp.__file__).parent / "wire" / "sums.py"
    namespace: dict = {}
    exec(compile("def add(x):\n    return x.float().sum(0).half()\n", str(path), "exec"), namespace)
    with audit(allow=["wire sums"]) as report:
        namespace["add"](half(3, 4))
    assert report.clean
    assert report.allowed["wire sums"] == (4, 48 + 48 + 16 + 16)
    error = caught_while(lambda: namespace["add"](half(3, 4)))
    assert error.line == line_of(test_wire_sums_are_those_of_lowp_wire, "error = caught_while")  # the user's, not lowp's
    assert ", in lowp.wire, at " in str(error)
    with pytest.raises(ForbiddenTensor), audit(allow=["wire sums"]):
        namespace["add"](half(3, 4)).float()


# --- the table ------------------------------------------------------------------------------------------------------------


def test_the_report_is_a_table():
    model = network(Widens())
    with audit(mode="report") as report:
        model(half(2, 4))
        half(1000).double()
    lines = str(report).splitlines()
    assert lines[0] == f"audit of {report.operations} operations; forbidden are float32 and float64"
    assert lines[1].split() == ["bytes", "touched", "calls", "dtype", "operation", "where", "line"]
    assert lines[2].split()[:7] == ["8,000", "0", "1", "float64", "aten._to_copy", "outside", "any"]
    assert lines[3].split()[:6] == ["32", "32", "2", "float32", "aten._to_copy", "1.0"]
    assert lines[4:] == ["total: 3 calls, 8,032 bytes made, 32 touched", "nothing was allowed"]
    assert lines[3].endswith(line_of(Widens.forward, "float()"))


def test_import_brings_no_compiler():
    code = "import sys, lowp.health.audit; sys.exit('torch._dynamo' in sys.modules or 'rich' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
