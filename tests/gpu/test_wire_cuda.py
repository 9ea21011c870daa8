"""The wire on a GPU: the same bytes as on the CPU, and the hooks over NCCL with one rank (all that one GPU can show)."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowp
from lowp.formats import FORMATS
from lowp.tensor.lists.parts import PartTable
from lowp.wire.codec import check_format, codec_of
from lowp.wire.part_kernels import measure
from lowp.wire.reductions import REDUCTIONS
from lowp.wire.scaling import SCALES
from waiting import no_host_waits

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]


def travels(fmt):
    try:
        return check_format(fmt)
    except ValueError:
        return None


CODECS = [*(str(fmt) for fmt in FORMATS if travels(fmt)), "topk:0.1:e4m3fn", "topk:0.3"]


def gradient(rank, size, device="cpu"):
    generator = torch.Generator().manual_seed(17 * rank + size)
    return (torch.randn(size, generator=generator) * 10.0 ** (rank % 5 - 3)).to(device)


@pytest.fixture
def compiled_kernels():
    lowp.set_kernel_policy("auto")  # conftest.py says "never"
    yield
    lowp.set_kernel_policy("never")


def assert_same_bytes(name, scale, rounding, size):
    codec = codec_of(name, rounding, scale)
    noise = lowp.Noise(1, 2, 3, 4) if rounding == "stochastic" else None
    numbers = gradient(1, size)
    found = []
    for device in ("cpu", "cuda"):
        message = torch.zeros(codec.wire_bytes(size), dtype=torch.uint8, device=device)
        codec.encode(numbers.to(device), message, noise, torch.zeros(1, dtype=torch.uint8, device=device))
        decoded = torch.empty(size, device=device)
        codec.decode(message, decoded)
        found.append((message.cpu(), decoded.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_messages_are_the_same_bytes(name, scale):
    for rounding in ("nearest", "stochastic"):
        for size in (1, 700, 70001):
            assert_same_bytes(name, scale, rounding, size)


@pytest.mark.parametrize("scale", ["none", "local"])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e2m1fn", "int8", "posit8", "dynamic8"])
def test_kernels_give_the_same_bytes(name, scale, compiled_kernels):
    for size in (70001, 5 * 65536):
        assert_same_bytes(name, scale, "nearest", size)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_virtual_worlds_agree(reduction, scale):
    world = lowp.VirtualWorld(5)
    for name in ("e5m2", "posit8", "e2m1fn", "int8"):
        sums = []
        for device in ("cpu", "cuda"):
            layers = lambda rank, device=device: [gradient(rank, size, device) for size in (3, 1000, 777)]  # noqa: E731
            sums.append(world.all_reduce(layers, name, scale=str(scale), reduction=reduction, chunk=1 << 28, kahan=True))
        for on_cpu, on_cuda in zip(*sums, strict=True):
            assert torch.equal(on_cpu, on_cuda.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_largest_of_many_layers_sees_nan_and_infinity(compiled_kernels, dtype):
    sizes = [100 + i for i in range(40)]
    flat = torch.cat([gradient(i, size) for i, size in enumerate(sizes)]).to(dtype)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    flat[starts[7] + 3], flat[starts[9] + 5] = torch.nan, -torch.inf
    rows = [(size, i, start) for i, (size, start) in enumerate(zip(sizes, starts, strict=True))]
    on_gpu = flat.cuda()
    found = measure(on_gpu, PartTable(rows, on_gpu.device), (True, False))[0].cpu().view(torch.float32)
    want = torch.stack([flat[start : start + size].abs().max() for size, _, start in rows]).to(torch.float32)
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(nan=7.0, posinf=torch.inf), want.nan_to_num(nan=7.0, posinf=torch.inf))


@pytest.fixture(scope="module")
def nccl():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # a port of its own: workers run side by side
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 300), nn.ReLU(), nn.Linear(300, 10))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": "aps"},
        {"scale": "local", "skip": "1d"},
        {"scale": "aps_delayed", "error_feedback": True},
        {"scale": "none", "rounding": "stochastic", "nonfinite": "skip", "check_replicas": True},
    ],
    ids=str,
)
def test_ddp_hook_gives_what_a_virtual_world_of_one_gives(nccl, options):
    from lowp.wire.settings import Settings
    from lowp.wire.virtual import VirtualExchange

    ddp = nn.parallel.DistributedDataParallel(model().cuda(), bucket_cap_mb=1)
    handle = lowp.compress_gradients(ddp, "e5m2", **options)
    shapes = {name: p.shape for name, p in ddp.module.named_parameters()}
    exchange = None
    for step in range(4):
        x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cuda()
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        own = torch.autograd.grad(ddp.module(x).square().mean(), list(ddp.module.parameters()))
        more = {k: v for k, v in options.items() if k != "check_replicas"}
        if exchange is None:
            exchange = VirtualExchange(1, shapes, Settings.of("e5m2", chunk=1 << 28, **more))
        exchange.buckets = handle.buckets
        wanted = exchange.reduce(lambda rank, own=own: dict(zip(shapes, own, strict=True)))
        for name, parameter in ddp.module.named_parameters():
            # convolutions on a GPU need not repeat bit for bit; their gradients are compared where they do
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=0.3, atol=1e-6)
    report = handle.total()
    assert report.steps == 4
    assert report.encode_seconds > 0
    handle.remove()


def test_nonfinite_gradients_skip_the_step(nccl):
    ddp = nn.parallel.DistributedDataParallel(model().cuda())
    handle = lowp.compress_gradients(ddp, "int8", nonfinite="skip")
    x = torch.randn(8, 3, 8, 8).cuda()
    (ddp(x).square().mean() * torch.inf).backward()
    assert all(parameter.grad is None for parameter in ddp.parameters())
    ddp(x).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ddp.parameters())
    assert handle.total().skipped == 1
    handle.remove()


def test_fsdp(nccl):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model().cuda()
    mesh = init_device_mesh("cuda", (1,))
    fully_shard(net, mesh=mesh)
    handle = lowp.fsdp.compress(net, reduce="e5m2", gather="e4m3fn")
    x = torch.randn(8, 3, 8, 8).cuda()
    net(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    handle.remove()


def test_the_hook_works_on_a_side_stream_while_backward_computes(nccl, compiled_kernels, tmp_path):
    from torch.profiler import ProfilerActivity, profile

    net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=60)
    handle = lowp.compress_gradients(ddp, "e5m2", scale="local")
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(4):
        ddp(x).square().mean().backward()
    with no_host_waits():
        ddp(x).square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        ddp(x).square().mean().backward()
        torch.cuda.synchronize()
    path = tmp_path / "overlap.json"
    seen.export_chrome_trace(str(path))
    kernels = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    products = [
        e for e in kernels if "gemm" in e["name"].lower() or "cutlass" in e["name"].lower() or "nvjet" in e["name"].lower()
    ]
    ours = [e for e in kernels if e["name"] == "run"]  # what printed kernels are called
    main = {e["args"]["stream"] for e in products}
    side = [e for e in ours if e["args"]["stream"] not in main]
    assert side, f"streams of products {main}, of ours {sorted({e['args']['stream'] for e in ours})}"
    overlapping = [s for s in side if any(p["ts"] < s["ts"] + s["dur"] and s["ts"] < p["ts"] + p["dur"] for p in products)]
    print(f"{len(overlapping)} of {len(side)} kernels of ours overlap with matrix products")
    assert overlapping
    handle.remove()


@pytest.mark.parametrize(("name", "scale"), [("e5m2", "aps"), ("mxfp4", "local"), ("e2m1fn", "block:32")])
def test_a_step_can_be_captured(nccl, compiled_kernels, name, scale):
    """A graph that was captured with one gradient reduces another one as the compressor itself does."""
    shapes = {"first": (3000,), "second": (70, 100)}
    compressor = lowp.Compressor(shapes, name, scale=scale, device="cuda")
    own, other = (torch.randn(10_000, device="cuda") for _ in range(2))
    numbers = own.clone()

    def step():
        future = compressor.submit(numbers, shapes)
        compressor.step_done()
        future.wait()
        compressor.step_arrived([])

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    numbers.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    replayed = numbers.clone()
    numbers.copy_(other)
    step()
    assert torch.equal(replayed, numbers)
    assert not torch.equal(replayed, other)
    compressor.close()


@pytest.mark.parametrize(
    ("name", "scale"), [("e5m2", "aps"), ("e5m2", "none"), ("e4m3fn", "local"), ("mxfp4", "local"), ("nvfp4", "local")]
)
def test_recorded_steps_give_what_launched_ones_do(nccl, compiled_kernels, name, scale):
    """Other numbers in every step, among them NaN; and other memory in the middle."""
    from lowp.wire import replay

    shapes = {"first": (3000,), "second": (70, 100), "third": (1,)}
    size = 10_001
    steps = [torch.randn(size, device="cuda") * 10.0**-i for i in range(12)]
    steps[8][5] = float("nan")
    found = []
    for before in (replay.BEFORE, 1000):
        replay.BEFORE, kept = before, replay.BEFORE
        compressor = lowp.Compressor(shapes, name, scale=scale, device="cuda", nonfinite="skip")
        numbers, results = torch.empty(size, device="cuda"), []
        for number, step in enumerate(steps):
            if number == 7:
                numbers = torch.empty(size, device="cuda")
            numbers.copy_(step)
            future = compressor.submit(numbers, shapes)
            compressor.step_done()
            future.wait()
            compressor.step_arrived([])
            results.append(numbers.clone())
        recorded = [seen.replayed is not None for seen in compressor._replays._seen.values()]
        assert recorded == [before != 1000]
        found.append((results, compressor.total().skipped, compressor.total().elements))
        compressor.close()
        replay.BEFORE = kept
    assert found[0][1:] == found[1][1:]
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_ddp_is_recorded(nccl, compiled_kernels):
    from lowp.wire import replay

    def train(before):
        kept, replay.BEFORE = replay.BEFORE, before
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(model().cuda(), bucket_cap_mb=0.01)
        handle = lowp.compress_gradients(ddp, "e5m2", scale="aps")
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for i in range(20):
            generator = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(8, 3, 8, 8, device="cuda", generator=generator)
            sgd.zero_grad()
            ddp(x).square().mean().backward()
            sgd.step()
        recorded = [seen.replayed is not None for seen in handle._compressor._replays._seen.values()]
        handle.remove()
        replay.BEFORE = kept
        return recorded, [p.detach().clone() for p in ddp.parameters()]

    torch.backends.cudnn.deterministic = True
    recorded, ours = train(replay.BEFORE)
    never, theirs = train(1000)
    assert any(recorded)
    assert not any(never)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
