"""DistributedDataParallel with compressed gradients: every way to use DDP, against the virtual world, bit for bit."""

import math

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.predict import auto
from lowp.predict.cluster import LinkLevel
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

WORLD = 3
STEPS = 4


class Net(nn.Module):
    """Frozen and unused parameters, a norm, a convolution in channels_last, several buckets."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 300)
        self.head = nn.Linear(300, 10)
        if unused:
            self.unused = nn.Linear(300, 50)

    def forward(self, x):
        x = self.conv(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        return self.head(self.hidden(self.norm(self.frozen(x))).relu())


def loss_of(net, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 3, 6, 6, generator=generator)
    y = torch.randint(0, 10, (4,), generator=generator)
    dtype = next(net.parameters()).dtype
    return nn.functional.cross_entropy(net(x.to(dtype)).float(), y)


CASES = {
    "plain": ({}, {"scale": "aps"}),
    "many buckets": (
        {"bucket_cap_mb": 0.002},
        {"scale": "local", "skip": "1d", "layers": {"last": "fp16", "conv.*": "e4m3fn"}},
    ),
    "bucket views": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, {"scale": "aps_delayed"}),
    "static graph": (
        {"static_graph": True, "bucket_cap_mb": 0.002},
        {"scale": "block:32", "rounding": "stochastic", "seed": 7},
    ),
    "unused": ({"find_unused_parameters": True}, {"scale": "aps", "error_feedback": True, "reduction": "ring"}),
    "schedule": ({}, {"format": {0: "fp16", 2: "e2m1fn"}, "scale": "local", "reduction": "tree", "kahan": True}),
    "nodes": ({"bucket_cap_mb": 0.002}, {"format": "topk:0.2:e4m3fn", "reduction": "hierarchical(2)", "error_feedback": True}),
}


def train(rank, name, dtype=torch.float32):
    ddp_options, options = CASES[name]
    options = dict(options)
    net = Net(unused="find_unused_parameters" in ddp_options).to(dtype)
    ddp = DistributedDataParallel(net, **ddp_options)
    handle = lowp.compress_gradients(ddp, options.pop("format", "e5m2"), check_replicas=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        steps.append((handle.buckets, gradients))
        optimizer.step()
    total = handle.total()
    handle.remove()
    assert total.steps == STEPS
    return steps, {n: p.detach().clone() for n, p in net.named_parameters()}, total.ratio


def train_all(rank, names, dtype=torch.float32):
    return {name: train(rank, name, dtype) for name in names}


def virtually(name, buckets_of, dtype=torch.float32):
    """The same training in one process; gradients of all ranks are taken one after the other."""
    ddp_options, options = CASES[name]
    options = dict(options)
    net = Net(unused="find_unused_parameters" in ddp_options).to(dtype)
    parameters = {n: p for n, p in net.named_parameters() if p.requires_grad}
    settings = Settings.of(options.pop("format", "e5m2"), **options)
    exchange = VirtualExchange(WORLD, {n: p.shape for n, p in parameters.items()}, settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):

        def gradients(rank, step=step):
            found = torch.autograd.grad(loss_of(net, rank, step), list(parameters.values()), allow_unused=True)
            zeros = (torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values(), strict=True))
            # DDP lays gradients out as their parameters are
            return {n: _memory_order(g, p) for (n, p), g in zip(parameters.items(), zeros, strict=True)}

        exchange.buckets = buckets_of(step)
        sums = exchange.reduce(gradients)
        for n, p in parameters.items():
            p.grad = None if n.startswith("unused") else sums[n].view(-1).as_strided(p.shape, p.stride()).clone()
        yield {n: p.grad for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
    yield {n: p.detach() for n, p in net.named_parameters()}


def _memory_order(gradient, parameter):
    laid_out = torch.empty_like(parameter).copy_(gradient)
    return laid_out.as_strided((laid_out.numel(),), (1,)).view(parameter.shape)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def trained(request):
    """All ways to use DDP in one launch."""
    names = list(CASES) if request.param == torch.float32 else ["plain", "many buckets"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks do: sums of gradients within a rank must not differ
    yield request.param, names, ranks.run(train_all, WORLD, names, request.param, timeout=200)
    torch.set_num_threads(threads)


@pytest.mark.other_cpu
def test_training_is_that_of_a_virtual_world(trained):
    dtype, names, results = trained
    for name in names:
        steps, weights, _ = results[0][name]
        virtual = virtually(name, lambda step, steps=steps: steps[step][0], dtype)
        for step, (_, gradients) in enumerate(steps):
            wanted = next(virtual)
            assert wanted.keys() == gradients.keys()
            for n, gradient in gradients.items():
                assert torch.equal(gradient, wanted[n]), (name, step, n)
        final = next(virtual)
        assert all(torch.equal(weights[n], final[n]) for n in weights), name


def test_replicas_end_with_the_same_weights(trained):
    _, names, results = trained
    for name in names:
        for other in results[1:]:
            assert all(torch.equal(other[name][1][n], weight) for n, weight in results[0][name][1].items())


def test_reports_say_how_much_was_sent(trained):
    dtype, _, results = trained
    if dtype == torch.float32:
        assert results[0]["plain"][2] == pytest.approx(4, rel=0.1)


def accumulate_and_resume(rank):
    """no_sync accumulates locally; a state_dict taken in the middle continues to the same bits."""
    options = {"scale": "aps_delayed", "error_feedback": True, "rounding": "stochastic", "seed": 3}

    def start():
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        handle = lowp.compress_gradients(ddp, "e4m3fn", **options)
        return ddp, handle, torch.optim.SGD(ddp.parameters(), lr=0.1)

    def steps(ddp, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, rank, 2 * step).backward()
            loss_of(ddp, rank, 2 * step + 1).backward()
            optimizer.step()

    ddp, handle, optimizer = start()
    steps(ddp, optimizer, range(3))
    assert handle.step == 3
    saved = handle.state_dict()
    model = {n: t.clone() for n, t in ddp.module.state_dict().items()}
    steps(ddp, optimizer, range(3, 5))
    wanted = [p.detach().clone() for p in ddp.parameters()]
    handle.remove()

    ddp, handle, optimizer = start()
    steps(ddp, optimizer, range(2))  # buckets are rebuilt as they were
    ddp.module.load_state_dict(model)
    handle.load_state_dict(saved)
    steps(ddp, optimizer, range(3, 5))
    assert all(torch.equal(p, w) for p, w in zip(ddp.parameters(), wanted, strict=True))
    handle.remove()
    loss_of(ddp, rank, 9).backward()  # plain DDP again
    return True


@pytest.mark.other_cpu
def test_no_sync_and_resuming():
    assert all(ranks.run(accumulate_and_resume, 2))


def train_compiled(rank):
    torch._dynamo.config.suppress_errors = False
    ddp = DistributedDataParallel(Net())
    handle = lowp.compress_gradients(ddp, "e5m2", scale="aps")
    compiled = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        ddp.zero_grad()
        loss_of(compiled, rank, step).backward()
    lowp.check_replicas({n: p.grad for n, p in ddp.module.named_parameters() if p.grad is not None})
    assert handle.total().steps == 3
    return True


def test_compiled_models():
    assert all(ranks.run(train_compiled, 2))


def notice_a_difference(rank):
    ddp = DistributedDataParallel(Net())
    lowp.compress_gradients(ddp, "e5m2", check_replicas=True)
    if rank == 1:
        with torch.no_grad():
            ddp.module.norm.weight[3] += 2.0**-20
    with pytest.raises(lowp.ReplicasDiffer, match=r"parameter .norm\.weight. differs between rank 0 and rank 1"):
        loss_of(ddp, rank, 0).backward()
    return True


def test_a_replica_that_differs_is_named():
    assert all(ranks.run(notice_a_difference, 2))


def measure_errors(rank):
    ddp = DistributedDataParallel(Net())
    handle = lowp.compress_gradients(ddp, "e4m3fn", scale="local", measure=True)
    loss_of(ddp, rank, 0).backward()
    return handle.report().relative_error


def test_errors_are_measured_on_request():
    for error in ranks.run(measure_errors, 2):
        assert 0.005 < error < 0.05


def decline(rank):
    # On a busy machine loopback is slow, and to compress may pay. (In a rank's own process.)
    auto.link_levels = lambda *_: [LinkLevel("network", 1e12, 1e-7)]
    ddp = DistributedDataParallel(Net())
    handle = lowp.compress_gradients(ddp, "e5m2", reduction="auto")
    loss_of(ddp, rank, 0).backward()
    exact = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    plain = DistributedDataParallel(Net())
    loss_of(plain, rank, 0).backward()
    same = all(
        torch.equal(a, p.grad) for a, p in zip(exact, (p for p in plain.parameters() if p.grad is not None), strict=True)
    )
    return handle.compresses, same


def test_auto_sends_fp32_where_compression_does_not_pay():
    """Plain operations are slower than a fast link: nothing is compressed, and gradients are DDP's own."""
    assert ranks.run(decline, 2) == [(False, True)] * 2


