"""Numbers with units: read exactly, written so that they are read again, refused where they could mean two things."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp.predict.quantities import FLOPS, RATE, SECONDS, SIZE, exact_text, quantity, rate_text, seconds_text


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("5 us", SECONDS, 5e-6),
        ("1.5ms", SECONDS, 1.5e-3),
        ("2 min", SECONDS, 120),
        ("3 ps", SECONDS, 3e-12),
        ("141 GB", SIZE, 141e9),
        ("16 GiB", SIZE, 16 * 2**30),
        ("24 kB", SIZE, 24e3),
        ("100 Gbit/s", RATE, 12.5e9),
        ("12.5 GB/s", RATE, 12.5e9),
        (" 200 Mbit/s ", RATE, 25e6),
        ("1e3 MB/s", RATE, 1e9),
        ("156 TFLOP/s", FLOPS, 156e12),
    ],
)
def test_units(text, unit, value):
    assert quantity(text, unit) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (100, RATE, "100 has no unit; write a bandwidth as '100 Gbit/s' or '12.5 GB/s'"),
        ("100", RATE, "'100' has no unit"),
        ("100 Gb/s", RATE, "'Gb/s' is no unit of a bandwidth; did you mean 'GB/s'"),
        ("5 sec", SECONDS, "'sec' is no unit of a time"),
        ("fast", SECONDS, "'fast' is not a time; write it as '5 us'"),
        (True, SIZE, "True is not a size"),
        (None, SIZE, "None is not a size"),
        ("nan s", SECONDS, "'nan s' is not a time"),
        ("1 GB", RATE, "'GB' is no unit of a bandwidth; did you mean 'GB/s'"),
    ],
)
def test_what_has_no_unit_or_a_wrong_one(value, unit, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        quantity(value, unit)


@given(st.floats(1e-12, 1e15), st.sampled_from([SECONDS, SIZE, RATE, FLOPS]))
def test_what_is_written_is_read_again(value, unit):
    assert quantity(exact_text(value, unit), unit) == value


def test_texts_for_people():
    assert exact_text(141e9, SIZE) == "141 GB"
    assert [rate_text(r) for r in (12.5e9, 3e11, 1.25e6)] == ["100 Gbit/s", "300 GB/s", "10 Mbit/s"]
    assert [seconds_text(s) for s in (0, 3.2e-7, 5e-6, 0.01234, 2.5)] == ["0 s", "320 ns", "5 us", "12.3 ms", "2.5 s"]
