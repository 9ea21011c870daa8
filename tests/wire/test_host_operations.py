"""What a bucket costs the host: operations of torch, each a launch on CUDA. Their number does not grow with the layers."""

import pytest
import torch
from counted import Counted

import lowp
from lowp.tensor.kernels import building
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.report import Meter
from lowp.wire.settings import Parameters, Settings
from lowp.wire.top_k import KeptRow, KeptTable
from lowp.wire.virtual import VirtualExchange
from lowp.wire.warm_up import SilentLink
from lowp.wire.workspace import Workspace

CASES = [
    ("e5m2", {"scale": "aps"}),
    ("e5m2", {"scale": "none"}),
    ("e4m3fn", {"scale": "local", "rounding": "stochastic"}),
    ("e2m1fn", {"scale": "block:32"}),
    ("e5m2", {"scale": "aps", "error_feedback": True}),
    ("e5m2", {"scale": "aps_delayed"}),
    ("e5m2", {"scale": "aps", "layers": {"p1*": "fp32"}}),
    ("topk:0.05", {}),
    ("topk:0.05:e4m3fn", {"scale": "aps", "error_feedback": True}),
    ("adaptive:4", {}),
    ("adaptive:4", {"rounding": "stochastic", "error_feedback": True, "layers": {"p1*": "fp32"}}),
]


def operations(layers, format, options):
    """Of the fourth step of a bucket, on one rank of one."""
    settings = Settings.of(format, **options)
    shapes = {f"p{i}": torch.Size([40 + i % 3]) for i in range(layers)}
    bucket = Parameters(shapes, settings).bucket(shapes, 0)
    state, flat, counted = State(), torch.randn(bucket.size), Counted()

    def step():
        scheduler, marks = ChunkScheduler(), []
        meter = Meter(samples=False)
        meter.samples = False
        args = (settings, settings.reduction, SilentLink(0, 1), state, meter, True, marks.append)
        BucketExchange(flat, bucket, *args).start(scheduler)
        scheduler.run()
        state.step += 1
        assert not marks[0]().any()

    with building():
        for _ in range(3):
            step()
        with counted:
            step()
    return counted.names


@pytest.fixture
def compiled_kernels():
    lowp.set_kernel_policy("auto")  # conftest.py says "never"
    yield
    lowp.set_kernel_policy("never")


@pytest.mark.parametrize(("format", "options"), CASES, ids=str)
def test_operations_do_not_grow_with_the_layers(format, options, compiled_kernels):
    few, many = (operations(layers, format, options) for layers in (20, 60))
    assert few == many
    assert many.count("zero_") <= 2  # the bucket's, the chunk's
    assert len(many) < 110  # 2 to 15 on CUDA, where chains on a few numbers are a kernel each


def test_nor_do_those_of_top_k_without_a_kernel():
    """As on CUDA, where selection has none. What encodes the kept numbers has one there, and goes part by part here."""
    few, many = (selection(layers) for layers in (20, 60))
    assert few == many
    assert len(many) < 130


def selection(layers):
    """The operations that choose positions, write them, read them and add two messages."""
    rows = [KeptRow(40 + i % 3, 2, 0, 43 * i, 8 * i) for i in range(layers)]
    table, x, message = KeptTable(rows), torch.randn(43 * layers), torch.zeros(2, 8 * layers, dtype=torch.uint8)
    values = table.choose(x, message[0])  # makes the table's columns
    with Counted() as counted:
        table.choose(x, message[0])
        table.add(message.view(-1), values.repeat(2), x, torch.ones(1), 3, 2, 8 * layers)
    return counted.names


@pytest.mark.parametrize(("format", "options"), [("e2m1fn", {"scale": "block:32"}), ("topk:0.05", {}), ("mxfp4", {})], ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_those_of_virtual_ranks_grow_with_their_number(format, options, feedback, compiled_kernels):
    """And not with its square, though each rank adds up a shard."""
    few, many = (of_virtual_ranks(world, format, options | {"error_feedback": feedback}) for world in (4, 16))
    assert len(many) < 4 * len(few)


def of_virtual_ranks(world, format, options):
    """The operations of the third step."""
    exchange = VirtualExchange(world, {"weight": torch.Size([40, 60]), "bias": torch.Size([40])}, format, **options)
    gradients = [{name: torch.randn(shape) for name, shape in (("weight", (40, 60)), ("bias", (40,)))} for _ in range(world)]
    with building():
        for _ in range(2):
            exchange.reduce(gradients.__getitem__)
        with Counted() as counted:
            exchange.reduce(gradients.__getitem__)
    return counted.names


def test_a_workspace_gives_the_same_tensors_again():
    workspace, cpu = Workspace(), torch.device("cpu")

    def ask():
        workspace.begin()
        found = [workspace.zeros((2, 3), cpu), workspace.empty((5,), torch.float32, cpu), workspace.zeros((4,), cpu)]
        assert not found[0].any()
        assert not found[2].any()
        for tensor in found:
            tensor.fill_(7)
        return found

    ask(), ask()  # until the memory is as large as it must be
    first, second = ask(), ask()
    assert all(left is right for left, right in zip(first, second, strict=True))


def test_a_workspace_grows_and_stays_right():
    workspace, cpu = Workspace(), torch.device("cpu")
    for count in (3, 1000, 5, 2000):
        workspace.begin()
        rooms = [workspace.empty((count,), torch.uint8, cpu) for _ in range(3)]
        zeros = [workspace.zeros((count,), cpu) for _ in range(3)]
        assert not any(zero.any() for zero in zeros)
        for number, tensor in enumerate([*rooms, *zeros]):
            tensor.fill_(number + 1)
        assert all((tensor == number + 1).all() for number, tensor in enumerate([*rooms, *zeros]))
