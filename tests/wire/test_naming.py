"""Which parameters "last" and a pattern mean, in models whose head is tied to the embedding and whose last module is a norm."""

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.simulation import restore, simulate
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters, Settings


class Tied(nn.Module):
    """As GPT-2: the head is the embedding, and a norm is the last module with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


class TiedWithBias(nn.Module):
    """As BERT: the head's bias belongs to the module around it, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.bias = nn.Parameter(torch.zeros(7))
        self.norm = nn.LayerNorm(4)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight, self.decoder.bias = self.embedding.weight, self.bias


class NormLast(nn.Module):
    """Registered in the order in which nothing is called: a head, then a norm and a vector."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.gain = nn.Parameter(torch.ones(3))


def codecs(model, **settings):
    """The format of each parameter, by all of its names."""
    names = all_names(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    parameters = Parameters(shapes, Settings.of("e5m2", **settings), names)
    return {name: str(parameters.codec(known, 0).format) for name, known in names.items()}


def changed(model, **settings):
    return {name for name, format in codecs(model, **settings).items() if format != "e5m2"}


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (Tied, {"embedding.weight", "head.weight"}),
        (TiedWithBias, {"embedding.weight", "decoder.weight", "bias", "decoder.bias"}),
        (NormLast, {"head.weight", "head.bias"}),
    ],
)
def test_the_last_layer_is_the_last_with_a_matrix(build, last):
    model = build()
    assert changed(model, skip="last") == last
    assert changed(model, layers={"last": "fp16"}) == last


@pytest.mark.parametrize(("build", "head"), [(Tied, "head"), (TiedWithBias, "decoder"), (NormLast, "head")])
def test_simulate_means_the_same_layer(build, head):
    model = build()
    simulation = simulate(model, weights="e5m2", layers={"last": {"weights": "fp16"}})
    assert [row.layer for row in simulation.formats() if row.format == "fp16"] == [head]
    restore(model)


@pytest.mark.parametrize("pattern", ["head.weight", "head.*", "embedding.*"])
def test_a_tied_parameter_is_found_by_any_name(pattern):
    assert changed(Tied(), skip=pattern) == {"embedding.weight", "head.weight"}
    assert changed(Tied(), layers={pattern: "fp16"}) == {"embedding.weight", "head.weight"}


def test_a_recipe_may_name_the_tied_head():
    from lowp.training.check import check_model
    from lowp.training.models import build_model
    from lowp.training.reading import read_recipe

    options = {"width": 8, "layers": 1, "heads": 2, "tied": True}
    model = build_model("gpt", shape=(8,), classes=11, options=options)
    check_model(read_recipe("gpt", ['wire.skip=["head.*"]', "model.options.tied=true"]), model)
    assert changed(model, skip="last") == {"embedding.tokens.weight", "head.weight"}


def test_last_of_a_model_without_matrices():
    with pytest.raises(ValueError, match="no parameter here has two dimensions"):
        Parameters({"bias": torch.Size([3])}, Settings.of("e5m2", skip="last"))


def send_tied(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tied())
    handle = lowp.compress_gradients(ddp, "e2m1fn", skip=("head.*", "1d"))  # everything
    ddp(torch.tensor([1, 2, 3 + rank])).square().sum().backward()
    handle.remove()
    return ddp.module.head.weight.grad


def test_ddp_skips_a_tied_parameter_by_its_other_name():
    torch.manual_seed(0)
    wanted = torch.zeros(7, 4)
    for rank in range(2):
        torch.manual_seed(0)
        model = Tied()
        model(torch.tensor([1, 2, 3 + rank])).square().sum().backward()
        wanted += model.head.weight.grad / 2
    for found in ranks.run(send_tied, 2):
        torch.testing.assert_close(found, wanted)
