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
    assert [line.split()[0] for line in said.splitlines()[2:8]] == [
        "weights",
        "gradients",
        "state",
        "buffers",
        "total",
        "activations",
    ]
    assert "12.000" in said
    assert "hardware" not in said  # nothing is simulated
    assert "hardware" in stdout("memory", "fp8", "--set", "model.options.hidden=[64]")


def test_beside_fp32(from_json):
    found = from_json("memory", "pure16", *SMALL)
    count = found["parameters"]
    assert found["bytes_of_fp32"] == {"weights": 4 * count, "gradients": 4 * count, "state": 4 * count, "buffers": 0}
    assert found["bytes"]["weights"] == found["bytes_of_fp32"]["weights"] / 2
    assert found["hardware"] is None


def test_activations_are_those_of_a_micro_batch(from_json):
    """What an MLP keeps of a sample: its 64 inputs and, after ReLU, 64 hidden numbers."""
    whole = from_json("memory", "fp32", "--set", "batch=64", *SMALL)
    assert (whole["samples"], whole["activations"]) == (64, 64 * 4 * (64 + 64))
    parts = from_json("memory", "fp32", "--set", "batch=64", "--set", "micro_batches=4", "--set", "virtual_ranks=2", *SMALL)
    assert (parts["samples"], parts["activations"]) == (8, whole["activations"] / 8)
    half = from_json("memory", "pure16", "--set", "batch=64", *SMALL)
    assert (half["activations"], half["activations_of_fp32"]) == (whole["activations"] / 2, whole["activations"])


def test_mixed_precision_keeps_weights_that_it_has_cast(from_json):
    """Once, however many samples there are: the second layer's matrix, in 2 bytes. (The first one's is not needed again.)"""
    found = {batch: from_json("memory", "mixed", "--set", f"batch={batch}", *SMALL)["activations"] for batch in (64, 128, 256)}
    assert found[256] - found[128] == 2 * (found[128] - found[64])
    assert 2 * found[64] - found[128] == 2 * 64 * 10


def test_what_hardware_would_hold(from_json):
    found = from_json("memory", "fp8-all", *SMALL)
    count, hardware = found["parameters"], found["hardware"]
    assert found["bytes"]["weights"] == 4 * count  # simulated: this run holds float32
    assert (hardware["weights"], hardware["master"], hardware["gradients"]) == (count, 2 * count, count)
    assert hardware["state"] == found["bytes"]["state"]
    # 64 hidden numbers, twice (before and after ReLU), in 8 bits, and 10 logits in 16.
    assert hardware["activations"] == found["activations_of_fp32"] * (2 * 64 * 8 + 10 * 16) / (2 * 64 + 10) / 32
    blocks = from_json("memory", "fp32", "--set", "precision.weights=mxfp4", *SMALL)["hardware"]
    assert (blocks["weights"], blocks["master"], blocks["gradients"]) == (count * 4.25 / 8, 4 * count, 4 * count)


def test_a_model_of_the_users_own(from_json):
    found = from_json("memory", "fp8", "--set", "model.name=train.training:normed", "--set", "model.options={}", *SMALL[2:])
    assert found["activations"] is None
    assert "activations" not in found["hardware"]
    assert found["hardware"]["weights"] < found["bytes"]["weights"]


def test_mistakes(mistake):
    assert "whole numbers" in mistake("memory", "fp32", "--shape", "3,a", "--classes", "10")
    assert "did you mean" in mistake("memory", "fp33")
