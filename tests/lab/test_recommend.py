"""`lowp recommend`: formats tried on a model beside float32."""

import json
import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowp
from lowp.cli import app
from lowp.lab import recommend as module

ROLES = ("weights", "activations", "gradients", "wire")


def subject() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs = torch.randn(64, 16)
    return model, inputs, (inputs[:, :4]).argmax(1)


def test_a_module_with_a_batch():
    model, inputs, targets = subject()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = []
    found = lowp.recommend(
        model, inputs, targets, nn.functional.cross_entropy, steps=8, formats=["bf16", "int8", "e2m1fn"], roles=ROLES,
        progress=lambda done, total, what: said.append((done, total, what)),
    )  # fmt: skip
    assert found.loss < found.first_loss
    assert len(found.trials) == 3 * len(ROLES)
    verdicts = {(trial.role, trial.format): trial.verdict for trial in found.trials}
    assert verdicts["activations", "bf16"] == verdicts["gradients", "bf16"] == "holds"
    differences = {(trial.role, trial.format): abs(trial.difference) for trial in found.trials}
    assert differences["weights", "e2m1fn"] > 10 * differences["weights", "bf16"]
    for role in ROLES:  # the narrowest that holds
        holding = [name for name in ("e2m1fn", "int8", "bf16") if verdicts[role, name] == "holds"]
        assert found.advice[role] == (holding[0] if holding else "fp32")
    assert all(trial.low <= trial.difference <= trial.high for trial in found.trials)
    assert said[-1][0] == said[-1][1] == len(said) - 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_formats_that_no_state_can_have():
    """The formats of one call are for all roles, and blocks or 4 bits are none for states."""
    model, inputs, targets = subject()
    found = lowp.recommend(
        model, inputs, targets, nn.functional.cross_entropy, steps=2, seeds=2, formats=["fp8", "mxfp4", "e2m1fn"],
        roles=("weights", "state"),
    )  # fmt: skip
    assert found.not_tried == ("state mxfp4", "state e2m1fn")
    assert [(trial.role, trial.format) for trial in found.trials][2:] == [("weights", "e2m1fn"), ("state", "e4m3fn")]
    with pytest.raises(ValueError, match="8 to 16 bits, without blocks: not in state mxfp4"):
        lowp.recommend(model, inputs, targets, nn.functional.cross_entropy, formats=["mxfp4"], roles=("state",))


def test_figures_of_the_numbers():
    x = torch.tensor([1.0, 2.0**-20, 0.0, -3.0])
    sqnr, underflow, overflow = module._fidelity(lowp.format("e4m3fn"), [x])
    assert math.isinf(sqnr) or sqnr > 60
    assert (underflow, overflow) == (pytest.approx(1 / 3), 0)
    assert module._fidelity(lowp.format("bf16"), [x])[1:] == (0, 0)
    assert module._fidelity(lowp.format("e4m3fn"), [torch.zeros(3)]) == (None, None, None)


def test_a_recipes_model_as_json(monkeypatch):
    arguments = ["recommend", "mlp", "--steps", "2", "--seeds", "2", "--role", "wire", "--format", "fp8", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == "mlp"
    assert [trial["format"] for trial in found["trials"]] == ["e4m3fn"]
    assert 0.25 <= found["trials"][0]["share"] < 0.26
    assert set(found["advice"]) == {"wire"}


def test_a_table_at_60_columns():
    arguments = ["recommend", "mlp", "--steps", "1", "--seeds", "2", "--role", "gradients", "--format", "bf16"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "60", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines()[1:])) <= 60
    assert "gradients  bf16    holds" in result.stdout
    assert "-0.0000" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "mlp", "roles": ["weigths"]}, "unknown role 'weigths'"),
        ({"model": "mlp", "seeds": 1}, "at least two seeds"),
        ({"model": "mlp", "tolerance": 0}, "tolerance is a part"),
        ({"model": "mlpp"}, "unknown recipe 'mlpp'"),
        ({"model": "mlp", "inputs": torch.ones(1)}, "belong to an nn.Module"),
        ({"model": "mlp", "formats": ["e4m3fm"]}, "did you mean 'e4m3fn'"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        lowp.recommend(**arguments)
