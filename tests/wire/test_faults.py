"""Ranks that disagree, die, hang or dawdle, and users who ask for what cannot be.

What lowp promises after a rank is gone: whoever waits for it in one of *its* collectives gets a CollectiveError that names the
collective and the rank, within the group's timeout and a roll call. DDP's own collectives (buffers in forward, buckets made
anew before the second step) are torch's, and so are their errors; models here have no buffers, and the clock starts after the
second step, so that every error is lowp's.
"""

import ctypes
import itertools
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire.faults import ROLL_CALL_SECONDS

TIMEOUT = 3.0  # of the group
SLACK = 4.0  # two shared cores


def model(seed=0, width=16, depth=6):
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))


def lowp_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lowp")]


def lowp_threads_in(seconds):
    """Those still alive after a while."""
    end = time.monotonic() + seconds
    while lowp_threads() and time.monotonic() < end:
        time.sleep(0.02)
    return lowp_threads()


# A rank that dies or hangs


def trains_until_the_end(rank, world, victim, how, delay, settings):
    """Train; the victim gets its signal `delay` seconds after the second step. Survivors tell what they saw."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    groups = len(dist.distributed_c10d._world.pg_map)
    handle = lowp.compress_gradients(ddp, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    error, steps, began = None, 0, time.monotonic()
    try:
        while time.monotonic() < began + 60:
            began_step = time.monotonic()
            optimizer.zero_grad()
            ddp(inputs).square().sum().backward()
            optimizer.step()
            steps += 1
            if steps == 2 and rank == victim:
                threading.Timer(delay, os.kill, (os.getpid(), how)).start()
    except RuntimeError as caught:
        error = caught
    took = time.monotonic() - began_step
    left = lowp_threads_in(5.0)
    found = {
        "kind": type(error).__name__,
        "text": str(error),
        "ranks": getattr(error, "ranks", None),
        "steps": steps,
        "took": took,
        "threads": left,
        "gradients": sum(p.grad is not None for p in ddp.parameters()),
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
        "repeats": _again(ddp, inputs),
    }
    handle.remove()
    return found


def _again(ddp, inputs):
    """A step after the failure fails at once, with the same words."""
    began = time.monotonic()
    try:
        ddp(inputs).square().sum().backward()
    except lowp.CollectiveError as error:
        return time.monotonic() - began < 1 and str(error)
    return "no CollectiveError"


def check_survivors(results, world, victim, reduction):
    for rank, found in enumerate(results):
        if rank == victim:
            assert found is None, f"the victim survived: {found}"
            continue
        about = f"rank {rank} of {world}, victim {victim}: {found}"
        assert found["kind"] == "CollectiveError", about
        assert found["text"].startswith(f"{reduction} of bucket "), about
        assert f"failed on rank {rank}" in found["text"], about
        named = f"rank {victim} did not answer" in found["text"]
        assert named or (victim == 0 and "its host (rank 0, or the launcher)" in found["text"]), about
        assert found["took"] < TIMEOUT + ROLL_CALL_SECONDS + SLACK, about
        assert found["threads"] == [], about
        assert found["gradients"] == 0, about
        assert found["groups"] == 0, about
        assert found["repeats"] == found["text"], about


REDUCTIONS = ("two_shot", "ring", "tree", "sequential")
SCALES = ("aps", "local", "aps_delayed", "none")


def kill(number, how=signal.SIGKILL):
    """One world, one victim, one moment: all drawn from `number`."""
    draw = random.Random(number)
    world = draw.choice((2, 3, 3))
    victim, delay = draw.randrange(world), draw.uniform(0, 0.3)
    settings = {"format": draw.choice(("e5m2", "int8", "e2m1fn")), "scale": draw.choice(SCALES)}
    settings |= {"reduction": draw.choice(REDUCTIONS), "error_feedback": draw.random() < 0.3}
    arguments = (world, victim, how, delay, settings)
    results = run(trains_until_the_end, world, *arguments, timeout=60, group_timeout=TIMEOUT, may_die=(victim,))
    check_survivors(results, world, victim, settings["reduction"])


def at_once(numbers, how=signal.SIGKILL):
    """Several worlds side by side: most of the time they wait. All failures are shown, not the first."""
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda number: _caught(kill, number, how), numbers))
    failed = {number: outcome for number, outcome in zip(numbers, outcomes, strict=True) if outcome}
    assert not failed, f"{len(failed)} of {len(outcomes)}:\n" + "\n".join(f"{n}: {text}" for n, text in failed.items())


def _caught(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        return str(error).split("\nassert ")[0] or repr(error)
    return None


def test_kills():
    at_once(range(8))


@pytest.mark.slow
def test_fifty_kills():
    at_once(range(50))


def test_hangs():
    at_once(range(100, 104), signal.SIGSTOP)


@pytest.mark.slow
def test_twenty_hangs():
    at_once(range(100, 120), signal.SIGSTOP)
