"""Many hosts: the README's torchrun line, with each rank in a network namespace of its own, joined by a veth pair."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowp.training.run import run as train
from train.hosts import two_hosts
from train.training import final_state

SOURCE = Path(__file__).parents[2] / "src"
SETTINGS = ("epochs=1", "data.limit=960", "batch=96", "model.options.hidden=[32]", "wire.format=e5m2", "wire.scale=aps")


@pytest.fixture
def hosts():
    """Two namespaces, 10.77.0.1 and .2."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    with two_hosts("10.77.0") as names:
        yield names


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchrun_on_two_hosts_is_two_virtual_ranks(hosts, tmp_path):
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    processes = []
    for node, name in enumerate(hosts):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29511"]
        command += ["-m", "lowp", "train", "fp32", "--out", str(tmp_path / "hosts"), *settings, "--set", "threads=1"]
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": f"veth{node + 1}", "LOWP_KERNELS": "never"}
        with (tmp_path / f"{node}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path))
    try:
        for process in processes:
            process.wait(200)
    finally:
        for process in processes:
            process.kill()
    said = [(tmp_path / f"{node}.log").read_text() for node in (0, 1)]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "2 real ranks" in said[0]
    assert "accuracy" not in said[1]
    from lowp.training.reading import read_recipe

    train(read_recipe("fp32", [*SETTINGS, "virtual_ranks=2", "threads=1"]), tmp_path / "virtual", quiet=True)
    but = frozenset({"bytes_sent", "bytes_of_fp32"})  # the virtual world does not count padding
    assert final_state(tmp_path / "hosts", but) == final_state(tmp_path / "virtual", but)
