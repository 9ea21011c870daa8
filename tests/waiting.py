"""How tests find a host that waits for its GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Inside, any synchronisation of the host with the GPU raises.

    torch warns when the mode is set for the first time in a process, after it has set it. The warning is no finding. The mode
    belongs to the process: it must not stay for the tests that follow, whatever happens here.
    """
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
