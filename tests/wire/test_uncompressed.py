"""`fp32` means uncompressed: gradients of 16 bits travel in their 16 bits, as DDP and FSDP2 send them by themselves."""

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire.codec import codec_for, codec_of
from lowp.wire.report import ring_bytes
from lowp.wire.settings import Parameters, Settings
from lowp.wire.virtual import VirtualExchange

HALVES = (torch.bfloat16, torch.float16)
HEADERS = 1.02  # messages have headers, and end at multiples of 16 bytes


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(dtype)


def gradients_of(net, rank):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)).to(next(net.parameters()).dtype)
    net(x).float().square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def of_ddp(rank, dtype, format, options):
    """What travels, what arrives, what DDP makes of the same gradients by itself, and these gradients."""
    net = DistributedDataParallel(model(dtype))
    handle = lowp.compress_gradients(net, format, **options)
    found = gradients_of(net, rank)
    by_itself = gradients_of(DistributedDataParallel(model(dtype)), rank)
    report = handle.report()
    own = {f"module.{name}": gradient for name, gradient in gradients_of(model(dtype), rank).items()}
    return report.bytes_sent, report.elements, found, by_itself, own


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("fp32", {}),
        ("fp32", {"reduction": "ring"}),
        ("fp32", {"error_feedback": True}),
        ({0: "fp32", 100: "e5m2"}, {}),
        ("e5m2", {"skip": ["*"]}),
        ("e5m2", {"layers": {"*": "fp32"}}),
    ],
    ids=str,
)
def test_ddp_sends_no_more_than_by_itself(dtype, format, options):
    results = ranks.run(of_ddp, 2, dtype, format, options)
    for sent, elements, found, by_itself, _ in results:
        assert elements == 64 * 128 + 128 + 128 * 64 + 64
        assert 0 < sent <= HEADERS * ring_bytes(elements * dtype.itemsize, 2)
        for name, gradient in found.items():
            assert gradient.dtype == dtype
            assert torch.equal(gradient, results[0][2][name])
            exact = (results[0][4][name].double() + results[1][4][name].double()) / 2
            info = torch.finfo(dtype)
            half_a_step = (exact.abs() * info.eps).clamp(min=info.smallest_normal * info.eps) / 2
            assert ((gradient.double() - exact).abs() <= half_a_step).all()
            # A sum of two has one order, and halving is exact, so that DDP has the same bits. But it halves first, and numbers
            # of float16 that are or become subnormal lose their last bit in that.
            assert dtype == torch.float16 or torch.equal(gradient, by_itself[name])


def of_virtual(rank, dtype):
    net = DistributedDataParallel(model(dtype))
    handle = lowp.compress_gradients(net, "fp32", chunk=4096)
    own = gradients_of(model(dtype), rank)
    found = gradients_of(net, rank)
    return {name.removeprefix("module."): each for name, each in found.items()}, own, handle.buckets, handle.report().bytes_sent


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_virtual_ranks_do_the_same(dtype):
    results = ranks.run(of_virtual, 3, dtype)
    shapes = {name: gradient.shape for name, gradient in results[0][1].items()}
    exchange = VirtualExchange(3, shapes, "fp32", buckets=results[0][2], chunk=4096)
    assert [exchange.bytes_sent(rank, dtype=dtype)[0] for rank in range(3)] == [sent for *_, sent in results]
    means = exchange.reduce(lambda rank: results[rank][1])
    for found, *_ in results:
        assert all(torch.equal(found[name], means[name]) for name in shapes)


def of_fsdp(rank, dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    fully_shard(net, mp_policy=policy)
    handle = lowp.fsdp.compress(net, reduce="fp32", gather="fp32")
    gradients_of(net, rank)
    own = model(torch.float32)
    fully_shard(own, mp_policy=policy)
    gradients_of(own, rank)
    equal = all(
        torch.equal(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in zip(net.parameters(), own.parameters(), strict=True)
    )
    return handle.report().bytes_sent, equal


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fsdp_sends_no_more_than_by_itself(dtype):
    elements = 64 * 128 + 128 + 128 * 64 + 64
    for sent, equal in ranks.run(of_fsdp, 2, dtype):
        # Two gathers (forward and, unless they are kept, backward) and one reduce-scatter, of half the numbers each.
        assert 0 < sent <= HEADERS * 3 * elements / 2 * dtype.itemsize
        assert equal


def of_all_reduce(rank, dtype):
    mine = torch.full((1000,), 1.5, dtype=dtype)
    report = lowp.all_reduce(mine, "fp32")
    return report.bytes_sent, mine


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_reduce(dtype):
    for sent, total in ranks.run(of_all_reduce, 2, dtype):
        assert sent <= HEADERS * ring_bytes(2000, 2)
        assert torch.equal(total, torch.full((1000,), 3.0, dtype=dtype))


def test_a_mean_that_float16_holds_does_not_overflow_on_the_way():
    rows = [torch.full((100,), 60000.0, dtype=torch.float16)] * 8
    assert torch.equal(lowp.VirtualWorld(8).all_reduce(rows, "fp32", op="mean"), rows[0])
    assert lowp.VirtualWorld(8).all_reduce(rows, "fp32").isinf().all()


def test_only_what_is_uncompressed_follows_the_dtype():
    parameters = Parameters({"a": torch.Size([3])}, Settings.of("e5m2"))
    assert parameters.codec("a", 0, torch.bfloat16) == parameters.codec("a", 0)
    assert str(codec_for(codec_of("fp32"), torch.bfloat16)) == "bf16/none"
    assert codec_for(codec_of("topk:.1"), torch.bfloat16) == codec_of("topk:.1")
    assert codec_for(codec_of("fp32"), torch.float64) == codec_of("fp32")
