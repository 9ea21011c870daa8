"""What a run's processes listen on, and what others on the network can do to it: local runs are seen by nobody."""

import base64
import ctypes
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lowp.training import rendezvous
from train import training
from train.hosts import two_hosts
from train.training import arguments, ranks_of, until

LONG = {"epochs": 300, "test_every": 0, "learning_rate__kind": "constant", "log__every": 1}
CLONE_NEWNET = 0x40000000  # linux/sched.h


def listening(process: int) -> list[tuple[str, int]]:
    """The addresses and ports that a process listens on, as the kernel says it."""
    sockets = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(os.readlink(entry))
    found = []
    for version, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{version}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                words = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


# `lowp train --ranks`, in a network of its own, beside another.


@pytest.fixture(scope="module")
def networks():
    """The names of two namespaces, 10.78.0.1 and .2."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with two_hosts("10.78.0") as names:
        yield names


def inside(network: str, work):
    """`work()`, with the sockets of a namespace. A thread can be in another one than its process."""
    results = []

    def enter():
        with open(f"/var/run/netns/{network}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0
        results.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert results, "it failed"
    return results[0]


def answers(address: str, ports: list[int]) -> list[int]:
    open_ports = []
    for port in ports:
        with suppress(OSError), socket.create_connection((address, port), timeout=2):
            open_ports.append(port)
    return open_ports


class Malice:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def attack(ports: list[int], run_id: str, marker: Path) -> list[int]:
    """Write a pickle into every TCPStore that answers, where torch's c10d rendezvous would look for its state.

    In the bytes of its protocol: torch's own client waits forever where something else listens.
    """
    validate, ping = struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<BI", 13, 1234)
    key, value = f"/torch.rendezvous.{run_id}".encode(), base64.b64encode(pickle.dumps(Malice(marker)))
    put = struct.pack("<BQ", 1, len(key)) + key + struct.pack("<Q", len(value)) + value
    stores = []
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection, suppress(OSError):
            connection.sendall(validate + ping + put)
            if connection.recv(4) == struct.pack("<I", 1234):
                stores.append(port)
    return stores


def test_the_attack_reaches_a_store(tmp_path):
    """Else it would prove nothing below."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert attack([store.port], "some-run", tmp_path / "marker") == [store.port]
    pickle.loads(base64.b64decode(store.get("torch.rendezvous.some-run")))
    assert (tmp_path / "marker").exists()


@contextmanager
def run_in(network: str, folder: Path):
    """A run on two ranks that has begun. The environment asks gloo for the network's interface, as a cluster's profile may."""
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "lowp"]
    command += arguments("fp32", folder / "run", "--ranks", "2", **LONG)
    environment = training._environment() | {"GLOO_SOCKET_IFNAME": "veth1"}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    process = training.Process(child.pid, folder / "log", child.poll)
    metrics = folder / "run" / "metrics.jsonl"
    try:
        until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size))
        assert process.poll() is None, process.said
        yield process
    finally:
        ranks = [] if process.poll() is not None else ranks_of(process)
        process.kill()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)


@pytest.mark.timeout(240)
def test_nobody_on_the_network_can_reach_a_local_run(networks, tmp_path):
    """Not from another host; and what a process on this host writes to its ports is not run."""
    with run_in(networks[0], tmp_path) as process:
        processes = [process.pid, *ranks_of(process)]
        assert len(processes) == 3
        heard = [place for each in processes for place in listening(each)]
        ports = [port for _, port in heard]
        assert ports, "gloo listens, so this test must see it"
        assert not [address for address, _ in heard if not is_loopback(address)]
        assert inside(networks[1], lambda: answers("10.78.0.1", ports)) == []
        assert inside(networks[0], lambda: answers("127.0.0.1", ports)) == ports  # they are there
        settings = Path(f"/proc/{processes[1]}/environ").read_text().split("\0")
        run_id = next(line.partition("=")[2] for line in settings if line.startswith("TORCHELASTIC_RUN_ID="))
        assert inside(networks[0], lambda: attack(ports, run_id, tmp_path / "marker")) == []
        size = (tmp_path / "run/metrics.jsonl").stat().st_size
        until(lambda: (tmp_path / "run/metrics.jsonl").stat().st_size > size + 1000)  # and the run goes on
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130, process.said
        assert not (tmp_path / "marker").exists()
        assert "stopped by SIGINT" in process.said
        assert not [each for each in processes if Path(f"/proc/{each}").exists()]


# Ranks that something else has started.


def test_rank_0_listens_where_it_was_told_to(tmp_path):
    """torch's own store would listen on every interface."""
    with training.server(tmp_path) as server:
        ranks = server.start_ranks(arguments("fp32", tmp_path / "run", **LONG), 2)
        until(lambda: (tmp_path / "run/metrics.jsonl").exists())
        heard = [place for rank in ranks for place in listening(rank.pid)]
        assert len(heard) >= 3  # the store, and gloo in both
        assert not [address for address, _ in heard if not is_loopback(address)]
        server.clear()


@pytest.fixture
def hosts(monkeypatch):
    """This is rank 0 of two hosts, whose name has the address that the test gives it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in (*rendezvous.INTERFACES, rendezvous.FOLDER):
        monkeypatch.delenv(name, raising=False)

    def named(address):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (address, 0))])

    return named


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_address_is_not_the_default(address, hosts, monkeypatch):
    hosts(address)
    with pytest.raises(ValueError, match=f"would listen on {re.escape(address)}, a public address: set GLOO_SOCKET_IFNAME"):
        rendezvous.choose_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    rendezvous.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.0.1", "fd00::1", "fe80::1%eth0", "127.0.1.1"])
def test_a_private_address_is(address, hosts):
    hosts(address)
    rendezvous.choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_of_one_machine_use_loopback(hosts, monkeypatch):
    hosts("8.8.8.8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for name in rendezvous.INTERFACES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    rendezvous.choose_interface()
    assert [os.environ[name] for name in rendezvous.INTERFACES] == ["lo", "lo"]


def test_other_hosts_cannot_reach_loopback(hosts, monkeypatch):
    hosts("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="MASTER_ADDR is localhost, which other hosts cannot reach"):
        rendezvous.store_of_ranks(timedelta(seconds=1))
