"""`python -m benchmarks bits`: what a wire's text means, what is within noise, and that a second run goes on with the first."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.bits")


def started(bits, monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks bits", *words])
    bits.main()


def rows_of(bits, wire: str, losses: list[float], **others) -> list[dict]:
    row = {"task": "gpt", "wire": wire, "bits": 2.0, "accuracy": 0.5, "seconds": 1.0, "diverged": ""} | others
    return [row | {"seed": seed, "loss": loss} for seed, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("text", "scale", "rounding", "feedback"),
    [
        ("fp32 none", "none", "nearest", False),
        ("e2m1fn block:32", "block:32", "nearest", False),
        ("adaptive:2", "local", "nearest", False),
        ("adaptive:2 feedback stochastic", "local", "stochastic", True),
    ],
)
def test_words_of_a_wire(bits, text, scale, rounding, feedback):
    wire = {"format": text.split()[0], "scale": scale, "rounding": rounding, "error_feedback": feedback}
    assert bits.wire_of(text) == wire


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e4m3fm", "unknown format 'e4m3fm'; did you mean"),
        ("e4m3fn local block:32", "has more than one scale or rounding: local, block:32"),
    ],
)
def test_a_wire_that_is_none_ends_the_run_in_one_line(bits, monkeypatch, text, said):
    with pytest.raises(SystemExit, match=said):
        started(bits, monkeypatch, "--quick", "--wires", text)


def test_differences_are_paired_by_seed(bits):
    """Seeds differ by 1, and the wire is worse by .01 to .012 in each: the pairs tell, the means would not."""
    rows = rows_of(bits, bits.BASELINE, [1.0, 2.0, 3.0]) + rows_of(bits, "a", [1.01, 2.011, 3.012])
    found = bits.summary("a", rows)
    assert found["loss_difference"] == pytest.approx((0.011, 4.303 * 0.001 / 3**0.5))
    assert found["loss_within_noise"] == "**no**"
    assert found["accuracy_within_noise"] == "yes"
    assert bits.summary(bits.BASELINE, rows)["loss_within_noise"] == ""


def test_lower_loss_is_better(bits):
    rows = rows_of(bits, bits.BASELINE, [1.0, 2.0, 3.0])
    assert bits.summary("b", rows + rows_of(bits, "b", [0.99, 1.99, 2.99]))["loss_within_noise"] == "better"
    assert bits.summary("c", rows + rows_of(bits, "c", [0.99, 2.02, 3.0]))["loss_within_noise"] == "yes"


def test_a_wire_that_diverged_is_not_within_noise(bits):
    rows = rows_of(bits, bits.BASELINE, [1.0, 2.0, 3.0])
    rows += rows_of(bits, "d", [1.0, 2.0])
    rows += [row | {"seed": 2} for row in rows_of(bits, "d", [0.0], diverged="NaN", accuracy=None)]
    found = bits.summary("d", rows)
    assert (found["n"], found["diverged"], found["loss_within_noise"]) == (3, 1, "**no**")
    assert "3 (1 diverged)" in "\n".join(bits.lines_of(bits.TASKS["gpt"], rows, {"machine": "m"}))


def test_a_quick_run_writes_a_table_and_a_figure(bits, monkeypatch, tmp_path, capsys):
    started(bits, monkeypatch, "--quick", "--out", str(tmp_path), "--wires", "adaptive:2 feedback")
    assert "| `adaptive:2 feedback` | 2.0" in capsys.readouterr().out
    (results,) = tmp_path.glob("*-bits-fashion-smoke.json")
    assert [row["wire"] for row in json.loads(results.read_text())["runs"]] == ["fp32 none", "adaptive:2 feedback"]
    (picture,) = tmp_path.glob("*-bits-smoke.png")
    assert picture.stat().st_size > 1000


def test_a_second_run_goes_on_with_the_first(bits, monkeypatch, tmp_path):
    made = []

    def trained(task, wire, seed, options):
        made.append((wire, seed))
        own = {"bits": 4.0, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0, "diverged": ""}
        return own | {"task": task, "wire": wire, "seed": seed, "training": bits.TASKS[task].described(options.device)}

    monkeypatch.setattr(bits, "trained", trained)
    words = ("--tasks", "fashion", "--out", str(tmp_path), "--wires", "nvfp4")
    started(bits, monkeypatch, *words, "--seeds", "1")
    started(bits, monkeypatch, *words, "--seeds", "2")
    assert made == [("fp32 none", 0), ("nvfp4", 0), ("fp32 none", 1), ("nvfp4", 1)]
    made.clear()
    started(bits, monkeypatch, *words[:-1], "adaptive:2", "--seeds", "1")
    assert made == [("adaptive:2", 0)]
    (results,) = tmp_path.glob("*-bits-fashion.json")
    assert len(json.loads(results.read_text())["runs"]) == 5
    # What this module would train otherwise is made anew
    made.clear()
    monkeypatch.setitem(bits.TASKS, "fashion", bits.TASKS["gpt"])
    started(bits, monkeypatch, *words, "--seeds", "1")
    assert made == [("fp32 none", 0), ("nvfp4", 0)]
    assert len(json.loads(results.read_text())["runs"]) == 2
