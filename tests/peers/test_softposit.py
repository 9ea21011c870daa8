"""SoftPosit, the posit arithmetic in C of the people who made posits: the same code for every number, the same number back.

Its posit8 has no exponent bits and its posit16 has one (the drafts before the 2022 standard); posit_2 is of any width with
two, as in the standard.
"""

import pytest
import softposit
import torch
from peer_inputs import EVERY_16_BIT_FLOAT, assert_same_codes, assert_same_values
from torch import Tensor

import lowp
from lowp.formats import PositFormat, reference

WIDTHS = range(3, 17)
FORMATS = [PositFormat(8, 0), PositFormat(16, 1), *(PositFormat(width) for width in WIDTHS)]
EXHAUSTIVE = [PositFormat(8, 0), PositFormat(16, 1), PositFormat(6), PositFormat(8), PositFormat(16)]

every_posit = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def code_of(x: float, fmt: PositFormat) -> int:
    match fmt.exponent_size:
        case 0:
            return softposit.convertDoubleToP8(x).v
        case 1:
            return softposit.convertDoubleToP16(x).v
        case _:
            return softposit.convertDoubleToPX2(x, fmt.width).v >> (32 - fmt.width)  # kept in the upper bits


def value_of(code: int, fmt: PositFormat) -> float:
    posit, decode = {
        0: (softposit.posit8_t, softposit.convertP8ToDouble),
        1: (softposit.posit16_t, softposit.convertP16ToDouble),
        2: (softposit.posit_2_t, softposit.convertPX2ToDouble),
    }[fmt.exponent_size]
    held = posit()
    held.v = code << (32 - fmt.width) if fmt.exponent_size == 2 else code
    return decode(held)


def codes_of(x: Tensor, fmt: PositFormat) -> Tensor:
    return as_codes([code_of(value, fmt) for value in x.double().tolist()], fmt)


def as_codes(codes: list[int], fmt: PositFormat) -> Tensor:
    return torch.tensor(codes).to(torch.uint8 if fmt.bits <= 8 else torch.int16)


def near_ties(fmt: PositFormat, most: int = 4000) -> Tensor:
    """Every posit and, between two of them, the posit of one more bit at which rounding changes over; and their neighbours."""
    values = torch.tensor(fmt.values, dtype=torch.float64)
    ties = torch.tensor([fmt.decode_body(2 * rank + 1, fmt.width) for rank in range(1, fmt.max_code)], dtype=torch.float64)
    points = torch.cat([values, ties, -ties, torch.tensor([2 * fmt.max, fmt.smallest / 2, -fmt.smallest / 2])])
    points = points[:: max(1, points.numel() // most)]
    infinity = torch.tensor(torch.inf, dtype=torch.float64)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])


@pytest.mark.parametrize("fmt", EXHAUSTIVE, ids=str)
def test_every_16_bit_float(fmt: PositFormat) -> None:
    x = EVERY_16_BIT_FLOAT.unique()  # the two sets share some; one NaN is left of many
    codes = codes_of(x, fmt)
    assert_same_codes(x, lowp.encode(x, fmt), codes)
    values = lowp.decode(codes, fmt)
    assert_same_values(x, lowp.quantize(x, fmt), values)


@every_posit
def test_around_ties(fmt: PositFormat) -> None:
    x = near_ties(fmt)
    codes = codes_of(x, fmt)
    assert_same_codes(x, lowp.encode(x, fmt), codes)
    some = slice(None, None, max(1, x.numel() // 200))
    ours = as_codes([reference.encode(value, fmt) for value in x[some].tolist()], fmt)
    assert_same_codes(x[some], ours, codes[some])


@every_posit
def test_decode(fmt: PositFormat) -> None:
    """Every code. SoftPosit gives NaR as infinity, having no better double for it; ours is NaN."""
    theirs = torch.tensor([value_of(code, fmt) for code in fmt.codes], dtype=torch.float64)
    assert theirs[fmt.nan_code].isinf()
    theirs[fmt.nan_code] = torch.nan
    codes = as_codes(list(fmt.codes), fmt)
    ours = lowp.decode(codes, fmt, dtype=torch.float64)
    assert_same_values(codes.double(), ours, theirs)


@every_posit
def test_not_numbers_and_extremes(fmt: PositFormat) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, -1e-30])
    assert_same_codes(x, lowp.encode(x, fmt), codes_of(x, fmt))
