"""`lowp train --on ray`: the numbers of local processes, a worker that dies, and what is refused."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import lowp
from lowp.lab import train_on_ray as module
from lowp.lab.train_on_ray import train_on_ray
from lowp.training.launch import RanksFailed
from lowp.training.reading import read_recipe
from lowp.training.rundir import read_status

ROOT = Path(__file__).parents[2]
CHANGES = [
    "epochs=2",
    "data.limit=768",
    "threads=1",
    "checkpoints.every=4",
    "wire.error_feedback=true",
    "model.name=models_that_die:mortal",
    "model.options={}",
]


def tensors(out: Path) -> bytes:
    """Weights, optimizer states and residuals of both ranks, at the end."""
    return (sorted((out / "checkpoints").iterdir())[-1] / "tensors.safetensors").read_bytes()


@pytest.fixture
def cluster(monkeypatch):
    import ray

    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT / "tests" / "integrations"]))
    environment = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ray.init(
        num_cpus=3,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.mark.trainers
@pytest.mark.slow  # Ray starts, notices that a worker is gone, and starts again: more than a minute
@pytest.mark.filterwarnings("ignore")  # of Ray, about itself
def test_numbers_are_those_of_local_processes_even_if_a_worker_dies(cluster, capsys):
    folder = Path(tempfile.mkdtemp(prefix="lowp-ray-"))
    try:
        local = lowp.train("aps8", CHANGES, ranks=2, out=folder / "local", quiet=True)
        there = lowp.train("aps8", CHANGES, ranks=2, out=folder / "there", on="ray")
        said = capsys.readouterr().out
        assert "epoch 1: test loss" in said
        assert "epoch 2: test loss" in said
        assert tensors(there.path) == tensors(local.path)
        assert (there.accuracy, there.metrics["bytes_sent"]) == (local.accuracy, local.metrics["bytes_sent"])
        with pytest.raises(RanksFailed, match="workers of Ray failed"):  # refused: another seed
            lowp.train(there.path, ["seed=1"], ranks=2, on="ray", resume=True, quiet=True)
        assert read_status(there.path)["state"] == "finished"
        dies = [*CHANGES[:-1], f"model.options.tomb={folder / 'tomb'}"]
        with pytest.raises(RanksFailed, match="workers of Ray failed"):
            lowp.train("aps8", dies, ranks=2, out=folder / "dead", on="ray", quiet=True)
        assert read_status(folder / "dead")["step"] == 8, read_status(folder / "dead")  # the last checkpoint before it
        by_hand = lowp.train(folder / "dead", ranks=2, on="ray", resume=True, quiet=True)
        (folder / "tomb").unlink()
        again = lowp.train("aps8", dies, ranks=2, out=folder / "again", on="ray", max_restarts=1, quiet=True)
        assert tensors(again.path) == tensors(by_hand.path) == tensors(local.path)
        with pytest.raises(lowp.Diverged, match="diverged in step"):
            lowp.train("aps8", [*CHANGES, "optimizer.lr=1e30"], ranks=2, out=folder / "wild", on="ray", max_restarts=3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--on ray needs the package ray: pip install 'lowp\[ray\]'"):
        lowp.train("fp32", ranks=2, out=tmp_path / "run", on="ray")
    assert not (tmp_path / "run").exists()


def test_a_link_that_cannot_be_measured_from_here(tmp_path):
    with pytest.raises(ValueError, match="wire=plan measures links between processes of this machine"):
        lowp.train("aps8", ["wire=plan"], ranks=2, out=tmp_path / "run", on="ray")


def test_other_places():
    with pytest.raises(ValueError, match="on='moon'"):
        lowp.train("fp32", on="moon")


class SmallCluster:
    @staticmethod
    def cluster_resources():
        return {"CPU": 3.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["ranks=4", "threads=1"], "4 ranks of 1 threads need 4 CPUs, and the cluster has 3"),
        (["ranks=2", "threads=1", "device=cuda"], "2 ranks with device = 'cuda' need as many GPUs, and the cluster has 1"),
    ],
)
def test_a_cluster_that_is_too_small(changes, said):
    """Ray would wait for more."""
    with pytest.raises(ValueError, match=said):
        module._on_gpus(SmallCluster, read_recipe("fp32", changes))


def test_gpus_are_taken_where_there_are_enough():
    assert module._on_gpus(SmallCluster, read_recipe("fp32", ["threads=1"]))
    assert not module._on_gpus(SmallCluster, read_recipe("fp32", ["threads=1", "ranks=2"]))
    assert not module._on_gpus(SmallCluster, read_recipe("fp32", ["threads=1", "device=cpu"]))


def test_a_directory_that_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "import_ray", lambda: None)
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(OSError, match="holds a run already"):
        train_on_ray(read_recipe("fp32"), tmp_path)
