"""Network namespaces of benchmarks that were killed hard: removed at the next start, and only those."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.fixture
def namespaces(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.links.namespaces")


def test_only_namespaces_whose_process_is_gone_are_removed(namespaces):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    gone = [f"lowp{ended.pid}-switch", f"lowp{ended.pid}-node0"]
    kept = [f"lowp{os.getpid()}-node77", f"lowp{ended.pid}-other", f"mine{ended.pid}-node0"]
    made = []
    try:
        for name in [*gone, *kept]:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this computer makes no namespaces: {error.stderr.strip()}")
            made.append(name)
        assert set(gone) <= set(namespaces.remove_stale())
        left = {line.split()[0] for line in ip("netns", "list").splitlines()}
        assert left >= set(kept)
        assert not left & set(gone)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
