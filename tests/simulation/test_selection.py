"""Keys of `layers=`: names, patterns, classes and predicates; the ends exempt; saved and copied as plain data."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from lowp.simulation import simulate, simulation_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc(self.norm(x))


class WideLinear(nn.Linear):
    pass


def model():
    return nn.Sequential(nn.Embedding(5, 4), Block(), Block(), WideLinear(4, 5))


def weights(simulation):
    return {row.layer: row.format for row in simulation.formats() if row.role == "weights"}


BLOCKS = {"1.norm", "1.fc", "2.norm", "2.fc"}


def is_second_norm(name, module):
    return name == "2.norm" and isinstance(module, nn.LayerNorm)


@pytest.mark.parametrize(
    ("key", "matched"),
    [
        (nn.Linear, {"1.fc", "2.fc", "3"}),
        (Block, BLOCKS),
        (nn.LayerNorm, {"1.norm", "2.norm"}),
        ("WideLinear", {"3"}),
        (is_second_norm, {"2.norm"}),
        (lambda name, module: isinstance(module, Block) and name == "1", {"1.norm", "1.fc"}),
        (lambda name, module: name.endswith("fc"), {"1.fc", "2.fc"}),
        (lambda name, module: sum(p.numel() for p in module.parameters(recurse=False)) > 20, {"3"}),
    ],
    ids=["class", "container", "norm", "name", "function", "blocks", "names", "sizes"],
)
def test_keys(key, matched):
    expected = {name: "e4m3fn" if name in matched else "fp16" for name in ("0", *sorted(BLOCKS), "3")}
    simulation = simulate(model(), weights="fp16", layers={key: {"weights": "e4m3fn"}}, scale="tensor")
    assert weights(simulation) == expected


def test_the_first_and_last_layer_are_exempt():
    simulation = simulate(model(), "e4m3fn", "e4m3fn", "e5m2", "e5m2", exempt_first_last=True, scale="tensor")
    found = {layer: {row.format for row in simulation.formats() if row.layer == layer} for layer in ("0", "1.fc", "3")}
    assert found == {"0": {"fp32"}, "1.fc": {"e4m3fn", "e5m2"}, "3": {"fp32"}}
    assert {row.format for row in simulation.formats() if row.layer == "1.norm"} == {"e4m3fn", "e5m2"}  # has no matrix
    simulation.set(layers={"3": {"weights": "fp16"}})  # what is said about a layer goes first
    assert weights(simulation)["3"] == "fp16"
    simulation.promote("0", "bf16")  # which is for what is rounded
    assert weights(simulation)["0"] == "fp32"
    simulation.set(exempt_first_last=False)
    assert weights(simulation)["0"] == "bf16"
    only = simulate(nn.Linear(2, 2), "e4m3fn", exempt_first_last=True)
    assert weights(only) == {"Linear": "fp32"}


def test_state_is_plain_data_and_copies_can_be_changed():
    original = model()
    layers = {is_second_norm: {"weights": "bf16"}, nn.Linear: {"weights": "e4m3fn", "scale": "channel"}, "0": {"weights": None}}
    simulation = simulate(original, weights="fp16", layers=layers, exempt_first_last=True)
    state = json.loads(json.dumps(simulation.state_dict()))
    other = simulate(model())
    other.load_state_dict(state)
    assert other.formats() == simulation.formats()
    assert other.state_dict() == simulation.state_dict()
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        theirs = simulation_of(nn.Sequential(copied))  # something around it, as a compiler puts there
        assert theirs.formats() == simulation.formats()
        theirs.set(layers={is_second_norm: {"weights": "e5m2"}})
        assert weights(theirs)["2.norm"] == "e5m2"
    assert weights(simulation)["2.norm"] == "bf16"
    with pytest.raises(ValueError, match=r"has formats for '2\.norm', which this model does not have"):
        simulate(nn.Sequential(nn.Linear(4, 4))).load_state_dict(state)
    orphan = copy.deepcopy(simulation)
    with pytest.raises(ValueError, match="a predicate needs the model"):
        orphan.set(layers={is_second_norm: {"weights": "e5m2"}})


def test_mistakes():
    for key, error, message in (
        (nn.Conv2d, ValueError, "layers: Conv2d matches nothing; there are 0, 1.norm, 1.fc, ..."),
        (is_second_norm.__name__, ValueError, "layers: 'is_second_norm' matches nothing"),
        (lambda name, module: False, ValueError, r"layers: .*<lambda> matches nothing"),
        (7, TypeError, "a key is a name, a pattern, a class or a predicate, not 7"),
        ("1.*", TypeError, r"layers\['1.\*'\] is a mapping of roles to formats, not 'fp16'"),
    ):
        with pytest.raises(error, match=message):
            simulate(model(), layers={key: "fp16" if key == "1.*" else {"weights": "fp16"}})
    with pytest.raises(ValueError, match=r"unknown role 'weight' in layers\[Linear\]; did you mean 'weights'"):
        simulate(model(), layers={nn.Linear: {"weight": "fp16"}})
    with pytest.raises(ZeroDivisionError):  # the predicate's own
        simulate(untouched := model(), layers={lambda name, module: 1 / 0: {"weights": "fp16"}})
    assert type(untouched[0]) is nn.Embedding
    assert torch.equal(untouched[0](torch.tensor([1])), untouched[0].weight[1:2])
