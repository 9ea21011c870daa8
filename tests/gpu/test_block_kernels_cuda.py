"""Kernels of block formats on a GPU against the integers of block.py on a CPU, bit for bit. Run it there: make test-gpu"""

import pytest
import torch

import lowp
from block_cases import DTYPES, FORMATS, check, check_stochastic, numbers, same
from lowp.formats.block import NVFP4
from lowp.tensor import block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_kernels_equal_the_integers(fmt, dtype):
    lowp.set_kernel_policy("always")
    x = numbers().to(dtype).cuda()
    check(x, fmt, False, "saturate")
    check(x[1:4000].view(3, 1333), fmt, True, "zero")
    if fmt.has_nan:
        check(x[:4000].view(4, 5, 200), fmt, False, "raise", axis=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_stochastic_kernels_equal_the_integers(fmt, dtype):
    lowp.set_kernel_policy("always")
    x, noise = numbers().to(dtype).cuda(), lowp.Noise(3, 4, 5, 6)
    check_stochastic(x, fmt, False, "saturate", noise)
    check_stochastic(x[1:4000].view(3, 1333), fmt, True, "zero", noise, pack=True)
    check_stochastic(x[:4000].view(4, 5, 200), fmt, False, "zero", noise, axis=1)
    in_memory = lowp.Noise(torch.tensor(3, device="cuda"), 4, 5, 6)  # a key that is made on the device
    same(
        lowp.quantize(x, fmt, "stochastic", seed=in_memory), block.quantize(x.cpu(), fmt, "stochastic", noise, False, -1, False)
    )


def test_stochastic_rounding_of_many_numbers():
    """16 of nvfp4's are to be expected in doubt."""
    lowp.set_kernel_policy("always")
    x, noise = torch.randn(1 << 12, 1 << 10, generator=torch.Generator().manual_seed(1)), lowp.Noise(3)
    for name in ("nvfp4", "mxfp4"):
        same(lowp.quantize(x.cuda(), name, "stochastic", seed=noise), lowp.quantize(x, name, "stochastic", seed=noise))


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.power_of_two_scale], ids=str)
def test_all_bfloat16_numbers(fmt):
    """In blocks of numbers of about their size, and beside numbers that are larger by 2^7 and 2^20."""
    lowp.set_kernel_policy("always")
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    larger = [(x.float() * factor).clamp(-3e38, 3e38).bfloat16() for factor in (2.0**7, 2.0**20)]
    x = torch.cat([x, torch.stack([x, *larger], 1).flatten()])
    same(lowp.quantize(x.cuda(), fmt), block.quantize(x, fmt, "nearest", None, False, -1, False))


def test_a_call_can_be_captured():
    """No host waits: in a CUDA graph, with other numbers than it was captured with."""
    lowp.set_kernel_policy("always")
    x = torch.randn(64, 256, device="cuda")
    lowp.quantize(x, NVFP4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = lowp.quantize(x, NVFP4)
    x.copy_(torch.randn(64, 256) * 3)
    graph.replay()
    assert torch.equal(result, lowp.quantize(x, NVFP4))
