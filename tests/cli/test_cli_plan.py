"""`lowp plan` and `lowp calibrate`: what they print and write, and mistakes in one line."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from lowp.predict.cluster import Cluster, Device, LinkLevel
from lowp.predict.cluster_file import cluster_toml, read_cluster


@pytest.fixture
def slow(tmp_path):
    """A cluster whose links are slow."""
    file = tmp_path / "slow.toml"
    device = Device("d", "cpu", bandwidth=1e10, flops=1e10)
    file.write_text(cluster_toml(Cluster("slow", device, (LinkLevel("network", 1e6, 1e-4),))))
    return file


def plan(file, *more):
    return ("plan", "--model", "mlp", "--cluster", file, "--ranks", 2, "--wire", "fp32", "--wire", "e4m3fn/local", *more)


def test_a_plan_explains_itself_and_says_how_to_apply_it(stdout, slow):
    said = stdout(*plan(slow))
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert 'lowp.compress_gradients(ddp, "e4m3fn", scale="local", reduction="one_shot")' in said
    assert '[wire]\nformat = "e4m3fn"' in said
    assert "chosen" in said
    assert "slower" in said


def test_json_has_all_options(from_json, slow):
    found = from_json(*plan(slow, "--max-error", 0, "--json"))
    assert found["wire"] == "fp32"
    assert found["arguments"] == {}
    assert [option["chosen"] for option in found["options"]] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--model", "mlp", "--cluster", "no.toml", "--ranks", 2), "no.toml"),
        (("plan", "--model", "mpl", "--cluster", "ethernet-1g", "--ranks", 2), "did you mean 'mlp'"),
        (("plan", "--model", "mlp", "--cluster", "ethernet-1g", "--ranks", 2, "--max-error", -1), "max_error: -1"),
        (("calibrate", "--out", "x.json"), "--out x.json: the name of a cluster's file ends in .toml"),
        (("calibrate", "--out", "no/where.toml"), "its folder is not there"),
        (("calibrate", "--seconds", 1), "seconds: 1 must be at least 5"),
        (("calibrate", "--device", "tpu"), "--device is cpu, cuda or auto, not 'tpu'"),
        (("calibrate", "--model", "mpl"), "did you mean 'mlp'"),
        (("calibrate", "--codec", "e4m3fm"), "did you mean 'e4m3fn'"),
        pytest.param(
            ("calibrate", "--device", "cuda"),
            "--device cuda: there is no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (("calibrate", "--model", "mlp", "--recipe", "aps8"), "--model and --recipe: give one of them"),
    ],
)
def test_mistakes_are_one_line(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def calibrate(folder, *more):
    command = [
        sys.executable,
        "-m",
        "lowp",
        "calibrate",
        "--out",
        "c.toml",
        "--device",
        "cpu",
        "--codec",
        "e4m3fn/local",
        *more,
    ]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_ranks_measure_and_one_writes(tmp_path):
    process = calibrate(tmp_path, "--ranks", "2", "--model", "mlp", "--batch", "8", "--seconds", "6")
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "links    machine: " in said
    assert "written" in said
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]
    found = read_cluster(tmp_path / "c.toml")
    assert len(found.levels) == 1
    always = {"e4m3fn/local", "torch fp16", "torch bf16"}
    assert always <= set(found.device.codecs) <= always | {"int8/block:256"}  # whole steps, where there is time
    assert found.device.times["mlp"].batch == 8
    assert "2 ranks" in found.source


def test_an_interrupted_calibration_leaves_what_was_there(tmp_path):
    before = "# of yesterday\n"
    (tmp_path / "c.toml").write_text(before)
    process = calibrate(tmp_path, "--ranks", "2", "--seconds", "60")
    for line in process.stdout:  # the first line: ranks are measuring
        if "device" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert (tmp_path / "c.toml").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]
