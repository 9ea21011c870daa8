"""Hosts for tests: network namespaces, joined by a veth pair."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def two_hosts(network: str) -> Iterator[list[str]]:
    """The names of two namespaces, NETWORK.1 and NETWORK.2 ("10.77.0"); gone afterwards, whatever happens. Needs root."""
    names = [f"lowp-{network}-{os.getpid()}-{host}" for host in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "veth1", "netns", names[0], "type", "veth", "peer", "name", "veth2", "netns", names[1])
        for host, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"{network}.{host}/24", "dev", f"veth{host}")
            ip("-n", name, "link", "set", f"veth{host}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)
