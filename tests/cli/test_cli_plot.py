"""`lowp formats --plot`: the picture is a picture, and what it draws is what rounding does."""

import struct
from fractions import Fraction

import pytest

import lowp
from lowp.cli.format_plot import COLOURS
from lowp.formats import Format, reference
from lowp.formats.gaps import error_steps, gaps


def number(name: str) -> Format:
    fmt = lowp.format(name)
    assert isinstance(fmt, Format)
    return fmt


def test_png_has_the_size_of_the_readme_picture(stdout, tmp_path):
    target = tmp_path / "formats.png"
    assert stdout("formats", "--plot", target) == f"wrote {target}\n"
    data = target.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1760, 864)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_other_suffixes(stdout, tmp_path, suffix, start):
    target = tmp_path / f"p.{suffix}"
    stdout("formats", "fp32", "e2m1fn", "nf4", "--plot", target)
    assert target.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plot", "x.gif"), "x.gif: pictures are .png, .svg, .pdf, not .gif"),
        (("--plot", "x"), "without a suffix"),
        (("mxfp4", "--plot", "x.png"), "plot its element, e2m1fn"),
        (("int2", "--plot", "x.png"), "single positive value"),
        ((*["e5m2"] * (len(COLOURS) + 1), "--plot", "x.png"), "too many"),
        (("e5m2", "--plot", "/no/such/folder/x.png"), "/no/such/folder/x.png: No such file"),
    ],
)
def test_mistakes(mistake, arguments, said):
    assert said in mistake("formats", *arguments)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "posit8", "posit8_0", "dynamic8", "int8", "nf4"])
def test_gaps_are_where_rounding_to_nearest_changes_over(name):
    fmt = number(name)
    between = list(gaps(fmt))
    assert [gap.low for gap in between] + [fmt.max] == [value for value in fmt.values if value > 0]
    for gap in between:
        below, above = gap.tie * (1 - 1e-12), gap.tie * (1 + 1e-12)
        assert reference.round(below, fmt) == gap.low
        assert reference.round(above, fmt) == gap.high
        worst = max(abs(reference.round(x, fmt) - x) / x for x in (below, above))
        assert gap.worst_relative_error == pytest.approx(worst, rel=1e-9)


@pytest.mark.parametrize("name", ["fp32", "tf32", "fixed4.15"])
def test_gaps_of_wide_formats_are_samples_of_every_binade(name):
    fmt = number(name)
    between = list(gaps(fmt))
    assert between[0].low == fmt.smallest
    assert fmt.max / 2 < between[-1].high <= fmt.max
    assert len(between) < 277 * 65
    for gap in between[:: len(between) // 50]:
        near = reference.neighbours(Fraction(gap.tie), fmt)
        assert (gap.low, gap.high) == (near.low, near.high)


def test_errors_by_binade_are_the_worst_of_each():
    between = list(gaps(number("e4m3fn")))
    every, by_binade = error_steps(between, every_gap=True), error_steps(between, every_gap=False)
    assert len(every) == 125
    assert [start for start, _ in by_binade] == [2.0**e for e in range(-9, 9)]
    for index, (start, worst) in enumerate(by_binade):
        assert worst == max(error for low, error in every if start <= low < 2 * start), index
