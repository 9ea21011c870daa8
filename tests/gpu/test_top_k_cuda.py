"""Top-k on a GPU: the positions, the numbers and the sums of a CPU's kernels, without waiting for the device."""

import math

import pytest
import torch

import lowp
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Layer, chunks_of
from lowp.wire.top_k import PIECE, KeptRow, KeptTable, position_bytes
from waiting import no_host_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]
SIZES = (1, 5, 300, 4099, PIECE, 3 * PIECE + 100, 17)


@pytest.fixture
def compiled_kernels():
    lowp.set_kernel_policy("auto")  # conftest.py says "never"
    yield
    lowp.set_kernel_policy("never")


def numbers(kind):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), generator=generator)
    if kind == "ties":
        return (x * 2).round()
    x = x * torch.randn(sum(SIZES), generator=generator).mul(8).exp()
    x[::7], x[1::11], x[2::1301], x[3::1409] = 0.0, -0.0, math.inf, math.nan
    return x


@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("share", [0.003, 0.2, 1.0])
@pytest.mark.parametrize("kind", ["ties", "many magnitudes"])
def test_the_same_are_kept(kind, share, gap, compiled_kernels):
    rows, start, begin = [], 0, 0
    for layer, size in enumerate(SIZES):
        kept = math.ceil(share * size)
        rows.append(KeptRow(size, kept, layer, start, begin))
        start, begin = start + size + gap, begin + -(-position_bytes(kept, size) // 8) * 8
    x = torch.cat([torch.cat([piece, torch.zeros(gap)]) for piece in numbers(kind).split(SIZES)])
    found = []
    for device in ("cpu", "cuda"):
        table, own = KeptTable(rows), x.to(device)
        factors = torch.tensor([2.0**i for i in range(len(SIZES))], device=device)
        buffer, sums = torch.zeros(3, begin, dtype=torch.uint8, device=device), torch.zeros_like(own)
        values = torch.stack([table.choose(own.roll(8 * rank), buffer[rank], factors) for rank in range(3)])
        table.add(buffer.view(-1), values, sums, factors, 3, 3, begin)
        found.append([each.cpu() for each in (buffer, values.view(torch.int32), sums.nan_to_num(7.0))])
        if device == "cuda":
            with no_host_waits():
                table.choose(own, buffer[0], factors)
                table.add(buffer.view(-1), values, sums, factors, 3, 3, begin)
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("format", "scale"), [("topk:0.1", "local"), ("topk:0.05:e4m3fn", "none"), ("topk:0.1:e2m1fn", "block:16")]
)
def test_messages_of_many_parts_are_the_same_bytes(format, scale, compiled_kernels):
    codec, other = codec_of(format, "nearest", scale), codec_of("e5m2", "nearest", "local")
    layers = tuple(Layer(str(i), size, other if i == 2 else codec, i) for i, size in enumerate(SIZES))
    (chunk,) = chunks_of(layers, 3, (1 << 20, 1 << 20))
    found = []
    for device in ("cpu", "cuda"):
        messages = Messages(chunk.shards, lambda part: part.codec, [shard.start for shard in chunk.shards])
        x, buffer = numbers("ties").to(device), torch.zeros(3, messages.length, dtype=torch.uint8, device=device)
        for rank in range(3):
            messages.encode(x.roll(rank), buffer[rank])
        sums = torch.zeros_like(x)
        messages.decode(buffer.view(-1), sums, messages=3, stride=messages.length)
        found.append([buffer.cpu(), sums.cpu()])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)
