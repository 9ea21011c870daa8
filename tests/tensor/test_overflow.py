"""One definition of overflow (tensor/overflow.py), against the exact reference and wherever it is counted."""

import math
from fractions import Fraction
from operator import attrgetter

import pytest
import torch

import lowp
from lowp.cli.quantize_numbers import note
from lowp.cli.rounder import FormatRounder
from lowp.formats import BlockFormat, FixedFormat, FloatFormat, reference
from lowp.formats import format as parse_format
from lowp.health.measures import measure, summary
from lowp.simulation import simulate
from lowp.tensor.overflow import border, overflows
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Part, Shard
from lowp.wire.report import Meter

PLAIN = [fmt for fmt in lowp.FORMATS if not isinstance(fmt, BlockFormat) and fmt.bits <= 16]
OTHERS = [parse_format(text) for text in ("e4m3fn_ns", "e3m0", "e5m2_u", "e8m0fnu", "binary8p3se", "fixed3.4", "e2m1fn_ns")]


@pytest.mark.parametrize("fmt", [fmt for fmt in (*PLAIN, *OTHERS) if isinstance(fmt, (FloatFormat, FixedFormat))], ids=str)
def test_overflow_is_what_rounds_beyond_the_largest_value(fmt):
    """The reference rounds to nearest on a grid that goes on: what becomes more than the largest value overflows."""
    tie = border(fmt, negative=False)[0]
    for number in (fmt.max, math.nextafter(tie, 0), tie, math.nextafter(tie, math.inf), 2 * tie):
        if not math.isfinite(number):
            continue
        near = reference.neighbours(Fraction(number), fmt)
        goes_up = reference._goes_up(Fraction(number), near, lowp.Rounding.NEAREST, False, None)
        expected = goes_up and near.high > Fraction(fmt.max)
        both = torch.tensor([number, -number], dtype=torch.float64)
        assert overflows(both, fmt).tolist() == [expected, expected and fmt.signed], number
        if not math.isfinite(fmt.overflow):
            rounded = lowp.quantize(both, fmt)
            assert overflows(both, fmt, rounded).tolist() == [expected, expected and fmt.signed], number


@pytest.mark.parametrize("fmt", [*PLAIN, *OTHERS, *map(parse_format, ("mxfp4", "nvfp4", "mxfp8_e4m3"))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_neither_infinities_nor_nan_nor_what_fits_overflows(fmt, dtype):
    numbers = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30], dtype=dtype)
    assert not overflows(numbers, fmt).any()
    assert overflows(numbers[:0], fmt).shape == (0,)
    assert overflows(numbers[0], fmt).shape == ()


def test_a_result_that_was_rounded_otherwise_decides():
    """Stochastic rounding may take 460 to 480, which is NaN, and 470 to 448."""
    fmt, numbers = parse_format("e4m3fn"), torch.tensor([460.0, 470.0, 448.0, 1e9]).repeat(200)
    rounded = lowp.quantize(numbers, fmt, "stochastic", seed=1)
    assert torch.equal(overflows(numbers, fmt, rounded), rounded.isnan())
    assert rounded[0::4].isnan().any()
    assert not rounded[1::4].isnan().all()
    inwards = lowp.quantize(numbers, fmt, "toward_zero")
    assert not overflows(numbers, fmt, inwards).any()


def test_elements_of_blocks_overflow_in_units_of_their_scale():
    """mxfp4 takes the scale from the exponent of the largest number: 7.5 counts in ones, and ends at 6."""
    block = torch.zeros(2, 32)
    block[0, :4] = torch.tensor([7.5, 7.0, 6.9, -7.0])
    block[1, :2] = torch.tensor([8.0, 6.9])  # in units of 2
    expected = torch.zeros_like(block, dtype=torch.bool)
    expected[0, [0, 1, 3]] = True
    for scale in (1.0, 2.0**-100, 2.0**90):
        assert torch.equal(overflows(block * scale, parse_format("mxfp4")), expected)
    assert not overflows(torch.randn(8, 64), parse_format("nvfp4")).any()  # scales are rounded: 6 / 6.4 at most


@pytest.mark.parametrize(("number", "expected"), [(448.0, 0), (450.0, 0), (464.0, 0), (465.0, 1), (-465.0, 1), (1e9, 1)])
@pytest.mark.parametrize("saturates", [False, True])
def test_everybody_counts_the_same(number, expected, saturates):
    """450 in e4m3fn used to overflow for `lowp quantize` and on the wire, and not for health and simulate."""
    fmt, x = parse_format("e4m3fn"), torch.tensor([number, 1.0])
    assert int(overflows(x, fmt).sum()) == expected

    rounder = FormatRounder(fmt, saturate=saturates)
    beyond = rounder.overflowed(x.double(), rounder.quantize(x.double()))
    assert int(beyond.sum()) == expected
    said = note(number, float(rounder.quantize(x)[0]), bool(beyond[0]), rounder.saturates)
    assert said == (("saturated" if saturates else "overflow") if expected else "exact" if number == 448 else "rounded")

    assert summary(measure(x, fmt).tolist())["overflow"] == expected / 2

    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    simulation = simulate(model, activations="e4m3fn", scale="none", count_overflow=True)
    model(x.abs())
    assert int(simulation.overflow_counts().sum()) == expected

    meter = Meter(whole=True)
    codec = codec_of("e4m3fn", scale="none")
    messages = Messages([Shard(0, 2, (Part(0, codec, 0, 0, 0, 2),))], attrgetter("codec"))
    buffer = torch.zeros(messages.length, dtype=torch.uint8)
    messages.encode(x, buffer)
    meter.see(messages, x, buffer, None)
    assert meter.finish().saturated_count == expected
