"""What top-k keeps, with kernels and without: exactly the largest magnitudes, of equal ones the first."""

import math

import numpy as np
import pytest
import torch

import lowp
from lowp.tensor.kernels import building
from lowp.wire.codec import PartLayout, codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Layer, chunks_of
from lowp.wire.reductions import REDUCTIONS
from lowp.wire.top_k import PIECE, KeptRow, KeptTable, position_bytes
from lowp.wire.virtual import VirtualExchange


@pytest.fixture(params=["never", "auto"])
def policy(request):
    """Plain operations, then kernels: conftest.py says "never"."""
    lowp.set_kernel_policy(request.param)
    with building():
        yield request.param
    lowp.set_kernel_policy("never")


def largest(numbers, count):
    """Positions, by sorting."""
    bits = numbers.numpy().view(np.int32) & 0x7FFFFFFF
    keys = np.minimum(bits, 0x7F800000)
    return np.sort(np.lexsort((np.arange(len(keys)), -keys))[:count])


def aligned(size):
    return -(-size // 8) * 8


def numbers(size, kind):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    match kind:
        case "many magnitudes":
            x = x * torch.randn(size, generator=generator).mul(8).exp()
            x[::7], x[1::11], x[2::13] = 0.0, -0.0, 1e-42
        case "few values":
            x = (x * 2).round()
        case "zeros":
            x = torch.where(x > 2.5, x, 0.0)
        case "not finite":
            x[size // 2], x[size // 3], x[-1] = math.inf, -math.nan, math.nan
        case "sample too small":  # the first of 16 vectors, which are the sample, are unlike the others
            x.view(-1)[(torch.arange(size) // 16) % 16 == 0] *= 1e-6
        case "sample too large":
            x.view(-1)[(torch.arange(size) // 16) % 16 == 0] *= 1e6
    return x


KINDS = ("normal", "many magnitudes", "few values", "zeros", "not finite", "sample too small", "sample too large")


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_are_those_that_sorting_finds(policy, kind):
    for share in (0.003, 0.2, 1.0):
        sizes = (1, 5, 16, 300, 1025, 4099, PIECE, PIECE + 1, 3 * PIECE + 100)
        pieces = [numbers(size, kind) for size in sizes]
        rows, start, begin = [], 3, 16
        for layer, size in enumerate(sizes):
            kept = math.ceil(share * size)
            rows.append(KeptRow(size, kept, layer, start, begin))
            start, begin = start + size, begin + aligned(position_bytes(kept, size)) + 24
        table, flat = KeptTable(rows), torch.cat([torch.full((3,), 1e30), *pieces])
        message, sums = torch.zeros(begin, dtype=torch.uint8), torch.full_like(flat, 7)
        values = table.choose(flat, message)
        table.add(message, values, sums)
        assert (sums[:3] == 7).all()
        for row, piece, own in zip(rows, pieces, values.split([row.kept for row in rows]), strict=True):
            wanted = largest(piece, row.kept)
            assert torch.equal(own.view(torch.int32), piece[wanted].view(torch.int32)), (share, row)
            expected = torch.zeros(row.size)
            expected[wanted] = piece[wanted]
            np.testing.assert_array_equal(sums[row.start : row.start + row.size], expected)


def test_factors_come_before_the_choice(policy):
    """Scaled down, both are 0, and equal: the first one is kept."""
    table = KeptTable([KeptRow(4, 1, 1, 0, 0)])
    x, message = torch.tensor([0.0, 1e-40, 3e-40, 0.0]), torch.zeros(8, dtype=torch.uint8)
    assert table.choose(x, message)[0] == x[2]
    assert table.choose(x, message, torch.tensor([1.0, 2.0**-30]))[0] == 0.0
    assert not message[:2].any()


FORMATS = [("topk:0.1", "local"), ("topk:0.3:e4m3fn", "none"), ("topk:0.02:e2m1fn", "block:16"), ("topk:0.1:nvfp4", "aps")]
SIZES = (1, 40, 1000, 3, 70_000, 2049)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "scale"), FORMATS)
def test_all_parts_at_once_are_the_parts_one_by_one(policy, format, scale, dtype, shards):
    """Every other layer has another codec, so that the numbers of top-k do not lie one after the other."""
    codec, other = codec_of(format, "nearest", scale), codec_of("e5m2", "nearest", "local")
    layers = tuple(Layer(str(i), size, other if i % 3 == 2 else codec, i) for i, size in enumerate(SIZES))
    (chunk,) = chunks_of(layers, shards, (1 << 20, 1 << 20))
    messages = Messages(chunk.shards, lambda part: part.codec, [shard.start for shard in chunk.shards])
    factors = torch.tensor([2.0**i if layer.codec.scale.shared else 1.0 for i, layer in enumerate(layers)])
    peaks = torch.arange(messages.parts).to(torch.int32)
    rows = [numbers(sum(SIZES), "many magnitudes").roll(rank).to(dtype) for rank in range(3)]
    buffer = torch.zeros(3, messages.length, dtype=torch.uint8)
    for row, message in zip(rows, buffer, strict=True):
        messages.encode(row, message, factors, peaks)
    found = torch.zeros(sum(SIZES), dtype=dtype)
    messages.decode(buffer.view(-1), found, factors, 3, 3, messages.length)
    for group in messages.groups:
        for index, part, start, begin, end in group.segments:
            stretch, total = slice(start, start + part.size), torch.zeros(part.size)
            for row, message in zip(rows, buffer, strict=True):
                own = torch.zeros(end - begin, dtype=torch.uint8)
                scaled = row[stretch].to(torch.float32) * factors[part.layer]
                part.codec.encode(scaled, own, peak=peaks[index : index + 1])
                assert torch.equal(message[begin:end], own), (index, part)
                one = torch.empty(part.size)
                part.codec.decode(own, one)
                total += one
            expected = (total * factors[part.layer] / 3).to(dtype)
            assert torch.equal(found[stretch], expected)


def test_positions_take_two_bytes():
    codec = codec_of("topk:0.01:e4m3fn")
    assert PartLayout.of(codec, 1000).payload == aligned(2 * 10)
    assert PartLayout.of(codec, 4 * PIECE).payload == aligned(2 * 2622 + 3 * 4)


def test_noise_is_that_of_the_part():
    """Stochastic rounding draws for the kept numbers, counted from the part's beginning, however messages are put together."""
    codec = codec_of("topk:0.2:e4m3fn", "stochastic", "none")
    layers = tuple(Layer(str(i), 500, codec, i) for i in range(2))
    (chunk,) = chunks_of(layers, 1)
    messages = Messages(chunk.shards, lambda part: part.codec)
    x, buffer = numbers(1000, "normal"), torch.zeros(messages.length, dtype=torch.uint8)
    messages.encode(x, buffer, noises=lambda part: lowp.Noise(3, 4, part.number, part.start))
    for _, part, start, begin, end in messages.groups[0].segments:
        own = torch.zeros(end - begin, dtype=torch.uint8)
        codec.encode(x[start : start + 500], own, lowp.Noise(3, 4, part.number, part.start))
        assert torch.equal(buffer[begin:end], own)


def test_sums_take_as_many_bytes_on_64_ranks_as_on_8():
    """Room for every rank's choice took 15.8 bits an element on 64 ranks, seven times those of 8."""
    shapes = {"weight": torch.Size([1 << 20])}

    def bits(world, format):
        sent, of_fp32 = VirtualExchange(world, shapes, format).bytes_sent()
        return 32 * sent / of_fp32

    assert bits(8, "topk:0.01") == pytest.approx(0.73, abs=0.01)
    assert bits(64, "topk:0.01") == pytest.approx(0.73, abs=0.02)
    assert bits(64, "topk:0.01:fp32:all") > 15


def test_a_sum_sends_its_largest_numbers():
    """Each rank keeps one number of its own, and the sum has room for two of them."""
    rows = [torch.zeros(8).index_fill_(0, torch.tensor([rank]), 1.0 + rank) for rank in range(4)]
    total = lowp.VirtualWorld(4).all_reduce(rows, "topk:0.01", reduction="sequential")
    assert total.tolist() == [0, 0, 3.0, 4.0, 0, 0, 0, 0]
    assert lowp.VirtualWorld(4).all_reduce(rows, "topk:0.01:fp32:all", reduction="sequential").tolist() == [
        1,
        2,
        3,
        4,
        0,
        0,
        0,
        0,
    ]


def test_what_a_sum_has_no_room_for_comes_later():
    """With error feedback. Of four equal numbers, kept by four ranks, two are sent. Rank 0 keeps two, and sends one a step."""
    exchange = VirtualExchange(4, {"weight": torch.Size([8])}, "topk:0.01", reduction="sequential", error_feedback=True)
    rows = [torch.zeros(8).index_fill_(0, torch.tensor([rank]), 1.0) for rank in range(4)]
    found = [exchange.reduce(lambda rank: {"weight": rows[rank]}, mean=False)["weight"]]
    found += [exchange.reduce(lambda rank: {"weight": torch.zeros(8)}, mean=False)["weight"] for _ in range(2)]
    assert [int(total.sum()) for total in found] == [2, 1, 1]
    assert sum(found).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def one_each(ranks, size=16):
    """Rank r has 1 + r at place r."""
    return [torch.zeros(size).index_fill_(0, torch.tensor([rank]), 1.0 + rank) for rank in range(ranks)]


def test_gathered_sums_of_nodes_are_whole():
    """Four nodes of two ranks, of which each keeps one number; hierarchical(2) sends the two largest of the sum on."""
    rows = one_each(8)
    kept = {str(r): lowp.VirtualWorld(8).all_reduce(rows, "topk:0.01", reduction=r) for r in REDUCTIONS if "hier" in str(r)}
    both = sum(rows).view(2, 8)  # the chunk's two shards lie one after the other: each keeps one of every node
    assert kept["hierarchical(2, gather)"].view(2, 8)[0].tolist() == [0, 2, 0, 4, 0, 6, 0, 8]
    assert torch.equal(kept["hierarchical(2, gather)"].view(2, 8)[1], both[1])
    assert (kept["hierarchical(2, leaders)"] != 0).sum() == 2


def test_inside_a_node_nothing_is_dropped():
    """Sums in memory are rounded to the format of sums, and not chosen from: 2 is among the smaller ones of the first rank."""
    rows = [torch.tensor([3, 2, 2.5, 0, 0, 0, 0, 0]), torch.tensor([0, 2.5, 0, 0, 0, 0, 0, 0])]
    for reduction in ("hierarchical(2, leaders)", "hierarchical(8, leaders)"):
        total = lowp.VirtualWorld(2).all_reduce(rows, "topk:0.01", reduction=reduction, sum_format="bf16")
        assert total.tolist() == [0, 4.5, 0, 0, 0, 0, 0, 0]


def test_sums_of_nodes_have_room_for_nodes():
    """Not for ranks, though "all" is asked for: two nodes of 32."""
    shapes = {"weight": torch.Size([1 << 18])}
    every, two = (
        VirtualExchange(64, shapes, f"topk:0.01:fp32:{room}", reduction="hierarchical(32)").bytes_sent() for room in ("all", 2)
    )
    assert every == two
