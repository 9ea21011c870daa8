"""Adaptive messages on a GPU: the bytes and sums of a CPU, bit for bit, in plain operations and in kernels."""

import sys
from pathlib import Path

import pytest
import torch

import lowp
from lowp.wire.workspace import Workspace

sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))
from test_adaptive_triton import CASES, SMALL, check, laid_out, numbers

pytestmark = pytest.mark.gpu
SIZES = (70_001, 3, 64, 0, 30_000, 1025)
LONG = (200_003, 64, 70_000)  # several blocks, and items that are full
MORE = [
    *(
        ("nearest", bits, dtype, 2, 2, 2, kind, LONG)
        for bits, dtype, kind in zip(
            (1.0, 1.5, 2.5, 4.0, 4.4, 8.0),
            (torch.float32, torch.bfloat16, torch.float16) * 2,
            ("mixed", "tiny", "not finite", "huge", "zero", "mixed"),
            strict=True,
        )
    ),
    *(("stochastic", bits, dtype, 3, 3, 3, "mixed", LONG) for bits, dtype in ((1.5, torch.float16), (4.4, torch.float32))),
    *(("nearest", 4.4, torch.float32, 1, messages, 1, "mixed", SMALL * 3) for messages in (1, 2, 3, 8)),
    ("nearest", 4.4, torch.float32, 1, 1, 1, "mixed", (2_000_003,)),  # 31 blocks
]


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_kernels_give_the_bytes_and_sums_of_a_cpu(case):
    check(*case, device="cuda")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_can_be_recorded(rounding, dtype):
    """Encode and decode in a CUDA graph; what it gives for other numbers is what kernels give that are launched one by one."""
    from lowp.wire.adaptive_triton import TritonDecoder, TritonEncoder

    device, stochastic = torch.device("cuda", torch.cuda.current_device()), rounding == "stochastic"
    group, length, count, keys = laid_out(rounding, 4.4, 2, LONG)
    table, factors, workspace = group.adaptive_table(device), torch.ones(len(LONG), device=device), Workspace()
    encoder, decoder = TritonEncoder(dtype, stochastic, device), TritonDecoder(dtype, stochastic, device)
    keys = None if keys is None else keys.to(device)
    x = torch.empty(count, dtype=dtype, device=device)
    message = torch.empty(length, dtype=torch.uint8, device=device)
    found = torch.empty(count, dtype=dtype, device=device)

    def both():
        encoder(x, message, table, factors, keys, workspace.begin())
        decoder(message, found, table, factors, 1, 1, 0, workspace.begin())

    x.copy_(numbers("mixed", dtype, 1, count))
    for _ in range(2):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for seed in (2, 3):
        x.copy_(numbers("mixed", dtype, seed, count))
        both()
        expected = message.clone(), found.clone()
        message.fill_(77)
        found.fill_(5.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(message, expected[0])
        assert torch.equal(found, expected[1])


def layers(rank, device, nan=False):
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(size, generator=generator) * 10.0 ** (i - 3) for i, size in enumerate(SIZES)]
    found[2].zero_()
    if nan:
        found[4][17] = float("nan")
    return [layer.to(device) for layer in found]


@pytest.fixture(params=["never", "auto"])
def policy(request):
    lowp.set_kernel_policy(request.param)
    yield request.param
    lowp.set_kernel_policy("never")


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("reduction", ["two_shot", "one_shot", "ring", "hierarchical(2)"])
@pytest.mark.parametrize(
    ("name", "rounding"), [("adaptive:4.4", "nearest"), ("adaptive:2.4", "nearest"), ("adaptive:3", "stochastic")]
)
def test_sums_are_those_of_a_cpu(policy, name, rounding, reduction, nan):
    world = lowp.VirtualWorld(4)
    options = {"reduction": reduction, "rounding": rounding, "seed": 3, "chunk": 1 << 16}
    on_cpu, on_cuda = (
        world.all_reduce(lambda rank, device=device: layers(rank, device, nan), name, **options) for device in ("cpu", "cuda")
    )
    for ours, theirs in zip(on_cuda, on_cpu, strict=True):
        same = ours.cpu().view(torch.int32) == theirs.view(torch.int32)
        both_nan = ours.cpu().isnan() & theirs.isnan()
        assert bool((same | both_nan).all())
