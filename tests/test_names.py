"""One grammar of patterns for layers and parameters, and one "did you mean" (lowp/names.py)."""

import ast
import pickle
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import lowp
from lowp.names import covers, did_you_mean, matches_nothing, unmatched
from lowp.optim import LAMB, LARS
from lowp.simulation import restore, simulate
from lowp.wire.settings import Parameters, Settings


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("fc.weight", "fc.weight", True),
        ("fc", "fc.weight", True),
        ("fc", "fc2.weight", False),
        ("weight", "fc.weight", False),
        ("*.weight", "blocks.0.fc.weight", True),
        ("blocks.[01]", "blocks.1.fc.weight", True),
        ("blocks.[01]", "blocks.2.fc.weight", False),
        ("FC", "fc.weight", False),
        ("*", "fc", True),
    ],
)
def test_a_pattern_covers_what_it_names_and_all_inside(pattern, name, expected):
    assert covers(pattern, name) is expected


def test_suggestions():
    assert did_you_mean("e4m3fm", ["e4m3fn", "posit8"]) == "did you mean 'e4m3fn'?"
    assert did_you_mean("ADAM", ["Adam", "SGD"]) == "did you mean 'Adam'?"
    assert did_you_mean("xyz", ["Adam", "SGD"], "there are Adam, SGD") == "there are Adam, SGD"
    assert matches_nothing("fd", ["fc.weight", "fc.bias"]) == "'fd' matches nothing; did you mean 'fc'?"
    assert matches_nothing(nn.Linear, ["a", "b", "c", "d"]) == "Linear matches nothing; there are a, b, c, ..."
    assert unmatched(["fd", "fc", "1d", "first"], ["fc.weight"]) == ["fd"]


def model() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)]
    return nn.Sequential(nn.Sequential(*layers[:2]), layers[2])


NAMES = ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.weight", "1.bias"]
CASES = {  # the parameters that a pattern means, wherever it is written
    "0": NAMES[:4],
    "0.*": NAMES[:4],
    "0.0": NAMES[:2],
    "*.bias": NAMES[1::2],
    "first": NAMES[:2],
    "last": NAMES[4:],
    "1d": [*NAMES[1:4], "1.bias"],
    "LayerNorm": NAMES[2:4],
}


def on_the_wire(pattern: str) -> list[str]:
    shapes = {name: parameter.shape for name, parameter in model().named_parameters()}
    settings = Settings.of("e5m2", skip=[pattern])
    assert settings.unmatched(shapes) == []
    parameters = Parameters(shapes, settings)
    return [name for name in shapes if str(parameters.codec(name, 0).format) == "fp32"]


def in_a_simulation(pattern: str) -> list[str]:
    simulated = model()
    simulation = simulate(simulated, weights="e5m2", layers={pattern: {"weights": "fp16"}})
    found = [layer.name for layer in simulation.layers if layer.formats["weights"] == "fp16"]
    restore(simulated)
    return [name for name in NAMES if name.rpartition(".")[0] in found]


def of_an_optimizer(kind, pattern: str) -> list[str]:
    optimizer = kind(model().named_parameters(), exclude=[pattern], update="nearest")
    group = optimizer.param_groups[0]
    rules = [optimizer.rule(p, group, name) for p, name in zip(group["params"], group["param_names"], strict=True)]
    return [name for name, rule in zip(NAMES, rules, strict=True) if rule.excluded]


@pytest.mark.parametrize("pattern", [key for key in CASES if key != "LayerNorm"])
def test_patterns_on_the_wire(pattern):
    assert on_the_wire(pattern) == CASES[pattern]


@pytest.mark.parametrize("pattern", [key for key in CASES if key not in ("1d", "*.bias")])
def test_patterns_of_simulated_layers(pattern):
    assert in_a_simulation(pattern) == CASES[pattern]


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("pattern", [key for key in CASES if key not in ("first", "last", "LayerNorm")])
def test_patterns_of_optimizers(kind, pattern):
    assert of_an_optimizer(kind, pattern) == CASES[pattern]


def test_a_layer_that_is_called_last_is_meant_by_the_word():
    shapes = {"last.weight": torch.Size([2, 2]), "head.weight": torch.Size([2, 2])}
    parameters = Parameters(shapes, Settings.of("e5m2", skip=["last"]))
    assert [str(parameters.codec(name, 0).format) for name in shapes] == ["fp32", "e5m2"]


def test_what_matches_nothing_is_an_error_everywhere():
    said = r"'0\.wieght' matches nothing; did you mean '0\.1\.weight' or '0\.0\.weight'"
    with pytest.raises(ValueError, match=rf"exclude: {said}"):
        LARS(model().named_parameters(), exclude=["0.wieght"], update="nearest")
    with pytest.raises(TypeError, match=r"exclude takes a list of patterns: exclude=\['bias'\]"):
        LAMB(model().named_parameters(), exclude="bias", update="nearest")
    with pytest.raises(ValueError, match=r"layers: '0\.2' matches nothing; did you mean '0\.1' or '0\.0'"):
        simulate(model(), weights="e5m2", layers={"0.2": {"weights": "fp16"}})
    with pytest.raises(ValueError, match=r"'first' is the first layer that has a matrix"):
        Parameters({"a": torch.Size([3])}, Settings.of("e5m2", skip=["first"]))


def test_an_allowance_for_a_module_is_for_all_inside():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with lowp.audit(forbid=torch.float32, mode="report", allow=["module:0"]) as report:
        net(torch.ones(2, 4))
    assert {finding.module for finding in report.findings if finding.operation.startswith("aten.addmm")} == {"1"}


SOURCE = Path(lowp.__file__).parent


def test_a_class_name_is_defined_once():
    """Who looks for a name lands in one place; a leading underscore makes no other name."""
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(path.relative_to(SOURCE).as_posix())
    # The same thing in three trainers, each in the module that is named after the trainer.
    assert {Path(home).parent.name for home in homes.pop("GradientCompression")} == {"integrations"}
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lowp.simulation.layers Layer", "SimulatedLayer"),
        ("lowp.simulation.simulation _Settings", "_SimulationSettings"),
        ("lowp.simulation.scales Scale", "Scale"),
        ("lowp.wire.ddp _Switch", "HookSwitch"),
        ("lowp.wire.ddp _HookSwitch", "HookSwitch"),
        ("lowp.wire.ddp _hook", "reduce_bucket"),
    ],
)
def test_what_was_saved_under_an_older_name_is_found(old, new):
    """Whole models are saved with pickle, which writes the names of classes."""
    module, name = old.split()
    assert pickle.loads(f"c{module}\n{name}\n.".encode()).__name__ == new


def test_no_module_is_called_like_one_of_pythons_own():
    own = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.stem in sys.stdlib_module_names]
    assert own == []


@pytest.mark.parametrize(("name", "homes"), [("scale_of", ["wire/scaling.py"]), ("exchange", [])])
def test_functions_that_were_called_alike_have_names_of_their_own(name, homes):
    """`scale_of` was a wire scale, a simulated scale and a gradient's scale; `exchange` was what a rank does for a chunk, and
    messages to and from other ranks. (An exchange is the sum of gradients over ranks: classes have that name.)"""
    found = [path for path in SOURCE.rglob("*.py") if f"def {name}(" in path.read_text()]
    assert [path.relative_to(SOURCE).as_posix() for path in found] == homes
