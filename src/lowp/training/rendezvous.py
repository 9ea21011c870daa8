"""Where ranks meet, and which interfaces they listen on.

Ranks tell each other their addresses through a store, and gloo and NCCL then listen for one another. Whoever can write to the
store, or connect first, can disturb the run; so nothing listens further out than it must.

    started by `lowp train --ranks`         a file in a folder of this user alone; loopback
    by something else, all on this machine  the store that MASTER_ADDR names; loopback
    on many hosts                           the same store; GLOO_SOCKET_IFNAME's interface or, where nothing is named, that of
                                            the host's name: refused if that is a public address

The store is torchrun's, where torchrun started the ranks: that one listens on every interface, and we cannot change it
(docs/TRAIN.md). Where ranks were started by hand (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), rank 0 hosts it, and binds to
MASTER_ADDR alone. torch's own would listen on every interface here, too.
"""

import ipaddress
import os
import socket
import sys
from functools import lru_cache
from typing import Any

import torch.distributed as dist

FOLDER = "LOWP_RENDEZVOUS"  # the environment variable that tells local ranks where to meet
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def attempt() -> str:
    """How often the launcher has started these ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def store_of_ranks(timeout: Any) -> dist.Store:
    """The store in which the ranks of this run meet."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        return dist.FileStore(f"{folder}/attempt-{attempt()}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and int(os.environ["RANK"]) == 0:
        return _hosted(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


@lru_cache(maxsize=1)
def _hosted(name: str, port: int, ranks: int, timeout: Any) -> dist.Store:
    """Rank 0's store, for as long as its process lives, on the address that it was given and on no other."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    if _many_hosts() and ipaddress.ip_address(address[0]).is_loopback:
        raise ValueError(
            f"MASTER_ADDR is {name}, which other hosts cannot reach: give rank 0's address in your private network"
        )
    try:
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise OSError(f"rank 0 cannot listen on MASTER_ADDR {name}, port {port}: {error.strerror or error}") from error
    return dist.TCPStore(
        name, port, ranks, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def choose_interface() -> None:
    """Let gloo and NCCL listen on loopback where all ranks are on this machine, and else on no public address by accident."""
    if FOLDER in os.environ:
        os.environ.update(dict.fromkeys(INTERFACES, LOOPBACK))  # whatever a cluster's profile says: nobody else takes part
    elif not _many_hosts():
        for each in INTERFACES:
            os.environ.setdefault(each, LOOPBACK)
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        _refuse_public_default()


def _many_hosts() -> bool:
    return int(os.environ["WORLD_SIZE"]) > int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _refuse_public_default() -> None:
    """gloo listens on the address of the host's name, unless it is told an interface."""
    host = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return  # gloo then takes loopback, and says that it cannot reach the others
    public = sorted(address for address in found if ipaddress.ip_address(str(address).partition("%")[0]).is_global)
    if public:
        raise ValueError(
            f"ranks on this host would listen on {public[0]}, a public address: set GLOO_SOCKET_IFNAME (and "
            "NCCL_SOCKET_IFNAME) to the interface of your private network"
        )
