"""`lowp tour`: it runs, draws, and what it claims is what it computed."""

import math

import pytest

from lowp.cli.tour_experiments import UPDATE, UPDATES, USABLE_DB, WEIGHTS, Surveyed, accumulate, gradients, survey


def test_tour_runs_and_writes_its_picture(stdout, tmp_path):
    target = tmp_path / "tour.png"
    text = stdout("tour", "--plot", target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert f"Both as a picture: {target}." in text
    assert "To nearest: bf16 1, e5m2 1." in text
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(target) not in line)


def test_tour_checks_the_picture_s_name_first(mistake):
    assert "pictures are" in mistake("tour", "--plot", "tour.bmp")


def test_layers_have_the_scales_they_should():
    layers = gradients(seed=3)
    assert layers.numel() < 1 << 16
    assert [float(layer.std().log10()) for layer in layers] == pytest.approx([-e for e in range(9)], abs=0.05)
    assert layers.equal(gradients(seed=3))


def test_survey_shows_what_the_text_says():
    found = {str(entry.fmt): entry for entry in survey(gradients(seed=0))}
    usable = {name: Surveyed.usable(entry.plain) for name, entry in found.items()}
    assert usable["bf16"] == usable["mxfp4"] == usable["nvfp4"] == usable["mxfp8_e4m3"] == 9
    assert usable["e4m3fn"] < usable["e5m2"] < usable["fp16"] < 9
    for name in ("fp16", "e5m2", "e4m3fn", "posit8", "dynamic8"):
        scaled = found[name].scaled
        assert scaled is not None
        assert min(layer.sqnr_db or 0.0 for layer in scaled) > USABLE_DB
        assert sum(layer.overflowed for layer in scaled) == 0
    assert found["mxfp4"].scaled is None


def test_stochastic_updates_arrive_on_average():
    for entry in accumulate(seed=5):
        assert entry.nearest == [1.0] * (UPDATES + 1)
        off = abs(entry.stochastic[-1] - (1 + UPDATES * UPDATE))
        assert off < 5 * entry.spread[-1] / math.sqrt(WEIGHTS)
        assert entry.spread[-1] > 0
