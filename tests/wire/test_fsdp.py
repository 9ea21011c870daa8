"""FSDP2's handle counts steps and bytes, also those that FSDP2 sends by itself between replicas."""

import logging
import subprocess
import sys

import pytest
import ranks
import torch
from counted import Counted
from torch import nn

import lowp
from lowp.tensor.kernels import building
from lowp.wire.codec import codec_of
from lowp.wire.fsdp import FsdpHandle, _gather_from_owners, _pieces, _reduce_to_owner
from lowp.wire.report import ring_bytes

ELEMENTS = 32 * 64 + 64 * 16  # of the model below, without biases


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))


def sharded(mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")[-len(mesh) :])
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train(net, rank, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in net.parameters()]


def figures(rank, reduce, gather):
    net = sharded((2,))
    handle = lowp.fsdp.compress(net, reduce=reduce, gather=gather)
    train(net, rank, range(3))
    found = handle.step, handle.report(), handle.total(), handle.compresses
    handle.remove()
    return *found, handle.compresses


@pytest.mark.parametrize(("reduce", "gather"), [("e4m3fn", None), (None, "fp16"), ("e5m2", "fp16")])
def test_the_handle_counts_steps_as_that_of_ddp(reduce, gather):
    for step, last, total, before, after in ranks.run(figures, 2, reduce, gather):
        assert (step, last.steps, total.steps, before, after) == (3, 1, 3, True, False)
        assert "3 steps" in str(total)
        assert 0 < last.bytes_sent < total.bytes_sent
        assert total.elements == 3 * ELEMENTS


def two_steps(rank, interrupted, format):
    net = sharded((2,))
    handle = lowp.fsdp.compress(net, reduce=format, rounding="stochastic")
    train(net, rank, range(1))
    if interrupted:
        state = handle.state_dict()
        handle.remove()
        handle = lowp.fsdp.compress(net, reduce=format, rounding="stochastic")
        handle.load_state_dict(state)
    weights = train(net, rank, range(1, 2))
    return weights, handle.step


@pytest.mark.parametrize("format", ["e2m1fn", "adaptive:3"])
def test_a_resumed_run_draws_the_noise_of_the_uninterrupted_one(format):
    (whole, steps), (resumed, more) = (ranks.run(two_steps, 2, interrupted, format)[0] for interrupted in (False, True))
    assert steps == more == 2
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_a_foreign_state_is_refused():
    handle = lowp.fsdp.FsdpHandle([], 0)
    for saved in ({}, {"step": 3}, {"step": "3", "collectives": 1}, 5):
        with pytest.raises(ValueError, match="no state of lowp"):
            handle.load_state_dict(saved)


def replicated(rank, reduce):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lowp").addHandler(handler)
    net = sharded((2, 2))
    handle = lowp.fsdp.compress(net, reduce=reduce)
    train(net, rank, range(1))
    return said, handle.total()


def test_hsdp_counts_what_replicas_send_and_says_that_it_is_not_compressed():
    reduce_scatter, replicas = ELEMENTS / 2, ring_bytes(ELEMENTS // 2 * 4, 2)
    for rank, (said, total) in enumerate(ranks.run(replicated, 4, "e4m3fn")):
        assert [("2 replicas" in text and "uncompressed" in text) for text in said] == ([True] if rank == 0 else [])
        assert reduce_scatter + replicas <= total.bytes_sent < 1.1 * reduce_scatter + replicas  # headers and padding
        assert total.bytes_of_fp32 == 4 * reduce_scatter + replicas
        assert total.ratio < 2


def replicas_alone(rank):
    net = sharded((2, 1))
    with pytest.raises(ValueError, match=r"2 replicas and shards nothing.*compress_gradients"):
        lowp.fsdp.compress(net, reduce="e5m2")


def test_a_mesh_of_replicas_alone_is_refused():
    ranks.run(replicas_alone, 2)


def test_the_module_can_be_imported_from_and_is_not_imported_before():
    script = "import sys, lowp; assert 'lowp.wire.fsdp' not in sys.modules; from lowp.fsdp import compress; "
    script += "assert compress is lowp.fsdp.compress"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def operations_of_later_collectives(rank, elements):
    """Of a reduce-scatter and an all-gather of as many elements a shard, after two of each."""
    lowp.set_kernel_policy("auto")  # in the rank's own process
    codec, handle, group = codec_of("e4m3fn", "nearest", None), FsdpHandle([], 0), torch.distributed.group.WORLD
    handle._meter.samples = False  # as on CUDA, in 63 of 64 steps
    source, shard = torch.randn(2 * elements), torch.empty(elements)
    counts = []
    for _ in range(3):
        before, counted = _pieces.cache_info().misses, Counted()
        with building(), counted:
            _reduce_to_owner(shard, source, codec, group, torch.distributed.ReduceOp.AVG, handle)
            _gather_from_owners(source, shard, codec, group, handle)
        counts.append((len(counted.names), _pieces.cache_info().misses - before))
    lowp.set_kernel_policy("never")
    return counts


def test_tables_are_made_once_for_each_size():
    for counts in ranks.run(operations_of_later_collectives, 2, 1000):
        (first, made), _, (last, made_again) = counts
        assert (made, made_again) == (1, 0)  # both collectives cut alike
        assert last < first
        assert last <= 40  # launches and messages, and nothing for tables
