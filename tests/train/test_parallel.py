"""Model parallelism: real and virtual teams compute the same bits, both ways, and a few bits are what really travels."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowp
from lowp.training.models import build_model
from lowp.training.parallel import (
    RealTeam,
    SplitLinear,
    TensorCodec,
    VirtualTeam,
    Whole,
    pipeline_model,
    split_model,
)
from wire import ranks

FORMATS = ("fp32", "e5m2", "e4m3fn", "int8", "dynamic8")
PLACES = {"split": split_model, "pipeline": pipeline_model}
STEPS = 2


@pytest.fixture(autouse=True)
def _one_thread():
    """As real ranks have: the order of sums in a product may depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(hidden=(40, 33), dropout=(0.2, 0.3, 0.3)):
    """The MNIST experiment's network, narrow; 33 outputs do not split evenly."""
    torch.manual_seed(0)
    return build_model("mlp", shape=(1, 9, 9), classes=10, options={"hidden": hidden, "dropout": dropout})


def batch(step=0, size=16):
    """Classes that can be told apart: a bright pixel each, and noise."""
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, 81, generator=generator)
    images[torch.arange(size), 8 * targets] += 6
    return images.view(size, 1, 9, 9), targets


def train(placement, steps, rate=0.1):
    """Losses; a step is the same call wherever the model is."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # dropout: alike on all ranks
        placement.module.zero_grad()
        losses.append(placement.forward_backward(*batch(step), nn.functional.cross_entropy, lambda loss: 8 * loss))
        with torch.no_grad():
            for parameter in placement.module.parameters():
                parameter.sub_(parameter.grad, alpha=rate / 8)
    return losses


def result(place, team, format, scale="local", steps=STEPS):
    """Everything that a run makes: losses, weights by name, outputs, and what was sent until then."""
    placement = PLACES[place](network(), team, format, scale)
    losses = train(placement, steps)
    sent = placement.bytes_sent, placement.bytes_of_fp32
    outputs = placement.evaluate(batch(99)[0])
    assert placement.module.training
    return losses, {n: p.detach().clone() for n, p in placement.module.named_parameters()}, outputs, sent


def cases(world):
    """Two ranks take all formats, both ways; three take what is special: uneven parts, sums of three, other scales."""
    if world == 2:
        return [(place, format, "local") for place in PLACES for format in FORMATS]
    return [("split", "fp32", "local"), ("split", "e4m3fn", "local"), ("split", "e5m2", "none"), ("split", "int4", "block:16")]


def results_of_a_rank(rank, world):
    """In a real process: what each case made, and the bytes that torch was really asked to send for it."""
    found, sends = {}, []
    send = dist.isend

    def counting(tensor, *arguments, **options):
        sends.append(tensor.numel() * tensor.element_size())
        return send(tensor, *arguments, **options)

    dist.isend = counting
    for case in cases(world):
        place, format, scale = case
        team = RealTeam()
        sends.clear()
        found[case] = *result(place, team, format, scale), team.bytes_sent, sum(sends)
    return found


@pytest.mark.other_cpu
@pytest.mark.timeout(60)
@pytest.mark.parametrize("world", [2, 3])
def test_real_and_virtual_teams_compute_the_same_bits(world):
    real = ranks.run(results_of_a_rank, world, world, timeout=50)
    for case in cases(world):
        place, format, scale = case
        losses, weights, outputs, sent = result(place, VirtualTeam(world), format, scale)
        seen = {}
        for rank in range(world):
            their_losses, their_weights, their_outputs, _, counted, really_sent = real[rank][case]
            assert torch.equal(torch.stack(their_losses), torch.stack(losses)), case
            assert torch.equal(their_outputs, outputs), case
            assert counted == really_sent, case
            assert all(torch.equal(weights[name], weight) for name, weight in their_weights.items()), case
            seen |= their_weights
        assert seen.keys() == weights.keys(), case  # nothing is held by nobody, and names are those of the virtual team
        each = [real[rank][case][3] for rank in range(world)]
        assert sent[0] == pytest.approx(sum(sent for sent, _ in each) / world, rel=0.06), case  # short messages have padding
        assert sent[1] == pytest.approx(sum(of_fp32 for _, of_fp32 in each) / world, rel=0.001), case


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("format", "ratio"), [("e5m2", 4), ("dynamic8", 4), ("e5m10", 2), ("fp32", 1), ("int4", 7.5)])
def test_bytes_are_those_of_the_format(place, format, ratio):
    placement = PLACES[place](network(hidden=(256, 256)), VirtualTeam(2), format)
    train(placement, 2)
    assert placement.bytes_of_fp32 / placement.bytes_sent == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(("place", "format"), [("split", "e5m2"), ("split", "dynamic8"), ("pipeline", "e5m2")])
def test_both_ways_train(place, format):
    placement = PLACES[place](network(hidden=(64, 64)), VirtualTeam(2), format)
    losses = train(placement, 40, rate=0.2)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    images, targets = batch(99, size=200)
    assert (placement.evaluate(images).argmax(1) == targets).float().mean() > 0.75


def in_integers(model):
    """Its parameters become -1, 0 and 1. Sums of integers below 2^24 are exact in float32: the same in any order."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def joined_gradients(split):
    """Of a split model, under the names that parameters have in the whole one."""
    found = {}
    for name, parameter in split.module.named_parameters():
        layer, _, _, kind = name.split(".")
        found.setdefault(f"{layer}.{kind}", []).append(parameter.grad)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.other_cpu
