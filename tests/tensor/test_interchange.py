"""Blocks along any axis, codes in torch's narrow dtypes, the ceiling rule, and the order of scales that cuBLAS reads."""

import math

import pytest
import torch

import lowp

NAMES = ("mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4", "block(int8, 5, bf16)", "mxfp6_e3m2_rceil")
every_name = pytest.mark.parametrize("name", NAMES)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(3 * torch.randn(shape, generator=generator))


# axis


@every_name
@pytest.mark.parametrize("shape", [(40, 3), (2, 64, 3), (3, 5, 2, 7), (33,), (0, 4), (4, 0)], ids=str)
def test_blocks_along_any_axis(name, shape):
    x = random(*shape)
    for axis in range(-x.dim(), x.dim()):
        moved = x.movedim(axis, -1).contiguous()
        wanted = lowp.quantize(moved, name).movedim(-1, axis)
        assert torch.equal(lowp.quantize(x, name, axis=axis), wanted)
        codes, reference = lowp.encode(x, name, axis=axis), lowp.encode(moved, name)
        assert torch.equal(codes.elements, reference.elements.movedim(-1, axis))
        assert torch.equal(codes.scales, reference.scales.movedim(-1, axis))
        assert torch.equal(lowp.decode(codes, name, axis=axis), wanted)
        packed = lowp.encode(x, name, axis=axis, pack=True)
        size = shape[axis] if lowp.format(name).element.bits < 8 else None
        assert torch.equal(lowp.decode(packed, name, axis=axis, size=size), wanted)


