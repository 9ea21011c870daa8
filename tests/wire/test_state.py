"""What a handle remembers, saved and loaded: by every rank, by one rank for all, by torch's distributed checkpoint."""

import io

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire.state import Owner

CODEC = {"scale": "aps_delayed", "error_feedback": True, "rounding": "stochastic", "seed": 3}


def make(width=40, format="e4m3fn", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, width, bias=False), nn.Linear(width, 3, bias=False))
    ddp = DistributedDataParallel(net)
    return ddp, lowp.compress_gradients(ddp, format, **(CODEC | options))


def train(ddp, rank, steps):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        ddp(x).square().mean().backward()
        optimizer.step()


def through_bytes(value):
    room = io.BytesIO()
    torch.save(value, room)
    room.seek(0)
    return torch.load(room, weights_only=True)


def saved_by_rank_0(value):
    """What all ranks load that one rank has saved."""
    everyones = [through_bytes(value)]
    dist.broadcast_object_list(everyones, src=0)
    return everyones[0]


def resume(rank, way, folder):
    """Three steps, saved, and two more; and the same after loading what was saved."""
    ddp, handle = make()
    train(ddp, rank, range(3))
    model = through_bytes(ddp.module.state_dict())
    if way == "dcp":
        dcp.save({"wire": handle, "model": ddp.module.state_dict()}, checkpoint_id=folder)
    elif way == "accelerate":
        saved = saved_by_rank_0(handle.all_ranks.state_dict())
    elif way == "all ranks":
        saved = saved_by_rank_0(handle.state_dict(all_ranks=True))
    else:
        saved = through_bytes(handle.state_dict())
    train(ddp, rank, range(3, 5))
    wanted = [p.detach().clone() for p in ddp.parameters()]
    handle.remove()

    ddp, handle = make()
    train(ddp, rank, range(1))  # DDP has its final buckets after that, as the uninterrupted run had (docs/WIRE.md)
    ddp.module.load_state_dict(model)
    if way == "dcp":
        dcp.load({"wire": handle}, checkpoint_id=folder)
    elif way == "accelerate":
        handle.all_ranks.load_state_dict(saved)
    else:
        handle.load_state_dict(saved)
    assert handle.step == 3
    mine = handle.state_dict()["residuals"]
    assert list(mine) == [str(rank)]
    assert all(bool(residual.any()) for residual in mine[str(rank)].values())
    train(ddp, rank, range(3, 5))
    handle.remove()
    return all(torch.equal(p, w) for p, w in zip(ddp.parameters(), wanted, strict=True)), mine[str(rank)]


def resume_in_all_ways(rank, folder):
    return {way: resume(rank, way, folder) for way in ("its own", "all ranks", "accelerate", "dcp")}


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    first, second = ranks.run(resume_in_all_ways, 2, str(tmp_path))
    for way in first:
        assert first[way][0], way
        assert second[way][0], way
        for name, residual in first[way][1].items():
            assert not torch.equal(residual, second[way][1][name]), way  # each rank has its own


def said(action, *arguments, **options):
    with pytest.raises(ValueError, match=r".") as caught:
        action(*arguments, **options)
    return str(caught.value)


def load_what_does_not_fit(rank):
    ddp, handle = make()
    train(ddp, rank, range(2))
    before = handle.state_dict()
    texts = {"of rank 0": ""} if rank == 0 else {"of rank 0": said(handle.load_state_dict, saved_by_rank_0(before))}
    if rank == 0:
        saved_by_rank_0(before)
    saved = through_bytes(handle.state_dict(all_ranks=True))
    _, wide = make(width=41)
    _, others = make(format="e5m2", error_feedback=False)
    texts["another shape"] = said(wide.load_state_dict, saved)
    texts["another codec"] = said(others.load_state_dict, saved)
    texts["no memory"] = said(handle.load_state_dict, others.state_dict())
    mine = saved["residuals"][str(rank)]
    wrong = saved | {"residuals": {str(rank): mine | {"0.weight": torch.zeros(7)}}}
    texts["a wrong residual"] = said(handle.load_state_dict, wrong)
    foreign = saved | {"residuals": {str(rank): mine | {"head.weight": torch.zeros(7)}}}
    texts["a foreign name"] = said(handle.load_state_dict, foreign)
    texts["an old form"] = said(handle.load_state_dict, {"step": 2, "residuals": {}, "bounds": {}})
    texts["another world"] = said(handle.load_state_dict, saved | {"world": 3})
    texts["another version"] = said(handle.load_state_dict, saved | {"version": 2})
    texts["nothing"] = said(handle.load_state_dict, {})
    after = handle.state_dict()  # what is refused has changed nothing
    for kind in ("bounds", "residuals"):
        theirs, ours = (s[kind] if kind == "bounds" else s[kind][str(rank)] for s in (after, before))
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    wide.load_state_dict(saved, step_only=True)
    assert (wide.step, handle.step) == (2, 2)
    train(ddp, rank, range(1))
    return texts