def shard(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, plain = nn.Sequential(nn.Linear(20, 77), nn.ReLU(), nn.Linear(77, 5)), None
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    import copy

    plain = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    handle = lowp.fsdp.compress(net, reduce="e4m3fn", gather="fp16")
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(rank))
    for model in (net, plain):
        model(x).square().mean().backward()
    errors = []
    for sharded, whole in zip(net.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(whole.grad)
        wanted = whole.grad / dist.get_world_size()
        errors.append(float((sharded.grad.full_tensor() - wanted).norm() / wanted.norm()))
    lowp.check_replicas({str(i): p.grad.full_tensor() for i, p in enumerate(net.parameters())})
    assert handle.total().bytes_sent < handle.total().bytes_of_fp32 / 2
    handle.remove()
    net(x).sum().backward()
    return errors


def test_fsdp_reduces_gradients_and_gathers_parameters():
    for errors in ranks.run(shard, 3):
        assert all(0 < error < 0.06 for error in errors)


def shard_nan(rank, scale, reduce, gather):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(8, 4, bias=False)
    nn.init.ones_(net.weight)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    lowp.fsdp.compress(net, reduce=reduce, gather=gather, scale=scale)
    if reduce is None:
        net.weight.to_local().detach()[0, 0] = math.nan if rank == 1 else 1.0
        return bool(net(torch.ones(1, 8)).isnan().any())
    x = torch.ones(1, 8)
    x[0, 3] = math.nan if rank == 1 else 1.0
    net(x).sum().backward()
    return bool(net.weight.grad.full_tensor().isnan().any())


@pytest.mark.parametrize("scale", ["none", "local", "block:16"])
@pytest.mark.parametrize(("reduce", "gather"), [("int8", None), (None, "int8"), ("e2m1fn", None), ("e5m2", None)])
def test_fsdp_nan_stays_nan_in_formats_without_one(scale, reduce, gather):
    assert ranks.run(shard_nan, 2, scale, reduce, gather) == [True, True]


def test_fsdp_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match="fully_shard"):
        lowp.fsdp.compress(nn.Linear(3, 3), reduce="e5m2")
