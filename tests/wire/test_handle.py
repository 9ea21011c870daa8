"""The life of a handle in other people's loops: uneven inputs, copies, another codec in mid-run, compiled wrappers."""

import copy
import io
import re
import threading
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import lowp
from lowp.wire.virtual import VirtualExchange

WIRE = Path(__file__).parents[2] / "docs/WIRE.md"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


def make(**options):
    return DistributedDataParallel(net(), bucket_cap_mb=0.0005, **options)


def inputs(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model, rank, step):
    model.zero_grad()
    model(inputs(rank, step)).square().mean().backward()


def gradients(ddp):
    return [p.grad.clone() for p in ddp.module.parameters()]


def plain_gradients(rank, step):
    """What DDP gives without compression."""
    ddp = make()
    backward(ddp, rank, step)
    return gradients(ddp)


def equal(some, others):
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def said(error, action, *arguments, **options):
    """What the error says that an action raises."""
    with pytest.raises(error) as caught:
        action(*arguments, **options)
    return str(caught.value)


# Uneven inputs


def train_unevenly(rank, world, **options):
    """Rank r has 2 + 2 r inputs. Returns the last rank's gradients, and which buckets each step had."""
    ddp = make(find_unused_parameters="error_feedback" in options)
    handle = lowp.compress_gradients(ddp, "e5m2", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    with ddp.join():
        for step in range(2 + 2 * rank):
            backward(ddp, rank, step)
            seen.append(gradients(ddp))
            optimizer.step()
    lowp.check_replicas(ddp.module)
    assert handle.step == handle.total().steps == 2 * world
    handle.remove()
    return seen, [handle.buckets_at(step) for step in range(2 * world)]


def train_virtually(world, layouts, **options):
    """The same in one process: a rank without inputs gives zeros."""
    model = net()
    exchange = VirtualExchange(world, {n: p.shape for n, p in model.named_parameters()}, "e5m2", **options)
    for step, layout in enumerate(layouts):
        found = {}
        for rank in range(world):
            given = torch.autograd.grad(model(inputs(rank, step)).square().mean(), list(model.parameters()))
            here = step < 2 + 2 * rank
            found[rank] = {n: g * here for (n, _), g in zip(model.named_parameters(), given, strict=True)}
        exchange.buckets = layout
        means = list(exchange.reduce(found.__getitem__).values())
        yield means
        with torch.no_grad():
            for p, mean in zip(model.parameters(), means, strict=True):
                p -= 0.1 * mean


def refuse_to_join(rank):
    ddp = make()
    handle = lowp.compress_gradients(ddp, "e5m2")
    with ddp.join(divide_by_initial_world_size=False):
        first = said(ValueError, backward, ddp, rank, 0)
    handle.remove()
    ddp = make()
    handle = lowp.compress_gradients(ddp, "e5m2", check_replicas=True)

    def one_without_inputs():
        with ddp.join():
            if rank == 0:
                backward(ddp, rank, 0)

    second = said(ValueError, one_without_inputs)
    handle.remove()
    return first, second


def raise_in_a_join(rank):
    """Rank 0 has joined. Its work is to match the others', and it learns what they learn, in the same step."""
    ddp = make()
    handle = lowp.compress_gradients(ddp, "e5m2", nonfinite="raise")

    def train():
        with ddp.join():
            for step in range(1 + rank):
                ddp.zero_grad()
                (ddp(inputs(rank, step)).square().mean() * (1 if step == 0 else torch.inf)).backward()

    text = said(lowp.NonFiniteGradient, train)
    handle.remove()
    return text


def join(rank, world):
    for options in ({"scale": "aps"}, {"scale": "local", "error_feedback": True}):
        seen, layouts = train_unevenly(rank, world, **options)
        if rank == world - 1:
            for step, wanted in enumerate(train_virtually(world, layouts, **options)):
                assert equal(seen[step], wanted), (options, step)
    return refuse_to_join(rank), raise_in_a_join(rank)


def test_uneven_inputs_in_a_join():
    for refused, raised in ranks.run(join, 2, 2):
        assert "call ddp.join(divide_by_initial_world_size=True)" in refused[0]
        assert "check_replicas=True cannot be used within ddp.join()" in refused[1]
        assert raised.startswith("step 1: the gradient of '0.weight' and 3 more is infinite or NaN on some rank")


# Another codec in mid-run


def groups():
    return len(dist.distributed_c10d._world.pg_map)


def couriers():
    return sum(thread.name == "lowp-comm" for thread in threading.enumerate())


def change_the_codec(rank):
    ddp = make()
    first = lowp.compress_gradients(ddp, "e5m2", scale="aps")
    again = said(RuntimeError, lowp.compress_gradients, ddp, "e4m3fn")
    assert couriers() == 1
    backward(ddp, rank, 0)
    first.remove()
    assert couriers() == 0
    assert not first.compresses
    backward(ddp, rank, 1)
    assert equal(gradients(ddp), plain_gradients(rank, 1))  # DDP's own in between
    second = lowp.compress_gradients(ddp, "e4m3fn", scale="aps")
    second.load_state_dict(first.state_dict(), step_only=True)
    backward(ddp, rank, 2)
    assert (first.step, second.step, couriers()) == (1, 2, 1)
    fresh = make()
    third = lowp.compress_gradients(fresh, "e4m3fn", scale="aps")
    backward(fresh, rank, 2)
    assert equal(gradients(ddp), gradients(fresh))  # the old codec has left nothing behind
    first.remove()  # it has no say any more
    assert second.compresses
    second.remove()
    third.remove()
    before = groups()
    for format in ("e5m2", "int8", "e5m2"):
        lowp.compress_gradients(ddp, format).remove()
    assert groups() == before
    other = make()
    other.register_comm_hook(None, fp16_compress_hook)
    return again, said(RuntimeError, lowp.compress_gradients, other, "e5m2"), couriers()


def test_another_codec_in_mid_run():
    for again, other, threads in ranks.run(change_the_codec, 2):
        assert again == "the gradients of this model are compressed already: call remove() on the handle of that first"
        assert other.startswith("this model has another communication hook already")
        assert threads == 0


# Copies and wrappers


def copy_models(rank):
    """As with torch's hooks, a copy has none: it sends as DDP does, until it is compressed itself."""
    ddp = make()
    handle = lowp.compress_gradients(ddp, "e2m1fn")
    backward(ddp, rank, 0)
    room = io.BytesIO()
    torch.save(ddp, room)
    room.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(room, weights_only=False), AveragedModel(ddp).module]
    plain = plain_gradients(rank, 1)
    for twin in copies:
        backward(twin, rank, 1)
        assert equal(gradients(twin), plain)
        own = lowp.compress_gradients(twin, "e2m1fn")
        backward(twin, rank, 1)
        backward(ddp, rank, 1)
        assert equal(gradients(twin), gradients(ddp))
        assert not equal(gradients(twin), plain)
        own.remove()
    handle.remove()
    return True


