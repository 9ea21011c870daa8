"""A simulated pass that takes its keys from memory rounds as the plain one; which passes are recorded, and when again.

(What graphs compute: tests/gpu/test_step_graph_cuda.py.)
"""

import pytest
import torch

from lowp.tensor.recorded_step import RecordedStep
from lowp.training.recipe import Recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World

ALL = ("weights", "activations", "errors", "gradients")


def every(fmt):
    return dict.fromkeys(ALL, fmt)


MIXED = {"activations": "stochastic", "errors": "stochastic", "gradients": "stochastic"}
ROWS = {
    "fp32": {},
    "posit8": {**every("posit8"), "scale": "tensor", "master": "posit16", "update": "nearest"},
    "fixed, stochastic": {
        **every("fixed7.8"), "rounding": "stochastic", "master": "fixed7.8", "update": "stochastic", "loss_scale": 128.0,
    },
    "e5m2": {**every("e5m2"), "rounding": MIXED, "layers": {"last": {"activations": "fp16"}}, "loss_scale": "dynamic"},
    "delayed": {**every("e4m3fn"), "rounding": "stochastic", "scale": "delayed:4"},
    "promote": {"weights": "e4m3fn", "activations": "e4m3fn", "promote": {"to": "fp16", "after": 1}},
    "switch": {"scale": "tensor", "switch": {"ladder": ["fixed3.4", "fixed3.8", "fp32"], "threshold": 1.2, "patience": 1}},
    "products": {"products": "mxfp4, stochastic, hadamard 64"},
}  # fmt: skip


def trainer_of(ranks=1, **precision):
    recipe = Recipe(
        name="recorded", seed=3, epochs=2, batch=32, virtual_ranks=ranks, device="cpu",
        model={"name": "mlp", "options": {"hidden": [64, 32]}}, data={"name": "fashion14", "limit": 320},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9}, precision=precision,
    )  # fmt: skip
    return Trainer(recipe, World.join("cpu", threads=0))


class KeysInMemory(RecordedStep):
    """In the second pass and later ones, keys are where they were recorded."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.places = {}
        self._places_of_pass = []

    def key(self, noise, first):
        place = noise.domain, noise.seed, noise.stream, noise.offset + first
        if place in self.places:
            return self.places[place]
        self._places_of_pass.append((noise, first, place))
        return super().key(noise, first)

    def record(self):
        """What the last pass has asked for. (Formats that change ask for other keys: all are recorded again.)"""
        asked = [(noise, first) for noise, first, _ in self._places_of_pass]
        for kind in ((int(noise.domain), noise.seed) for noise, _ in asked):
            self._asked[kind] += 1
        with self.recording():
            self.places = {place: RecordedStep.key(self, *key[:2]) for *key, place in self._places_of_pass}


class TakenAgain:
    """Does what StepGraph does with keys, without CUDA."""

    def __init__(self, trainer):
        self._backward, self._keys, self.numbers = trainer.recording._pass, trainer.numerics.keyed_by, set()

    def run(self, inputs, targets, number=None, step=0):
        if self._keys is not None:
            self._keys.now = step
            self._keys.fill(step)
        self._backward(inputs, targets)
        if self._keys is not None and number not in self.numbers:
            self._keys.record()
        self.numbers.add(number)
        return True

    def own_gradients(self):
        """Every pass makes new ones here."""


def recorded_trainer_of(**told):
    trainer = trainer_of(**told)
    if trainer.numerics.simulation is not None:
        trainer.numerics.keyed_by = KeysInMemory()
    trainer.recording.of_pass = TakenAgain(trainer)
    return trainer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_keys_in_memory_round_as_those_of_the_host(row, ranks):
    plain, recorded = trainer_of(ranks, **ROWS[row]), recorded_trainer_of(ranks=ranks, **ROWS[row])
    for trainer in (plain, recorded):
        for epoch in range(2):
            trainer.numerics.epoch_begins(epoch)
            for _ in range(10):
                trainer.train_step()
            trainer.numerics.epoch_ends()
    assert recorded.take_metrics() == plain.take_metrics()
    states = zip(plain.model.state_dict().values(), recorded.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    if "stochastic" in str(ROWS[row]):
        assert recorded.numerics.keyed_by.places
    if row in ("promote", "switch"):
        assert {number[1] for number in recorded.recording.of_pass.numbers} == {
            1,
            recorded.numerics.number,
        }  # formats changed once
    saved = [plain.numerics.state_dict(), recorded.numerics.state_dict()]
    assert str(saved[0]) == str(saved[1])


def test_changed_formats_are_another_number():
    numerics = trainer_of(**ROWS["posit8"]).numerics
    seen = {numerics.number}
    for change in (
        lambda: numerics.simulation.set(weights="posit16"),
        lambda: numerics.simulation.promote(numerics.simulation.layers[0].name, "fp16"),
        lambda: numerics.load_state_dict(numerics.state_dict()),
    ):
        change()
        assert numerics.number not in seen
        seen.add(numerics.number)
    numerics.begin(5, 1)
    assert numerics.number in seen
    assert numerics.moment == (1 << 40) + 5


def test_without_a_recording_noise_is_of_numbers():
    simulation = trainer_of(**ROWS["fixed, stochastic"]).numerics.simulation
    assert simulation.moment == 0


def test_which_numerics_learn_from_a_step():
    """Others may begin a step before it is known that the gradients of the one before were finite."""
    of_a_layer = {"weights": "e4m3fn", "layers": {"last": {"activations": "e4m3fn", "scale": "delayed:4"}}}
    learning = {row for row in ROWS if trainer_of(**ROWS[row]).numerics.learns}
    assert learning == {"delayed", "promote", "switch"}
    assert trainer_of(**of_a_layer).numerics.learns


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ({}, True),
        (ROWS["e5m2"], True),
        (ROWS["products"], True),
        ({"arithmetic": {"approximate": "integer_add"}}, False),
        ({"accumulate": "fp16"}, False),
        ({"weights": "e4m3fn", "layers": {"last": {"accumulate": "bf16"}}}, False),
    ],
)
def test_which_numerics_may_be_recorded(precision, expected):
    assert trainer_of(**precision).numerics.may_be_recorded is expected
