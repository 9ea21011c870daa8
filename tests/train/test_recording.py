"""Which graphs a run makes, and when. (StepGraph needs CUDA: a stand-in computes at once what a graph would launch.)"""

import pytest
import torch

from lowp.training import ranks_graph, recording
from lowp.training.reading import read_recipe
from lowp.training.recording import Recording
from lowp.training.trainer import Trainer
from lowp.training.world import World

CPU = torch.device("cpu")
SMALL = ["epochs=1", "batch=16", "data.limit=96", "device=cpu", "threads=1", "optimizer.lr=0.05", "model.name=mlp"]


class AtOnce:
    """StepGraph's interface. `works`: are steps recorded, or does it fail?"""

    works = True

    def __init__(self, backward, parameters, keyed_by=None) -> None:
        self.backward, self.launches = backward, 0

    def run(self, inputs, targets, number=None, step=0) -> bool:
        if not self.works:
            return False
        self.backward(inputs, targets)
        self.launches += 1
        return True

    def own_gradients(self) -> None: ...


class Fails(AtOnce):
    works = False


def trainer_of(monkeypatch, *changes, of_pass=AtOnce, of_ranks=AtOnce):
    monkeypatch.setattr(Recording, "_may_be_recorded", lambda self: True)
    monkeypatch.setattr(recording, "StepGraph", of_pass)
    monkeypatch.setattr(ranks_graph, "StepGraph", of_ranks)
    return Trainer(read_recipe("fp32", [*SMALL, *changes]), World(0, 1, CPU))


def plain_trainer(*changes):
    return Trainer(read_recipe("fp32", [*SMALL, *changes]), World(0, 1, CPU))


def steps(trainer, count=4):
    for _ in range(count):
        trainer.train_step()
    weights = [p.detach().clone() for p in trainer.parameters.values()]
    return weights, trainer.take_metrics(), trainer.exchange.bytes_sent()


def check_the_same(found, expected):
    assert found[1:] == expected[1:]
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))


def test_one_rank_has_a_graph_of_its_pass_from_the_start(monkeypatch):
    trainer = trainer_of(monkeypatch)
    assert trainer.recording.of_pass is not None
    found = steps(trainer)
    assert trainer.recording.of_pass.launches == 4
    assert trainer.recording.of_ranks is None
    assert trainer.passes.keeps_casts is False
    check_the_same(found, steps(plain_trainer()))


@pytest.mark.parametrize("changes", [[], ["wire.format=e5m2", "wire.scale=aps"], ["precision.activations=bf16"]])
def test_ranks_that_draw_nothing_have_one_graph_from_their_second_step_on(monkeypatch, changes):
    trainer = trainer_of(monkeypatch, "virtual_ranks=4", *changes)
    assert (trainer.recording.of_pass, trainer.recording.of_ranks) == (None, None)
    found = steps(trainer)
    assert trainer.recording.of_pass is None
    assert trainer.recording.of_ranks._graph.launches == 3
    assert trainer.passes.keeps_casts is True
    check_the_same(found, steps(plain_trainer("virtual_ranks=4", *changes)))


def test_ranks_that_draw_share_the_graph_of_a_pass(monkeypatch):
    changes = "virtual_ranks=4", "model.options.dropout=0.2"
    trainer = trainer_of(monkeypatch, *changes)
    found = steps(trainer)
    assert trainer.recording.of_ranks is None
    assert trainer.recording.of_pass.launches == 3 * 4
    assert trainer.passes.keeps_casts is False
    check_the_same(found, steps(plain_trainer(*changes)))


def test_where_all_ranks_cannot_be_recorded_a_pass_is(monkeypatch):
    trainer = trainer_of(monkeypatch, "virtual_ranks=4", of_ranks=Fails)
    found = steps(trainer)
    assert trainer.recording.of_ranks is None
    assert trainer.recording.of_pass.launches == 3 * 4
    assert trainer.passes.keeps_casts is False
    check_the_same(found, steps(plain_trainer("virtual_ranks=4")))


def test_where_nothing_can_be_recorded_steps_are_plain(monkeypatch):
    trainer = trainer_of(monkeypatch, "virtual_ranks=4", of_pass=Fails, of_ranks=Fails)
    check_the_same(steps(trainer), steps(plain_trainer("virtual_ranks=4")))


def test_graphs_are_made_anew_where_states_are_loaded(monkeypatch):
    trainer = trainer_of(monkeypatch, "virtual_ranks=4")
    steps(trainer, 2)
    saved, old = (trainer.state(), trainer.state_of_ranks()), trainer.recording
    assert old.of_ranks is not None
    trainer.load_state(*saved)
    assert trainer.recording is not old
    assert trainer.recording.of_ranks is None
    steps(trainer, 2)
    assert trainer.recording.of_ranks._graph.launches == 1