def test_draws_count_elements_in_their_own_order():
    """Whichever way blocks lie: here they have the same scales in both, so the same draws give the same numbers."""
    x = torch.full((32, 32), 1.3)
    x[:, 0] = x[0] = 5.0
    across, down = (lowp.quantize(x, "mxfp4", "stochastic", seed=3, axis=axis) for axis in (-1, 0))
    assert torch.equal(across, down)
    assert len(across.unique()) == 4


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: lowp.quantize(torch.ones(3, 4), "mxfp4", axis=2), r"there is no axis 2 in a tensor of shape \(3, 4\)"),
        (
            lambda: lowp.quantize(torch.ones(3, 4), "e4m3fn", axis=0),
            r"axis is for block formats; in e4m3fn every number stands alone",
        ),
        (lambda: lowp.encode(torch.ones(3, 4), "int8", axis=0), r"axis is for block formats"),
        (lambda: lowp.decode(torch.ones(3, 4, dtype=torch.uint8), "int8", axis=0), r"axis is for block formats"),
    ],
)
def test_wrong_axes(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# The ceiling rule


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"])
def test_rceil_is_the_smallest_power_of_two_that_holds_the_largest(name):
    fmt = lowp.format(f"{name}_rceil")
    assert str(fmt) == f"{name}_rceil"
    assert lowp.format(fmt.text) == fmt
    largest = fmt.element.max
    for value in (largest, math.nextafter(largest, math.inf), math.nextafter(largest, 0), 1.0, 1e-3, 3e30):
        x = torch.tensor([value, -value / 3], dtype=torch.float64)
        exponent = lowp.encode(x, fmt).scales.item() - 127
        assert largest * 2.0**exponent >= value > largest * 2.0 ** (exponent - 1)
        assert lowp.encode(x, fmt).scales.item() - lowp.encode(x, name).scales.item() in (0, 1)


def test_rceil_does_not_saturate():
    x = torch.tensor([7.9] + [0.1] * 31)
    assert lowp.quantize(x, "mxfp4")[0] == 6
    assert lowp.quantize(x, "mxfp4_rceil")[0] == 8


def test_rceil_is_for_powers_of_two():
    with pytest.raises(ValueError, match="rceil is a rule for power-of-two scales, and e4m3fn has a mantissa"):
        lowp.format("block(e2m1fn, 16, e4m3fn, rceil)")


# Dtypes


@pytest.mark.parametrize(
    ("name", "element", "scale"),
    [
        ("mxfp8_e4m3", torch.float8_e4m3fn, torch.float8_e8m0fnu),
        ("mxfp8_e5m2", torch.float8_e5m2, torch.float8_e8m0fnu),
        ("mxfp4", torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
        ("nvfp4", torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        ("block(e4m3fnuz, 64, fp32)", torch.float8_e4m3fnuz, torch.float32),
        ("block(e5m2fnuz, 16, bf16)", torch.float8_e5m2fnuz, torch.bfloat16),
    ],
)
def test_codes_are_the_bytes_of_torch_dtypes(name, element, scale):
    x = random(6, 64)
    codes = lowp.encode(x, name, pack=True)
    typed = codes._replace(elements=codes.elements.view(element), scales=codes.scales.view(scale))
    wanted = lowp.quantize(x, name)
    assert torch.equal(lowp.decode(typed, name), wanted)
    assert torch.equal(lowp.decode(typed, name, dtype=torch.float64).float(), wanted)
    if element != torch.float4_e2m1fn_x2:  # torch's own reading of them
        whole = 1.0 if codes.tensor_scale is None else codes.tensor_scale.double()
        size = lowp.format(name).size
        scales = typed.scales.double().repeat_interleave(size, -1)[:, : x.shape[-1]]
        assert torch.equal((typed.elements.double() * scales * whole).float(), wanted)


def test_plain_formats_take_dtypes_too():
    x = random(50)
    assert torch.equal(lowp.decode(x.to(torch.float8_e5m2), "e5m2"), x.to(torch.float8_e5m2).float())
    assert torch.equal(lowp.decode(x.bfloat16(), "bf16"), x.bfloat16().float())
    packed = lowp.encode(x, "e2m1fn", pack=True).view(torch.float4_e2m1fn_x2)
    assert torch.equal(lowp.decode(packed, "e2m1fn"), lowp.quantize(x, "e2m1fn"))
    with pytest.raises(TypeError, match=r"codes of e4m3fn are torch\.uint8 tensors, not torch\.float8_e5m2"):
        lowp.decode(x.to(torch.float8_e5m2), "e4m3fn")


def test_strange_scales_of_others_are_read_as_ieee_has_it():
    """Negative, zero, infinite and NaN ones, which encode never writes."""
    scales = torch.tensor([-2.0, 0.0, -0.0, math.inf, math.nan, 3.0]).to(torch.bfloat16)
    elements = torch.tensor([1.0, 0.0, -0.0, -1.5, math.inf, math.nan]).to(torch.float8_e5m2)
    rows, columns = elements.repeat(6, 1).T.contiguous(), scales.repeat(6, 1)
    got = lowp.decode(lowp.BlockCodes(rows, columns, None), "block(e5m2, 1, bf16)")
    wanted = rows.float() * columns.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


# 128 x 4


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (129, 5), (256, 8), (300, 3), (0, 4)])
def test_scales_in_tiles(rows, columns):
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    tiles = lowp.to_128x4(scales)
    assert tiles.numel() == math.ceil(rows / 128) * math.ceil(columns / 4) * 512
    assert torch.equal(lowp.from_128x4(tiles, rows, columns), scales)
    across = math.ceil(columns / 4)
    for row, column in [(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 2)] if rows else []:
        tile = (row // 128) * across + column // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4  # cuBLAS's own formula
        assert tiles[place] == scales[row, column]
    assert int(tiles.long().sum()) == int(scales.long().sum()), "the rest is zeros"


def test_tiles_of_more_dimensions_and_dtypes():
    scales = lowp.encode(random(3, 50, 96), "mxfp8_e4m3").scales
    tiles = lowp.to_128x4(scales.view(torch.float8_e8m0fnu))
    assert tiles.dtype == torch.float8_e8m0fnu
    assert torch.equal(lowp.from_128x4(tiles.view(torch.uint8), 150, 3), scales.flatten(0, 1))
    with pytest.raises(ValueError, match="the layout is for matrices of 1-byte scales"):
        lowp.to_128x4(torch.zeros(4))
    with pytest.raises(ValueError, match=r"5 x 3 scales are 1 tiles of 512 bytes, not 4 of torch\.uint8"):
        lowp.from_128x4(torch.zeros(4, dtype=torch.uint8), 5, 3)