@pytest.mark.parametrize("world", [2, 3, 7])
def test_where_sums_are_exact_a_split_model_is_the_whole_one(world):
    """Outputs, loss, and all gradients, to the last bit: no part is lost, doubled or in the wrong place."""
    dropout = (0.5, 0.5, 0.5)  # what stays is doubled: still integers
    whole, split = (in_integers(network(dropout=dropout)) for _ in range(2))
    whole, split = Whole(whole), split_model(split, VirtualTeam(world), "fp32")
    generator = torch.Generator().manual_seed(1)
    images, targets = torch.randint(-1, 2, (4, 1, 9, 9), generator=generator).float(), torch.zeros(4, 10)
    assert torch.equal(split.evaluate(images), whole.evaluate(images))
    losses = []
    for placement in (whole, split):
        torch.manual_seed(1)
        losses.append(placement.forward_backward(images, targets, lambda y, t: (y - t).square().sum() / 2))
    assert torch.equal(*losses)
    gradients = {name: parameter.grad for name, parameter in whole.module.named_parameters()}
    for name, gradient in joined_gradients(split).items():
        assert gradient.abs().max() < 2**19  # as are all sums of magnitudes here: far from where sums would be rounded
        assert torch.equal(gradient, gradients.pop(name)), name
    assert not gradients


def bound_on_outputs(model, x):
    """How far a float32 evaluation of linear layers may be from the exact one, whatever the order of its sums.

    A sum of n products in float32, in any order, fused or not, is off by at most g sum |w x| with g = n u / (1 - n u) and
    u = 2^-24; the bias is one more addend. What x was off by is multiplied by |w|. ReLU makes nothing larger.
    """
    x, error = x.flatten(1).double(), torch.zeros(1, dtype=torch.float64)
    for layer in model:
        if isinstance(layer, nn.ReLU):
            x = x.relu()
        elif isinstance(layer, nn.Linear):
            weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
            n = (weight.shape[1] + 1) * 2.0**-24
            error = error.expand_as(x) @ weight.abs().T
            error = error + n / (1 - n) * ((x.abs() @ weight.abs().T) + error + bias.abs())
            x = x @ weight.T + bias
    return x, error


@pytest.mark.other_cpu
def test_in_fp32_a_split_model_is_near_the_whole_one():
    """torch adds up a product of another shape in another order: both are within the bound of the exact result."""
    whole, split = Whole(network()), split_model(network(), VirtualTeam(3), "fp32")
    images, targets = batch()
    exact, bound = bound_on_outputs(whole.module, images)
    assert bound.max() < 1e-3 * exact.abs().max()  # it says something
    for placement in (whole, split):
        assert ((placement.evaluate(images).double() - exact).abs() <= bound).all()
    losses = []
    for placement in (whole, split):
        torch.manual_seed(1)  # the same masks of dropout
        losses.append(placement.forward_backward(images, targets, nn.functional.cross_entropy))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    gradients = joined_gradients(split)
    for name, parameter in whole.module.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@pytest.mark.other_cpu
def test_in_fp32_a_pipeline_without_dropout_is_the_whole_model():
    plain = {"dropout": 0.0}
    whole, pipeline = Whole(network(**plain)), pipeline_model(network(**plain), VirtualTeam(2), "fp32")
    assert torch.equal(torch.stack(train(pipeline, 3)), torch.stack(train(whole, 3)))
    assert torch.equal(pipeline.evaluate(batch()[0]), whole.evaluate(batch()[0]))


