"""Models divided among ranks, trained by the one loop: resumed runs repeat the uninterrupted one."""

import json
from pathlib import Path

import pytest

from lowp.training.reading import read_recipe
from lowp.training.run import run
from train.training import final_state

SETTINGS = (
    "data.name=fashion14",
    "data.limit=512",
    "batch=64",
    "epochs=2",
    "ranks=1",
    "virtual_ranks=2",
    "model.options.hidden=[32]",
    "model.options.dropout=[0.1,0.2]",
    "log.every=3",
    "parallel.format=e5m2",
)


@pytest.mark.other_cpu
@pytest.mark.parametrize("kind", ["split", "pipeline"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, tmp_path):
    settings = [*SETTINGS, f"parallel.kind={kind}", "learning_rate.kind=constant"]
    recipe = read_recipe("mnist-model-parallel", settings)
    whole = run(recipe, tmp_path / "whole", quiet=True)
    assert whole["accuracy"] > 0.4
    assert whole["bytes_sent"] < whole["bytes_of_fp32"] / 2  # a test's logits travel in fp32, and count
    run(recipe.model_copy(update={"epochs": 1}), tmp_path / "halves", quiet=True)
    run(recipe, tmp_path / "halves", resume=True, quiet=True)
    assert final_state(tmp_path / "halves") == final_state(tmp_path / "whole")
    whole_losses, losses = (losses_of(tmp_path / name) for name in ("whole", "halves"))
    assert whole_losses == losses


def losses_of(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_one_rank_cannot_divide_a_model():
    from lowp.training.check import check

    with pytest.raises(ValueError, match="parallel"):
        check(read_recipe("mnist-model-parallel", ["ranks=1"]))
