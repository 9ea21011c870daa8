"""Several ranks: replicas stay identical; sharded parameters take the steps of whole ones, bit for bit; checkpoints change
hands."""

import math

import pytest
import torch
import torch.distributed as dist
from test_optimizers import numbers, same
from torch import nn

import lowp
from lowp.optim import LAMB, LARS, SGD, AdamW
from wire import ranks

KINDS = {"sgd": SGD, "lars": LARS, "adamw": AdamW, "lamb": LAMB}
OPTIONS = {"sgd": {"momentum": 0.9, "weight_decay": 0.01}, "lars": {}, "adamw": {}, "lamb": {}}
SHAPES = [(67, 64), (5, 3), (17,), (8, 3, 3, 3), (1, 4), (64, 96)]  # rows that neither 2 nor 3 divides; fewer rows than ranks
STEPS = 3


class Weights(nn.Module):
    """Parameters, and nothing to do with them: gradients are given."""

    def __init__(self, dtype):
        super().__init__()
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"w{i}", nn.Parameter(numbers(math.prod(shape), i, dtype).view(shape)))


def whole_gradient(i, shape, step, dtype):
    return numbers(math.prod(shape), 1000 * step + i, dtype).view(shape)


def set_gradients(params, step, dtype):
    """The same numbers, whole or as shards of the parameter's mesh."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for i, (p, shape) in enumerate(zip(params, SHAPES, strict=True)):
        gradient = whole_gradient(i, shape, step, dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


def optimizer_for(model, case):
    kind, update, _, state = case
    return KINDS[kind](model.named_parameters(), lr=0.05, update=update, state=state, seed=3, **OPTIONS[kind])


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def everything(model, optimizer):
    """Weights and states, by name, as whole tensors."""
    found = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": whole(v) if isinstance(v, torch.Tensor) else v for key, v in optimizer.state[p].items()}
    return found


def agree(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert same(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


def unsharded(case, steps=STEPS):
    model = Weights(case[2])
    optimizer = optimizer_for(model, case)
    for step in range(steps):
        set_gradients(list(model.parameters()), step, case[2])
        optimizer.step()
    return everything(model, optimizer)


def fully_sharded(rank, cases):
    from torch.distributed.fsdp import fully_shard

    found = []
    for case in cases:
        model = fully_shard(Weights(case[2]))
        optimizer = optimizer_for(model, case)
        for step in range(STEPS):
            set_gradients(list(model.parameters()), step, case[2])
            optimizer.step()
        found.append(everything(model, optimizer))
    return found


CASES = [
    ("sgd", "stochastic", torch.float16, None), ("sgd", "kahan", torch.bfloat16, "dynamic8"),
    ("lars", "stochastic", torch.bfloat16, "dynamic8"), ("lars", "kahan", torch.float16, None),
    ("adamw", "stochastic", torch.float16, "dynamic8"), ("adamw", "kahan", torch.bfloat16, None),
    ("lamb", "stochastic", torch.bfloat16, None), ("lamb", "nearest", torch.float16, "dynamic8"),
    ("sgd", "nearest", torch.float32, None), ("lars", "nearest", torch.float32, None),
]  # fmt: skip


@pytest.mark.other_cpu
@pytest.mark.parametrize("world", [2, 3])
def test_shards_take_the_steps_of_the_whole(world):
    cases = CASES if world == 2 else [CASES[2], CASES[7]]
    wanted = [unsharded(case) for case in cases]
    for found in ranks.run(fully_sharded, world, cases):
        for case, mine, theirs in zip(cases, wanted, found, strict=True):
            try:
                agree(mine, theirs)
            except AssertionError as error:
                raise AssertionError(case) from error


def not_finite(rank):
    """Rank 1's shard alone has a NaN: all ranks must raise, name it, and change nothing."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Weights(torch.bfloat16))
    optimizer = optimizer_for(model, ("adamw", "stochastic", torch.bfloat16, None))
    params = list(model.parameters())
    set_gradients(params, 0, torch.bfloat16)
    optimizer.step()
    before = everything(model, optimizer)
    set_gradients(params, 1, torch.bfloat16)
    if rank == 1:
        params[0].grad.to_local()[-1, -1] = math.nan
    message = ""
    try:
        optimizer.step()
    except lowp.NonFiniteGradient as error:
        message = str(error)
    after = everything(model, optimizer)
    agree(before, after)
    return message


def test_a_shard_that_is_not_finite_stops_all_ranks():
    for message in ranks.run(not_finite, 2, group_timeout=20):
        assert "'w0' is not finite" in message


# Replicas


def replicated(rank, kind):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3)).to(torch.bfloat16))
    optimizer = KINDS[kind](model.parameters(), lr=0.05, state="dynamic8", **OPTIONS[kind])
    for step in range(4):
        optimizer.zero_grad()
        x = numbers(24, 100 * step + rank, torch.bfloat16).view(4, 6)
        model(x).float().square().mean().backward()
        optimizer.step()
    lowp.check_replicas(model)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["sgd", "lamb"])
def test_replicas_stay_identical(kind):
    first, second = ranks.run(replicated, 2, kind)
    assert all(same(p, q) for p, q in zip(first, second, strict=True))


# Checkpoints


def saved(rank, folder, case):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Weights(case[2]))
    optimizer = optimizer_for(model, case)
    for step in range(STEPS):
        set_gradients(list(model.parameters()), step, case[2])
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return everything(model, optimizer)


def loaded(rank, folder, case):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )  # fmt: skip
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Weights(case[2]))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = optimizer_for(model, case)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    right = everything(model, optimizer)
    for step in range(STEPS, STEPS + 2):
        set_gradients(list(model.parameters()), step, case[2])
        optimizer.step()
    return right, everything(model, optimizer)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("adamw", "kahan", torch.bfloat16, "dynamic8"), id="adamw"),
        pytest.param(("lamb", "stochastic", torch.float16, None), id="lamb", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_save_and_three_go_on(case, tmp_path):
    whole_then, whole_later = unsharded(case), unsharded(case, STEPS + 2)
    for found in ranks.run(saved, 2, str(tmp_path), case):
        agree(whole_then, found)
    for right, later in ranks.run(loaded, 3, str(tmp_path), case):
        agree(whole_then, right)
        agree(whole_later, later)


def refused(rank):
    """A replicated parameter works; one sharded by columns, and a replicated gradient for one sharded by rows, do not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Shard(1)]))
    rows = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Shard(0)]))
    same_everywhere = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Replicate()]))
    same_everywhere.grad = distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Replicate()])
    SGD([same_everywhere], lr=0.25).step()
    assert (same_everywhere.to_local() == 0.75).all()
    try:
        SGD([columns])
    except ValueError as error:
        told.append(str(error))
    rows.grad = distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Replicate()])
    try:
        SGD([rows], lr=0.25).step()
    except TypeError as error:
        told.append(str(error))
    return told


def test_other_placements():
    for columns, whole_gradient in ranks.run(refused, 2, group_timeout=20):
        assert "first dimension" in columns
        assert "gradient" in whole_gradient
