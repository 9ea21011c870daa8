"""A step is whole or not at all, also where it is answered after the next one has begun whether its gradients were finite.

That is how a GPU is kept busy (update.py). Here a CPU does the same: the code is the same but for the event.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.tensor.errors import surely_finite
from lowp.training import checkpoint
from lowp.training.data.base import AHEAD, Request
from lowp.training.divergence import Diverged
from lowp.training.metrics import KEPT, KEPT_LOGITS, Metrics
from lowp.training.reading import read_recipe
from lowp.training.run import run
from lowp.training.trainer import Trainer
from lowp.training.world import World
from train.training import TIMES

HERE = World(0, 1, torch.device("cpu"))
SMALL = [
    "epochs=2",
    "batch=16",
    "data.limit=96",
    "device=cpu",
    "threads=1",
    "optimizer.lr=0.05",
    "log.every=100",
    "test_every=0",
    "learning_rate.kind=constant",
    "learning_rate.warmup=0",
]
OPTIMIZERS = {
    "sgd": ["optimizer.momentum=0.9"],
    "adamw": ["optimizer.name=adamw", "optimizer.weight_decay=0.1"],
    "torch": ["optimizer.name=torch:SGD"],
    "kernels": ["precision.weights=bf16"],
}
sick_at = math.inf  # the training step whose gradients are not finite


class Sick(nn.Module):
    """Running statistics, a parameter without a gradient, and gradients that are NaN in one step while outputs are finite."""

    def __init__(self, shape, classes) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, classes)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.body(x)
        if self.training:
            self.passes += 1
            if self.passes - 1 == sick_at and x.requires_grad:
                x.register_hook(lambda gradient: gradient * math.nan)
        return self.last(x)


def sick(shape, classes):
    return Sick(shape, classes)


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def later(request, monkeypatch):
    answer_later(monkeypatch, request.param)
    return request.param


def answer_later(monkeypatch, later: bool) -> None:
    monkeypatch.setattr("lowp.training.trainer.ANSWER_LATER", ("cuda", "cpu") if later else ("cuda",), raising=False)


def recipe_of(*changes: str):
    return read_recipe("fp32", [*SMALL, "model.name=train.test_update:sick", *changes])


class HostReads(TorchDispatchMode):
    """Counts numbers that the host reads from tensors: on a GPU each of them is a wait."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [["model.name=train.training:normed"], ["model.name=mlp", "data.augment=['crop', 'flip']"]])
def test_a_step_in_float32_reads_nothing_from_the_device(model, later):
    trainer = Trainer(recipe_of("optimizer.momentum=0.9", *model), HERE)
    trainer.train_step()
    with HostReads() as reads:
        for _ in range(8):
            trainer.train_step()
        # Who answers at once reads whether each gradient is finite, and nothing else.
        answers = 0 if later else 8 * sum(p.grad is not None and p.numel() > 0 for p in trainer.parameters.values())
        assert reads.found == answers
        trainer.take_metrics()
        assert reads.found > answers  # it does count


def state_of(trainer: Trainer):
    return trainer.step, trainer.state(), trainer.state_of_ranks()


def flat(state) -> list:
    """Tensors as bytes, so that NaN is NaN."""
    if isinstance(state, dict):
        return [(key, flat(value)) for key, value in sorted(state.items(), key=lambda item: str(item[0]))]
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return [str(state.dtype), state.flatten().tolist()] if isinstance(state, torch.Tensor) else [state]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("asks", ["the next step", "confirm"])
def test_a_step_whose_gradients_are_not_finite_is_undone(optimizer, asks, later, monkeypatch):
    """Weights, states, running statistics and counters are those before the step, and the step is named."""
    expected = Trainer(recipe_of(*OPTIMIZERS[optimizer]), HERE)
    trainer = Trainer(recipe_of(*OPTIMIZERS[optimizer]), HERE)
    for _ in range(4):
        expected.train_step()
        trainer.train_step()
    expected._metrics.forget()  # sums of a stretch with a bad step are given up
    monkeypatch.setattr("train.test_update.sick_at", 4)

    def two_steps() -> None:
        trainer.train_step()
        trainer.confirm() if asks == "confirm" else trainer.train_step()

    with pytest.raises(lowp.NonFiniteGradient, match=r"gradient of .*body"):
        two_steps()
    assert trainer.step == 4
    assert flat(state_of(trainer)) == flat(state_of(expected))
    monkeypatch.setattr("train.test_update.sick_at", math.inf)
    for _ in range(3):  # and training can go on from there
        expected.train_step()
        trainer.train_step()
    assert flat(state_of(trainer)) == flat(state_of(expected))


def test_the_first_step_and_one_with_other_gradients_are_undone(later, monkeypatch):
    """Before the first step there are no states to copy."""
    trainer = Trainer(recipe_of("optimizer.momentum=0.9"), HERE)
    before = flat(state_of(trainer))
    monkeypatch.setattr("train.test_update.sick_at", 0)
    with pytest.raises(lowp.NonFiniteGradient):
        trainer.train_step()
    after = state_of(trainer)
    assert after[0] == 0
    assert flat(after[1]["model"]) == dict(before[1])["model"]


def test_an_error_of_the_step_after_a_bad_one_names_the_bad_one(monkeypatch):
    """Weights that are not finite may make anything fail."""
    answer_later(monkeypatch, True)
    trainer = Trainer(recipe_of("optimizer.momentum=0.9"), HERE)
    for sick_step in (math.inf, 1):
        monkeypatch.setattr("train.test_update.sick_at", sick_step)
        trainer.train_step()
    monkeypatch.setattr("train.test_update.Sick.forward", lambda self, x: 1 / 0)
    with pytest.raises(lowp.NonFiniteGradient):
        trainer.train_step()
    assert trainer.step == 1


