"""Inside torch.compile: the same bits as eager, one graph, and no other one when the learning rate changes."""

import pytest
import torch
from test_optimizers import numbers, parameters, same, set_gradients
from torch import nn

from lowp.optim import LAMB, LARS, SGD, AdamW

HALF = torch.bfloat16
pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"
)  # torch's own
KINDS = [SGD, LARS, AdamW, LAMB]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counter():
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(HALF)


def changed(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_a_compiled_step_is_the_eager_one(kind, update):
    runs = []
    for compiled in (False, True):
        params = parameters(HALF)
        optimizer = kind(params, update=update)
        count = counter()
        step_of = torch.compile(optimizer.step, backend=count) if compiled else optimizer.step
        for step in range(6):
            changed(optimizer, step)
            set_gradients(params, step)
            step_of()
            if step == 1:
                warm = count.frame_count
        if compiled:
            assert 0 < count.frame_count == warm, "compiled again when the learning rate changed"
        runs.append((params, [optimizer.decoded_state(p) for p in params], [optimizer.state[p]["step"] for p in params]))
    (ours, states, counts), (others, other_states, other_counts) = runs
    assert all(same(p.data, q.data) for p, q in zip(ours, others, strict=True))
    assert counts == other_counts == [6] * 4
    for one, other in zip(states, other_states, strict=True):
        assert all(same(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_training_step(backend):
    """Forward, backward outside the graph, step in one; the loss comes down and is the eager run's, step by step."""
    runs = []
    for compiled in (False, True):
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.05)

        def finish(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        finish_it = torch.compile(finish, backend=backend) if compiled else finish
        x, y = numbers(32, 1, HALF).view(8, 4), numbers(16, 2, HALF).view(8, 2)
        losses = []
        for step in range(8):
            changed(optimizer, step)
            loss = (model(x) - y).float().square().mean()
            loss.backward()
            finish_it()
            losses.append(loss.item())
        runs.append((losses, [p.detach() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][-1] < runs[0][0][0]
    assert all(same(p, q) for p, q in zip(runs[0][1], runs[1][1], strict=True))


def test_one_graph():
    """fullgraph=True: a function that calls step() has no break (torch's profiling wrapper around step is left out)."""
    p = nn.Parameter(numbers(64, 0, HALF))
    optimizer = SGD([p], lr=0.25, update="nearest")

    def twice(x):
        optimizer.step()
        return x + p

    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    result = torch.compile(twice, backend="aot_eager", fullgraph=True)(torch.ones(64, dtype=HALF))
    wanted = (before.float() - 0.25).to(HALF)
    assert same(p.data, wanted)
    assert same(result.detach(), 1 + wanted)  # what follows in the graph sees the new weights


def test_a_gradient_scale_in_the_graph():
    found = []
    for compiled in (False, True):
        p = nn.Parameter(numbers(64, 0, HALF))
        optimizer = SGD([p], lr=0.25)
        p.grad = numbers(64, 1, HALF)

        def step(scale, optimizer=optimizer):
            optimizer.step(gradient_scale=scale)

        run = torch.compile(step, backend="aot_eager") if compiled else step
        for scale in (1.0, 4.0, 16.0):
            run(scale)
        found.append(p.detach())
    assert same(*found)


def test_gradients_that_are_not_finite_raise_in_the_graph_too():
    import lowp

    p = nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = SGD([p], lr=0.25)
    p.grad = torch.tensor([1.0, 2.0, torch.nan, 0.0], dtype=HALF)
    with pytest.raises(lowp.NonFiniteGradient):
        torch.compile(optimizer.step, backend="aot_eager")()
    assert (p == 1).all()
    assert p.grad.isnan().any()


def test_two_optimizers_and_one_that_is_gone():
    """Graphs name their optimizer by number; another with parameters of the same shapes is not mistaken for it."""
    p, q = (nn.Parameter(torch.ones(8, dtype=HALF)) for _ in range(2))
    one, other = SGD([p], lr=0.25, update="nearest"), SGD([q], lr=0.5, update="nearest")
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)

    def both():
        one.step()
        other.step()

    torch.compile(both, backend="aot_eager")()
    assert (p == 0.75).all()
    assert (q == 0.5).all()


def test_parameters_that_share_memory_with_nothing_of_size_zero():
    """Empty parameters all have the same address."""
    params = [
        nn.Parameter(torch.ones(0, dtype=HALF)),
        nn.Parameter(torch.ones(0, dtype=HALF)),
        nn.Parameter(torch.ones(3, dtype=HALF)),
    ]
    optimizer = SGD(params, lr=0.25, update="nearest")
    params[0].grad, params[2].grad = torch.ones(0, dtype=HALF), torch.ones(3, dtype=HALF)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert (params[2] == 0.75).all()
