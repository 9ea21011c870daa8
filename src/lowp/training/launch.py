"""Local ranks, started and watched by torch's own elastic agent, the one behind torchrun (agent.py says what differs).

Each rank is the same command again, told its rank by environment variables; on many hosts torchrun does the same with the same
command. A rank that dies takes the others with it; all of them start again from the last checkpoint, as often as `max_restarts`
says.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowp.invocation import VARIABLE, program
from lowp.training.recipe import Recipe
from lowp.training.rendezvous import FOLDER
from lowp.training.rundir import check_directory
from lowp.training.toml import to_toml
from lowp.training.world import threads_of_a_rank

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FAILED, MISTAKE, DIVERGED = 1, 2, 3  # exit codes of a rank: a collective failed; a user's mistake; the run cannot go on

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


def launch_run(recipe: Recipe, out: Path, *, resume: bool, data: Path | None, quiet: bool, max_restarts: int) -> int:
    """Train a recipe on `recipe.ranks` local processes. Returns the exit code of the whole.

    A directory that the run cannot have is refused before any process starts. Ranks read the recipe, complete, from a file.
    """
    check_directory(out, resume)
    with tempfile.TemporaryDirectory(prefix="lowp-recipe-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(to_toml(recipe), encoding="utf-8")
        command = ["train", str(file), "--out", str(out)]
        command += ["--data", str(data)] if data is not None else []
        command += [flag for flag, wanted in (("--resume", resume), ("--quiet", quiet)) if wanted]
        return launch(command, recipe.ranks, recipe.threads, max_restarts)


def launch(command: Sequence[str], ranks: int, threads: int, max_restarts: int) -> int:
    """Run `lowp <command>` as `ranks` processes on this machine. Returns the exit code of the whole.

    0: they finished, or stopped when told to. What they have to say they say themselves, rank 0 for all. KeyboardInterrupt:
    they were ended by Ctrl-C before rank 0 could say anything.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lowp.training.agent import FIRST, Agent, SingleAgentRendezvous

    folder = tempfile.TemporaryDirectory(prefix="lowp-ranks-")
    with folder as path, _environment(_of_ranks(path, ranks, threads)), _silent("torch.distributed.elastic"):
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=SingleAgentRendezvous(uuid.uuid4().hex),
            entrypoint=sys.executable,
            args=("-c", FIRST, *command),
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        agent = Agent(spec, DefaultLogsSpecs(log_dir=path))
        try:
            with agent.listening():
                result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT and agent.exit_code_of(0) != 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            return 128 + int(error.sigval)
        return _exit_code(ChildFailedError("lowp", result.failures)) if result.is_failed() else 0


def _of_ranks(folder: str, ranks: int, threads: int) -> dict[str, str]:
    """What ranks are told by their environment, besides what the agent tells each of them."""
    return {
        FOLDER: folder,
        VARIABLE: program(),
        PARENT: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads_of_a_rank(threads, ranks)),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # they find the modules that this process finds
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # `Agent.listening` does
    }


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The agent starts ranks with this process's environment: it is changed meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent(package: str) -> Iterator[None]:
    """What the agent warns of, ranks and we ourselves say in a line."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(f"{package}.")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _exit_code(error: Any) -> int:
    """What the rank that failed first ended with. A rank that could say why has said so; one that was killed could not."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        raise RanksFailed(f"rank {rank} was killed ({failure.signal_name()}); the others were ended") from None
    return failure.exitcode
