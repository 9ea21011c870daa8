"""Recipes of narrow numbers: what they ask for is what the model computes in, and what the optimizer keeps."""

import pytest
import torch

import lowp
from lowp.simulation import describe
from lowp.training.reading import read_recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World

SMALL = ["data.limit=64", "batch=16", "model.options.hidden=[8]", "device=cpu", "threads=1"]


def trainer_of(name: str, *changes: str) -> Trainer:
    return Trainer(read_recipe(name, [*SMALL, *changes]), World(0, 1, torch.device("cpu")))


def formats(trainer: Trainer) -> dict[str, set[str]]:
    """Of the two layers with weights, by role."""
    rows = [row for row in describe(trainer.model) if row.layer in ("1", "3")]
    return {role: {row.format for row in rows if row.role == role} for role in (row.role for row in rows)}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "master"), [("fixed16", "fixed7.8"), ("fp8-all", "fp16"), ("posit8-quire", "posit16")])
def test_weights_stay_in_the_format_of_their_master(name, master):
    trainer = trainer_of(name, "precision.accumulate=", "precision.arithmetic={}")
    before = [p.detach().clone() for p in trainer.parameters.values()]
    for _ in range(2):
        trainer.train_step()
    after = [p.detach() for p in trainer.parameters.values()]
    assert all(torch.equal(p, lowp.quantize(p, master)) for p in (*before, *after))
    assert not all(map(torch.equal, before, after))
    assert trainer.state()["master"] == {"format": master, "rounding": trainer.master.rounding, "seed": 0, "step": 2}


def test_an_update_that_the_loss_scale_leaves_out_draws_no_noise():
    trainer = trainer_of("fp8-all", "optimizer.momentum=0")
    trainer.loss_scale.value = 2.0**24  # errors in e5m2 end at 57344
    before = [p.detach().clone() for p in trainer.parameters.values()]
    trainer.train_step()
    assert trainer.loss_scale.skipped == 1
    assert trainer.master.step == 0
    assert all(map(torch.equal, before, (p.detach() for p in trainer.parameters.values())))


def test_sums_and_products():
    assert formats(trainer_of("no-multiply"))["accumulate"] == {"fp32 integer_add"}
    found = formats(trainer_of("posit8-quire", "precision.layers.last.accumulate=posit16"))
    assert found == {
        **{role: {"posit8"} for role in ("weights", "activations", "errors", "gradients")},
        "accumulate": {"posit8 quire", "posit16 quire"},
    }
    exempt = formats(trainer_of("posit8-quire", "precision.layers.last.accumulate=fp32", "precision.arithmetic.kahan=false"))
    assert exempt["accumulate"] == {"posit8 quire", "fp32"}


def test_roundings_and_scales_by_role():
    trainer = trainer_of("fp8-all", "precision.scale.errors=aps", "precision.layers.first.scale=channel")
    simulation = trainer.numerics.simulation
    assert simulation.roundings == {
        "weights": "nearest", "activations": "stochastic", "errors": "stochastic", "gradients": "stochastic"
    }  # fmt: skip
    scales = {(row.layer, row.role): row.scale for row in simulation.formats()}
    assert (scales["1", "errors"], scales["1", "weights"]) == ("channel", "channel")
    assert (scales["3", "errors"], scales["3", "weights"]) == ("aps", "none")
    assert formats(trainer)["activations"] == {"e5m2", "fp16"}


def test_the_first_and_the_last_layer_are_left_alone():
    trainer = trainer_of("posit8", "model.options.hidden=[8, 8]", "precision.exempt_first_last=true")
    assert trainer.numerics.simulation is not None
    weights = {row.layer: row.format for row in trainer.numerics.simulation.formats() if row.role == "weights"}
    assert list(weights.values()) == ["fp32", "posit8", "fp32"]
