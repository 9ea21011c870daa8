"""Kernels of block formats on a GPU against the integers of block.py on a CPU, bit for bit. Run it there: make test-gpu"""

import pytest
import torch

import lowp
from block_cases import DTYPES, FORMATS, check, numbers
from lowp.formats.block import NVFP4

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
