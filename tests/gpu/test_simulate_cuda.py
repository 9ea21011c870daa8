"""Simulated models on a GPU: the grid of every role, compiled equal to eager, and what compiling fuses. Run it there:

make test-gpu
"""

import copy

import pytest
import torch
from torch import nn

import lowp
from lowp.simulation import restore, simulate
from lowp.training.models.gpt import gpt
from lowp.training.models.resnet import resnet18

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]

FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _kernels():
    lowp.set_kernel_policy("auto")
    yield
    lowp.set_kernel_policy("never")


def seeded(model, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.5 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.to(device)


def elementwise():
    """Products and sums of grid numbers that are exact in float32, so that the order of additions does not matter."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))


def images(count=8):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()


def texts():
    return torch.randint(0, 65, (4, 32), generator=torch.Generator().manual_seed(1)).cuda()


MODELS = {
    "resnet": (lambda: resnet18((3, 32, 32), 10, width=16), images),
    "gpt": (lambda: gpt((32,), 65, width=64, layers=2, heads=2), texts),
    "lstm": (
        lambda: nn.LSTM(8, 8, batch_first=True),
        lambda: torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2)).cuda(),
    ),
}


def result(model, run, x):
    model.zero_grad()
    y = run(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().square().mean().mul(64).backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def on_grid(tensor, format):
    return torch.equal(lowp.quantize(tensor, format).nan_to_num(), tensor.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_everything_is_on_its_grid(name, dtype, compiled):
    make, inputs = MODELS[name]
    x = inputs().to(dtype) if name != "gpt" else inputs()
    model = seeded(make()).to(dtype)
    if name == "lstm" and compiled:
        pytest.skip("torch.compile leaves recurrent layers to cuDNN")
    before = copy.deepcopy(model.state_dict())
    simulate(model, **FORMATS)
    torch._dynamo.reset()
    y, *gradients = result(model, torch.compile(model, fullgraph=True) if compiled else model, x)
    assert on_grid(y, "e4m3fn")
    assert all(on_grid(gradient, "e5m2") for gradient in gradients)
    restore(model)
    running = ("running_mean", "running_var", "num_batches_tracked")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if not key.endswith(running))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_same_bits_as_on_the_cpu(rounding):
    """Where sums are exact: inputs, weights and errors with few bits."""
    x = lowp.quantize(torch.randn(5, 4, generator=torch.Generator().manual_seed(3)), "e4m3fn")
    on_cpu, on_gpu = seeded(elementwise(), "cpu"), seeded(elementwise(), "cuda")
    for model in (on_cpu, on_gpu):
        simulate(model, rounding=rounding, **FORMATS).step = 2
    want, got = result(on_cpu, on_cpu, x), result(on_gpu, on_gpu, x.cuda())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_compiled_equals_eager(rounding):
    model = seeded(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    simulate(model, rounding=rounding, **FORMATS).step = 4
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(4)).cuda()
    want = result(model, model, x)
    got = result(other, torch.compile(other, backend="aot_eager", fullgraph=True), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_quantizers_fuse():
    """Behind a product, a quantizer of an activation shares the kernel of the operation before it: none of its own."""
    from torch._inductor import metrics

    def kernels(model, x):
        torch._dynamo.reset()
        metrics.reset()
        result(model, torch.compile(model, fullgraph=True), x)
        return metrics.generated_kernel_count

    def make():
        return seeded(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)))

    x = torch.randn(128, 64, device="cuda", requires_grad=True)
    plain = kernels(make(), x)
    model = make()
    simulate(model, activations="e4m3fn", errors="e5m2")
    # At most one more for the result of each product (there and back), and for what the loss sees
    assert kernels(model, x) <= plain + 5
