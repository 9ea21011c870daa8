"""`lowp formats`: the table, the pages, their JSON, and the mistakes one can make."""

import math

import pytest

import lowp
from lowp.cli.figures import FAMILIES, figures
from lowp.formats import FORMATS, BlockFormat, Format
from lowp.formats.binades import binades, code_of, positive_codes

NUMBERS = [entry for entry in FORMATS if isinstance(entry, Format)]
NAMES = [str(entry) for entry in FORMATS]


def fits(text: str, columns: int) -> bool:
    return "\x1b" not in text and "…" not in text and all(len(line) <= columns for line in text.splitlines())


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_table_has_every_format_and_fits(stdout, columns):
    text = stdout("formats", columns=columns)
    first_words = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert [word for word in first_words if word in NAMES] == NAMES
    assert [word for word in first_words if word in FAMILIES] == list(FAMILIES)
    assert fits(text, columns)
    assert ("layout" in text) == (columns >= 120)


def test_table_row_says_what_the_format_is(stdout):
    row = next(line for line in stdout("formats").splitlines() if line.split()[:1] == ["e4m3fn"])
    assert row.split() == ["e4m3fn", "8", "448", "0.00195", "0.125", "17.8", "253", "NaN,", "-0"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_filters(from_json, family):
    assert [entry["name"] for entry in from_json("formats", "--family", family)] == [
        str(f) for f in FORMATS if f.family == family
    ]


def test_json_of_all(from_json):
    listed = {entry["name"]: entry for entry in from_json("formats")}
    assert list(listed) == NAMES
    assert listed["int2"]["epsilon"] is None
    assert listed["mxfp4"]["count"] is None
    assert listed["e5m2"]["overflow"] == "inf"
    assert listed["e4m3fn"]["overflow"] == "nan"
    assert listed["e4m3fn"]["special_codes"] == {"zero": 0, "-zero": 0x80, "nan": 0x7F}
    assert listed["e8m0fnu"]["specials"] == ["NaN", ">0 only"]
    assert "values" not in listed["e4m3fn"]


def test_page_lists_every_value_with_its_code(stdout):
    text = stdout("formats", "e4m3fn")
    assert "448  0x7e" in text
    assert "2^-6 = 0.015625  0x08" in text
    assert "2^-9 = 0.001953125  0x01" in text
    assert "253 finite ones in 256 codes" in text
    assert "zero=0x00  -zero=0x80  nan=0x7f" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("2^")]
    assert rows[0] == ["2^-9", "01", "0.00195"]
    assert rows[9] == ["2^0", "38..3f", "1", "1.125", "1.25", "1.375", "1.5", "1.625", "1.75", "1.875"]
    assert rows[-1] == ["2^8", "78..7e", "256", "288", "320", "352", "384", "416", "448"]
    assert sum(len(row) - 2 for row in rows) == 126


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("name", [*NAMES, "e1m0finite", "e3m2_u", "fixed0.23", "block(posit6, 5, e5m2)"])
def test_every_page_fits(stdout, name, columns):
    text = stdout("formats", name, columns=columns)
    assert text.startswith(str(lowp.format(name)))
    assert fits(text, columns)


def test_pages_of_wide_formats_are_samples(stdout):
    assert "12 of 277 binades" in stdout("formats", "fp32")
    assert "12 of 255 binades" in stdout("formats", "e8m0fnu")  # one value each
    assert len(stdout("formats", "fp16", "--values").splitlines()) > 31743 // 8


def test_block_page(stdout):
    text = stdout("formats", "nvfp4")
    for fact in ("e2m1fn, 4 bits, up to 6", "16 neighbours", "e4m3fn, 8 bits, 0.00195 to 448", "one float32", "4 + 8/16 = 4.5"):
        assert fact in text


@pytest.mark.parametrize("name", ["e2m1fn", "e5m2", "posit8", "dynamic8", "int8", "nf4"])
def test_json_of_one_has_its_values(from_json, name):
    fmt = lowp.format(name)
    assert isinstance(fmt, Format)
    document = from_json("formats", name)
    assert tuple(document["values"]) == fmt.values
    assert len(document["table"]) == 1 << fmt.bits
    for text, value in zip(document["table"], fmt.table, strict=True):
        assert float(text) == value or math.isnan(value)
        assert isinstance(text, str) != math.isfinite(value)


def test_json_of_several(from_json):
    documents = from_json("formats", "fp16", "mxfp4", "mxfp8_e5m2")
    assert [document["name"] for document in documents] == ["fp16", "mxfp4", "mxfp8_e5m2"]
    assert len(documents[2]["element"]["values"]) == 247  # its 8.25 bits are 8 of an element and a share of the scale
    assert "values" not in documents[0]
    assert documents[1]["element"]["values"] == list(lowp.format("e2m1fn").values)
    assert documents[1]["fields"] == {
        "element": "e2m1fn",
        "size": 32,
        "scale": "e8m0fnu",
        "tensor_scale": False,
        "rceil": False,
    }


def test_json_with_values_of_sixteen_bits(from_json):
    assert len(from_json("formats", "fp16", "--values")["values"]) == 63487


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("e4m3fm",), "unknown format 'e4m3fm'; did you mean 'e4m3fn'"),
        (("e9m1",), "impossible split e9m1"),
        (("--family", "posits"), "unknown family 'posits'; the families are float, fixed, posit, codebook, block"),
        (("e5m2", "--family", "float"), "--family"),
        (("--values",), "--values"),
        (("fp32", "--values"), "up to 16 bits"),
        (("fp32", "--values", "--json"), "up to 16 bits"),
        (("--plot", "x.png", "--json"), "--plot"),
    ],
)
def test_mistakes(mistake, arguments, said):
    assert said in mistake("formats", *arguments)


@pytest.mark.parametrize("fmt", NUMBERS, ids=str)
def test_binades_hold_every_positive_value_once(fmt):
    groups = binades(fmt)
    for group in groups:
        assert 2.0**group.exponent <= fmt.value(group.codes[0]) <= fmt.value(group.codes[-1]) < 2.0 ** (group.exponent + 1)
    if fmt.bits <= 16:
        found = [fmt.value(code) for group in groups for code in group.codes]
        assert found == [value for value in fmt.values if value > 0]
    else:
        assert sum(len(group.codes) for group in groups) == fmt.max_code


def test_codes_of_values():
    fp32 = lowp.format("fp32")
    assert isinstance(fp32, Format)
    assert code_of(1.0, fp32) == 0x3F800000
    assert code_of(1.0 + 2.0**-30, fp32) is None
    assert code_of(1e300, fp32) is None
    mantissa8 = lowp.format("mantissa8")
    assert isinstance(mantissa8, Format)
    assert code_of(10.0, mantissa8) == mantissa8.table.index(10.0)  # it stands twice: the lower code
    assert len(positive_codes(mantissa8)) == sum(value > 0 for value in mantissa8.values)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_figures_are_those_of_the_format(fmt):
    known = figures(fmt)
    assert (known.name, known.bits, known.max, known.smallest) == (str(fmt), fmt.bits, fmt.max, fmt.smallest)
    assert ("inf" in known.specials, "NaN" in known.specials) == (fmt.has_inf, fmt.has_nan)
    assert (known.count is None) == isinstance(fmt, BlockFormat)
    assert known.epsilon is None or known.epsilon == fmt.epsilon
