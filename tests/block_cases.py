"""Numbers on which kernels of block formats are compared with the integers of block.py, bit for bit, NaN's sign included."""

import math
from functools import lru_cache

import torch

import lowp
from lowp.formats import BlockFormat
from lowp.formats.block import NAMES
from lowp.tensor import block

OTHERS = (
    *("block(int8, 64, fp32)", "block(e4m3fn, 5, bf16)", "block(int4, 16, e4m3finite)", "block(e3m0, 8, e5m0)"),
    *("block(e4m3fnuz, 32, e5m2fnuz)", "block(int8, 16, e5m2, fp32)", "block(e3m4, 7, e4m0)", "block(int3, 8, fp16)"),
)
FORMATS = (*NAMES, *(lowp.format(text) for text in OTHERS))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@lru_cache(maxsize=1)
def numbers() -> torch.Tensor:
    """float32: any bits; blocks of any exponent, wide and narrow; ties; what is tiny, huge, zero or not finite."""
    draw = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int64)

    parts = [integers(-(2**31), 2**31, 4096).to(torch.int32).view(torch.float32)]
    for binades in (1, 8, 40):
        exponent = (integers(0, 255, 64, 1) - integers(0, binades + 1, 64, 64)).clamp(0, 254)
        fraction = integers(0, 1 << 23, 64, 64)
        fraction = torch.where(integers(0, 2, 64, 64) > 0, fraction >> 18 << 18, fraction)  # ties are among the short ones
        bits = (integers(-1, 1, 64, 64) << 31) + (exponent << 23) + fraction
        parts.append(bits.flatten().to(torch.int32).view(torch.float32))
    usual, ties = torch.randn(1024, generator=draw), integers(-64, 64, 1024).float() / 8
    special = usual.clone()
    special[::77], special[5::101], special[7::111], special[9::59] = math.nan, math.inf, -math.inf, -math.nan
    largest = torch.full((96,), torch.finfo(torch.float32).max)
    parts += [usual, usual * 2.0**-140, usual * 2.0**-126, usual * 2.0**124, ties, ties * 2.0**-130, ties * 1.2345678]
    return torch.cat([*parts, special, -torch.zeros(96), largest, torch.full((96,), 2.0**-149), torch.full((96,), math.inf)])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGERS[x.dtype.itemsize])


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    found = found.cpu()
    differ = bits(found) != bits(wanted)
    assert not differ.any(), (int(differ.sum()), found[differ][:4], wanted[differ][:4])


def check(
    x: torch.Tensor, fmt: BlockFormat, saturate: bool, nan: str, axis: int = -1, packs: tuple[bool, ...] = (False, True)
) -> None:
    """The public functions on x, by kernels or not, on its device, against plain integers on a CPU."""
    plain = x.cpu()
    same(
        lowp.quantize(x, fmt, saturate=saturate, axis=axis), block.quantize(plain, fmt, "nearest", None, saturate, axis, False)
    )
    for pack in packs:
        codes = lowp.encode(x, fmt, saturate=saturate, nan=nan, axis=axis, pack=pack)
        wanted = block.encode(plain, fmt, "nearest", None, nan, pack, saturate, axis, False)
        for found, right in zip(codes, wanted, strict=True):
            assert (found is None) == (right is None)
            if found is not None:
                same(found, right)
        size = x.shape[axis] if pack and fmt.element.bits < 8 else None
        found = lowp.decode(codes, fmt, dtype=x.dtype, size=size, axis=axis)
        same(found, block.decode(wanted, fmt, x.dtype, size, axis, False))


def check_stochastic(
    x: torch.Tensor, fmt: BlockFormat, saturate: bool, nan: str, noise: lowp.Noise, axis: int = -1, pack: bool = False
) -> None:
    """Stochastic rounding of x, by kernels or not, on its device, against plain integers on a CPU."""
    plain = x.cpu()
    same(
        lowp.quantize(x, fmt, "stochastic", seed=noise, saturate=saturate, axis=axis),
        block.quantize(plain, fmt, "stochastic", noise, saturate, axis, False),
    )
    codes = lowp.encode(x, fmt, "stochastic", seed=noise, saturate=saturate, nan=nan, axis=axis, pack=pack)
    wanted = block.encode(plain, fmt, "stochastic", noise, nan, pack, saturate, axis, False)
    for found, right in zip(codes, wanted, strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            same(found, right)
