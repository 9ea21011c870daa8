"""Machines on one computer: network namespaces joined by a switch, each with a network card of a known speed.

    node 0: eth0 --tbf--> veth --+
                                 +-- br0, in a namespace of its own
    node 1: eth0 --tbf--> veth --+

- A node is a namespace. What it sends passes a token bucket (tbf) on its eth0, as on a card of that rate; what it receives was
  shaped by the sender, so a link is full duplex. Nothing touches the host's interfaces, and names carry our process id: what a
  process has left that was killed hard is removed when the next one starts.
- Several ranks on a node share its eth0, as on a machine with several GPUs, and reach each other through the kernel's loopback,
  which is not shaped: addresses of the own namespace never leave it. This is all that 2 x 2 ranks need. Classes by destination
  (htb) would give each rank a card of its own, which machines do not have.
- The bucket holds half a millisecond of the rate, but at least one packet of 64 KiB as TCP hands it down. A smaller one cuts
  packets up and falls behind on a busy computer; a larger one lets more bytes fly for free after each pause.
- Frames are 9000 bytes, as clusters and clouds have them: headers are 0.7 % of the bytes. With 1500 they would be 4.4 %, and
  hide what we measure, which is how many bytes a codec needs.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INSTALL = "install iproute2 (apt-get install -y iproute2)"
FRAME = 9000
LARGEST_PACKET = 64 << 10
BURST_SECONDS = 0.5e-3
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LOOPBACK = "loopback"
NAME = re.compile(r"lowp(\d+)-(?:switch|node\d+)")  # of a namespace of ours; the number is the process's
TCP = {  # in our namespaces; the host keeps its own
    "tcp_congestion_control": "reno",  # waits for losses, of which there are none; bbr, some hosts' default, pauses to probe
    "tcp_rmem": "4096 4194304 33554432",  # windows that are large from the start, not after some transfers
    "tcp_wmem": "4096 4194304 33554432",
}
SETUP_TIMEOUT = 20  # seconds for one ip or tc


class CannotShapeError(RuntimeError):
    """This computer cannot make namespaces; the message is for the user."""


@dataclass(frozen=True)
class Topology:
    """How many nodes, how many ranks on each, and how fast each node's network card is, in the words of tc."""

    rates: tuple[str, ...]  # one for each node
    ranks_per_node: int = 1

    @property
    def ranks(self) -> int:
        return len(self.rates) * self.ranks_per_node

    @property
    def interface(self) -> str:
        """What the ranks talk through."""
        return "lo" if self.rates == (LOOPBACK,) else "eth0"

    @property
    def name(self) -> str:
        rates = self.rates[0] if len(set(self.rates)) == 1 else " and ".join(self.rates)
        each = "" if self.ranks_per_node == 1 or self.interface == "lo" else f" on {len(self.rates)} nodes"
        return f"{rates}, {self.ranks} ranks{each}"


def link(rate: str, ranks: int) -> Topology:
    """One rank on each node; for loopback, all of them on a single one."""
    return Topology((LOOPBACK,), ranks) if rate == LOOPBACK else Topology((rate,) * ranks)


@dataclass(frozen=True)
class Node:
    namespace: str  # empty: this computer as it is
    address: str

    def command(self, *words: str) -> list[str]:
        """`words`, to be run inside; `ip netns exec` becomes the process itself, so that its id is the command's."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)


HERE = Node("", "127.0.0.1")


def bits_per_second(rate: str) -> float:
    for unit, factor in UNITS.items():
        number = rate.removesuffix(unit)
        if number != rate and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise ValueError(f"unknown rate {rate!r}; rates look like 200mbit, 1gbit or {LOOPBACK}")


def burst_bytes(rate: str) -> int:
    return max(LARGEST_PACKET + FRAME, int(bits_per_second(rate) / 8 * BURST_SECONDS))


@contextmanager
def network(topology: Topology) -> Iterator[list[Node]]:
    """Make the nodes of `topology`, and remove them whatever happens; interfaces go with their namespaces."""
    check_able()
    remove_stale()
    prefix = f"lowp{os.getpid()}"
    switch = f"{prefix}-switch"
    nodes = [Node(f"{prefix}-node{i}", f"10.77.0.{i + 1}") for i in range(len(topology.rates))]
    made: list[str] = []
    try:
        for namespace in (switch, *(node.namespace for node in nodes)):
            made.append(namespace)
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            for name, value in TCP.items():
                _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
        if topology.interface == "lo":
            yield [Node(nodes[0].namespace, "127.0.0.1")]
            return
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "mtu", str(FRAME), "up")
        for i, (node, rate) in enumerate(zip(nodes, topology.rates, strict=True)):
            _plug_in(node, rate, switch, port=f"port{i}")
        yield nodes
    finally:
        for namespace in reversed(made):
            # not checked: the one that failed to appear is not there to be removed
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=SETUP_TIMEOUT)


def remove_stale() -> list[str]:
    """Remove namespaces of ours whose process is gone (ranks that still run there keep their network until they end)."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=SETUP_TIMEOUT).stdout
    found = [line.split()[0] for line in listed.splitlines() if line.strip()]
    stale = [name for name in found if (ours := NAME.fullmatch(name)) and not _runs(int(ours[1]))]
    for name in stale:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=SETUP_TIMEOUT)
    return stale


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _plug_in(node: Node, rate: str, switch: str, port: str) -> None:
    inside = ("ip", "-n", node.namespace)
    _run(*inside, "link", "add", "eth0", "mtu", str(FRAME), "type", "veth", "peer", "name", port, "mtu", str(FRAME))
    _run(*inside, "link", "set", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _run(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    # latency bounds the queue before the bucket; TCP keeps less than this there, so that nothing is dropped
    shape = ("root", "tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "200ms")
    _run("tc", "-n", node.namespace, "qdisc", "add", "dev", "eth0", *shape)


def check_able() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise CannotShapeError(f"{' and '.join(missing)} not found: {INSTALL}")
    if os.geteuid() != 0:
        raise CannotShapeError("making network namespaces needs root: run this with sudo, or in a container with CAP_NET_ADMIN")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=SETUP_TIMEOUT)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[:1] or ["no reason given"]
        raise CannotShapeError(f"`{' '.join(words)}` failed: {reason[0]}")
