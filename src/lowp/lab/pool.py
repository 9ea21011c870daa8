"""Runs on this machine: a few worker processes, which share its cores, or its GPUs, fairly.

`jobs` runs are under way at once. A run of several ranks takes as many places as it has ranks, or all of them: two ranks that
wait for each other must not be slowed down by runs beside them. Every process has the study's number of threads; threads that
wait sleep (OMP_WAIT_POLICY), and do not take a core from a run that computes.

On CUDA `jobs` runs share a GPU: a small model leaves most of it idle. Where there are several GPUs, workers are dealt out to
them one by one. With `--mps` (mps.py) kernels of several processes run at the same time.

A worker that dies (killed, out of memory, a crash in C++) takes its run with it and nothing else: the run is recorded as failed
with the reason, and another worker takes the place.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lowp.lab.execution import Job, Outcome
from lowp.lab.worker import PARENT

GRACE = 60.0  # seconds that a worker has to finish its step and save
IDLE_GRACE = 5.0  # and one without a run, to end: some of those that compiled do not end by themselves


class Executor(Protocol):
    """Where runs are made. Runs are started one by one, and reported in the order in which they end."""

    def has_room(self, job: Job) -> bool:
        """Can this run begin now?"""

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[Outcome]:
        """What has ended; waits for the first one, but not longer."""

    def stop(self) -> None:
        """Ask all runs to finish their step and save."""

    def kill(self) -> None:
        """End everything now."""

    def close(self) -> None: ...


class Worker:
    """One process."""

    def __init__(self, number: int, logs: Path, environment: Mapping[str, str]) -> None:
        with (logs / f"worker-{number}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lowp.lab.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the study, which asks its workers to stop
            )
        self.job: Job | None = None
        self.began = 0.0
        self._text = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def answers(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, job: Job) -> None:
        assert self.job is None
        assert self._process.stdin is not None
        self.job, self.began = job, time.perf_counter()
        with suppress(BrokenPipeError):  # it has died: `read` will find out
            self._process.stdin.write(job.text().encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> tuple[list[dict], bool]:
        """What it has answered, and whether it is still there."""
        piece = os.read(self.answers, 1 << 16)
        *lines, self._text = (self._text + piece).split(b"\n")
        return [json.loads(line) for line in lines], bool(piece)

    def death(self) -> str:
        """Why it has died, in words."""
        code = self._process.wait()
        if code < 0:
            return f"its process was killed ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number) if number == signal.SIGKILL else self._process.send_signal(number)

    def give_no_more(self) -> None:
        """It ends after its job."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, seconds: float) -> None:
        self.give_no_more()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalPool:
    def __init__(self, jobs: int, threads: int, logs: Path, gpus: int = 0) -> None:
        """`gpus`: how many to deal workers out to; 0: leave that to the runs."""
        self._jobs, self._threads, self._logs, self._gpus = jobs, threads, logs, gpus
        self._workers: dict[int, Worker] = {}  # by their number
        self._selector = selectors.DefaultSelector()
        self._stopping = False

    def _places(self, job: Job) -> int:
        return min(self._jobs, job.ranks)

    def has_room(self, job: Job) -> bool:
        taken = sum(self._places(worker.job) for worker in self._workers.values() if worker.job is not None)
        return not self._stopping and taken + self._places(job) <= self._jobs

    def start(self, job: Job) -> None:
        idle = next((worker for worker in self._workers.values() if worker.job is None), None)
        (idle or self._new_worker()).start(job)

    def _new_worker(self) -> Worker:
        number = next(number for number in range(len(self._workers) + 1) if number not in self._workers)
        worker = self._workers[number] = Worker(number, self._logs, self._environment(number))
        self._selector.register(worker.answers, selectors.EVENT_READ, number)
        return worker

    def _environment(self, number: int) -> dict[str, str]:
        own = {
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # a worker finds what this process finds
        }
        if self._gpus > 1:
            own["CUDA_VISIBLE_DEVICES"] = str(number % self._gpus)
        return os.environ | own

    def wait(self, seconds: float) -> list[Outcome]:
        found: list[Outcome] = []
        for key, _ in self._selector.select(seconds):
            worker = self._workers[key.data]
            answers, alive = worker.read()
            for answer in answers:
                if "ready" not in answer:
                    found.append(Outcome(**answer))
                    worker.job = None
            if not alive:
                found += self._bury(key.data)
        return found

    def _bury(self, number: int) -> list[Outcome]:
        worker = self._workers.pop(number)
        self._selector.unregister(worker.answers)
        job, reason = worker.job, worker.death()
        worker.close(0)
        if job is None:
            return []
        state = "stopped" if self._stopping else "failed"
        return [Outcome(job.name, state, reason, time.perf_counter() - worker.began)]

    def stop(self) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.signal(signal.SIGKILL)

    def close(self) -> None:
        for worker in self._workers.values():  # all at once: torch takes seconds to end, more on a GPU
            worker.give_no_more()
        began = time.perf_counter()
        for worker in self._workers.values():
            until = began + (IDLE_GRACE if worker.job is None else GRACE)
            worker.close(max(0.0, until - time.perf_counter()))
        self._workers.clear()
        self._selector.close()
