"""Models divided among ranks, trained by the one loop: resumed runs repeat the uninterrupted one, real ranks virtual ones."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lowp.training import checkpoint
from lowp.training.optimizers import draw_as_the_whole, numbers_of, optimizer_for
from lowp.training.parallel import VirtualTeam, pipeline_model, split_model
from lowp.training.reading import read_recipe
from lowp.training.run import run
from train import training
from train.training import arguments, final_state, records

SETTINGS = (
    "data.name=fashion14",
    "data.limit=512",
    "batch=64",
    "epochs=2",
    "ranks=1",
    "virtual_ranks=2",
    "model.options.hidden=[32]",
    "model.options.dropout=[0.1,0.2]",
    "log.every=3",
    "parallel.format=e5m2",
)


@pytest.mark.other_cpu
@pytest.mark.parametrize("kind", ["split", "pipeline"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, tmp_path):
    settings = [*SETTINGS, f"parallel.kind={kind}", "learning_rate.kind=constant"]
    recipe = read_recipe("mnist-model-parallel", settings)
    whole = run(recipe, tmp_path / "whole", quiet=True)
    assert whole["accuracy"] > 0.4
    assert whole["bytes_sent"] < whole["bytes_of_fp32"] / 2  # a test's logits travel in fp32, and count
    run(recipe.model_copy(update={"epochs": 1}), tmp_path / "halves", quiet=True)
    run(recipe, tmp_path / "halves", resume=True, quiet=True)
    assert final_state(tmp_path / "halves") == final_state(tmp_path / "whole")
    whole_losses, losses = (losses_of(tmp_path / name) for name in ("whole", "halves"))
    assert whole_losses == losses
    assert bytes_of(tmp_path / "halves") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "format", "ranks"), [("split", "e5m2", 3), ("split", "fp32", 2), ("pipeline", "e5m2", 2)])
def test_parameters_and_bytes_of_real_ranks_are_those_of_virtual_ones(kind, format, ranks, tmp_path):
    """A rank has a part of the parameters; and ranks send different amounts, of which the mean is told."""
    changes = {"parallel__kind": kind, "parallel__format": format, "learning_rate__kind": "constant", "data__limit": 96}
    with training.server(tmp_path) as server:
        server.run(arguments("fp32", tmp_path / "virtual", "--virtual-ranks", str(ranks), **changes))
        server.run_ranks(arguments("fp32", tmp_path / "real", "--ranks", str(ranks), **changes), ranks)
    assert bytes_of(tmp_path / "real") == bytes_of(tmp_path / "virtual")
    real, virtual = (training.records(tmp_path / name)[-1]["parameters"] for name in ("real", "virtual"))
    assert real == virtual == 14 * 14 * 16 + 16 + 16 * 10 + 10


def test_bytes_are_the_same_however_a_run_was_interrupted(tmp_path):
    """Of three ranks, which send no whole number of bytes on average."""
    settings = [*SETTINGS, "virtual_ranks=3", "data.limit=256", "parallel.kind=split", "learning_rate.kind=constant"]
    recipe = read_recipe("mnist-model-parallel", settings)
    run(recipe.model_copy(update={"epochs": 5}), tmp_path / "whole", quiet=True)
    for epochs in range(1, 6):
        run(recipe.model_copy(update={"epochs": epochs}), tmp_path / "parts", resume=True, quiet=True)
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def bytes_of(folder: Path) -> list[tuple[int, int]]:
    """All along, and at the end."""
    *records, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    trained = [record for record in records if record["kind"] == "train"]
    return [(record["bytes_sent"], record["bytes_of_fp32"]) for record in (*trained, last)]


def losses_of(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_one_rank_cannot_divide_a_model():
    from lowp.training.check import check

    with pytest.raises(ValueError, match="parallel"):
        check(read_recipe("mnist-model-parallel", ["ranks=1"]))


SGD16 = ("precision.weights=bf16", "precision.update=stochastic", "optimizer.weight_decay=0.01")
ADAMW8 = (*SGD16, "optimizer.name=adamw", "optimizer.lr=0.01", "precision.state=dynamic8")
LAMB16 = (*SGD16, "optimizer.name=lamb", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def lowp_server(tmp_path_factory):
    with training.server(tmp_path_factory.mktemp("processes")) as found:
        yield found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All parts' weights, by their names, from the newest checkpoint."""
    _, state = checkpoint.load(max((folder / "checkpoints").glob("step-*")), fingerprint=None)
    return {name: tensor for rank in state["ranks"] for name, tensor in rank["model"].items()}


