"""`lowp memory`: counted, not promised."""

import pytest

SMALL = ("--set", "model.options.hidden=[64]", "--shape", "1,8,8", "--classes", "10")


@pytest.mark.parametrize(
    ("recipe", "changes", "each"),
    [
        ("fp32", (), 12.0),
        ("fp32", ("--set", "optimizer.name=adamw"), 16.0),
        ("fp32", ("--set", "optimizer.momentum=0"), 8.0),
        ("pure16", (), 6.0),
    ],
)
def test_bytes_a_parameter(from_json, recipe, changes, each):
    found = from_json("memory", recipe, *changes, *SMALL)
    assert found["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    assert found["bytes_per_parameter"] == pytest.approx(each, abs=0.01)
    assert found["bytes"]["weights"] == found["parameters"] * (2 if recipe == "pure16" else 4)


def test_what_a_step_sends(from_json):
    found = from_json("memory", "aps8", "--set", "virtual_ranks=4", *SMALL)
    assert found["fp32_bytes"] == 4 * found["parameters"]
    assert found["wire_bytes"] == pytest.approx(found["parameters"], rel=0.01)
    # Each layer's part of a message is padded to four bytes: at most 3 bytes for each of 4 layers in 6 messages.
    assert 0 <= found["sent_per_step"] - 2 * 3 / 4 * found["wire_bytes"] <= 6 * 4 * 3


def test_the_table(stdout):
    said = stdout("memory", "fp32", "--set", "model.options.hidden=[64]")
    assert "bytes a parameter" in said
    assert "12.000" in said


def test_mistakes(mistake):
    assert "whole numbers" in mistake("memory", "fp32", "--shape", "3,a", "--classes", "10")
    assert "did you mean" in mistake("memory", "fp33")
