"""Sixteen bits are enough: models train with no FP32 tensor anywhere, and the audit watches."""

import pytest
import torch

import lowp
import pure16


@pytest.fixture(autouse=True)
def compiled_kernels():
    lowp.set_kernel_policy("auto")  # conftest.py says "never", and plain operations have temporaries in FP32
    yield
    lowp.set_kernel_policy("never")


OPTIMIZERS = {
    "sgd": lambda p: lowp.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: lowp.optim.AdamW(p, lr=3e-3),
    "adamw8": lambda p: lowp.optim.AdamW(p, lr=3e-3, state="dynamic8", update="kahan"),
    "lars": lambda p: lowp.optim.LARS(p, lr=0.1, trust=0.02),
    "lamb": lambda p: lowp.optim.LAMB(p, lr=0.02),
}
# Fused attention saves logarithms of sums in FP32, by torch's own doing; everything else has no allowance on a CPU.
ALLOWED = {"resnet18": [], "lstm": [], "gpt": ["attention logsumexp"]}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("resnet18", "sgd"), ("resnet18", "lars"), ("lstm", "adamw"), ("lstm", "adamw8"), ("gpt", "adamw"), ("gpt", "lamb")],
)
def test_pure_fp16_trains_under_the_strict_audit(name, optimizer):
    torch.manual_seed(0)
    net = pure16.MODELS[name](4 if name == "resnet18" else 16).half()
    optimizer = OPTIMIZERS[optimizer](net.named_parameters())
    scale = lowp.LossScale("dynamic", model=net, init=2.0**6)
    x, y = pure16.batch(name, 4, 8)
    with lowp.audit(forbid=(torch.float32, torch.float64), allow=ALLOWED[name]) as report:
        losses = pure16.train(net, optimizer, scale, x, y, 6)
    assert report.clean
    assert report.operations > 300
    assert scale.skipped == 0
    assert losses[-1] < losses[0]
    assert {p.dtype for p in net.parameters()} == {torch.float16}


def test_without_a_compiler_the_audit_sees_the_temporaries():
    """Plain operations compute in float32: the audit is not fooled."""
    lowp.set_kernel_policy("never")
    net = torch.nn.Linear(4, 4).half()
    optimizer = lowp.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4).half()).sum().backward()
    with pytest.raises(lowp.ForbiddenTensor, match="optimizer step"), lowp.audit():
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({"optimizer": "SGD", "momentum": 0.9}, 6),
        ({"optimizer": "AdamW"}, 8),
        ({"optimizer": "AdamW", "state": "dynamic8"}, 6),
        ({"optimizer": "AdamW", "update": "kahan"}, 10),
    ],
)
def test_bytes_of_a_parameter(options, bytes_each):
    """Weights, gradients and state; a scale for each block of 256 is the rest."""
    net = torch.nn.Linear(512, 512, bias=False).half()
    net.weight.grad = torch.ones_like(net.weight)
    options = dict(options)
    optimizer = getattr(lowp.optim, options.pop("optimizer"))(net.parameters(), **options)
    optimizer.step()
    assert bytes_each <= lowp.health.memory(net, optimizer).bytes_per_parameter < bytes_each * 1.002
