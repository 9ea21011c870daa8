"""Local ranks, started and watched by torch's own elastic launcher, the one behind torchrun.

Each rank is the same command again, told its rank by the launcher's environment variables; on many hosts torchrun does the same
with the same command. A rank that dies takes the others with it; all of them start again from the last checkpoint, as often as
`max_restarts` says.
"""

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from lowp.train.world import default_threads

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE = 300  # seconds that ranks have to finish their step and save, after a signal


PARENT = "LOWP_LAUNCHER"  # the environment variable that tells ranks who started them


class RanksFailed(RuntimeError):
    """Ranks ended with an error that none of them could explain: killed, or out of memory."""


def is_rank() -> bool:
    """Has a launcher started this process as one of several?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def follow_launcher() -> None:
    """Where the launcher is killed, its ranks are asked to stop: they save, and are no orphans. (Linux; under torchrun, its own
    way.)"""
    launcher = os.environ.get(PARENT)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(launcher):
        raise RanksFailed("the launcher was gone before its rank began")


def is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch(command: Sequence[str], ranks: int, threads: int, max_restarts: int) -> int:
    """Run `python -m lowp <command>` as `ranks` processes on this machine. Returns the exit code of the whole.

    0: they finished, or stopped when told to. What they have to say they say themselves, rank 0 for all.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads or default_threads(ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]:
        logging.getLogger(name).setLevel(logging.ERROR)  # what the launcher warns of, ranks say themselves
    os.environ[PARENT] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "lowp", *command)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        return _exit_code(error)
    return 0


def _exit_code(error: Any) -> int:
    """What the rank that failed first ended with. A rank that could say why has said so; one that was killed could not."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        raise RanksFailed(f"rank {rank} was killed ({failure.signal_name()}); the others were ended") from None
    return failure.exitcode
