"""Optimizers, loss scale, audit and watch on a CUDA device: the same bits as on a CPU, nobody waits, no FP32 tensor."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lowp
import pure16
from waiting import no_host_waits

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]
SHAPES = [(64, 128), (33,), (8, 3, 3, 3), (50, 100), (1,), (3, 1000), (300, 509)]
OPTIMIZERS = {
    "sgd": lambda p, **k: lowp.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
    "adamw": lambda p, **k: lowp.optim.AdamW(p, lr=0.01, **k),
    "lars": lambda p, **k: lowp.optim.LARS(p, lr=0.5, **k),
    "lamb": lambda p, **k: lowp.optim.LAMB(p, lr=0.01, **k),
}
STATES = [None, "dynamic8", "e4m3fn", "posit16", "fp16"]


def steps(make, device, dtype, policy, count=3, **options):
    lowp.set_kernel_policy(policy)
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in SHAPES]
    optimizer = make(parameters, **options)
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype).to(device)
        optimizer.step()
    found = [p.detach().cpu() for p in parameters]
    for p in parameters:
        found += [v.cpu() for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return found


def same(a, b):
    return all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("update", ["stochastic", "kahan", "nearest"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cuda_equals_cpu(name, update, dtype):
    for state in STATES if update == "stochastic" else STATES[:2]:
        on_cpu = steps(OPTIMIZERS[name], "cpu", dtype, "never", update=update, state=state)
        on_cuda = steps(OPTIMIZERS[name], "cuda", dtype, "always", update=update, state=state)
        assert same(on_cpu, on_cuda), state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_operations_equal_the_kernels(name):
    runs = [steps(OPTIMIZERS[name], "cuda", torch.float16, policy) for policy in ("never", "always")]
    assert same(*runs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_keep_their_sign(name):
    """-0 minus 0 is -0. (Triton's own minus is 0 - x: LARS added +0.)"""
    found = []
    for device, policy in (("cpu", "never"), ("cuda", "always")):
        lowp.set_kernel_policy(policy)
        parameter = nn.Parameter(torch.tensor([0.0, -0.0] * 50, dtype=torch.float16).to(device))
        optimizer = OPTIMIZERS[name]([parameter], update="nearest")
        parameter.grad = torch.tensor([0.0, 0.0, -0.0, -0.0] * 25, dtype=torch.float16).to(device)
        optimizer.step()
        found.append([parameter.detach().cpu()])
    assert same(*found)


@pytest.mark.parametrize("state", [None, "e4m3fn"])
def test_gradients_that_move(state):
    """Kernels that were launched before are launched again as they are: with gradients elsewhere, at odd addresses and back."""
    found = []
    for device, policy in (("cpu", "never"), ("cuda", "always")):
        lowp.set_kernel_policy(policy)
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).half().to(device)) for shape in SHAPES]
        optimizer = lowp.optim.AdamW(parameters, lr=0.01, state=state)
        kept = []
        for odd in (0, 0, 1, 0, 3):
            for p in parameters:
                gradient = (torch.randn(p.shape, generator=generator) * 0.1).half()
                memory = torch.empty(p.numel() + odd, dtype=p.dtype, device=device)
                kept.append(memory)  # so that the next one is elsewhere
                p.grad = memory[odd:].view(p.shape).copy_(gradient)
            optimizer.step(gradient_scale=1.0 + odd)
        found.append([p.detach().cpu() for p in parameters])
    assert same(*found)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_fp32_weights(name):
    runs = [steps(OPTIMIZERS[name], device, torch.float32, "always", update="nearest") for device in ("cpu", "cuda")]
    assert same(*runs)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fp32_is_torchs_own(name):
    """Everything in float32: torch.optim's bits."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    theirs = copy.deepcopy(ours)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    options = {"momentum": 0.9} if name == "sgd" else {}
    a = getattr(lowp.optim, {"sgd": "SGD", "adamw": "AdamW"}[name])(ours, lr=0.01, update="nearest", **options)
    b = make(theirs, lr=0.01, **options)
    for _ in range(5):
        for x, y in zip(ours, theirs, strict=True):
            x.grad = torch.randn_like(x)
            y.grad = x.grad.clone()
        a.step()
        b.step()
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nobody_waits(name):
    """After the first step nothing synchronises with the device."""
    lowp.set_kernel_policy("always")
    parameters = [nn.Parameter(torch.randn(shape, device="cuda").half()) for shape in SHAPES]
    optimizer = OPTIMIZERS[name](parameters)
    for p in parameters:
        p.grad = torch.randn_like(p) * 0.1
    optimizer.step()
    optimizer.step()
    with no_host_waits():
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_raises_with_the_next_step(name, value):
    lowp.set_kernel_policy("always")
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half().cuda()
    optimizer = OPTIMIZERS[name](net.named_parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 0.1
    optimizer.step()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net[1].bias.grad[7] = value
    optimizer.step()
    with pytest.raises(lowp.NonFiniteGradient, match=r"1\.bias"):
        optimizer.step()
    now = net.state_dict(), optimizer.state_dict()
    assert all(torch.equal(now[0][k], before[0][k]) for k in now[0])
    for key, state in now[1]["state"].items():
        for k, v in state.items():
            assert torch.equal(torch.as_tensor(v), torch.as_tensor(before[1]["state"][key][k])), k


def test_compiled_step_with_changing_lr():
    lowp.set_kernel_policy("always")
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(64, 64, device="cuda").half())
        optimizer = lowp.optim.AdamW([parameter], lr=0.01)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for i in range(5):
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
            parameter.grad = torch.randn(64, 64, device="cuda").half() * 0.1
            step()
        runs.append(parameter.detach().clone())
    assert torch.equal(*runs)


ALLOWED = {"resnet18": ["norm statistics"], "lstm": [], "gpt": ["norm statistics", "attention logsumexp"]}


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
@pytest.mark.parametrize("name", pure16.MODELS)
def test_pure_fp16_trains_under_the_audit(name, update):
    """Only what torch's own kernels save in float32 is allowed, by name; everything else is 16 bits."""
    lowp.set_kernel_policy("auto")
    torch.manual_seed(0)
    net = pure16.MODELS[name](64 if name == "resnet18" else 128).half().cuda()
    optimizer = lowp.optim.AdamW(net.named_parameters(), lr=1e-3, update=update)
    scale = lowp.LossScale("dynamic", model=net, init=2.0**10)
    x, y = pure16.batch(name, 32 if name == "resnet18" else 8, 32 if name == "resnet18" else 64, "cuda")
    with lowp.audit(forbid=(torch.float32, torch.float64), allow=ALLOWED[name]) as report:
        losses = pure16.train(net, optimizer, scale, x, y, 8)
    print(report)
    assert report.clean
    assert report.operations > 100
    assert losses[-1] < losses[0]
    memory = lowp.health.memory(net, optimizer)
    print(memory)
    assert memory.bytes_per_parameter < (8.3 if update == "stochastic" else 10.3)
    assert memory.measured_peak > memory.total