def rounded(tensor, codec):
    return codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)


@pytest.mark.other_cpu
def test_what_a_split_layer_computes():
    """Outputs are rounded slice by slice; gradients of the weight are exact, that of the input is a rounded sum.

    On multiples of 1/16, whose sums are exact: here other products stand beside the layer's own.
    """
    codec, team, generator = TensorCodec.of("e4m3fn"), VirtualTeam(2), torch.Generator().manual_seed(0)

    def sixteenths(*shape):
        return torch.randint(-32, 33, shape, generator=generator) / 16

    linear = nn.Linear(6, 5)
    linear.load_state_dict({"weight": sixteenths(5, 6), "bias": sixteenths(5)})
    layer = SplitLinear.of(linear, team, codec)
    assert layer.widths == (3, 2)
    x = sixteenths(4, 7, 6).requires_grad_()
    y = layer(x)
    slices = [
        nn.functional.linear(x, *rows) for rows in zip(linear.weight.split((3, 2)), linear.bias.split((3, 2)), strict=True)
    ]
    assert torch.equal(y, torch.cat([rounded(part, codec) for part in slices], dim=-1))
    gradient = sixteenths(4, 7, 5)
    y.backward(gradient)
    for shard, part, rows in zip(layer.shards.values(), gradient.split((3, 2), -1), linear.weight.split((3, 2)), strict=True):
        assert torch.equal(shard.weight, rows)
        assert torch.equal(shard.weight.grad, part.flatten(0, 1).T @ x.detach().flatten(0, 1))
    addends = [part @ rows for part, rows in zip(gradient.split((3, 2), -1), linear.weight.detach().split((3, 2)), strict=True)]
    exact = sum(addends)
    assert torch.equal(x.grad, VirtualTeam(2).add_up(addends, codec))
    assert 0 < (x.grad - exact).norm() / exact.norm() < 0.06


def test_layers_that_stay_whole():
    """Those with fewer outputs than ranks, and a head that is the embedding, too."""
    split = split_model(network(), VirtualTeam(12), "e5m2").module
    assert [type(child).__name__ for child in split if list(child.parameters())] == ["SplitLinear", "SplitLinear", "Linear"]
    gpt = build_model("gpt", shape=(6,), classes=11, options={"width": 8, "layers": 1, "heads": 2, "tied": True})
    split = split_model(gpt, VirtualTeam(2), "e5m2")
    assert type(split.module.head) is nn.Linear
    assert type(split.module.blocks[0].attention.qkv) is SplitLinear
    tokens = torch.zeros(2, 6, dtype=torch.long)
    loss = split.forward_backward(
        tokens, tokens, lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    )
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in split.module.parameters())


def test_the_stages_of_a_pipeline_draw_their_own_masks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    masks = []
    for dropout in (model[1], model[3]):
        dropout.register_forward_hook(lambda module, x, y: masks.append(y == 0))
    pipeline = pipeline_model(model, VirtualTeam(2), "fp32", cut=2)
    x = torch.ones(8, 64)
    for _ in range(2):
        pipeline.forward_backward(x, x, nn.functional.mse_loss)
    assert all(0.3 < mask.float().mean() < 0.7 for mask in masks)
    assert len({mask.numpy().tobytes() for mask in masks}) == 4  # neither stages nor steps have the same


