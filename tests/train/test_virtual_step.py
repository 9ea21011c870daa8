"""What the micro-batches and the virtual ranks of one step share: cast weights, the model's buffers, a graph."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.training.reading import read_recipe
from lowp.training.step_graph import StepGraph
from lowp.training.trainer import Trainer
from lowp.training.world import World

CPU = torch.device("cpu")
SMALL = ["epochs=1", "batch=16", "data.limit=64", "device=cpu", "threads=1", "optimizer.lr=0.05"]


class Counting(nn.Module):
    """Its buffers: one of batch norm's kind, changed in place, and one to which each pass assigns a new tensor."""

    def __init__(self, shape, classes) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
        self.register_buffer("passes", torch.zeros(2))

    def forward(self, x):
        self.passes = self.passes + self.training
        return self.layers(x)


def counting(shape, classes):
    return Counting(shape, classes)


class Casts(TorchDispatchMode):
    """Counts the copies of some tensors in another dtype."""

    def __init__(self, tensors) -> None:
        super().__init__()
        self.watched = {t.data_ptr() for t in tensors}
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.watched:
            self.found += result.dtype != args[0].dtype
        return result


def trainer_of(*changes: str) -> Trainer:
    return Trainer(read_recipe("fp32", [*SMALL, "model.name=train.test_virtual_step:counting", *changes]), World(0, 1, CPU))


AUTOCAST = "precision.activations=bf16"


@pytest.mark.parametrize(
    "passes", [["micro_batches=4"], ["virtual_ranks=4"], ["virtual_ranks=2", "micro_batches=2", "wire.format=e5m2"]]
)
def test_autocast_casts_a_weight_once_a_step(passes):
    trainer = trainer_of(AUTOCAST, *passes)
    weights = [p for p in trainer.parameters.values() if p.dim() == 2]
    for _ in range(2):  # and again in the next step, whose weights are others
        with Casts(weights) as casts:
            trainer.train_step()
        assert casts.found == len(weights)


def test_shared_casts_change_no_bit(monkeypatch):
    """As with casts of its own for every micro-batch."""
    shared, own = (trainer_of(AUTOCAST, "virtual_ranks=4", "wire.format=e5m2") for _ in range(2))
    backward = own.passes.backward

    def with_casts_of_its_own(*arguments):
        torch.clear_autocast_cache()
        return backward(*arguments)

    monkeypatch.setattr(own.passes, "backward", with_casts_of_its_own)
    for _ in range(3):
        shared.train_step()
        own.train_step()
    for a, b in zip(shared.parameters.values(), own.parameters.values(), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    "passes", [["virtual_ranks=1"], ["virtual_ranks=4"], ["virtual_ranks=4", "wire.format=e5m2", "wire.scale=aps"]]
)
def test_virtual_ranks_leave_the_buffers_of_rank_0(passes):
    """Also those that the model assigns: after three steps rank 0 has seen three passes, however many ranks there are."""
    trainer = trainer_of(*passes)
    for _ in range(3):
        trainer.train_step()
    assert trainer.model.passes.tolist() == [3.0, 3.0]
    assert trainer.model.layers[2].num_batches_tracked == 3


def test_a_step_that_is_not_taken_leaves_assigned_buffers():
    trainer = trainer_of("virtual_ranks=2")
    trainer.train_step()
    kept = trainer.model.layers[2].running_mean.clone()
    trainer.model.layers[3].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(ArithmeticError):
        trainer.train_step()
    assert trainer.model.passes.tolist() == [1.0, 1.0]
    assert torch.equal(trainer.model.layers[2].running_mean, kept)


def test_a_model_trains_again_after_a_test():
    trainer = trainer_of()
    trainer.train_step()
    trainer.test()
    assert not trainer.model.training
    trainer.train_step()
    assert trainer.model.passes.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("launched", [False, True])
def test_passes_that_are_taken_twice_count_once(launched):
    """Where memory does not hold the gradients of all ranks, and `aps` agrees on scales first."""
    found = []
    for fits in (True, False):
        trainer = trainer_of("virtual_ranks=2", "wire.format=e5m2", "wire.scale=aps", "wire.reduction=sequential")
        trainer.exchange._fits = fits
        if launched:
            trainer.recording.of_pass = ReplayedOnCpu(trainer.recording._pass, [*trainer.parameters.values()])
        assert trainer.exchange.steady is fits  # else all ranks' passes are no graph
        trainer.train_step()
        trainer.train_step()
        assert trainer.model.passes.tolist() == [2.0, 2.0]
        found.append(trainer.take_metrics())
    assert found[0] == found[1]
    assert 1 < found[0]["loss"] < 4


