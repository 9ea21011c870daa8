"""`lowp doctor`: what works here."""

import os
import subprocess

import pytest

from lowp.cli import doctor


@pytest.fixture
def link(monkeypatch):
    """The link between two ranks, without ranks: one test starts them."""
    found = {"latency": 2e-5, "bandwidth": 1.25e9}
    monkeypatch.setattr(doctor, "_start_rank", lambda store: subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True))
    monkeypatch.setattr(doctor, "measure_link", lambda store, rank: (found["latency"], found["bandwidth"]))
    return found


@pytest.mark.parametrize("columns", [60, 80])
def test_what_it_says(stdout, link, columns):
    text = stdout("doctor", columns=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    first = {line[:12].strip(): line[14:20].strip() for line in lines if line[:12].strip()}
    assert {"Python", "torch", "cores", "C++ compiler", "kernel cache", "Triton", "GPU", "NCCL", "two ranks", "report"} <= set(
        first
    )
    assert first["torch"] == first["two ranks"] == "ok"
    assert "20 us a message, 10.0 Gbit/s" in " ".join(text.split())
    assert "lowp works here." in lines[-1]


def test_json(from_json, link):
    found = from_json("doctor")
    assert found["works"] is True
    assert {"what", "state", "text", "advice"} == set(found["findings"][0])


def test_no_compiler_is_slower_and_not_broken(stdout, link, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = " ".join(stdout("doctor").split())
    assert "C++ compiler less no C++ compiler was found: CXX is no-such-compiler. Install g++" in text
    assert "many times slower" in text


def test_a_cache_that_is_not_ours(stdout, link, monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LOWP_CACHE", str(tmp_path))
    assert "can be written by others" in " ".join(stdout("doctor").split())


def test_ranks_that_do_not_meet_are_exit_code_1(run, link, monkeypatch):
    def refused(store, rank):
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(doctor, "measure_link", refused)
    result = run("doctor")
    assert result.exit_code == 1
    assert "Not everything works: two ranks." in result.stdout


def test_two_real_ranks(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what is set for ranks is taken back
    findings = {finding.what: finding for finding in doctor.look()}
    assert findings["two ranks"].state == "ok", findings["two ranks"]
    assert "Gbit/s" in findings["two ranks"].text
