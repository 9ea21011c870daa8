"""Learning rates over time: every value of small schedules, and the optimizers that use them."""

import pytest
import torch
from torch import nn

from lowp.optim import SGD, schedules


def rates(make, count, lr=2.0):
    """The learning rate that each step takes."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=lr)
    schedule, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        p.grad = torch.zeros_like(p)
        optimizer.step()
        schedule.step()
    return found


def test_warmup():
    assert rates(lambda o: schedules.warmup(o, 4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(lambda o: schedules.warmup(o, 2, start=0.5), 3) == [1.5, 2.0, 2.0]
    assert rates(lambda o: schedules.warmup(o, 0), 2) == [2.0, 2.0]
    assert rates(lambda o: schedules.warmup(o, 2, then=lambda step: 0.5**step), 4) == [1.0, 1.0, 0.5, 0.25]


def test_poly():
    assert rates(lambda o: schedules.poly(o, 4, power=1), 6) == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates(lambda o: schedules.poly(o, 4), 5) == [2.0, 1.125, 0.5, 0.125, 0.0]
    assert rates(lambda o: schedules.poly(o, 6, power=1, warmup=2), 7) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]


def test_piecewise_linear():
    davidnet = rates(lambda o: schedules.piecewise_linear(o, [0, 2, 6], [0, 1, 0]), 8)
    assert davidnet == [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates(lambda o: schedules.piecewise_linear(o, [2, 3], [0.5, 1]), 5) == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_piecewise_constant():
    assert rates(lambda o: schedules.piecewise_constant(o, [2, 4], factor=0.5), 6) == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]
    assert rates(lambda o: schedules.piecewise_constant(o, [3], 0.5, warmup=2), 5) == [1.0, 2.0, 2.0, 1.0, 1.0]


def test_groups_keep_their_ratio():
    params = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = SGD([{"params": params[:1], "lr": 1.0}, {"params": params[1:], "lr": 8.0}])
    schedules.poly(optimizer, 4, power=1, warmup=2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 4.0]


def test_a_schedule_is_saved_and_resumed():
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    runs = []
    for resume in (False, True):
        optimizer = SGD([p], lr=1.0)
        schedule = schedules.poly(optimizer, 10, warmup=2)
        found = []
        for step in range(8):
            if resume and step == 4:
                saved, kept = schedule.state_dict(), optimizer.state_dict()
                optimizer = SGD([p], lr=1.0)
                schedule = schedules.poly(optimizer, 10, warmup=2)
                optimizer.load_state_dict(kept)
                schedule.load_state_dict(saved)
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        runs.append(found)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("make", "message"), [
    (lambda o: schedules.warmup(o, -1), "0 steps or more"),
    (lambda o: schedules.warmup(o, 2, start=1.5), "between 0 and 1"),
    (lambda o: schedules.poly(o, 5, warmup=5), "must end before"),
    (lambda o: schedules.poly(o, 0), "must end before"),
    (lambda o: schedules.piecewise_linear(o, [0, 5, 3], [0, 1, 0]), "ascending"),
    (lambda o: schedules.piecewise_linear(o, [0, 5], [0, 1, 0]), "as many factors"),
    (lambda o: schedules.piecewise_linear(o, [], []), "ascending"),
    (lambda o: schedules.piecewise_constant(o, [5, 3]), "ascending"),
])  # fmt: skip
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make(SGD([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]))


def test_a_warmup_multiplies_a_piecewise_linear_rate():
    quadratic = rates(lambda o: schedules.piecewise_linear(o, [0, 4, 8], [0, 1, 0], warmup=4), 9)
    assert quadratic == [2 * (step / 4) ** 2 for step in range(4)] + [2.0, 1.5, 1.0, 0.5, 0.0]
    halved = rates(lambda o: schedules.piecewise_linear(o, [0, 4], [1, 1], warmup=2, start=0.5), 4)
    assert halved == [1.0, 1.5, 2.0, 2.0]
