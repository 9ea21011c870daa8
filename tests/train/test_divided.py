"""Models divided among ranks, trained by the one loop: resumed runs repeat the uninterrupted one."""

import json
from pathlib import Path

import pytest

from lowp.training.reading import read_recipe
from lowp.training.run import run
from train import training
from train.training import arguments, final_state

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
    assert bytes_of(tmp_path / "halves") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "format", "ranks"), [("split", "e5m2", 3), ("split", "fp32", 2), ("pipeline", "e5m2", 2)])
def test_parameters_and_bytes_of_real_ranks_are_those_of_virtual_ones(kind, format, ranks, tmp_path):
    """A rank has a part of the parameters; and ranks send different amounts, of which the mean is told."""
    changes = {"parallel__kind": kind, "parallel__format": format, "learning_rate__kind": "constant", "data__limit": 96}
    with training.server(tmp_path) as server:
        server.run(arguments("fp32", tmp_path / "virtual", "--virtual-ranks", str(ranks), **changes))
        server.run_ranks(arguments("fp32", tmp_path / "real", "--ranks", str(ranks), **changes), ranks)
    assert bytes_of(tmp_path / "real") == bytes_of(tmp_path / "virtual")
    real, virtual = (training.records(tmp_path / name)[-1]["parameters"] for name in ("real", "virtual"))
    assert real == virtual == 14 * 14 * 16 + 16 + 16 * 10 + 10


def test_bytes_are_the_same_however_a_run_was_interrupted(tmp_path):
    """Of three ranks, which send no whole number of bytes on average."""
    settings = [*SETTINGS, "virtual_ranks=3", "data.limit=256", "parallel.kind=split", "learning_rate.kind=constant"]
    recipe = read_recipe("mnist-model-parallel", settings)
    run(recipe.model_copy(update={"epochs": 5}), tmp_path / "whole", quiet=True)
    for epochs in range(1, 6):
        run(recipe.model_copy(update={"epochs": epochs}), tmp_path / "parts", resume=True, quiet=True)
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def bytes_of(folder: Path) -> list[tuple[int, int]]:
    """All along, and at the end."""
    *records, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    trained = [record for record in records if record["kind"] == "train"]
    return [(record["bytes_sent"], record["bytes_of_fp32"]) for record in (*trained, last)]


def losses_of(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_one_rank_cannot_divide_a_model():
    from lowp.training.check import check

    with pytest.raises(ValueError, match="parallel"):
        check(read_recipe("mnist-model-parallel", ["ranks=1"]))
