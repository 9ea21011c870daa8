"""Ranks that run a list of cases in one process group: several NCCL ranks on one GPU, or gloo ranks on the CPU.

`run(cases, world, backend)` starts one process a rank, lets all of them call `case.function(device, *case.arguments)` for each
case in order, and returns what each rank returned. Starting a process costs ten seconds on a machine with a GPU, so one start
serves many cases. A case that raises, or in which all ranks are silent for too long, ends its world: the cases after it run in
a new world, those of the same kind last.

NCCL refuses two ranks on one GPU of one host. A host is recognised by NCCL_HOSTID if that is set: each process has another one,
and all messages go through sockets on the loopback interface.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
RESTARTS = 5  # worlds that are started again after a case that failed
READY = ""  # the name of the first report: the ranks have met
START_SECONDS = 60.0  # to import torch, and to meet
EXIT_SECONDS = 20.0

_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Case:
    """Something that all ranks do together. `function` is called with the rank's device and `arguments`; both are pickled."""

    name: str
    function: Callable[..., Any]
    arguments: tuple = ()
    kind: str = ""


@dataclass(frozen=True)
class Failed:
    """A rank raised, died, or did not end in time: why."""

    why: str


@dataclass
class World:
    """How ranks are started."""

    size: int
    backend: str  # "nccl": all on GPU 0; "gloo": on the CPU
    timeout: float = 200  # seconds for all cases together
    group_timeout: float = 60  # seconds for one collective
    silence: float = 30  # seconds in which no rank ends a case: they wait for each other
    grace: float = 6  # seconds for what other ranks say about a case that failed on one
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda:0" if self.backend == "nccl" else "cpu"

    def run(self, cases: Sequence[Case]) -> dict[str, list[Any]]:
        """By case: what each rank returned, or `Failed`."""
        deadline, found = time.monotonic() + self.timeout, {}
        remaining = list(cases)
        for _ in range(RESTARTS + 1):
            if not remaining:
                break
            found |= self._attempt(remaining, deadline)
            failed = {case.kind for case in remaining if any(isinstance(v, Failed) for v in found.get(case.name, ()))}
            remaining = sorted((case for case in remaining if case.name not in found), key=lambda case: case.kind in failed)
        return found | {case.name: [Failed("not run: too many cases before it failed")] * self.size for case in remaining}

    def _attempt(self, cases: list[Case], deadline: float) -> dict[str, list[Any]]:
        """Up to the first case that fails, which is the last one found."""
        with self._started(cases) as (processes, pipes):
            said: list[dict[str, Any]] = [{} for _ in range(self.size)]
            open_pipes = dict(zip(pipes, range(self.size), strict=True))
            patience = time.monotonic() + START_SECONDS
            while open_pipes and time.monotonic() < min(deadline, patience):
                for pipe in multiprocessing.connection.wait(list(open_pipes), timeout=0.5):
                    rank = open_pipes[pipe]
                    patience = time.monotonic() + self.silence
                    try:
                        name, value = pipe.recv()
                    except EOFError:
                        del open_pipes[pipe]
                        processes[rank].join(EXIT_SECONDS)
                        missing = [case.name for case in cases if case.name not in said[rank]]
                        if missing:
                            said[rank][missing[0]] = Failed(f"the process ended with exit code {processes[rank].exitcode}")
                    else:
                        said[rank] |= {name: value} if name != READY else {}
                failed = {name for values in said for name, value in values.items() if isinstance(value, Failed)}
                if failed:
                    deadline = min(deadline, time.monotonic() + self.grace)
                    if all(failed & values.keys() for values in said):
                        break
        return _together(cases, said)

    @contextmanager
    def _started(self, cases: list[Case]):
        """The ranks' processes and pipes. No process outlives the block."""
        port, pipes, processes = _free_port(), [], []
        try:
            for rank in range(self.size):
                receiving, sending = _context.Pipe(duplex=False)
                pipes.append(receiving)
                processes.append(_context.Process(target=_rank, args=(rank, self, port, cases, sending), daemon=True))
                processes[-1].start()
                sending.close()
            yield processes, pipes
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(EXIT_SECONDS)
            for pipe in pipes:
                pipe.close()


def _together(cases: list[Case], said: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Cases that all ranks finished, and the first that not all did."""
    found = {}
    for case in cases:
        values = [rank.get(case.name, Failed("did not end in time")) for rank in said]
        found[case.name] = values
        if any(isinstance(value, Failed) for value in values):
            break
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, world: World, port: int, cases: list[Case], pipe: Any) -> None:
    os.environ.update(NCCL | {"NCCL_HOSTID": f"lowp-test-{rank}", "GLOO_SOCKET_IFNAME": "lo"} | dict(world.environment))
    torch.set_num_threads(1)
    device, name = torch.device(world.device), cases[0].name
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            world.backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.group_timeout),
        )
        pipe.send((READY, None))
        for case in cases:
            name = case.name
            faulthandler.dump_traceback_later(max(1.0, world.silence - 5))  # where a rank waits for ever
            pipe.send((name, case.function(device, *case.arguments)))
        faulthandler.cancel_dump_traceback_later()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((name, Failed(traceback.format_exc())))
        pipe.close()
        os._exit(1)  # without NCCL's own end, which would wait for the other ranks
