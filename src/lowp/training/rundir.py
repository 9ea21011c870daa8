"""A run is a directory, and one process at a time may write to it.

    runs/aps8-001/recipe.toml         what was asked for, complete; it makes the directory a run
                  environment.json    where it ran; after a resume the earlier places, too
                  status.json         running, finished, stopped, diverged or failed; at which step; why
                  metrics.jsonl       one record a line
                  health.jsonl
                  checkpoints/        step-00000120/, ...
                  run.lock            who writes here

The lock is the kernel's (flock), not the file: it is gone when its process is, however that ended, and a stale file never keeps
anybody out. The file says only who holds it. A process that was restarted may come a moment before the one it replaces has
gone, so a lock that is held is waited for, a few seconds.

Only rank 0 touches these files.
"""

import json
import os
import platform
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from lowp.machine import try_lock
from lowp.training.durable import explained, make_directory, partial_of, replace_file, sync_directory
from lowp.training.json_lines import JsonLines as JsonLines
from lowp.training.json_lines import read_lines as read_lines

RECIPE, ENVIRONMENT, STATUS, LOCK = "recipe.toml", "environment.json", "status.json", "run.lock"
METRICS = "metrics.jsonl"
STATES = ("running", "finished", "stopped", "diverged", "failed")
LOCK_SECONDS = 5.0  # what a killed process may need to go


class RunError(OSError):
    """A directory that a run cannot have, or cannot write to; the message names it and says why."""


class RunDirectory:
    """The directory of one run, locked until `close`. Make one with `create`.

    `resumed` is whether the run was there before. `begun` is whether this process may change it: a new run is begun by
    `create`, and one that was there by `begin`, when it is known that it can go on.
    """

    def __init__(self, path: Path, lock: FileIO, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self.begun = False
        self.checkpoints = path / "checkpoints"
        self.metrics = path / METRICS
        self.health = path / "health.jsonl"
        self._lock = lock

    @classmethod
    def create(cls, path: Path, recipe_toml: str, environment: dict[str, Any], *, resume: bool) -> Self:
        """Make the directory, or with `resume` go on with the run that it holds (if it holds none, begin it).

        What is refused is left as it was. Whether today's recipe fits a run that was there is the caller's question; if it
        does, the caller calls `begin`.
        """
        check_directory(path, resume)
        with explained(RunError, f"create {path}"):
            make_directory(path)
        lock = take_lock(path / LOCK)
        try:
            check_directory(path, resume)  # two may have begun at once, and the other had the lock first
            run = cls(path, lock, resumed=(path / RECIPE).exists())
            if not run.resumed:
                run.begin(recipe_toml, environment)
        except BaseException:
            lock.close()
            raise
        return run

    def begin(self, recipe_toml: str, environment: dict[str, Any]) -> None:
        """Say what is trained from here on, and where. A resumed run's recipe.toml becomes the recipe that it goes on with: a
        later resume must not fall back to the one before."""
        self.begun = True
        with explained(RunError, f"write to {self.path}"):
            replace_file(self.path / RECIPE, recipe_toml.encode())
            before = _read_object(self.path / ENVIRONMENT)
            if before:
                environment = environment | {"earlier": [*before.pop("earlier", []), before]}
            replace_file(self.path / ENVIRONMENT, _json(environment))
        self.set_status(state="running", message="")

    def status(self) -> dict[str, Any]:
        """`state`, `step`, `epoch` and `message`, as they were last set."""
        return read_status(self.path)

    def set_status(
        self,
        *,
        state: str | None = None,
        step: int | None = None,
        epoch: float | None = None,
        message: str | None = None,
    ) -> None:
        """Change what is given. It waits for the disk: for checkpoints and ends, not for every step."""
        if state is not None and state not in STATES:
            raise ValueError(f"unknown state {state!r}; it is one of {', '.join(STATES)}")
        given = {"state": state, "step": step, "epoch": epoch, "message": message}
        with explained(RunError, f"write to {self.path}"):
            changed = self.status() | {key: value for key, value in given.items() if value is not None}
            replace_file(self.path / STATUS, _json(changed))

    def close(self) -> None:
        """Release the lock. The file stays: to remove it would let two others each lock one of that name."""
        if not self._lock.closed:
            with suppress(OSError):  # the content is a courtesy
                self._lock.truncate(0)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_status(path: Path) -> dict[str, Any]:
    """`state`, `step`, `epoch` and `message` of the run in a directory, whoever has it."""
    return {"state": "running", "step": 0, "epoch": 0.0, "message": ""} | _read_object(path / STATUS)


def next_directory(root: Path, name: str) -> Path:
    """The first free one of runs/aps8-001, runs/aps8-002, ... It is made, so that two who ask at once get two."""
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"{name!r} is no name for a run's directory: it must not be empty, begin with a dot or hold a slash")
    with explained(RunError, f"create a directory in {root}"):
        make_directory(root)
        number = 1
        while True:
            path = root / f"{name}-{number:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            sync_directory(root)
            return path


def check_directory(path: Path, resume: bool) -> None:
    """Whether a run may have this directory: none, an empty one, one where a run was about to begin, or a run to resume."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise RunError(f"{path} is not a directory: choose another --out")
    with explained(RunError, f"read {path}"):
        names = {entry.name for entry in path.iterdir()}
    if RECIPE in names:
        if not resume:
            raise RunError(f"{path} holds a run already: go on with it by --resume, or choose another --out")
    elif names - {LOCK, partial_of(path / RECIPE).name}:
        some = ", ".join(sorted(names)[:3])
        raise RunError(f"{path} is not a run, and not empty: it holds {some} and no {RECIPE}; choose another --out")


# The lock.

_held: WeakSet[FileIO] = WeakSet()


def take_lock(path: Path) -> FileIO:
    """The open file whose lock this process now holds; RunError with the holder's name if it does not give it up."""
    with explained(RunError, f"lock {path}"):
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        try:
            _wait_for_lock(file, path.parent)
            _held.add(file)
            file.truncate(0)
            file.write(_json({"pid": os.getpid(), "host": platform.node()}))
        except BaseException:
            file.close()
            raise
    return file


def _wait_for_lock(file: FileIO, run: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return try_lock(file)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(f"output directory {run} is in use by {_holder(file)}") from None
        time.sleep(0.05)


def _holder(file: FileIO) -> str:
    try:
        found = json.loads(file.readall())
        return f"process {found['pid']} on host {found['host']}"
    except (ValueError, KeyError, TypeError):  # it has just taken the lock, and is about to write who it is
        return "another process"


def _close_in_child() -> None:
    """A forked process, such as a data loader's worker, has its parent's lock, and would keep it when the parent is killed."""
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


# The small files.


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _read_object(path: Path) -> dict[str, Any]:
    """Empty if there is none, or somebody has damaged it: nothing that a run needs is in these files."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