def test_watch_does_not_wait():
    lowp.set_kernel_policy("auto")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).half().cuda()
    optimizer = lowp.optim.SGD(net.named_parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(16, 64).half().cuda()
    with lowp.health.watch(net, optimizer, every=2) as health:
        for i in range(9):
            with no_host_waits() if i in (6, 7) else nullcontext():  # a sampled step and one that is not
                optimizer.zero_grad()
                net(x).float().square().mean().backward()
                optimizer.step()
        health.flush()
        assert {r["role"] for r in health.records} == {"weights", "activations", "gradients", "updates", "states"}


@pytest.mark.parametrize("state", [None, "e4m3fn", "dynamic8"])
@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_programs_of_several_steps(update, state, monkeypatch):
    """Large lists: a program takes several steps, and reads ahead."""
    from lowp.tensor.lists import function

    monkeypatch.setattr(function, "_CUDA_PROGRAMS", 4)
    monkeypatch.setitem(globals(), "SHAPES", [(130, 512), (64, 3, 7, 7), (100, 576), (7, 4096), (77,)])
    for dtype in (torch.bfloat16, torch.float16):
        on_cpu = steps(OPTIMIZERS["adamw"], "cpu", dtype, "never", update=update, state=state)
        on_cuda = steps(OPTIMIZERS["adamw"], "cuda", dtype, "always", update=update, state=state)
        assert same(on_cpu, on_cuda), dtype
