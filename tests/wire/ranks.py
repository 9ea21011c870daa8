"""Real ranks for tests: gloo processes on loopback, forked from a server that has imported everything already.

`run(function, world, *arguments)` calls `function(rank, *arguments)` in every process, inside an initialised world, and returns
what each returned. Every process has a deadline; none outlives the call.
"""

import io
import multiprocessing
import os
import socket
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# What a rank would otherwise import by itself, each time: test modules need pytest, and the first DDP model or optimizer of a
# process loads torch._dynamo, which takes longer than most tests. The parts of lowp are imported when they are first asked for.
_IMPORTED_ONCE = [
    "pytest", "torch.distributed", "torch.nn.parallel", "torch.distributed.fsdp", "torch._dynamo",
    "lowp.fsdp", "lowp.health.audit", "lowp.optim", "lowp.training.parallel", "lowp.wire.compressor", "lowp.wire.virtual",
]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED_ONCE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def alone():
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


EXIT_SECONDS = 10  # a process that has returned is gone by then


class RankFailed(AssertionError):
    """A rank raised, or did not end in time."""


def run(
    function, world: int, *arguments, timeout: float = 120, group_timeout: float = 60, may_die: tuple[int, ...] = ()
) -> list:
    """Results by rank; None for ranks of `may_die` that gave none (they are asked last, and killed if they hang)."""
    deadline, results = time.monotonic() + timeout, [None] * world
    with _started(function, world, arguments, group_timeout) as (processes, pipes):
        for rank in sorted(range(world), key=lambda rank: rank in may_die):
            if rank not in may_die or pipes[rank].poll(1):
                results[rank] = _result(rank, pipes[rank], processes[rank], deadline, may_die)
    return results


def exit_codes(
    function, world: int, *arguments, timeout: float = 60, group_timeout: float = 60, may_hang: tuple[int, ...] = ()
):
    """The exit codes of ranks that end on their own account; None for one that does not (`may_hang`: nobody waits for it)."""
    deadline = time.monotonic() + timeout
    with _started(function, world, arguments, group_timeout) as (processes, _):
        for rank, process in enumerate(processes):
            if rank not in may_hang:
                process.join(max(0.0, deadline - time.monotonic()))
        for rank in may_hang:
            processes[rank].join(1)
        return [process.exitcode for process in processes]


@contextmanager
def _started(function, world: int, arguments: tuple, group_timeout: float):
    """The ranks' processes and pipes. None outlives the block."""
    port = free_port()
    pipes, processes = [], []
    try:
        for rank in range(world):
            receiving, sending = _context.Pipe(duplex=False)
            pipes.append(receiving)
            target = (function, rank, world, port, group_timeout, arguments, sending)
            processes.append(_context.Process(target=_rank, args=target, daemon=True))
            processes[-1].start()
            sending.close()
        yield processes, pipes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
            process.close()
        for pipe in pipes:
            pipe.close()


def _result(rank: int, pipe, process, deadline: float, may_die: tuple[int, ...]):
    if pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            good, payload = pipe.recv()
        except EOFError:
            good, payload = False, f"ended without a word, exit code {process.exitcode}"
        if good:
            process.join(max(0.0, min(EXIT_SECONDS, deadline - time.monotonic())))
            if process.exitcode != 0:
                raise RankFailed(f"rank {rank} returned but its process does not end (exit code {process.exitcode})")
            return torch.load(io.BytesIO(payload), weights_only=False)
        if rank in may_die:
            return None
        raise RankFailed(f"rank {rank}: {payload}")
    raise RankFailed(f"rank {rank} did not end in time")


def _rank(function, rank: int, world: int, port: int, group_timeout: float, arguments: tuple, pipe) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import lowp

    lowp.set_kernel_policy("never")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout),
        )
        result = function(rank, *arguments)
        room = io.BytesIO()
        torch.save(result, room)
        pipe.send((True, room.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise SystemExit(1) from None