@pytest.mark.other_cpu
@pytest.mark.parametrize("kind", ["split", "pipeline"])
@pytest.mark.parametrize("numbers", [SGD16, ADAMW8, LAMB16], ids=["sgd", "adamw", "lamb"])
def test_real_ranks_draw_what_virtual_ranks_draw(numbers, kind, lowp_server, tmp_path):
    settings = ("fp32", "--set", "batch=32", "--set", "data.limit=96", "--set", "threads=1", "--set", "epochs=2")
    sets = [word for text in (*numbers, f"parallel.kind={kind}", "model.options.hidden=[17]") for word in ("--set", text)]
    lowp_server.run(["train", *settings, *sets, "--virtual-ranks", "2", "--out", str(tmp_path / "virtual")])
    lowp_server.run_ranks(["train", *settings, *sets, "--ranks", "2", "--out", str(tmp_path / "real")], 2)
    virtual, real = weights_of(tmp_path / "virtual"), weights_of(tmp_path / "real")
    assert virtual.keys() == real.keys()
    assert [name for name in virtual if not torch.equal(virtual[name], real[name])] == []
    losses = [[record["loss"] for record in records(tmp_path / name) if "loss" in record] for name in ("virtual", "real")]
    assert losses[0] == losses[1]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential()
    for name, layer in (("first", nn.Linear(6, 17)), ("shards", nn.Linear(17, 5, bias=False)), ("norm", nn.LayerNorm(5))):
        layers.add_module(name, layer)
    layers.add_module("last", nn.Sequential(nn.Linear(5, 1)))
    return layers.to(torch.bfloat16)


def stepped(recipe, model, placement, numbers, gradients, whole_of) -> dict[str, torch.Tensor]:
    """Two steps with given gradients of the whole model; the weights."""
    parameters = dict(model.named_parameters())
    optimizer = optimizer_for(recipe, parameters)
    if placement is not None:
        draw_as_the_whole(optimizer, parameters, placement, numbers)
    for step in range(2):
        for name, parameter in parameters.items():
            whole, first = whole_of(name)
            gradient = gradients[step, whole].reshape(-1)[first : first + parameter.numel()]
            parameter.grad = gradient.view(parameter.shape).clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.other_cpu
@pytest.mark.parametrize("kind", ["split", "pipeline"])
@pytest.mark.parametrize("settings", [SGD16, ADAMW8[:-1]], ids=["sgd", "adamw"])
def test_parts_of_a_parameter_draw_what_the_whole_one_draws(settings, kind):
    """Of a layer named as the parts of a split one are, too."""
    recipe = read_recipe("fp32", list(settings))
    model = network()
    parameters = dict(model.named_parameters())
    numbers = numbers_of(recipe, parameters)
    assert sorted(numbers.values()) == list(range(len(parameters)))
    gradients = {(step, name): torch.randn_like(p) for step in range(2) for name, p in parameters.items()}
    whole = stepped(recipe, model, None, numbers, gradients, lambda name: (name, 0))
    placement = split_model(network(), VirtualTeam(3)) if kind == "split" else pipeline_model(network(), VirtualTeam(2), cut=2)
    parts = stepped(recipe, placement.module, placement, numbers, gradients, placement.whole_of)
    for name, part in parts.items():
        of, first = placement.whole_of(name)
        assert torch.equal(part.reshape(-1), whole[of].reshape(-1)[first : first + part.numel()]), name
    assert {placement.whole_of(name)[0] for name in parts} == whole.keys()
