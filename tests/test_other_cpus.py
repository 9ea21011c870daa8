"""What lowp computes is the same on every processor, whatever its instruction set and the number of threads.

Everything here is computed from integers, without torch's own products, norms or random numbers: torch promises the same bits
for those only in the same shape, on the same machine, with as many threads. (`torch.randn` differs between instruction sets.)

Two checks. `KNOWN` are digests that were written down once: an AMD EPYC with torch 2.13, an Intel Xeon with torch 2.11 and an
H200 gave these. And a second process that is held to the lowest instruction set and one thread must give what this one gives,
noise included; a training run there is near the one here.
`make test-variant` runs this file and all others that are marked `other_cpu` on the lowest instruction set.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import lowp
from lowp import optim

pytestmark = pytest.mark.other_cpu

FORMATS = ("e5m2", "e4m3fn", "e3m0", "bf16", "fixed3.4", "posit8", "posit16", "dynamic8", "mxfp8_e4m3", "mxfp4", "nvfp4")
LOWEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Float32, of both signs, over 16 binades, assembled from bits: the same on every machine."""
    count = np.arange(1, 1 + np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)
    bits = count * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    sign, exponent, fraction = bits >> np.uint64(63), (bits >> np.uint64(40)) % np.uint64(16), bits & np.uint64((1 << 23) - 1)
    fields = (sign << np.uint64(31)) | ((np.uint64(115) + exponent) << np.uint64(23)) | fraction
    return torch.from_numpy(fields.astype(np.uint32).view(np.float32)).reshape(shape).clone()


def quantized(device: str, **options) -> Iterator[torch.Tensor]:
    x = numbers(3, 1000, seed=1).to(device)
    for name in FORMATS:
        yield lowp.quantize(x, name, **options)


def encoded(device: str) -> Iterator[torch.Tensor]:
    x = numbers(3, 1000, seed=1).to(device)
    for name in FORMATS:
        codes = lowp.encode(x, name, pack=True)
        yield from (codes.scales, codes.elements) if isinstance(codes, lowp.BlockCodes) else (codes,)


def multiplied(device: str, **options) -> Iterator[torch.Tensor]:
    a, b = (numbers(*shape, seed=seed).to(device).requires_grad_() for shape, seed in (((7, 33), 2), ((33, 10), 3)))
    for accumulate, more in (("fp32", {}), ("fp16", {"chunk": 8}), ("e5m2", {"kahan": True}), ("posit8", {"quire": True})):
        product = lowp.matmul(a, b, accumulate=accumulate, **more, **options)
        yield product.detach()
        yield from torch.autograd.grad(product, (a, b), numbers(7, 10, seed=4).to(device))
    yield lowp.conv2d(
        numbers(2, 3, 6, 6, seed=5).to(device), numbers(4, 3, 3, 3, seed=6).to(device), accumulate="bf16", **options
    )


def optimized(device: str, update: str, rounding: str) -> Iterator[torch.Tensor]:
    for kind in (optim.SGD, optim.LARS, optim.AdamW, optim.LAMB):
        for dtype, state in ((torch.bfloat16, None), (torch.float16, "dynamic8")):
            shapes = ((67, 64), (17,))
            weights = [torch.nn.Parameter(numbers(*s, seed=7).to(device, dtype)) for s in shapes]
            more = {"momentum": 0.9} if kind is optim.SGD else {}
            optimizer = kind(weights, lr=0.01, update=update, state=state, state_rounding=rounding, **more)
            for step in range(2):
                for weight in weights:
                    weight.grad = numbers(*weight.shape, seed=8 + step).to(device, dtype)
                optimizer.step()
            yield from (weight.detach() for weight in weights)


def reduced(device: str, **options) -> Iterator[torch.Tensor]:
    gradients = [numbers(5000, seed=20 + rank).to(device) for rank in range(3)]
    for reduction in ("two_shot", "ring", "tree"):
        for name, scale in (("e5m2", "aps"), ("e4m3fn", "local"), ("int8", "block:64")):
            yield lowp.VirtualWorld(3).all_reduce(gradients, name, scale=scale, reduction=reduction, chunk=2048, **options)


def digest(tensors: Iterator[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@cache
def digests(device: str = "cpu") -> dict[str, str]:
    return {
        "quantize": digest(quantized(device)),
        "encode": digest(encoded(device)),
        "matmul": digest(multiplied(device)),
        "optimizers": digest(optimized(device, "kahan", "nearest")),
        "wire": digest(reduced(device)),
    }


def with_noise() -> dict[str, str]:
    return {
        "quantize": digest(quantized("cpu", rounding="stochastic", seed=3)),
        "matmul": digest(multiplied("cpu", rounding="stochastic", seed=3)),
        "optimizers": digest(optimized("cpu", "stochastic", "stochastic")),
        "wire": digest(reduced("cpu", rounding="stochastic", seed=3)),
    }


KNOWN = {
    "quantize": "625fc77c15e4f200",
    "encode": "10d8f9e5bf694cfb",
    "matmul": "b3d60ecd4efe0dd2",
    "optimizers": "70e88793e99f8d23",
    "wire": "cdf54dc6caaa9519",
}


def test_the_digests_are_those_of_other_machines():
    assert digests() == KNOWN


@pytest.mark.gpu
def test_cuda_gives_the_digests_too():
    assert digests("cuda") == digests() == KNOWN


def trained() -> list[float]:
    """The loss of each step of a run: torch's own products, so that on another processor it is near, and not the same."""
    from lowp.training.reading import read_recipe
    from lowp.training.trainer import Trainer
    from lowp.training.world import World

    settings = ("data.limit=144", "batch=48", "epochs=2", "model.options.hidden=[16]", "device=cpu", "virtual_ranks=2")
    trainer = Trainer(read_recipe("aps8", settings), World(0, 1, torch.device("cpu")))
    losses = []
    for _ in range(6):
        trainer.train_step()
        losses.append(trainer.take_metrics()["loss"])
    return losses


def test_the_lowest_instruction_set_gives_the_same_bits():
    root = Path(__file__).parents[1]
    environment = os.environ | LOWEST | {"PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "LOWP_KERNELS": "never"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(done.stdout)
    assert found["capability"] == "DEFAULT"
    assert found["nearest"] == digests()
    assert found["noise"] == with_noise()
    assert found["losses"] == pytest.approx(trained(), rel=1e-3)


if __name__ == "__main__":
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"capability": capability, "nearest": digests(), "noise": with_noise(), "losses": trained()}))