def test_large_models_wait(monkeypatch):
    """Copies of weights and states would take too much memory: the answer is read before the update."""
    answer_later(monkeypatch, True)
    monkeypatch.setattr("lowp.training.update.COPIES_AT_MOST", 1000)
    trainer = Trainer(recipe_of("optimizer.momentum=0.9"), HERE)
    trainer.train_step()
    monkeypatch.setattr("train.test_update.sick_at", 1)
    with pytest.raises(lowp.NonFiniteGradient):
        trainer.train_step()
    assert trainer.step == 1


# Whole runs.


def records(path: Path) -> list[dict]:
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in found]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["log.every=1"],
        ["checkpoints.every=5"],
        ["epochs=1", "data.limit=80"],
        ["batch=19", "test_every=1", "data.limit=95"],
    ],
    ids=["next step", "line", "checkpoint", "last step", "test"],
)
def test_a_run_that_diverges_leaves_the_same_behind(changes, tmp_path, monkeypatch):
    """Whatever asks first for what step 4, the fifth, has made; and what is saved can be resumed."""
    for later in (False, True):
        answer_later(monkeypatch, later)
        out, recipe = tmp_path / f"{later}", recipe_of("optimizer.momentum=0.9", *changes)
        monkeypatch.setattr("train.test_update.sick_at", 4)
        with pytest.raises(Diverged, match=r"diverged in step 4: .*gradient of 'body"):
            run(recipe, out, quiet=True, world=HERE)
        assert json.loads((out / "status.json").read_text())["step"] == 4
        monkeypatch.setattr("train.test_update.sick_at", math.inf)
        run(recipe, out, quiet=True, resume=True, world=HERE)
    assert records(tmp_path / "True") == records(tmp_path / "False")
    states = [checkpoint.latest(tmp_path / f"{later}/checkpoints", fingerprint=None).state for later in (False, True)]
    shared, ranks = ([state[part] for state in states] for part in ("shared", "ranks"))
    assert flat(shared[0]) == flat(shared[1])
    assert flat(ranks[0]) == flat(ranks[1])


# What a step leaves to be done some steps at a time.


@pytest.mark.parametrize("changes", [[], ["data.augment=['crop', 'cutout']"]])
def test_requests_taken_ahead_give_the_batches_of_single_ones(changes):
    split = Trainer(recipe_of(*changes), HERE).data.train
    sizes = [1 + number % 3 for number in range(2 * AHEAD + 1)]
    asked = [Request(torch.arange(size) * 7 + number, (0, 0, number)) for number, size in enumerate(sizes)]
    together, single = list(split.stream(asked)), [next(iter(split.stream([request]))) for request in asked]
    for a, b in zip(together, single, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_predictions_counted_later_are_all_counted(lasting, shape):
    metrics, generator = Metrics(range(1, 2), 2, torch.device("cpu"), lasting), torch.Generator().manual_seed(0)
    right = samples = 0
    for size in (*range(1, KEPT + 3), KEPT_LOGITS // KEPT, 2):  # the last but one is too large to be kept
        logits = torch.randn(size, *shape, 5, generator=generator)
        targets = torch.randint(5, (size, *shape), generator=generator)
        metrics.add_predictions(1, logits, targets)
        metrics.add_samples(1, targets.numel())
        right += int((logits.argmax(-1) == targets).sum())
        samples += targets.numel()
        if not lasting:  # whoever made them may use the memory again
            logits.zero_()
            targets.zero_()
    assert metrics.sums() == [(0.0, right, samples)]


@pytest.mark.parametrize(
    ("changes", "lasting"),
    [
        (["model.name=mlp"], True),
        ([], False),  # a model of one's own
        (["model.name=mlp", "data.transform='train.plugins_of_a_user:transform'"], False),
        (["model.name=mlp", "data.filter='train.plugins_of_a_user:choose'"], False),
        (["model.name=mlp", "data.name='train.data_sets_of_a_user:pictures'", "data.limit=0"], False),
    ],
)
def test_predictions_of_what_a_user_made_are_counted_at_once(changes, lasting, monkeypatch):
    """A model or a data set of a user's may use the memory of logits or targets again in its next step."""
    assert Trainer(recipe_of(*changes), HERE)._metrics._lasting is lasting


def test_losses_added_later_have_the_bits_of_losses_added_at_once():
    generator = torch.Generator().manual_seed(1)
    for share, dtype in ((1.0, torch.float32), (0.25, torch.float32), (1 / 3, torch.float32), (0.5, torch.bfloat16)):
        metrics, expected = Metrics(range(1), 1, torch.device("cpu")), torch.zeros((), dtype=torch.float64)
        for _ in range(KEPT + 5):
            loss = torch.rand((), generator=generator).to(dtype)
            metrics.add_loss(0, loss, share)
            expected.add_(loss, alpha=share)
        assert metrics.sums() == [(float(expected), 0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_that_are_not_finite_are_found(dtype):
    good = [torch.randn(7, 5).to(dtype), torch.empty(0, dtype=dtype), torch.full((3, 5), -0.0, dtype=dtype).t()]
    assert surely_finite(good)
    for bad in (math.inf, -math.inf, math.nan):
        for size in (1, 7, 100_000):
            for place in (0, size // 2, size - 1):
                one = torch.ones(size, dtype=dtype)
                one[place] = bad
                assert not surely_finite([*good, one, torch.ones(40, dtype=dtype)])
