"""`lowp.train`: the command as a function."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lowp
from lowp.training.mistakes import RecipeError

SMALL = {"epochs": 1, "data.limit": 192, "batch": 48, "model.options.hidden": [12], "device": "cpu"}
IN_WORDS = ["epochs=1", "data.limit=192", "batch=48", "model.options.hidden=[12]", "device=cpu"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_name_with_changes(capsys):
    threads = torch.get_num_threads()
    result = lowp.train("aps8", SMALL | {"log.health": 2, "threads": 1}, virtual_ranks=2)
    assert (result.path, result.state) == (Path("runs/aps8-001"), "finished")
    assert result.metrics["ranks"] == 1
    assert result.metrics["virtual_ranks"] == 2
    assert result.metrics["bytes_sent"] < 0.3 * result.metrics["bytes_of_fp32"]
    assert result.accuracy == result.run.accuracy
    assert result.loss == result.run.loss
    assert {record["step"] for record in result.health} == {1, 3}
    assert "aps8-001" in result._repr_html_()
    assert "aps8: mlp" in capsys.readouterr().out
    assert torch.get_num_threads() == threads


def test_the_same_from_words_a_recipe_a_file_and_in_a_thread(tmp_path):
    recipe = lowp.Recipe(
        name="mine", epochs=1, batch=48, device="cpu", data={"limit": 192}, model={"options": {"hidden": [12]}}
    )
    (tmp_path / "mine.toml").write_text(
        'epochs = 1\nbatch = 48\ndevice = "cpu"\n[data]\nlimit = 192\n[model.options]\nhidden = [12]'
    )
    results = []
    thread = threading.Thread(target=lambda: results.append(lowp.train(recipe, out="a", quiet=True)))
    thread.start()
    thread.join(100)
    results.append(lowp.train(tmp_path / "mine.toml", out=Path("b"), quiet=True))
    results.append(lowp.train("fp32", [*IN_WORDS, "name=mine", "virtual_ranks=1"], out="c", quiet=True))
    assert results[0].loss == results[1].loss
    assert results[2].state == "finished"
    assert lowp.train("a", resume=True, quiet=True).metrics["loss"] == results[0].loss
    with pytest.raises(OSError, match="holds a run already"):
        lowp.train("a", quiet=True)


def test_ranks_are_started():
    """By new interpreters: this module is not run again."""
    result = lowp.train("aps8", SMALL, ranks=2, out="two", quiet=True)
    assert result.metrics["ranks"] == 2
    assert result.run.recipe["ranks"] == 2
    assert 0 < result.metrics["bytes_sent"] < 0.3 * result.metrics["bytes_of_fp32"]


def test_what_cannot_be_done_from_here_is_said(monkeypatch, tmp_path):
    with pytest.raises(RecipeError, match=r"model.name: '__main__:net' is defined in the program itself"):
        lowp.train("fp32", {"model.name": "__main__:net"}, ranks=2)
    with pytest.raises(ValueError, match="resume=True needs the run's directory"):
        lowp.train("fp32", SMALL, resume=True)
    with pytest.raises(TypeError, match=r"a recipe is a name, a file, .* not int"):
        lowp.train(3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="did you mean 'aps8'"):
        lowp.train("aps")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store")), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="this process is in a process group already"):
            lowp.train("fp32", SMALL)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"ranks=2: a launcher has started this process as one of 1 \(WORLD_SIZE\)"):
        lowp.train("fp32", SMALL, ranks=2)
    with pytest.raises(ValueError, match="ranks=2: a launcher"):
        lowp.train(lowp.Recipe(ranks=2))
    with pytest.raises(ValueError, match="under torchrun, say with out="):
        lowp.train("fp32", SMALL)
    assert not (tmp_path / "runs").exists()


def test_divergence_is_raised():
    with pytest.raises(lowp.Diverged, match="diverged in step"):
        lowp.train("fp32", SMALL | {"optimizer.lr": 1e30, "epochs": 3}, out="far", quiet=True)
    assert lowp.train.__module__ == "lowp.train_function"  # no package of that name has taken its place


@pytest.mark.parametrize(("weights", "share"), [("fp32", 1.0), ("bf16", 0.5)])
def test_uncompressed_gradients_travel_as_wide_as_the_weights(weights, share):
    """As with DistributedDataParallel, which sends gradients in their own dtype."""
    changes = SMALL | {"precision.weights": weights, "data.limit": 48}
    found = lowp.train("fp32", changes, virtual_ranks=2, out=weights, quiet=True).metrics
    assert found["bytes_sent"] == pytest.approx(share * found["bytes_of_fp32"], rel=0.01)
