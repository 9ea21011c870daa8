"""What programs do around the wire: groups that overlap, gradients in another order, parameters frozen or unused, settings that
differ between ranks. Each gives the right result, or the same clear error on all ranks."""

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire import compressor
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange


def reduce_in_overlapping_groups(rank):
    """Each rank is in other groups: torch would number lowp's own by how many a process knows."""
    groups = [(members, dist.new_group(list(members))) for members in ((0, 2), (1, 2), (0, 1))]
    sums = {}
    for members, group in groups:
        if rank in members:
            tensor = torch.full((4,), float(rank + 1))
            lowp.all_reduce(tensor, "e5m2", group=group)
            sums[members] = tensor[0].item()
    return sums


def test_groups_that_overlap():
    found = ranks.run(reduce_in_overlapping_groups, 3, group_timeout=10)
    assert found == [{(0, 2): 4.0, (0, 1): 3.0}, {(1, 2): 5.0, (0, 1): 3.0}, {(0, 2): 4.0, (1, 2): 5.0}]


def reduce_one_of_a_row(rank):
    tensor = torch.full((1, 4), float(rank + 1))[:, 1]  # one number, and a stride of four
    lowp.all_reduce(tensor, "fp32")
    return tensor.tolist()


def test_one_number_of_any_stride():
    assert ranks.run(reduce_one_of_a_row, 2) == [[3.0]] * 2


def test_chunks_of_one_number():
    numbers = [torch.arange(1.0, 9.0)] * 2
    assert torch.equal(lowp.VirtualWorld(2).all_reduce(numbers, "e4m3fn", chunk=1), 2 * numbers[0])


@pytest.mark.parametrize("error_feedback", [False, True])
def test_top_k_beside_adaptive_layers(error_feedback):
    """Parts of striped shards say where they lie in the chunk. Kept numbers lie elsewhere: a kernel wrote over other memory."""
    shapes = {"a": torch.Size([6, 5]), "b": torch.Size([33, 9]), "c": torch.Size([40, 10])}
    numbers = torch.Generator().manual_seed(0)
    own = [{name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()} for _ in range(2)]

    def steps(policy):
        lowp.set_kernel_policy(policy)
        exchange = VirtualExchange(2, shapes, "adaptive:4", layers={"b": "topk:0.1"}, error_feedback=error_feedback)
        return [exchange.reduce(own.__getitem__) for _ in range(2)]

    plain, kernels = steps("never"), steps("always")
    assert all(torch.equal(mine[name], theirs[name]) for mine, theirs in zip(plain, kernels, strict=True) for name in shapes)
    means, kept = (own[0]["b"] + own[1]["b"]) / 2, plain[0]["b"] != 0
    assert 29 <= int(kept.sum()) <= 62  # a tenth of 297, of each rank
    assert ((plain[0]["b"] == means) | (2 * plain[0]["b"] == own[0]["b"]) | (2 * plain[0]["b"] == own[1]["b"]))[kept].all()
    assert all(float((plain[0][name] - (own[0][name] + own[1][name]) / 2).abs().max()) < 1.2 for name in "ac")  # of four bits


def reduce_in_another_order(rank):
    reducer = lowp.Compressor({"a": (4,), "b": (4,)}, "e5m2", scale="none")
    gradients = {"a": torch.ones(4), "b": torch.full((4,), 96.0)}
    means = reducer.reduce(dict(sorted(gradients.items(), reverse=rank == 1)))
    return [(name, mean[0].item()) for name, mean in means.items()]


def test_gradients_are_found_by_name():
    assert ranks.run(reduce_in_another_order, 2) == [[("a", 1.0), ("b", 96.0)], [("b", 96.0), ("a", 1.0)]]


