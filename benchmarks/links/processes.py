"""Processes on the nodes of a network: started together, ended together, by their ids, and never waited for without end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import free_port
from benchmarks.links.namespaces import Node, Topology, bits_per_second

ROOT = Path(__file__).parents[2]
PORT = 29500  # the namespaces are ours, so nobody else has it
# Several NCCL ranks on one GPU: each has another NCCL_HOSTID, or NCCL refuses, and messages take sockets, as between machines.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
PROBE_SECONDS = 0.6  # at full rate
PROBE_TIMEOUT = 60
PROBE_ATTEMPTS = 5
RATE_TOLERANCE = 0.03
TAIL = 15  # lines of a failed rank's output that are shown


class RanksFailedError(RuntimeError):
    """A rank ended with an error, or did not end in time; the message holds the end of its output."""


def end_on_sigterm() -> None:
    """Raise an exception where SIGTERM would end this process at once: ranks and namespaces are removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_ranks(topology: Topology, nodes: list[Node], plan: dict, timeout: float) -> dict:
    """Run `plan` with one process for each rank; what rank 0 wrote down is returned.

    Where a rank fails after some cases were done, these are returned, with the failure under the name of the ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        (Path(folder) / "plan.json").write_text(json.dumps(plan))
        commands, port = [], PORT if nodes[0].namespace else free_port()
        for rank in range(topology.ranks):
            node = nodes[rank // topology.ranks_per_node]
            words = (sys.executable, "-m", "benchmarks.links.rank", f"{folder}/plan.json", str(result))
            environment = _environment(topology, nodes, rank, port)
            if plan["device"] != "cpu":
                environment |= NCCL | {"NCCL_HOSTID": f"lowp-{rank}"}
            commands.append((node.command(*words), environment))
        failed = {}
        with _started(commands, Path(folder)) as processes:
            try:
                _wait(processes, time.monotonic() + timeout, Path(folder))
            except RanksFailedError as error:
                if not result.exists():
                    raise
                failed["ranks"] = str(error)
        found = json.loads(result.read_text())
        return found | {"failures": found["failures"] | failed}


def measured_rate(topology: Topology, nodes: list[Node]) -> float:
    """What a plain TCP socket gets from each node to the next, over the rate that was asked for; the slowest of them.

    A busy computer can only make a link slower than it is, so the best of a few attempts is the link's.
    """
    ratios = []
    for i, rate in enumerate(topology.rates):
        asked, best = bits_per_second(rate), 0.0
        for _ in range(PROBE_ATTEMPTS):
            best = max(best, _transfer(nodes[i], nodes[(i + 1) % len(nodes)], int(asked / 8 * PROBE_SECONDS)) / asked)
            if best >= 1 - RATE_TOLERANCE:
                break
        ratios.append(best)
    return min(ratios)


def _transfer(sender: Node, receiver: Node, size: int) -> float:
    """Bits a second."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rate"
        probe = (sys.executable, "-m", "benchmarks.links.probe")
        hear = receiver.command(*probe, "hear", receiver.address, str(result))
        send = sender.command(*probe, "send", receiver.address, str(size))
        with _started([(hear, dict(os.environ)), (send, dict(os.environ))], Path(folder)) as processes:
            _wait(processes, time.monotonic() + PROBE_TIMEOUT, Path(folder))
        return 8 * float(result.read_text())


def _environment(topology: Topology, nodes: list[Node], rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, and one thread: the computer's few processors are shared by all ranks."""
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.ranks),
        "LOCAL_RANK": str(rank % topology.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(topology.ranks_per_node),
        "GROUP_RANK": str(rank // topology.ranks_per_node),
        "MASTER_ADDR": nodes[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": topology.interface,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def _started(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Sessions of their own keep Ctrl-C from the ranks: it reaches us alone, and we end them here."""
    processes: list[subprocess.Popen] = []
    try:
        for i, (words, environment) in enumerate(commands):
            with (folder / f"{i}.log").open("w") as log:
                start = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            processes.append(start)
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen], deadline: float, folder: Path) -> None:
    """Until all are done; the first that fails ends the wait, since the others would wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [i for i, code in enumerate(codes) if code]
        if failed:
            raise RanksFailedError(f"process {failed[0]} ended with {codes[failed[0]]}:\n{_tail(folder / f'{failed[0]}.log')}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = codes.index(None)
            raise RanksFailedError(f"process {late} was not done in time; its last words:\n{_tail(folder / f'{late}.log')}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
