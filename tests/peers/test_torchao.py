"""Bytes of MX and NVFP4 against torchao's: elements, scales, their order; and the cases where the two differ, by name."""

import warnings

import pytest
import torch
from torch import Tensor

import lowp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

FLOOR, RCEIL = ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL
TYPES = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp4": torch.float4_e2m1fn_x2,
}
every_type = pytest.mark.parametrize("name", TYPES)
every_rule = pytest.mark.parametrize("rule", [FLOOR, RCEIL], ids=["floor", "rceil"])


def rows(dtype: torch.dtype) -> Tensor:
    """Blocks of all sizes from 2^-100 to 2^100: normal numbers, ones at the edge of a binade, an outlier, zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) * torch.exp2(torch.randint(-100, 100, (400, 1), generator=generator).float())
    x[:100] = torch.randn(100, 64, generator=generator)
    x[0] = 0.0
    x[1, ::2] *= 1e-4
    x[2] = 2.0 - 2.0**-7
    for row, largest in enumerate((448.0, 57344.0, 28.0, 7.5, 6.0)):
        x[3 + row, 0] = largest
        x[10 + row, 0] = largest * (1 + 2.0**-7)
        x[20 + row, 0] = largest * (1 - 2.0**-7)
    return x.to(dtype)


def elements_of(codes: lowp.BlockCodes, name: str) -> Tensor:
    """As torchao lays them out: two 4-bit codes in a byte, 6-bit codes in a byte each."""
    return lowp.pack(codes.elements, "e2m1fn") if name == "mxfp4" else codes.elements


@every_type
@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_bytes(name: str, rule: ScaleCalculationMode, dtype: torch.dtype) -> None:
    x = rows(dtype)
    scales, elements = to_mx(x, TYPES[name], 32, rule)
    ours = lowp.encode(x, name if rule is FLOOR else f"{name}_rceil")
    zeros = x.unflatten(-1, (-1, 32)).abs().amax(-1) == 0  # the scale of a block of zeros: torchao's RCEIL agrees here too
    assert torch.equal(ours.scales[~zeros], scales.view(torch.uint8)[~zeros])
    assert torch.equal(ours.scales[zeros], torch.zeros_like(ours.scales[zeros]))
    assert torch.equal(elements_of(ours, name), elements.view(torch.uint8))


@every_type
@every_rule
def test_we_decode_theirs_and_they_ours(name: str, rule: ScaleCalculationMode) -> None:
    x = rows(torch.bfloat16)
    fmt = lowp.format(name)
    scales, elements = to_mx(x, TYPES[name], 32, rule)
    theirs = to_dtype(elements, scales, TYPES[name], 32, torch.float32)
    typed = elements.view(torch.float4_e2m1fn_x2) if name == "mxfp4" else elements  # to_mx leaves pairs in uint8
    assert torch.equal(lowp.decode(lowp.BlockCodes(typed, scales), fmt), theirs)
    codes = lowp.encode(x, fmt if rule is FLOOR else f"{name}_rceil")
    ours = elements_of(codes, name).view(elements.dtype)
    assert torch.equal(to_dtype(ours, codes.scales.view(torch.float8_e8m0fnu), TYPES[name], 32, torch.float32), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_bytes(dtype: torch.dtype) -> None:
    """With torchao's scale of the tensor, which is ours: the largest magnitude / (6 * 448), rounded to float32.

    torchao multiplies by a reciprocal in float32, three roundings in all: where that lands on a tie between two elements, or a
    scale on a tie, it may go the other way. On these numbers that happens to none of the scales and to few elements.
    """
    x = (torch.randn(256, 64, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    scale = per_tensor_amax_to_scale(x.abs().amax().float())
    scales, packed = nvfp4_quantize(x, per_tensor_scale=scale)
    ours = lowp.encode(x, "nvfp4", pack=True)
    assert ours.tensor_scale == scale
    assert torch.equal(ours.scales, scales.reshape(ours.scales.shape).view(torch.uint8))
    mine, other = (lowp.unpack(codes, "e2m1fn", 64) for codes in (ours.elements, packed))
    differ = mine != other
    assert differ.float().mean() < 1e-3
    unit = lowp.decode(ours.scales, "e4m3fn").double().repeat_interleave(16, -1) * scale.double()
    quotient = (x.double() / unit).abs()[differ]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    assert ((quotient[:, None] / ties - 1).abs().amin(-1) < 2.0**-22).all(), "only next to a tie"
    theirs = lowp.BlockCodes(packed.view(torch.float4_e2m1fn_x2), scales.reshape(ours.scales.shape), scale)
    assert torch.equal(lowp.decode(theirs, "nvfp4")[~differ], lowp.quantize(x.float(), "nvfp4")[~differ])


@pytest.mark.parametrize(("height", "width"), [(128, 4), (130, 5), (1, 1), (256, 12), (77, 32)])
def test_swizzled_scales(height: int, width: int) -> None:
    scales = torch.randint(0, 255, (height, width), dtype=torch.uint8)
    tiles = lowp.to_128x4(scales)
    assert torch.equal(tiles, to_blocked(scales))
    assert torch.equal(from_blocked(tiles, height, width), lowp.from_128x4(tiles, height, width))


# Where they differ


def test_blocks_that_are_not_finite() -> None:
    """torchao's FLOOR takes infinity for the maximum, and its exponent 128 for the block's: in mxfp4 the scale is 2^126 and the
    infinity decodes to 5.1e38, infinite in float32; the finite elements beside it become zeros. Ours is NaN, scale and all.
    NaN is the scale's NaN in both. In mxfp8, whose elements have NaN, ours stays in the element and the others stay numbers."""
    x = torch.ones(1, 32)
    x[0, 3] = torch.inf
    scales, _ = to_mx(x, torch.float4_e2m1fn_x2, 32, FLOOR)
    assert scales.view(torch.uint8).item() == 253
    assert lowp.encode(x, "mxfp4").scales.item() == 255
    x[0, 3] = torch.nan
    for name in TYPES:
        scales, _ = to_mx(x, TYPES[name], 32, FLOOR)
        assert scales.view(torch.uint8).item() == 255
        assert lowp.encode(x, name).scales.item() == (255 if "mxfp8" not in name else 127 - lowp.format(name).max_exponent)


def test_the_smallest_scale() -> None:
    """Blocks whose scale is 2^-127: torchao divides by 2^-126 (FLOOR) or by 1 (RCEIL) and writes 2^-127; ours divides by it."""
    x = torch.full((1, 32), 2.0**-127)
    scales, elements = to_mx(x, torch.float8_e4m3fn, 32, FLOOR)
    ours = lowp.encode(x, "mxfp8_e4m3")
    assert scales.view(torch.uint8).item() == ours.scales.item() == 0
    assert lowp.decode(ours, "mxfp8_e4m3")[0, 0] == 2.0**-127
    assert lowp.decode(lowp.BlockCodes(elements, scales), "mxfp8_e4m3")[0, 0] == 2.0**-128


def test_nvfp4_scales_of_quiet_blocks() -> None:
    """torchao keeps scales at 2^-6 and above, the smallest normal number of e4m3; ours go down to 2^-9."""
    x = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1e-6)], -1)
    scale = per_tensor_amax_to_scale(x.abs().amax())
    scales, _ = nvfp4_quantize(x, per_tensor_scale=scale)
    assert scales.flatten()[1].float() == 2.0**-6
    assert lowp.decode(lowp.encode(x, "nvfp4").scales, "e4m3fn").flatten()[1] == 2.0**-9
