"""Operands of linear layers' products in block formats, against products written out with `lowp.quantize`."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.simulation.products import Products, _rotated

ROWS, INPUTS, OUTPUTS = 40, 48, 32  # no multiple of 32 rows, and inputs of one and a half blocks


def gradients(products: str, step: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, nn.Linear, Tensor, Tensor]:
    """Output and the gradients of input, weight and bias of one layer, then the layer, its input and the error."""
    torch.manual_seed(1)
    layer = nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(ROWS // 4, 4, INPUTS, requires_grad=True)
    error = torch.randn(ROWS // 4, 4, OUTPUTS) * 1e-3
    simulated = copy.deepcopy(layer)
    model = nn.Sequential(simulated)
    lowp.simulate(model, products=products, seed=seed).step = step
    y = model(x)
    y.backward(error)
    of = {name: p.grad for name, p in model.named_parameters()}
    assert x.grad is not None
    weight, bias = of["0.weight"], of["0.bias"]
    assert weight is not None
    assert bias is not None
    return y.detach(), x.grad, weight, bias, layer, x.detach(), error


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_every_product_is_rounded_along_what_it_sums_over(name: str) -> None:
    y, of_x, of_weight, of_bias, layer, x, error = gradients(name)
    weight, rows, errors = layer.weight.detach(), x.reshape(ROWS, -1), error.reshape(ROWS, -1)

    def q(tensor: Tensor, axis: int) -> Tensor:
        return lowp.quantize(tensor, name, axis=axis)

    assert torch.equal(y.reshape(ROWS, -1), q(rows, 1) @ q(weight, 1).t() + layer.bias.detach())
    assert torch.equal(of_x.reshape(ROWS, -1), q(errors, 1) @ q(weight, 0))
    assert torch.equal(of_weight, q(errors, 0).t() @ q(rows, 0))
    assert torch.allclose(of_bias, errors.sum(0))


def test_errors_have_a_format_of_their_own() -> None:
    y, of_x, *_, layer, _, error = gradients("mxfp8_e4m3, errors mxfp8_e5m2")
    assert torch.equal(y, gradients("mxfp8_e4m3")[0])
    errors = lowp.quantize(error.reshape(ROWS, -1), "mxfp8_e5m2", axis=1)
    assert torch.equal(of_x.reshape(ROWS, -1), errors @ lowp.quantize(layer.weight.detach(), "mxfp8_e4m3", axis=0))


def test_square_blocks_give_both_passes_the_same_weight() -> None:
    y, of_x, *_, layer, x, error = gradients("nvfp4, square")
    weight = layer.weight.detach()
    whole = weight.abs().max()  # the scale of the whole tensor is that of the largest number in it
    expected = torch.empty_like(weight)
    for i in range(0, OUTPUTS, 16):
        for j in range(0, INPUTS, 16):
            tile = weight[i : i + 16, j : j + 16]
            # another row holds the largest number, so that this tile alone has the whole tensor's scale
            beside = torch.zeros(1, 256)
            beside[0, 0] = whole
            rounded = lowp.quantize(torch.cat([tile.reshape(1, 256), beside]), _tiles())
            expected[i : i + 16, j : j + 16] = rounded[0].view(16, 16)
    rows, errors = x.reshape(ROWS, -1), error.reshape(ROWS, -1)
    assert torch.equal(y.reshape(ROWS, -1), lowp.quantize(rows, "nvfp4") @ expected.t() + layer.bias.detach())
    assert torch.equal(of_x.reshape(ROWS, -1), lowp.quantize(errors, "nvfp4") @ expected)


def _tiles() -> lowp.formats.BlockFormat:
    return Products("nvfp4", square=True)._tiles


def test_a_rotation_cancels_in_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (4, 16, 64):
        a, b = (torch.randn(ROWS, n, generator=generator) for n in (5, 7))
        rotated = _rotated(a, size, 3).t() @ _rotated(b, size, 3)
        assert torch.allclose(rotated, a.t() @ b, atol=1e-4)
    assert not torch.equal(_rotated(a, 64, 3), _rotated(a, 64, 4))


def test_stochastic_errors_are_keyed_and_have_little_bias() -> None:
    first, again, other = (gradients("nvfp4, stochastic", step) for step in (0, 0, 1))
    assert torch.equal(first[0], gradients("nvfp4")[0])  # the forward pass has nothing that is stochastic
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[2], again[2])
    assert not torch.equal(first[1], other[1])
    many = torch.stack([gradients("nvfp4, stochastic", step)[1] for step in range(200)])
    weight = lowp.quantize(first[4].weight.detach(), "nvfp4", axis=0)
    exact = first[6].reshape(ROWS, -1) @ weight
    off = float((many.mean(0).reshape(ROWS, -1) - exact).norm() / exact.norm())
    nearest = float((gradients("nvfp4")[1].reshape(ROWS, -1) - exact).norm() / exact.norm())
    # Not 0: a block's scale is rounded to nearest, and where it is rounded down the largest number saturates.
    assert off < nearest / 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.ones(2, 64)
    x[0, 40] = bad
    for name in ("mxfp4", "nvfp4", "mxfp8_e5m2"):
        assert not Products(name, stochastic=True).error(x, -1, lowp.Noise(0)).isfinite().all()


def test_names_are_read_as_they_are_written() -> None:
    for text in ("nvfp4", "mxfp8_e4m3, errors mxfp8_e5m2", "nvfp4, stochastic, square, hadamard 16"):
        assert str(Products.parse(text)) == text
    assert str(Products.parse("block(e2m1fn, 16, e4m3fn), square")).endswith(", square")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e4m3fn", "operands are rounded in blocks, and e4m3fn has none"),
        ("nvfp4, hadamard 8", "hadamard mixes 4, 16, 64, 256 samples"),
        ("nvfp4, stochastik", "did you mean 'stochastic'"),
        ("nvfp5", "unknown format"),
    ],
)
def test_mistakes_are_answered_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lowp.simulate(nn.Sequential(nn.Linear(4, 4)), products=text)


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    lowp.simulate(model, products="mxfp4")
    with pytest.raises(ValueError, match="layer '0' multiplies in conv2d"):
        model(torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match="accumulate and products cannot be had together"):
        lowp.simulate(nn.Sequential(nn.Linear(4, 4)), products="mxfp4", accumulate="fp16")


def test_layers_are_left_out_and_described() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    simulation = lowp.simulate(model, products="nvfp4", exempt_first_last=True)
    rows = [row for row in lowp.describe(model).rows if row.role == "products"]
    assert [(row.layer, row.format) for row in rows] == [("1", "nvfp4")]
    simulation.set(products=None)
    x = torch.randn(3, 32)
    before = model(x)
    lowp.restore(model)
    assert torch.equal(before, model(x))


def test_a_saved_simulation_has_its_products_again() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    state = lowp.simulate(model, products="nvfp4, square").state_dict()
    other = nn.Sequential(nn.Linear(32, 32))
    simulation = lowp.simulate(other, weights="e4m3fn")
    simulation.load_state_dict(state)
    assert str(simulation.layers[0].products) == "nvfp4, square"
    del state["formats"]["products"]  # as saved before there were any
    simulation.load_state_dict(state)
    assert simulation.layers[0].products is None
