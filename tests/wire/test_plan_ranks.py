"""Plans that real ranks make: all choose the same. DDP's first steps are float32's, the others as in the virtual world."""

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.predict.auto import fastest
from lowp.predict.cluster import Cluster, Device, LinkLevel
from lowp.predict.ddp_plan import TIMED, WARM_UP
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

OBSERVED = WARM_UP + TIMED


def slow_cluster():
    return Cluster("slow", Device("d", "cpu", bandwidth=1e10, flops=1e10), (LinkLevel("network", 1e5, 1e-5),))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def loss_of(model, rank, step, dtype=torch.float32):
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(dtype)).square().mean()


def plan_in_ddp(rank):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(net())
    handle = lowp.compress_gradients(ddp, "plan", max_error=0.05, cluster=slow_cluster())
    assert not handle.compresses
    assert handle.state_dict() == {"plan": None, "wire": None}
    found = []
    for step in range(OBSERVED + 2):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        found.append({name: p.grad.clone() for name, p in ddp.module.named_parameters()})
    assert handle.compresses
    assert handle.step == 2
    assert handle.report().bytes_sent < handle.report().bytes_of_fp32
    assert (handle.plan is not None) == (rank == 0)
    state = handle.state_dict()
    other = DistributedDataParallel(net())
    again = lowp.compress_gradients(other, "plan", max_error=0.05)
    again.load_state_dict(state)  # nothing is measured
    assert again.compresses
    assert again.step == 2
    for each in (handle, again):
        each.remove()
        assert not each.compresses
    return handle.arguments, found, handle.buckets_at(0)


def test_ddp_makes_a_plan_in_its_first_steps():
    results = ranks.run(plan_in_ddp, 2)
    threads, _ = torch.get_num_threads(), torch.set_num_threads(1)  # as the ranks have
    try:
        compare(results)
    finally:
        torch.set_num_threads(threads)


def compare(results):
    arguments = results[0][0]
    assert all(each[0] == arguments for each in results)
    assert arguments["format"] != "fp32"
    model = net()
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def gradients(step):
        return lambda rank: dict(
            zip(shapes, torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())), strict=True)
        )

    for step in range(OBSERVED):  # a sum of two has one order
        exact = {name: (gradients(step)(0)[name] + gradients(step)(1)[name]) / 2 for name in shapes}
        assert all(torch.equal(exact[name], results[0][1][step][name]) for name in shapes)
    virtual = VirtualExchange(2, shapes, Settings.of(**arguments), buckets=results[0][2])
    for step in range(OBSERVED, OBSERVED + 2):
        means = virtual.reduce(gradients(step))
        for _, found, _ in results:
            assert all(torch.equal(means[name], found[step][name]) for name in shapes)


def mistakes(rank):
    ddp = DistributedDataParallel(net())
    for arguments, message in (
        ({"scale": "aps"}, "scale: is the plan's to choose"),
        ({"reduction": "ring"}, "reduction: is the plan's to choose"),
        ({"max_error": -1.0}, "max_error: -1 must be at least 0"),
        ({"cluster": "nowhere.toml"}, "nowhere.toml"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            lowp.compress_gradients(ddp, "plan", **arguments)
    with pytest.raises(ValueError, match="max_error: is for the format 'plan'"):
        lowp.compress_gradients(ddp, "e5m2", max_error=0.1)
    handle = lowp.compress_gradients(ddp, "plan", max_error=0, cluster=slow_cluster())
    for step in range(OBSERVED + 2):
        loss_of(ddp, rank, step).backward()
    return handle.compresses, handle.arguments


def test_mistakes_name_the_argument_and_no_budget_is_float32():
    assert ranks.run(mistakes, 2) == [(False, {})] * 2


def plan_of_a_16_bit_model(rank):
    ddp = DistributedDataParallel(net().bfloat16())
    handle = lowp.compress_gradients(ddp, "plan", max_error=0, cluster=slow_cluster())
    for step in range(OBSERVED + 1):
        loss_of(ddp, rank, step, torch.bfloat16).backward()
    return handle.arguments, handle.plan and [option.wire for option in handle.plan.options if option.uncompressed]


def test_a_16_bit_model_is_compared_with_what_ddp_sends():
    """And keeps it where there is no budget: it loses nothing that DistributedDataParallel would not lose."""
    assert ranks.run(plan_of_a_16_bit_model, 2) == [({}, ["bf16"]), ({}, None)]


def measure_and_choose(rank):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(net())
    lowp.compress_gradients(ddp, "e4m3fn", reduction="auto").remove()
    numbers = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    lowp.all_reduce(numbers, "e4m3fn", reduction="auto")
    handle = lowp.compress_gradients(DistributedDataParallel(net()), "e4m3fn", reduction="auto")
    return handle.compresses, numbers


def test_auto_is_the_same_on_all_ranks():
    (first, numbers), (second, others) = ranks.run(measure_and_choose, 2)
    assert first == second
    assert torch.equal(numbers, others)


@pytest.mark.parametrize(
    ("bandwidth", "count", "wanted"),
    [(1e6, 2, "one_shot"), (1e6, 8, "two_shot"), (1e12, 2, "all_reduce"), (1e12, 8, "all_reduce")],
)
def test_auto_compresses_on_slow_links(bandwidth, count, wanted):
    machine = Cluster("c", Device("d", "cpu", bandwidth=1.0, flops=1.0), (LinkLevel("network", bandwidth, 1e-6),))
    option, fp32 = fastest(Settings.of("e4m3fn", reduction="auto"), machine, count, 1 << 20)
    assert option.step.reduction == wanted
    assert option.step.step <= fp32.step.step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_auto_compares_with_what_ddp_would_send(dtype):
    """16-bit gradients travel in half the time of float32, so that a codec must be faster than that."""
    machine = Cluster("c", Device("d", "cpu", bandwidth=1.0, flops=1.0), (LinkLevel("network", 1e6, 0.0),))
    settings = Settings.of("fp16", scale="none", reduction="auto")  # as many bytes as the gradients themselves
    _, fp32 = fastest(settings, machine, 2, 1 << 20)
    option, plain = fastest(settings, machine, 2, 1 << 20, dtype)
    assert plain.step.step == pytest.approx(fp32.step.step / 2, rel=0.01)
    assert option.choice.plain
    assert not fastest(settings, machine, 2, 1 << 20)[0].choice.plain