def test_what_does_not_fit_is_refused():
    _, texts = ranks.run(load_what_does_not_fit, 2)
    assert texts["of rank 0"].startswith("this is rank 1, and the saved state has the residuals of rank 0: ")
    assert "state_dict(all_ranks=True)" in texts["of rank 0"]
    other = "the saved state is of another model: '0.weight' had the shape (40, 6), now (41, 6)"
    assert texts["another shape"] == other
    assert texts["another codec"].startswith(
        "the state was saved with format=e4m3fn error_feedback=True, now it is format=e5m2 error_feedback=False; "
    )
    assert "error_feedback=True" in texts["no memory"]
    assert texts["a wrong residual"] == (
        "the saved residual of '0.weight' is torch.float32 of shape (7,), not torch.float32 of shape (240,)"
    )
    assert "'head.weight', which is no parameter here" in texts["a foreign name"]
    assert "does not say whose it is" in texts["an old form"]
    assert "saved by 3 ranks, now there are 2" in texts["another world"]
    assert "version 2" in texts["another version"]
    assert "no 'step'" in texts["nothing"]
    for text in texts.values():
        assert "\n" not in text


def owner(rank=0, world=2, error_feedback=True, delayed=True, codec="format=e5m2", names=("a", "b")):
    shapes = {name: torch.Size((2, 3)) for name in names}
    return Owner(rank, world, shapes, codec, error_feedback, delayed)


def test_a_state_is_a_copy():
    residuals = {"a": torch.ones(6)}
    saved = owner().save(4, residuals, {"b": torch.tensor(130, dtype=torch.uint8)}, torch.device("cpu"))
    residuals["a"].zero_()
    step, mine, bounds = owner().load(saved)
    assert step == 4
    assert torch.equal(mine["a"], torch.ones(6))
    assert torch.equal(mine["b"], torch.zeros(6))
    assert {name: int(bound) for name, bound in bounds.items()} == {"b": 130}  # that of "a" is not known


def test_without_memory_a_state_is_a_step():
    """Then the number of ranks and the codec make no difference; the model does."""
    plain = owner(error_feedback=False, delayed=False)
    saved = plain.save(4, {}, {}, torch.device("cpu"))
    other = owner(rank=5, world=8, error_feedback=False, delayed=False, codec="format=int8")
    assert other.load(saved) == (4, {}, {})
    with pytest.raises(ValueError, match="it lacks 'c'"):
        owner(error_feedback=False, delayed=False, names=("a", "b", "c")).load(saved)
    with pytest.raises(ValueError, match="format=int8"):
        owner(codec="format=int8").load(saved)


@pytest.mark.parametrize("step", [-1, "3", None, 2.0])
def test_a_step_is_a_count(step):
    with pytest.raises(ValueError, match="not a count"):
        owner().load({"step": step}, step_only=True)


def save_with_dcp(rank, folder):
    ddp, handle = make()
    train(ddp, rank, range(2))
    dcp.save({"wire": handle}, checkpoint_id=folder)
    return True


def load_with_dcp(rank, folder):
    _, handle = make()
    return said(dcp.load, {"wire": handle}, checkpoint_id=folder)


def test_dcp_on_fewer_ranks_is_refused(tmp_path):
    assert all(ranks.run(save_with_dcp, 2, str(tmp_path)))
    (text,) = ranks.run(load_with_dcp, 1, str(tmp_path))
    assert text.startswith("the state was saved by 2 ranks, now there are 1")
