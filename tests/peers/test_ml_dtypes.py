"""ml_dtypes is the reference of the JAX world for every float of 8 bits and fewer: same values, same codes, NaN codes too."""

import ml_dtypes
import numpy as np
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
from lowp.formats import reference

TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3": ml_dtypes.float8_e4m3,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}
INTEGERS = {"int4": ml_dtypes.int4, "int2": ml_dtypes.int2}
WITHOUT_NAN = ("e3m2fn", "e2m3fn", "e2m1fn")

# ml_dtypes rounds the ties of e8m0fnu away from zero; ours, like those of every format, go to the even code by default.
MODES = {name: "nearest_away" if name == "e8m0fnu" else "nearest" for name in TYPES}

every_type = pytest.mark.parametrize("name", TYPES)


def cast(x: Tensor, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):  # casts of NaN and overflows set the processor's flags, as they should
        return x.numpy().astype(TYPES[name])


def values_of(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes.astype(np.float32))


def bits_of(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes.view(np.uint8 if codes.itemsize == 1 else np.int16))


def comparable(x: Tensor, name: str) -> Tensor:
    """The inputs on which the two mean the same thing; the tests below say what happens on the others."""
    if name in WITHOUT_NAN:
        return x[~x.isnan()]
    if name == "e8m0fnu":
        return x[~in_rounded_twice(x)]
    return x


def in_rounded_twice(x: Tensor) -> Tensor:
    """Subnormal fp32 numbers closer to 2^-127 than to 2^-126, which ml_dtypes (and torch) make 2^-126."""
    return (x > 2.0**-127) & (x < 1.5 * 2.0**-127)


def every_input(name: str) -> Tensor:
    return comparable(torch.cat([EVERY_16_BIT_FLOAT, near_decisions(lowp.format(name))]), name)


def test_every_float_type_of_ml_dtypes_is_compared() -> None:
    floats = {getattr(ml_dtypes, name) for name in dir(ml_dtypes) if name.startswith(("float", "bfloat"))}
    assert floats == set(TYPES.values())


@every_type
def test_quantize(name: str) -> None:
    x = every_input(name)
    ours = lowp.quantize(x, name, MODES[name])
    assert_same_values(x, ours, values_of(cast(x, name)))


@every_type
@pytest.mark.parametrize("x", [EVERY_FP16, EVERY_BF16], ids=["fp16", "bf16"])
def test_quantize_16_bit_tensors(name: str, x: Tensor) -> None:
    x = comparable(x, name)
    ours = lowp.quantize(x, name, MODES[name])
    assert ours.dtype == x.dtype
    assert_same_values(x, ours, values_of(cast(x.float(), name)).to(x.dtype))


@every_type
def test_encode(name: str) -> None:
    x = every_input(name)
    ours = lowp.encode(x, name, MODES[name])
    assert_same_codes(x, ours, bits_of(cast(x, name)))


@every_type
def test_decode(name: str) -> None:
    fmt = lowp.format(name)
    codes = torch.arange(1 << fmt.bits).to(torch.uint8 if fmt.bits <= 8 else torch.int16)
    theirs = codes.numpy().view(TYPES[name])
    assert_same_values(codes.double(), lowp.decode(codes, name), values_of(theirs))


@every_type
def test_the_reference(name: str) -> None:
    fmt = lowp.format(name)
    x = comparable(near_decisions(fmt), name)
    x = x[:: max(1, x.numel() // 700)]
    ours = torch.tensor([reference.round(value, fmt, MODES[name]) for value in x.double().tolist()])
    assert_same_values(x, ours, values_of(cast(x, name)))
    codes = torch.tensor([reference.encode(value, fmt, MODES[name]) for value in x.double().tolist()])
    assert_same_codes(x, codes.to(bits_of(cast(x, name)).dtype), bits_of(cast(x, name)))


# Where the two differ, and that this is still so


@pytest.mark.parametrize("name", WITHOUT_NAN)
def test_nan_without_a_code_for_it(name: str) -> None:
    """ml_dtypes turns NaN silently into a zero, of the other sign. We keep it in a tensor and refuse to encode it."""
    nans = torch.tensor([torch.nan, -torch.nan])
    assert_same_values(nans, values_of(cast(nans, name)), torch.tensor([-0.0, 0.0]))
    assert lowp.quantize(nans, name).isnan().all()
    with pytest.raises(ValueError, match="NaN"):
        lowp.encode(nans, name)
    assert lowp.encode(nans, name, nan="zero").tolist() == [0, 0]


def test_e8m0fnu_ties() -> None:
    ties = 1.5 * torch.exp2(torch.arange(-126.0, 127.0))
    assert_same_values(ties, lowp.quantize(ties, "e8m0fnu", "nearest_away"), values_of(cast(ties, "e8m0fnu")))
    codes = lowp.encode(ties, "e8m0fnu")
    assert (codes % 2 == 0).all()


def test_e8m0fnu_of_subnormal_numbers() -> None:
    """ml_dtypes takes 2^-127 (1 + e), a subnormal fp32 number, to 2^-126 for every e > 0. The nearest power is 2^-127."""
    x = torch.tensor([2.0**-127 * (1 + 2.0**-22), 2.0**-127 * 1.49])
    assert in_rounded_twice(x).all()
    assert (values_of(cast(x, "e8m0fnu")) == 2.0**-126).all()
    assert (lowp.quantize(x, "e8m0fnu") == 2.0**-127).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1fn"])
def test_float64_is_rounded_once(name: str) -> None:
    """ml_dtypes casts float64 to float32 first, which makes a tie of a number just above one; ours goes up, as it should."""
    above_tie = torch.tensor([1 + lowp.format(name).epsilon / 2 + 2.0**-40], dtype=torch.float64)
    assert values_of(cast(above_tie, name)).item() == 1.0
    assert lowp.quantize(above_tie, name).item() == 1 + lowp.format(name).epsilon


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    """ml_dtypes drops the fraction and wraps around beyond the range; inside it that is our toward_zero."""
    fmt = lowp.format(name)
    x = EVERY_16_BIT_FLOAT[EVERY_16_BIT_FLOAT.abs() <= fmt.max]
    theirs = x.numpy().astype(INTEGERS[name]).astype(np.int8)
    ours = lowp.quantize(x, name, "toward_zero")
    assert_same_values(x, ours, torch.from_numpy(theirs).float())
    codes = lowp.encode(x, name, "toward_zero")
    assert_same_codes(x, codes, torch.from_numpy(theirs) & (1 << fmt.bits) - 1)


@pytest.mark.parametrize("name", INTEGERS)
def test_decode_integers(name: str) -> None:
    codes = torch.arange(1 << lowp.format(name).bits, dtype=torch.uint8)
    theirs = codes.numpy().view(np.int8).astype(INTEGERS[name]).astype(np.float32)
    assert_same_values(codes.double(), lowp.decode(codes, name), torch.from_numpy(theirs))
