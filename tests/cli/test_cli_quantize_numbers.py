"""`lowp quantize FORMAT NUMBERS`: what is printed is what the exact reference says."""

import math
from fractions import Fraction

import pytest

import lowp
from lowp.cli.quantize import parse_formats, parse_number
from lowp.cli.quantize_numbers import note
from lowp.formats import Format, Rounding, reference

NUMBERS = (
    "0",
    "-0.0",
    "0.3",
    "-1.5",
    "1e-4",
    "-1e-30",
    "460",
    "-500",
    "7e4",
    "1e300",
    "inf",
    "-inf",
    "nan",
    "0x1.8p-3",
    "5e-324",
)
MODES = [mode for mode in Rounding if mode is not Rounding.STOCHASTIC]


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "fp16", "posit8", "int8", "dynamic8", "e8m0fnu", "tf32"])
def test_values_and_codes_are_the_reference_s(from_json, name, mode, saturate):
    fmt = lowp.format(name)
    assert isinstance(fmt, Format)
    rows = from_json("quantize", name, *NUMBERS, "--rounding", mode, *(["--saturate"] if saturate else []))
    assert len(rows) == len(NUMBERS)
    for text, row in zip(NUMBERS, rows, strict=True):
        number, value = parse_number(text), float(row["value"])
        assert same(float(row["number"]), number)
        assert same(value, reference.round(number, fmt, mode, saturate=saturate)), row
        if math.isnan(value):
            assert (row["code"] is None) == (not fmt.has_nan)
        else:
            assert int(row["code"], 16) == reference.encode(number, fmt, mode, saturate=saturate), row
        if math.isfinite(number) and math.isfinite(value):
            assert row["error"] == float(Fraction(value) - Fraction(number))
        else:
            assert row["error"] is None


def test_table_of_one_format(stdout):
    rows = [line.split() for line in stdout("quantize", "e4m3fn", "0.3", "-500", "1e-4", "-1.5").splitlines()]
    assert rows[2] == ["0.3", "0.3125", "0x2a", "0.0125", "4.17", "%", "rounded"]
    assert rows[3] == ["-500", "nan", "0xff", "-", "-", "overflow"]
    assert rows[4] == ["0.0001", "0", "0x00", "-0.0001", "100", "%", "underflow"]
    assert rows[5] == ["-1.5", "-1.5", "0xbc", "0", "0", "exact"]


@pytest.mark.parametrize("before", [(), ("--",)])
def test_negative_numbers_need_no_separator(stdout, before):
    text = stdout("quantize", "e4m3fn", *before, "-1.5", "-1e-3", "-inf", "-.5")
    for number in ("-1.5", "-0.001", "-inf", "-0.5"):
        assert number in text


def test_options_may_follow_negative_numbers(from_json):
    (row,) = from_json("quantize", "e4m3fn", "-500", "--saturate")
    assert (row["value"], row["note"]) == (-448.0, "saturated")


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("e4m3fn", "0.25", "exact"),
        ("e4m3fn", "0.3", "rounded"),
        ("e4m3fn", "449", "rounded"),  # beyond the largest value, but nearest to it
        ("e4m3fn", "500", "overflow"),
        ("e5m2", "1e6", "overflow"),
        ("e5m2", "inf", "exact"),
        ("e4m3fn", "inf", "became NaN"),
        ("posit8", "1e30", "saturated"),
        ("posit8", "1e-30", "rounded"),
        ("posit8", "inf", "became NaN"),
        ("posit8", "-0.0", "-0 became 0"),
        ("e5m2", "-0.0", "exact"),
        ("int8", "inf", "saturated"),
        ("int8", "nan", "NaN"),
        ("int8", "0.2", "underflow"),
        ("bnb_dynamic8", "-1", "saturated"),  # its range is not symmetric
        ("e8m0fnu", "-2", "became NaN"),
        ("e8m0fnu", "0", "became NaN"),
        ("mxfp4", "7.5", "saturated"),  # the scale is 1, the largest element 6
        ("mxfp4", "6.5", "rounded"),
        ("nvfp4", "3.3", "rounded"),  # the scales take its size, up to their rounding
    ],
)
def test_notes(from_json, name, number, said):
    (row,) = from_json("quantize", name, number)
    assert row["note"] == said, row


def test_note_never_calls_a_change_exact():
    assert note(1.0, 1.0, False, False) == "exact"
    assert note(0.0, -0.0, False, False) == "-0 became 0"
    assert note(1e-9, 0.0, False, False) == "underflow"
    assert note(2.0, math.inf, True, False) == "overflow"


def test_several_formats_side_by_side(from_json, stdout):
    formats = "e5m2, mxfp4 ,block(e2m1fn, 2, e4m3fn)"
    rows = from_json("quantize", formats, "0.3", "40")
    assert [row["format"] for row in rows] == ["e5m2", "mxfp4", "block(e2m1fn, 2, e4m3fn)"] * 2
    assert [row["number"] for row in rows] == [0.3] * 3 + [40.0] * 3
    assert [row["code"] for row in rows] == ["0x35", None, None, "0x51", None, None]
    text = stdout("quantize", "e5m2,mxfp4", "0.3", "40")
    assert "each 32 neighbours share a scale" in text


@pytest.mark.parametrize("columns", [80, 140])
def test_wide_numbers_are_not_cut_off(stdout, columns):
    text = stdout("quantize", "fp32,posit8,bnb_dynamic8", "0.1", "-1234567.891", columns=columns)
    assert "…" not in text
    assert all(len(line) <= columns for line in text.splitlines())


def test_stochastic_rounding_follows_its_seed(from_json):
    def values(seed: int) -> list[float]:
        return [
            row["value"] for row in from_json("quantize", "e4m3fn", *["0.3"] * 64, "--rounding", "stochastic", "--seed", seed)
        ]

    first = values(0)
    assert set(first) == {0.28125, 0.3125}
    assert first == values(0)
    assert first != values(1)
    rows = from_json("quantize", "e4m3fn", *["0.3"] * 64, "--rounding", "stochastic")
    assert [row["value"] for row in rows] == first  # the seed is 0 unless told
    assert {(row["value"], row["code"]) for row in rows} == {(0.28125, "0x29"), (0.3125, "0x2a")}


def test_limit(from_json, stdout):
    assert len(from_json("quantize", "e5m2", *"12345", "--limit", 2)) == 2
    assert "Left out by --limit: 3 more numbers." in stdout("quantize", "e5m2", *"12345", "--limit", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("e4m3fm", "1"), "did you mean 'e4m3fn'"),
        (("e5m2,", "1"), "unknown format ''"),
        (("e5m2",), "nothing to quantize"),
        (("e5m2", "one"), "'one' is not a number"),
        (("e5m2", "0xzz"), "'0xzz' is not a number"),
        (("e5m2", "1", "--satrate"), "no such option: --satrate"),
        (("e5m2", "1", "--file", "x.npy"), "not both"),
    ],
)
def test_mistakes(mistake, arguments, said):
    assert said in mistake("quantize", *arguments)


@pytest.mark.parametrize(("option", "value"), [("--rounding", "sideways"), ("--limit", "0"), ("--seed", "x")])
def test_wrong_options_are_named(run, option, value):
    result = run("quantize", "e5m2", "1", option, value)
    assert result.exit_code == 2
    assert option in result.stderr


def test_parsing():
    assert [str(fmt) for fmt in parse_formats("e5m2,block(e2m1fn, 16, e4m3fn, fp32),posit8")] == ["e5m2", "nvfp4", "posit8"]
    assert parse_number("-0x1.8p3") == -12.0
    assert parse_number("1_000") == 1000.0
