"""torch's own casts: same values and same codes; which NaN code they choose differs, that it is one does not."""

import pytest
import torch
from peer_inputs import (
    EVERY_16_BIT_FLOAT,
    EVERY_BF16,
    EVERY_FP16,
    assert_same_codes,
    assert_same_values,
    near_decisions,
)
from torch import Tensor

import lowp

TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
every_type = pytest.mark.parametrize("name", TYPES)


def saturates(name: str) -> bool:
    """Whether this torch's cast clamps what is too large, infinities included: newer ones do for e4m3fn, and only there."""
    huge = torch.tensor([torch.finfo(torch.float32).max, torch.inf])
    finite = huge.to(TYPES[name]).float().isfinite()
    assert finite.all() if name == "e4m3fn" and finite.any() else not finite.any()
    return bool(finite.all())


def every_input(name: str) -> Tensor:
    return torch.cat([EVERY_16_BIT_FLOAT, near_decisions(lowp.format(name))])


@every_type
def test_quantize(name: str) -> None:
    x = every_input(name)
    ours = lowp.quantize(x, name, saturate=saturates(name))
    assert_same_values(x, ours, x.to(TYPES[name]).float())


@every_type
@pytest.mark.parametrize("x", [EVERY_FP16, EVERY_BF16], ids=["fp16", "bf16"])
def test_quantize_16_bit_tensors(name: str, x: Tensor) -> None:
    ours = lowp.quantize(x, name, saturate=saturates(name))
    assert ours.dtype == x.dtype
    assert_same_values(x, ours, x.to(TYPES[name]).to(x.dtype))


@every_type
def test_encode(name: str) -> None:
    x = every_input(name)
    theirs = x.to(TYPES[name])
    ours = lowp.encode(x, name, saturate=saturates(name))
    assert_same_values(x, ours.view(TYPES[name]).float(), theirs.float())
    number = ~theirs.float().isnan()
    assert_same_codes(x[number], ours[number], theirs.view(ours.dtype)[number])


@every_type
def test_decode(name: str) -> None:
    integer = torch.uint8 if TYPES[name].itemsize == 1 else torch.int16
    codes = torch.arange(1 << 8 * TYPES[name].itemsize).to(integer)
    assert_same_values(codes.double(), lowp.decode(codes, name), codes.view(TYPES[name]).float())


def test_e8m0fnu() -> None:
    """torch's e8m0fnu drops the sign, takes zero to 2^-127, rounds ties away and, as ml_dtypes does, the subnormal numbers
    between 2^-127 and its upper tie to 2^-126. We follow the format: no sign and no zero means NaN."""
    x = torch.cat([EVERY_16_BIT_FLOAT, near_decisions(lowp.format("e8m0fnu"))])
    theirs = x.to(torch.float8_e8m0fnu).float()
    wrong = (x.abs() > 2.0**-127) & (x.abs() < 1.5 * 2.0**-127)
    usual = (x > 0) & ~wrong | x.isnan()
    ours = lowp.quantize(x, "e8m0fnu", "nearest_away")
    assert_same_values(x[usual], ours[usual], theirs[usual])
    codes = lowp.encode(x, "e8m0fnu", "nearest_away")
    assert_same_codes(x[usual], codes[usual], x.to(torch.float8_e8m0fnu).view(torch.uint8)[usual])

    assert_same_values(x[x < 0], theirs[x < 0], (-x[x < 0]).to(torch.float8_e8m0fnu).float())
    assert (theirs[x == 0] == 2.0**-127).all()
    assert (theirs[wrong] == 2.0**-126).all()
    assert ours[x <= 0].isnan().all()
    assert (ours[wrong & (x > 0)] == 2.0**-127).all()


def test_decode_e8m0fnu() -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert_same_values(codes.double(), lowp.decode(codes, "e8m0fnu"), codes.view(torch.float8_e8m0fnu).float())
