"""Which parameters "last" and a pattern mean, in models whose head is tied to the embedding and whose last module is a norm."""

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.simulation import describe, restore, simulate
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters, Settings


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=2, n_head=2))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    return transformers.BertForMaskedLM(config)


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


TIED_BERT = {
    "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
}


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (gpt2, {"transformer.wte.weight", "lm_head.weight"}),
        (bert, TIED_BERT),
        (NormLast, {"head.weight", "head.bias"}),
    ],
)
def test_the_last_layer_is_the_last_with_a_matrix(build, last):
    model = build()
    assert changed(model, skip="last") == last
    assert changed(model, layers={"last": "fp16"}) == last


@pytest.mark.parametrize(("build", "head"), [(gpt2, "lm_head"), (bert, "cls.predictions.decoder"), (NormLast, "head")])
def test_simulate_means_the_same_layer(build, head):
    model = build()
    simulate(model, weights="e5m2", layers={"last": {"weights": "fp16"}})
    kept = {row.layer for row in describe(model).rows if row.role == "weights" and row.format == "fp16"}
    restore(model)
    assert kept == {head}


@pytest.mark.parametrize("pattern", ["lm_head.weight", "lm_head.*", "transformer.wte.*"])
def test_a_tied_parameter_is_found_by_any_name(pattern):
    assert changed(gpt2(), skip=pattern) == {"transformer.wte.weight", "lm_head.weight"}
    assert changed(gpt2(), layers={pattern: "fp16"}) == {"transformer.wte.weight", "lm_head.weight"}


def test_last_of_a_model_without_matrices():
    with pytest.raises(ValueError, match="no parameter here has two dimensions"):
        Parameters({"bias": torch.Size([3])}, Settings.of("e5m2", skip="last"))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


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
