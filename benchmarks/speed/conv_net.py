"""A residual conv net with a quantizer after every activation: what simulation costs a whole training step on a GPU."""

import argparse
import statistics
from collections.abc import Callable

import torch
from benchmarks.speed.prebuild import tune_later
from torch import Tensor, nn

import lowp

FORWARD, BACKWARD = "e4m3fn", "e5m2"
BATCH = 512


class Quantizer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return lowp.fake_quantize(x, FORWARD, BACKWARD)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, quantizer: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.quantize1, self.quantize2 = quantizer(), quantizer()
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.quantize1(torch.relu(self.norm1(self.conv1(x))))
        return self.quantize2(torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x)))


def resnet18(quantizer: type[nn.Module]) -> nn.Module:
    """ResNet-18 for 32 x 32 images: 17 activations."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), quantizer()]
    blocks = [Residual(inputs, outputs, stride, quantizer) for inputs, outputs, stride in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def training_step(quantizer: type[nn.Module], compiled: bool, batch: int = BATCH) -> Callable[[], None]:
    """Forward and backward in bf16, channels last."""
    torch.manual_seed(0)
    model = resnet18(quantizer).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device="cuda")
    run = torch.compile(model) if compiled else model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(run(images).float(), labels).backward()

    return step


def conv_net_costs(rounds: int) -> dict[str, float]:
    """Milliseconds a step of each kind, and the ratios with over without quantizers, the median of interleaved rounds."""
    from triton.testing import do_bench

    plain, quantized = training_step(nn.Identity, True), training_step(Quantizer, True)
    eager_plain, eager = training_step(nn.Identity, False), training_step(Quantizer, False)
    steps = {"compiled": plain, "compiled, quantized": quantized, "eager": eager_plain, "eager, quantized": eager}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(do_bench(step, warmup=50, rep=150, return_mode="median"))
    result = {f"{name}, ms": statistics.median(values) for name, values in times.items()}
    for name in ("compiled", "eager"):
        pairs = zip(times[f"{name}, quantized"], times[name], strict=True)
        result[f"{name}: with / without"] = statistics.median(a / b for a, b in pairs)
    return result


if __name__ == "__main__":  # fills the compiler's cache, in a process beside others
    argparse.ArgumentParser(description=__doc__).parse_args()
    tune_later()
    for quantizer in (nn.Identity, Quantizer):
        training_step(quantizer, compiled=True)()
