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


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        (("wire.format=e2m1fn",), 4.25),  # a byte for every 32 numbers
        (("wire.format=e2m1fn", "wire.scale=local"), 4),
        (("wire.format=e2m1fn", 'wire.scale=""'), 4.25),
        (("wire.format=e4m3fn",), 8),
        (("wire.format=mxfp4",), 4.25),
        (("wire.format=fp16", "wire.layers.first=int4"), (4.25 * (64 * 64 + 64) + 16 * 650) / 4810),
    ],
    ids=str,
)
def test_a_narrow_format_has_a_scale_for_every_block(from_json, changes, bits):
    found = from_json("memory", "fp32", *(word for change in changes for word in ("--set", change)), *SMALL)
    assert found["wire_bytes"] / found["fp32_bytes"] == pytest.approx(bits / 32, rel=0.02)


def test_the_table(stdout):
    said = stdout("memory", "fp32", "--set", "model.options.hidden=[64]")
    assert "bytes a parameter" in said
    assert "12.000" in said


def test_mistakes(mistake):
    assert "whole numbers" in mistake("memory", "fp32", "--shape", "3,a", "--classes", "10")
    assert "did you mean" in mistake("memory", "fp33")