@pytest.mark.parametrize(
    ("gradients", "buckets", "message"),
    [
        ({}, None, "there are no gradients"),
        ({"a": torch.ones(6)}, None, r"the gradient of 'a' has the shape \(6,\), the parameter \(4,\)"),
        ({"c": torch.ones(4)}, None, "'c'"),
        ({"a": torch.ones(4, dtype=torch.int64)}, None, "not torch.int64"),
        ({"a": torch.ones(4, dtype=torch.complex64)}, None, "not torch.complex64"),
        ({"a": None}, None, "takes a tensor, not NoneType"),
        ({"a": torch.ones(4), "b": torch.ones(4)}, [["a"]], "must name each gradient once"),
        ({"a": torch.ones(4)}, [["a"], ["a"]], "must name each gradient once"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradients, buckets, message):
    with ranks.alone():
        reducer = lowp.Compressor({"a": (4,), "b": (4,)}, "e5m2")
        with pytest.raises((TypeError, ValueError), match=message):
            reducer.reduce(gradients, buckets)
        assert reducer.state.step == 0
        reducer.close()


def test_parameters_that_cannot_travel_are_refused_at_once():
    with ranks.alone(), pytest.raises(TypeError, match=r"parameter 'z'.* not torch.complex64"):
        lowp.Compressor([("z", torch.zeros(2, dtype=torch.complex64))], "fp32")


def reduce_other_gradients(rank):
    reducer = lowp.Compressor({"a": (4,), "b": (4,)}, "e5m2")
    with pytest.raises(ValueError, match="ranks disagree on what to reduce"):
        reducer.reduce({"a": torch.ones(4)} if rank == 0 else {"b": torch.ones(4)})
    return True


def test_ranks_with_other_gradients():
    assert ranks.run(reduce_other_gradients, 2) == [True] * 2


@pytest.mark.parametrize("error_feedback", [False, True])
def test_steps_in_inference_mode(error_feedback):
    gradients = {"a": torch.randn(4), "b": torch.randn(4)}
    with ranks.alone():
        reducers = [lowp.Compressor({"a": (4,), "b": (4,)}, "e2m1fn", error_feedback=error_feedback) for _ in range(2)]
        for first in (True, False):
            with torch.inference_mode(first):
                found = reducers[0].reduce(gradients)
            wanted = reducers[1].reduce(gradients)
            assert all(torch.equal(found[name], wanted[name]) for name in gradients)
        for reducer in reducers:
            reducer.close()


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("e5m2", {"chunk": "8"}, "chunk is a number"),
        ("e5m2", {"chunk": True}, "chunk is a number"),
        ("e5m2", {"skip": 3}, "skip is a pattern"),
        ("e5m2", {"layers": "last"}, "layers maps patterns"),
        ("e5m2", {"error_feedback": "no"}, "error_feedback is True or False"),
        ({"0": "e5m2"}, {}, "a schedule maps steps"),
        ({0: "e5m2", 2.5: "fp16"}, {}, "a schedule maps steps"),
        ({0: "e5m2", -3: "fp16"}, {}, "a schedule maps steps"),
    ],
)
def test_arguments_of_another_kind(format, options, message):
    with pytest.raises(TypeError, match=message):
        Settings.of(format, **options)


class Two(nn.Module):
    uses_both = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.a(x) + self.b(x) if self.uses_both else self.a(x)


def freeze_or_thaw(rank, freeze):
    """After DDP was made, which is told of it by nobody."""
    model = Two()
    model.b.requires_grad_(freeze)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model.b.requires_grad_(not freeze)
    handle = lowp.compress_gradients(ddp, "e5m2")
    for _ in range(2):
        with pytest.raises(ValueError, match="are not those that DDP was made with"):
            ddp(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is None for parameter in model.a.parameters())
    handle.remove()
    ddp(torch.ones(2, 4)).sum().backward()
    return model.a.weight.grad is not None


@pytest.mark.parametrize("freeze", [True, False])
def test_parameters_frozen_or_thawed_after_ddp(freeze):
    assert ranks.run(freeze_or_thaw, 2, freeze) == [True] * 2


