"""Hooks of a recipe: which samples of a batch are trained on, and what becomes of inputs."""

import json

from lowp.training.reading import read_recipe
from lowp.training.run import run

SETTINGS = ("data.limit=256", "batch=64", "epochs=1", "log.every=1", "model.options.hidden=[16]")


def only_low_classes(model, inputs, targets):
    return targets < 5


def nothing(model, inputs, targets):
    return targets < 0


def first_records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line]


def test_a_filter_decides_what_is_trained_on(tmp_path):
    plain = run(read_recipe("fp32", SETTINGS), tmp_path / "plain", quiet=True)
    kept = run(
        read_recipe("fp32", [*SETTINGS, "data.filter=train.test_filter:only_low_classes"]), tmp_path / "kept", quiet=True
    )
    assert kept["loss"] != plain["loss"]
    losses = [record["loss"] for record in first_records(tmp_path / "kept")]
    assert losses[0] != first_records(tmp_path / "plain")[0]["loss"]
    assert 1 < losses[0] < 4


def test_a_filter_that_keeps_nothing_leaves_the_weights_alone(tmp_path):
    recipe = read_recipe("fp32", [*SETTINGS, "data.filter=train.test_filter:nothing", "optimizer.weight_decay=0"])
    end = run(recipe, tmp_path / "none", quiet=True)
    assert [record["loss"] for record in first_records(tmp_path / "none")] == [0.0] * 4
    assert 2 < end["loss"] < 3