def test_copies_of_a_compressed_model():
    assert all(ranks.run(copy_models, 2))


def compress_what_is_compiled(rank):
    ddp = DistributedDataParallel(net())
    compiled = torch.compile(ddp, backend="eager")
    handle = lowp.compress_gradients(compiled, "e2m1fn")
    again = said(RuntimeError, lowp.compress_gradients, ddp, "e2m1fn")
    backward(compiled, rank, 0)
    inside = DistributedDataParallel(torch.compile(net(), backend="eager"))
    within = lowp.compress_gradients(inside, "e2m1fn")
    backward(inside, rank, 0)
    not_ddp = said(TypeError, lowp.compress_gradients, torch.compile(net(), backend="eager"), "e5m2")
    return handle.total().steps, within.total().steps, again, not_ddp


def test_a_compiled_wrapper_is_taken_off():
    for steps, within, again, not_ddp in ranks.run(compress_what_is_compiled, 2):
        assert (steps, within) == (1, 1)
        assert "already" in again
        assert not_ddp.startswith("compress_gradients takes a DistributedDataParallel model, not Sequential; trainers keep")


# A run repeated in one process


def run_the_example(rank):
    """The example of docs/WIRE.md, as printed."""
    example = re.search(r"```python\n(# A DDP run, and the same.*?)```", WIRE.read_text(), re.DOTALL)
    assert example is not None
    names: dict = {}
    exec(compile(example[1], str(WIRE), "exec"), names)
    return names["same"], len({str(layout) for layout in names["layouts"]})


def test_a_run_is_repeated_as_the_documentation_says():
    """DDP lays gradients into other buckets after the first step, and the scales of messages depend on them."""
    assert ranks.run(run_the_example, 2) == [(True, 2)] * 2


def test_the_buckets_of_every_step_are_known():
    (found,) = ranks.run(lay_into_buckets, 1)
    assert found == ([["b"], ["a"]], [["a", "b"]], "the buckets of step 2 are not known here: steps 0 to 1 were done")


def lay_into_buckets(rank):
    compressor = lowp.Compressor([("a", (3,)), ("b", (2, 2))], "e5m2")
    given = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    compressor.reduce(given, [["b"], ["a"]])
    compressor.reduce(given)
    found = compressor.buckets_at(0), compressor.buckets_at(1), said(ValueError, compressor.buckets_at, 2)
    assert compressor.buckets == compressor.buckets_at(1)
    compressor.close()
    return found


# What a Compressor is given


def describe_parameters(rank):
    model = net()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    given = {name: torch.full(shape, 1.0 + rank) for name, shape in shapes.items()}
    for form in (shapes, list(shapes.items()), model.named_parameters(), {n: tuple(s) for n, s in shapes.items()}, model):
        compressor = lowp.Compressor(form, "e5m2")
        means = compressor.reduce(given)
        assert means.keys() == given.keys()
        assert all(bool((mean == 1.5).all()) for mean in means.values())
        compressor.close()
    return [
        said(TypeError, lowp.Compressor, list(model.parameters()), "e5m2"),
        said(TypeError, lowp.Compressor, list(shapes), "e5m2"),
        said(TypeError, lowp.Compressor, 3, "e5m2"),
        said(TypeError, lowp.Compressor, [("a", 3)], "e5m2"),
        said(ValueError, lowp.Compressor, [("a", (3,)), ("a", (3,))], "e5m2"),
        said(ValueError, lowp.Compressor, model, "e5m2", group=dist.GroupMember.NON_GROUP_MEMBER),
    ]


def test_a_compressor_takes_named_parameters():
    wanted = "lowp.Compressor takes model.named_parameters(), or a dict or pairs of names and shapes"
    for texts in ranks.run(describe_parameters, 2):
        assert texts == [
            f"{wanted}; an entry here is a tensor of shape (40, 6), which has no name",
            f"{wanted}; an entry here is '0.weight', which has no name",
            f"{wanted}, not int",
            f"{wanted}; 'a' comes with 3",
            "two parameters are called 'a'",
            "this rank is not in the group",
        ]