def test_evaluation_draws_nothing():
    pipeline = pipeline_model(network(), VirtualTeam(2), "e5m2")
    before = torch.get_rng_state()
    assert torch.equal(pipeline.evaluate(batch()[0]), pipeline.evaluate(batch()[0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_frozen_first_stage_is_left_alone():
    model = network(dropout=0.0)
    pipeline = pipeline_model(model, VirtualTeam(2), "e5m2")
    model[1].requires_grad_(False)
    pipeline.forward_backward(*batch(), nn.functional.cross_entropy)
    assert model[1].weight.grad is None
    assert model[3].weight.grad is not None


def test_a_module_that_comes_twice_runs_twice():
    torch.manual_seed(0)
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    x = torch.randn(8, 4)
    assert torch.equal(pipeline_model(model, VirtualTeam(2), "fp32").evaluate(x), model(x))


def test_frozen_parameters_stay_frozen_when_split():
    linear = nn.Linear(4, 4)
    linear.bias.requires_grad_(False)
    shards = SplitLinear.of(linear, VirtualTeam(2), TensorCodec.of("e5m2")).shards.values()
    assert [(shard.weight.requires_grad, shard.bias.requires_grad) for shard in shards] == [(True, False)] * 2


def test_the_cut_balances_parameters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(81, 1000), nn.ReLU(), nn.Linear(1000, 50), nn.ReLU(), nn.Linear(50, 10))
    pipeline = pipeline_model(model, VirtualTeam(2))
    assert [name for name, _ in pipeline._stages[1].named_parameters()] == ["3.weight", "3.bias", "5.weight", "5.bias"]


@pytest.mark.parametrize("scale", ["local", "none", "block:8"])
@pytest.mark.parametrize("format", ["e4m3fn", "int8", "dynamic8", "int4", "posit8", "fp16", "fp32"])
def test_messages(format, scale):
    codec = TensorCodec.of(format, scale)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.randn(5, 7, generator=generator).to(dtype)
        message = codec.encode(tensor)
        assert message.dtype == torch.uint8
        assert message.numel() == codec.length(35)
        again = codec.decode(message, tensor.shape, dtype)
        assert again.dtype == dtype
        if scale == "none":
            assert torch.equal(again, lowp.quantize(tensor.float(), format, saturate=True).to(dtype))
        elif format != "posit8":  # scales bring numbers to the end of the range, where posits are coarse
            assert (again - tensor).norm() / tensor.norm() <= {"int4": 0.2, "fp32": 0.0}.get(format, 0.05)
    zeros = torch.zeros(3, 5)
    assert torch.equal(rounded(zeros, codec), zeros)
    assert rounded(torch.empty(0, 4), codec).shape == (0, 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", ["local", "none", "block:8"])
@pytest.mark.parametrize("format", ["e4m3fn", "int8", "dynamic8", "fp32", "mxfp8_e4m3"])
def test_what_is_not_finite_stays_so(format, scale, bad):
    tensor = torch.ones(33)
    tensor[17] = bad
    assert not rounded(tensor, TensorCodec.of(format, scale))[17].isfinite()


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_is_not_finite_reaches_all_weights(place):
    placement = PLACES[place](network(dropout=0.0), VirtualTeam(2), "int8")
    images, targets = batch()
    loss = placement.forward_backward(images * math.nan, targets, nn.functional.cross_entropy)
    assert loss.isnan()
    assert all(not p.grad.isfinite().all() for p in placement.module.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split_model(network(), VirtualTeam(2), "e4m3fm"), r"unknown format 'e4m3fm'; did you mean 'e4m3fn'"),
        (lambda: split_model(network(), VirtualTeam(2), "e8m20"), r"up to 16 bits"),
        (
            lambda: split_model(network(), VirtualTeam(2), "e5m2", "aps"),
            r"scale 'aps' is for sums over ranks; activations take local",
        ),
        (
            lambda: split_model(nn.Conv2d(1, 1, 1), VirtualTeam(2)),
            r"nothing to split: the model has no linear layer with 2 outputs",
        ),
        (lambda: pipeline_model(network(), VirtualTeam(3)), r"a pipeline has two stages and takes two ranks, not 3"),
        (lambda: pipeline_model(nn.Linear(2, 2), VirtualTeam(2)), r"takes an nn.Sequential, .*, not Linear"),
        (lambda: pipeline_model(network(), VirtualTeam(2), cut=99), r"is cut after 1 to 8 of the model's 9 children, not 99"),
        (lambda: pipeline_model(nn.Sequential(nn.Linear(2, 2)), VirtualTeam(2)), r"parameters in two of its children"),
        (lambda: pipeline_model(tied_gpt(), VirtualTeam(2)), r"both stages .* would need embedding.tokens.weight"),
        (lambda: VirtualTeam(0), r"a team has at least one rank, not 0"),
    ],
)
def test_a_wrong_wish_is_one_clear_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def tied_gpt():
    return build_model("gpt", shape=(6,), classes=11, options={"width": 8, "layers": 1, "heads": 2, "tied": True})


def test_a_real_team_needs_a_world():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        RealTeam()


def disagreement(rank, place):
    try:
        PLACES[place](network(), RealTeam(), ("e5m2", "e4m3fn")[rank])
    except ValueError as error:
        return str(error)
    return "agreed"


@pytest.mark.timeout(60)
def test_ranks_that_disagree_on_the_codec_find_out_at_the_start():
    for said in ranks.run(disagreement, 2, "pipeline", timeout=50):
        assert said == "ranks disagree on how to cut the model: rank 0 has codec=e5m2/local, rank 1 has codec=e4m3fn/local"