def take_static_steps(rank):
    """In the first step of a static graph DDP gives every bucket the number 0, and says of none that it is the last."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 4))
    net[1].register_forward_pre_hook(lambda _, inputs: tuple(x.bfloat16() for x in inputs))
    net[2].register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
    ddp = DistributedDataParallel(net, static_graph=True, bucket_cap_mb=0.0001)
    handle = lowp.compress_gradients(ddp, "e5m2")
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
    return handle.step, len(handle.buckets) > 1


def test_static_graphs_of_several_buckets():
    assert ranks.run(take_static_steps, 2) == [(3, True)] * 2


def gradients_of(model, rank, step):
    """A step's own gradients, on one rank: rank 1 uses both parameters in every other step, rank 0 in every fourth."""
    model.uses_both = step % (4 - 2 * rank) == 0
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    found = torch.autograd.grad(model(x).square().sum(), [*model.parameters()], allow_unused=True)
    return x, {name: gradient for (name, _), gradient in zip(model.named_parameters(), found, strict=True)}


def leave_a_parameter_unused(rank):
    """What was given of b, less what was got and what is left; and the gradients and the buckets of each step."""
    model = Two()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    handle = lowp.compress_gradients(ddp, "e2m1fn", error_feedback=True)
    given, got, differences, steps = torch.zeros(4, 4), torch.zeros(4, 4), [], []
    for step in range(8):
        ddp.zero_grad()
        x, own = gradients_of(model, rank, step)
        if own["b.weight"] is not None:
            given += own["b.weight"]
        ddp(x).square().sum().backward()
        if model.b.weight.grad is not None:
            got += model.b.weight.grad
        left = handle.state_dict()["residuals"][str(rank)]["b.weight"].view(4, 4) - given
        dist.all_reduce(left)
        differences.append(float((left + got * dist.get_world_size()).abs().max()))
        steps.append(({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, handle.buckets))
    return max(differences), steps


def test_residuals_of_unused_parameters_are_kept():
    found = ranks.run(leave_a_parameter_unused, 2)
    assert max(difference for difference, _ in found) < 1e-4
    model = Two()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for rank in range(2):
        _, steps = found[rank]
        buckets = steps[0][1]
        assert all(laid_out == buckets for _, laid_out in steps)
        exchange = VirtualExchange(2, shapes, "e2m1fn", buckets=buckets, error_feedback=True)
        for step, (real, _) in enumerate(steps):
            virtual = exchange.reduce(lambda rank, step=step: gradients_of(model, rank, step)[1])
            assert real.keys() == virtual.keys()
            assert all(torch.equal(real[name], virtual[name]) for name in real)
        assert any("b.weight" not in real for real, _ in steps)


def decline_and_check(rank):
    compressor.choose = lambda *_: None  # in this rank's own process
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    handle = lowp.compress_gradients(ddp, "e5m2", reduction="auto", nonfinite="raise")
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(lowp.NonFiniteGradient, match=r"step 1: the gradient of '(weight|bias)'"):
        ddp(torch.full((2, 4), float("nan") if rank == 1 else 1.0)).sum().backward()
    assert all(parameter.grad is None for parameter in ddp.parameters())
    skipping = DistributedDataParallel(nn.Linear(4, 4))
    other = lowp.compress_gradients(skipping, "e5m2", reduction="auto", nonfinite="skip")
    skipping(torch.full((2, 4), float("nan") if rank == 1 else 1.0)).sum().backward()
    assert all(parameter.grad is None for parameter in skipping.parameters())
    return handle.compresses, handle.step, other.compresses, other.report().skipped


def test_where_auto_declines_gradients_are_still_looked_at():
    assert ranks.run(decline_and_check, 2) == [(False, 2, False, 1)] * 2


def shard_with_other_formats(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(4, 4, bias=False)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="ranks disagree on how to compress: rank 0 has gather=e5m2, rank 1 has gather=e4m3fn"):
        lowp.fsdp.compress(net, gather="e5m2" if rank == 0 else "e4m3fn")
    handle = lowp.fsdp.compress(net, reduce="e5m2")
    with pytest.raises(RuntimeError, match="compressed already"):
        lowp.fsdp.compress(net, reduce="e4m3fn")
    handle.remove()
    other = lowp.fsdp.compress(net, reduce="e4m3fn")
    handle.remove()  # of one that is over: the other goes on
    net(torch.ones(2, 4)).sum().backward()
    return other.step, other.report().bytes_sent > 0


def test_fsdp_compares_settings_and_refuses_a_second_handle():
    assert ranks.run(shard_with_other_formats, 2) == [(1, True)] * 2
