"""The service is ended, also where it does not end by itself. A script plays NVIDIA's program."""

import os
import time
from pathlib import Path

import pytest

from lowp.lab import mps as module
from lowp.lab.mps import CONTROL, FOLDER, mps

SERVICE = """#!/bin/sh
if [ "$1" = -d ]; then "$0" serve & exit; fi
if [ "$1" = serve ]; then echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"; while :; do sleep 0.05; done; fi
read command
if [ "$command" = quit ] && [ ! "$HANGS" ]; then kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid"); else exec sleep 60; fi
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / CONTROL
    script.write_text(SERVICE)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(module, "SECONDS", 1.0)


def started() -> int:
    """The process id of the service in this environment."""
    place = Path(os.environ[FOLDER]) / "pid"
    for _ in range(200):
        if place.exists() and place.read_text():
            return int(place.read_text())
        time.sleep(0.05)
    raise AssertionError("it did not start")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("hangs", ["", "yes"])
def test_the_service_is_ended(service, monkeypatch, hangs):
    monkeypatch.setenv("HANGS", hangs)
    before = os.environ.get(FOLDER)
    with mps():
        pid = started()
        assert is_running(pid)
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)
    assert os.environ.get(FOLDER) == before


def test_no_other_service_is_ended(service, monkeypatch):
    monkeypatch.setenv("HANGS", "yes")
    with mps():
        other = started()
        with mps():
            own = started()
            assert own != other
        assert is_running(other)


def test_a_machine_without_the_service(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run without --mps"), mps():
        pass