class ReplayedOnCpu:
    """What StepGraph does, without CUDA: batches, gradients and figures are at the same places in every launch."""

    def __init__(self, backward, parameters) -> None:
        self._backward, self._parameters = backward, parameters
        self._batch = self._gradients = None
        self.launches = 0

    def run(self, inputs, targets, number=None, step=0) -> bool:
        if self._batch is None:
            self._batch = inputs.clone(), targets.clone()
        for place, new in zip(self._batch, (inputs, targets), strict=True):
            place.copy_(new)
        for parameter in self._parameters:
            parameter.grad = None
        self._backward(*self._batch)
        made = [parameter.grad for parameter in self._parameters]
        if self._gradients is None:
            self._gradients = [gradient.clone() for gradient in made]
        for parameter, place, gradient in zip(self._parameters, self._gradients, made, strict=True):
            place.copy_(gradient)
            parameter.grad = place
        self.launches += 1
        return True

    own_gradients = StepGraph.own_gradients


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "wire",
    [
        [],
        ["wire.format=e5m2", "wire.scale=aps", "wire.reduction=sequential"],
        ["wire.format=e5m2"],
        ["precision.loss_scale=dynamic"],
    ],
)
def test_ranks_that_share_a_graph_keep_their_gradients_and_figures(ranks, wire):
    """A launch writes to where the last one did: the ranks' gradients and figures must be taken before the next one."""
    changes = f"virtual_ranks={ranks}", AUTOCAST, "label_smoothing=0.1", *wire
    plain, launched = trainer_of(*changes), trainer_of(*changes)
    launched.recording.of_pass = ReplayedOnCpu(launched.recording._pass, [*launched.parameters.values()])
    for _ in range(3):
        plain.train_step()
        launched.train_step()
    assert launched.recording.of_pass.launches == 3 * ranks
    assert launched.take_metrics() == plain.take_metrics()
    states = zip(plain.model.state_dict().values(), launched.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


class StepOnCpu:
    """What StepGraph does with a whole step, without CUDA: batches and means are at the same places in every launch."""

    @staticmethod
    def in_place(trainer):
        trainer.recording._make_graph_of_ranks()
        of_ranks = trainer.recording.of_ranks
        of_ranks._graph = graph = StepOnCpu(of_ranks._take, trainer.parameters.values())
        return graph

    def __init__(self, backward, parameters) -> None:
        self._backward, self._parameters = backward, [*parameters]
        self._batch = self._means = None
        self.launches = 0

    def run(self, inputs, targets, number=None, step=0) -> bool:
        self._batch = (inputs.clone(), targets.clone()) if self._batch is None else self._batch
        for place, new in zip(self._batch, (inputs, targets), strict=True):
            place.copy_(new)
        self._backward(*self._batch)
        self._means = [p.grad.clone() for p in self._parameters] if self._means is None else self._means
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            mean.copy_(parameter.grad)
            parameter.grad = mean
        self.launches += 1
        return True


WIRES = {
    "fp32": [],
    "local": ["wire.format=e5m2", "wire.scale=local"],
    "sequential": ["wire.format=e5m2", "wire.scale=aps", "wire.reduction=sequential"],
    "tree": ["wire.format=e5m2", "wire.scale=aps", "wire.reduction=tree", "wire.sum_format=e5m2"],
    "kahan": ["wire.format=e5m2", "wire.scale=aps", "wire.reduction=sequential", "wire.kahan=true"],
    "adaptive": ["wire.format=adaptive:4.4", "wire.scale=local"],
    "loss scale": ["precision.loss_scale=dynamic"],
    "autocast": [AUTOCAST],
}


@pytest.mark.parametrize("wire", WIRES)
def test_a_step_of_all_ranks_is_what_one_pass_after_the_other_gives(wire):
    changes = "virtual_ranks=4", "label_smoothing=0.1", *WIRES[wire]
    plain, launched = trainer_of(*changes), trainer_of(*changes)
    for step in range(4):
        if step == 1:
            assert launched.exchange.steady
            graph = StepOnCpu.in_place(launched)
        plain.train_step()
        launched.train_step()
    assert graph.launches == 3
    assert launched.exchange.bytes_sent() == plain.exchange.bytes_sent()
    assert launched.take_metrics() == plain.take_metrics()
    assert launched.state()["step"] == plain.state()["step"] == 4
    assert [of["step"] for of in launched.state_of_ranks()] == [of["step"] for of in plain.state_of_ranks()]
    states = zip(plain.model.state_dict().values(), launched.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_a_step_of_all_ranks_that_is_not_taken_is_undone():
    trainer = trainer_of("virtual_ranks=2", "wire.format=e5m2")
    trainer.train_step()
    StepOnCpu.in_place(trainer)
    trainer.train_step()
    kept = trainer.model.layers[2].running_mean.clone()
    trainer.model.layers[3].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(ArithmeticError):
        trainer.train_step()
    assert trainer.step == 2
    assert {of["step"] for of in trainer.state_of_ranks()} == {2}
    assert torch.equal(trainer.model.layers[2].running_mean, kept)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["wire.format=e5m2", "wire.scale=aps"], True),
        (["wire.format=e5m2", "wire.rounding=stochastic"], False),
        (["wire.format=e5m2", "wire.error_feedback=true"], False),
        (["wire.format=topk:0.1"], False),
        (["wire.format=e5m2", "wire.scale=aps_delayed"], False),
        (["precision.schedule=[{epoch=1, wire='e5m2'}]", "epochs=2"], False),
    ],
)
def test_which_exchanges_are_the_same_in_every_step(change, expected):
    assert trainer_of("virtual_ranks=2", *change).exchange.steady is expected


@pytest.mark.parametrize(("model", "expected"), [({"dropout": 0.2}, True), ({}, False)])
def test_it_is_known_whether_passes_draw(model, expected):
    changes = [f"model.options.{name}={value}" for name, value in model.items()]
    trainer = Trainer(read_recipe("fp32", [*SMALL, "model.name=mlp", "virtual_ranks=2", *changes]), World(0, 1, CPU))
    assert trainer.recording.draws is None
    trainer.train_step()
    assert trainer.recording.draws is expected
