"""`lowp quantize FORMAT --file FILE`: the figures are right, in pieces as in one, and every kind of file gets an answer."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lowp
from lowp.cli import fidelity
from lowp.cli.fidelity import Fidelity, measure, pieces
from lowp.cli.rounder import FormatRounder
from lowp.formats import Rounding


@pytest.fixture
def model(tmp_path) -> Path:
    """One tensor of every kind, among them one whose name looks like rich's markup."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    tensors = {
        "layers[q].weight": torch.randn(8, 40, generator=generator) * 0.01,
        "bf16": torch.randn(10, generator=generator).bfloat16(),
        "fp8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
        "half": torch.tensor([1e-7, 6e4, 1.0]).half(),
        "ints": torch.arange(4),
        "flags": torch.tensor([True]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.25),
        "wild": torch.tensor([math.nan, math.inf, -math.inf, 1e6, -1e-30, 0.0, -0.0]),
    }
    save_file(tensors, path)
    return path


def test_every_tensor_has_an_answer(from_json, model):
    document = from_json("quantize", "e4m3fn", "--file", model)
    found = {entry["name"]: entry for entry in document["tensors"]}
    assert len(found) == 9
    assert found["ints"]["skipped"] == found["flags"]["skipped"] == "not floating point"
    assert found["fp8"]["sqnr_db"] == found["scalar"]["sqnr_db"] == "inf"
    assert (found["empty"]["sqnr_db"], found["empty"]["mean_relative_error"], found["empty"]["shape"]) == (None, None, [0, 3])
    assert (found["half"]["underflow"], found["half"]["overflow"]) == (1 / 3, 1 / 3)
    assert (found["half"]["sqnr_db"], found["half"]["max_error"]) == ("-inf", "inf")
    assert (found["wild"]["nan"], found["wild"]["inf"]) == (1, 2)
    assert (found["wild"]["underflow"], found["wild"]["overflow"]) == (1 / 2, 1 / 4)
    assert found["bf16"]["dtype"] == "BF16"
    (everything,) = document["all"]
    assert (everything["name"], everything["nan"]) == ("all 7 tensors", 1)


@pytest.mark.parametrize("columns", [80, 140])
def test_table_shows_every_tensor_and_format(stdout, model, columns):
    text = stdout("quantize", "e4m3fn,mxfp4", "--file", model, columns=columns)
    for name in ("layers[q].weight", "bf16", "half", "empty", "scalar", "all 7 tensors"):
        assert name in text
    assert text.count("skipped") == 2
    assert text.count("mxfp4") == 8
    assert "…" not in text
    assert all(len(line) <= columns for line in text.splitlines())


def test_saturating_limits_the_error(from_json, model):
    document = from_json("quantize", "e4m3fn", "--file", model, "--saturate")
    half = next(entry for entry in document["tensors"] if entry["name"] == "half")
    assert half["max_error"] == 6e4 - 448
    assert half["overflow"] == 1 / 3


def test_limit(from_json, model):
    document = from_json("quantize", "e5m2", "--file", model, "--limit", 2)
    assert (len(document["tensors"]), document["left_out"]) == (2, 7)


@pytest.mark.parametrize(
    "array",
    [
        np.linspace(-3, 3, 50).reshape(5, 10).astype(np.float32),
        np.linspace(-3, 3, 50).reshape(5, 10).astype(">f4"),
        np.asfortranarray(np.linspace(-3, 3, 50).reshape(5, 10)),
        np.float16(1.1),
    ],
    ids=["float32", "big-endian", "fortran", "scalar"],
)
def test_numpy_files(from_json, tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    (entry,) = from_json("quantize", "e4m3fn", "--file", tmp_path / "x.npy")["tensors"]
    x = torch.from_numpy(np.asarray(array, dtype=np.float64))
    error = lowp.quantize(x, "e4m3fn") - x
    assert entry["shape"] == list(array.shape)
    assert entry["max_error"] == float(error.abs().max())
    assert entry["sqnr_db"] == pytest.approx(10 * math.log10(float(x.square().sum() / error.square().sum())))


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.arange(4), np.zeros(2, dtype=complex), np.array([True])])
def test_numpy_files_with_nothing_to_measure(from_json, tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    (entry,) = from_json("quantize", "e4m3fn", "--file", tmp_path / "x.npy")["tensors"]
    assert ("skipped" in entry) == (array.dtype.kind != "f")


def damaged(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def test_files_that_cannot_be_read(mistake, tmp_path):
    np.save(tmp_path / "whole.npy", np.zeros(100))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    truncated = (tmp_path / "whole.npy").read_bytes()[:-8]
    (tmp_path / "folder.npy").mkdir()
    for path, said in [
        (tmp_path / "missing.npy", "No such file or directory"),
        (tmp_path / "missing.safetensors", "No such file or directory"),
        (tmp_path / "folder.npy", "Is a directory"),
        (tmp_path / "objects.npy", "is broken"),
        (damaged(tmp_path, "table.csv", b"1,2"), "files are .npy or .safetensors, not .csv"),
        (damaged(tmp_path, "nothing", b""), "without a suffix"),
        (damaged(tmp_path, "empty.npy", b""), "is not a .npy file"),
        (damaged(tmp_path, "text.npy", b"hello world"), "is not a .npy file"),
        (damaged(tmp_path, "cut.npy", truncated), "is broken"),
        (damaged(tmp_path, "header.npy", truncated[:9]), "is broken"),
        (damaged(tmp_path, "empty.safetensors", b""), "is broken"),
        (damaged(tmp_path, "text.safetensors", b"hello world, this is text"), "is broken"),
    ]:
        line = mistake("quantize", "e5m2", "--file", path)
        assert said in line
        assert path.name in line


def totals(found: Fidelity) -> tuple[object, ...]:
    counts = (found.elements, found.finite, found.nonzero, found.underflowed, found.overflowed, found.nan, found.inf)
    return *counts, *(pytest.approx(value) for value in (found.signal, found.noise, found.relative, found.max_error))


@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.STOCHASTIC])
@pytest.mark.parametrize("name", ["e4m3fn", "dynamic8", "mxfp4", "block(e2m1fn, 24, e4m3fn)", "nvfp4"])
@pytest.mark.parametrize("shape", [(7, 50), (3, 2, 130), (300, 1), (411,)])
def test_pieces_round_as_the_whole_does(monkeypatch, shape, name, rounding):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[5], x.view(-1)[77] = math.nan, 1e4
    rounder = FormatRounder(lowp.format(name), rounding)
    whole = measure(x, rounder)
    monkeypatch.setattr(fidelity, "PIECE", 64)
    cut = list(pieces(x, rounder))
    assert len(cut) > 1 or name == "nvfp4"
    assert [offset for offset, _ in cut] == [sum(p.numel() for _, p in cut[:i]) for i in range(len(cut))]
    assert torch.equal(torch.cat([p.flatten() for _, p in cut]).nan_to_num(), x.flatten().nan_to_num())
    assert totals(measure(x, rounder)) == totals(whole)


def test_measuring_leaves_threads_and_kernels_as_they_were():
    before = (torch.get_num_threads(), lowp.kernel_info()["policy"])
    measure(torch.ones(3), FormatRounder(lowp.format("e5m2")))
    assert (torch.get_num_threads(), lowp.kernel_info()["policy"]) == before


def test_figures_of_no_signal():
    nothing = measure(torch.zeros(4), FormatRounder(lowp.format("e5m2")))
    assert (nothing.sqnr_db, nothing.mean_relative_error, nothing.underflow, nothing.overflow) == (None, None, 0.0, 0.0)
