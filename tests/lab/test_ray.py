"""`lowp ablate --on ray`, on a real cluster of two nodes on this machine."""

import os

import pytest
from made_studies import finish, start, write_study

from lowp.lab.results import study_results

pytestmark = pytest.mark.slow
BODY = """
[axes]
batch = [8, 16]
[changes]
broken = ["model.name=models_of_a_study:broken"]
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "nodes").mkdir()
    monkeypatch.setenv("NODES_SEEN", str(tmp_path / "nodes"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # of Ray, about itself
def test_a_study_on_two_nodes(cluster, tmp_path):
    study = write_study(tmp_path, BODY, head="seeds = 3")
    study.write_text(study.read_text().replace("options = { hidden = [4] }", 'name = "models_of_a_study:on_a_node"'))
    code, out, err = finish(start("ablate", study, "--on", "ray", cwd=tmp_path))
    assert code == 1, out + err
    assert "3 runs failed" in err
    results = study_results(tmp_path / "runs/tiny")
    rows = {row["setting"]: row for row in results.records()}
    assert {name: (row["n"], row["failed"]) for name, row in rows.items()} == {
        "base": (3, 0), "batch=8": (3, 0), "batch=16": (3, 0), "broken": (0, 3),
    }  # fmt: skip
    nodes = {path.name.partition("-")[0] for path in (tmp_path / "nodes").iterdir()}
    assert len(nodes) == 2
