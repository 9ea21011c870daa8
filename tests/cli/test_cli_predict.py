"""`lowp predict`: tables that fit, JSON, CSV, a picture, and mistakes in one line."""

import csv

import pytest

QUICK = ("predict", "--model", "resnet18-cifar", "--batch", "64")
CLUSTER = ("--cluster", "ethernet-10g")


def test_the_table_fits_80_columns(stdout):
    said = stdout(*QUICK, *CLUSTER, "--ranks", "1:4096", "--wire", "fp32", "--wire", "adaptive:4.4")
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "speed-up" in said
    assert "hidden" in said
    assert "4096" in said
    assert "it fits" in said
    assert "…" not in said


def test_wide_terminals_have_encoding_and_decoding(stdout):
    said = stdout(*QUICK, *CLUSTER, "--ranks", "4", columns=110)
    assert " encode " in said.splitlines()[4]
    assert " decode " in said.splitlines()[4]


def test_json_has_every_figure(from_json):
    found = from_json(*QUICK, *CLUSTER, "--ranks", "1:8", "--wire", "e5m2/aps")
    assert [step["ranks"] for step in found["steps"]] == [1, 2, 4, 8]
    assert found["steps"][0]["efficiency"] == pytest.approx(1)
    assert 0 < found["steps"][-1]["efficiency"] < 1
    assert found["cluster"] == "ethernet-10g"


def test_csv_and_picture(stdout, tmp_path):
    table, picture = tmp_path / "out.csv", tmp_path / "out.png"
    stdout(*QUICK, *CLUSTER, "--ranks", "1:8", "--csv", table, "--plot", picture)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3 * 4
    assert {row["wire"] for row in rows} == {"fp32", "fp16", "e5m2/aps"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_ones_own(stdout, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[device]\nflops = "10 TFLOP/s"\nbandwidth = "500 GB/s"\n[[levels]]\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n'
    )
    assert "mine" in stdout(*QUICK, "--cluster", path, "--ranks", "2")


def test_names_are_text(stdout, tmp_path):
    """rich would take brackets for markup."""
    path = tmp_path / "größe [x].toml"
    path.write_text(
        'name = "[/red] rack"\n[device]\nname = "[bold]"\nflops = "10 TFLOP/s"\nbandwidth = "500 GB/s"\n'
        '[[levels]]\nname = "[/]"\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n'
    )
    assert "[/red] rack  [bold]; [/] 1 Gbit/s" in stdout(*QUICK, "--cluster", path, "--ranks", "2")


def test_tiny_models_fit_too(stdout):
    """Compute of some microseconds, speed-ups far below 1."""
    said = stdout("predict", "--model", "mlp", *CLUSTER, "--ranks", "1:4096", "--wire", "fp32", "--wire", "e5m2")
    assert "…" not in said
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "<.01 %" in stdout("predict", "--model", "mlp", "--batch", "1", *CLUSTER, "--ranks", "4096", "--wire", "e5m2@ring")


def test_lists(stdout, from_json):
    said = stdout("predict", "--clusters")
    assert "dgx-h100" in said
    assert "arXiv 1807.11205" in said
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert {"name", "device", "source", "levels"} <= set(from_json("predict", "--clusters")[0])
    assert "gpt2-xl" in stdout("predict", "--models")
    assert {"resnet50", "vgg16"} <= {each["name"] for each in from_json("predict", "--models")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--cluster is missing"),
        (("--cluster", "dgx-h10"), "did you mean 'dgx-h100'"),
        (("--cluster", "none.toml"), "none.toml: No such file"),
        ((*CLUSTER, "--model", "resnet5"), "unknown model 'resnet5'; did you mean 'resnet50'"),
        ((*CLUSTER, "--wire", "e5m2@rign"), "unknown reduction 'rign'; did you mean 'ring'"),
        ((*CLUSTER, "--ranks", "8:1"), "does not ascend"),
        ((*CLUSTER, "--ranks", "0"), "ranks: '0' must be at least 1"),
        ((*CLUSTER, "--wire", "e5m2@"), "wire 'e5m2@': after @ comes a reduction"),
        (("--cluster", "dgx-h100", "--ranks", "12"), "ranks: 12 do not divide into groups of 8"),
        ((*CLUSTER, "--optimizer", "adam"), "did you mean 'adamw'"),
        ((*CLUSTER, "--plot", "out.gif"), "pictures are .png"),
        (("--clusters", "--models"), "give one of them"),
        ((*CLUSTER, "--weights", "e5m3x"), "unknown format"),
    ],
)
def test_mistakes(mistake, arguments, said):
    assert said in mistake(*QUICK, *arguments)
