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
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import exit_codes, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire import compressor
from lowp.wire.faults import ROLL_CALL_SECONDS

TIMEOUT = 3.0  # of the group
SLACK = 4.0  # two shared cores


def model(seed=0, width=16, depth=6):
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))


def lowp_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lowp")]


def lowp_threads_in(seconds, may_stay):
    """Those still alive after a while, which need not pass for those that may stay."""
    end = time.monotonic() + seconds
    while not may_stay.issuperset(lowp_threads()) and time.monotonic() < end:
        time.sleep(0.02)
    return lowp_threads()


# A rank that dies or hangs


def trains_until_the_end(rank, world, victim, how, delay, settings):
    """Train; the victim gets its signal `delay` seconds after the second step. Survivors tell what they saw."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    # Many processes start slowly side by side. What is connected keeps its long timeout, and what lowp adds has a short one.
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=TIMEOUT)
    groups = len(dist.distributed_c10d._world.pg_map)
    handle = lowp.compress_gradients(ddp, **settings)
    assert handle._compressor._communicator.timeout.total_seconds() == TIMEOUT
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
    left = lowp_threads_in(5.0, threads_that_may_stay(victim, how))
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


def threads_that_may_stay(victim, how):
    """A store whose host hangs is asked by a thread that ends when the host does: torch gives no way to call it back."""
    return {"lowp-roll-call"} if victim == 0 and how == signal.SIGSTOP else set()


def check_survivors(results, world, victim, reduction, how):
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
        assert found["threads"] in ([], list(threads_that_may_stay(victim, how))), about
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
    results = run(trains_until_the_end, world, *arguments, timeout=60, may_die=(victim,))
    check_survivors(results, world, victim, settings["reduction"], how)


def at_once(numbers, how=signal.SIGKILL):
    """Several worlds side by side: most of the time they wait. All failures are shown, not the first."""
    with ThreadPoolExecutor(4) as pool:
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
    at_once((101,), signal.SIGSTOP)  # rank 0 of 3, the store's host: the hardest


@pytest.mark.slow
def test_twenty_hangs():
    at_once(range(100, 120), signal.SIGSTOP)


# A real interpreter's end


def dies_and_leaves(rank, victim, how, code):
    """Like a script whose error nobody catches: the interpreter is taken down, and says so by its exit code."""
    ddp = DistributedDataParallel(model())
    lowp.compress_gradients(ddp, "e5m2", scale="aps")
    for step in itertools.count():
        if step == 3 and rank == victim:
            os.kill(os.getpid(), how)
        try:
            ddp(torch.ones(2, 16)).sum().backward()
        except lowp.CollectiveError:
            sys.stdout.flush()
            ctypes.pythonapi.Py_Exit(code)  # finalises the interpreter; a child of multiprocessing leaves without


STOPPED = pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow)


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), STOPPED])
def test_the_process_can_exit(victim, how):
    codes = exit_codes(dies_and_leaves, 2, victim, how, 7, timeout=30, group_timeout=TIMEOUT, may_hang=(victim,))
    assert codes == [{signal.SIGKILL: -signal.SIGKILL, signal.SIGSTOP: None}[how] if rank == victim else 7 for rank in range(2)]


def leaves_in_the_middle(rank):
    """A user's error between two steps, with everything still open."""
    ddp = DistributedDataParallel(model())
    lowp.compress_gradients(ddp, "e5m2", scale="aps")
    ddp(torch.ones(2, 16)).sum().backward()
    ctypes.pythonapi.Py_Exit(5)


def test_the_process_can_exit_without_removing_anything():
    assert exit_codes(leaves_in_the_middle, 2, timeout=30, group_timeout=TIMEOUT) == [5, 5]


# all_reduce


def all_reduces_until_the_end(rank, victim):
    """all_reduce has no thread; a rank that is gone is named all the same."""
    error, tensor = None, torch.ones(1000)
    for step in range(1000):
        if step == 5 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            lowp.all_reduce(tensor.fill_(1), "e5m2")
        except lowp.CollectiveError as caught:
            error = caught
            break
    return str(error), error.ranks, time.monotonic() - began, lowp_threads()


def test_all_reduce_names_the_rank_that_died():
    survivors = run(all_reduces_until_the_end, 3, 1, timeout=60, group_timeout=TIMEOUT, may_die=(1,))
    for rank in (0, 2):
        text, ranks, took, threads = survivors[rank]
        assert "all_reduce of 1000 elements failed on rank" in text
        assert "rank 1 did not answer" in text
        assert ranks == (1,)
        assert took < TIMEOUT + ROLL_CALL_SECONDS + SLACK
        assert threads == []


# Slow ranks


class Dawdling(nn.Module):
    """Sleeps in forward and in backward, at random, differently on every rank."""

    def __init__(self, inner, random):
        super().__init__()
        self.inner = inner
        self._random = random

    def forward(self, numbers):
        numbers = self.inner(numbers)
        if self._random is not None:
            self._nap()
            numbers.register_hook(lambda _: self._nap())
        return numbers

    def _nap(self):
        if self._random.random() < 0.3:
            time.sleep(self._random.uniform(0, 0.004))


def trains(rank, steps, delays, settings):
    torch.manual_seed(0)
    draw = random.Random(rank) if delays else None
    layers = [Dawdling(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), draw) for _ in range(5)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-5)
    handle = lowp.compress_gradients(ddp, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.Generator().manual_seed(rank)
    if draw is not None:
        thread = handle._compressor._comm_thread
        send = thread.send
        thread.send = lambda bucket: (draw.random() < 0.2 and time.sleep(draw.uniform(0, 0.004)), send(bucket))
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=inputs)).square().sum().backward()
        optimizer.step()
    buckets = len(handle.buckets)
    handle.remove()
    return buckets, torch.cat([p.detach().view(-1) for p in ddp.parameters()])


@pytest.mark.parametrize("steps", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_steps_under_random_delays(steps):
    settings = {"format": "e4m3fn", "scale": "aps_delayed", "rounding": "stochastic", "error_feedback": True}
    with ThreadPoolExecutor(2) as pool:
        swift, slow = pool.map(lambda delays: run(trains, 3, steps, delays, settings), (False, True))
    assert swift[0][0] >= 5  # buckets
    for rank in range(3):
        assert torch.equal(slow[rank][1], swift[0][1])
        assert torch.equal(swift[rank][1], swift[0][1])
    assert swift[0][1].isfinite().all()


# Ranks that disagree


def registers(rank, cases):
    """What each pair of settings (rank 0's, the others') raises; and that the next registration works."""
    said = []
    for ours, theirs, sizes in cases:
        settings = {"format": "e5m2", **(ours if rank == 0 else theirs)}
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(8, 8))
        before = lowp_threads()
        if sizes and rank == 1:
            ddp.module.register_parameter("extra", nn.Parameter(torch.ones(3)))
        try:
            lowp.compress_gradients(ddp, **settings).remove()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
        said[-1] += "" if lowp_threads() == before else " THREADS ARE LEFT"
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    handle = lowp.compress_gradients(ddp, "e5m2")
    ddp(torch.ones(1, 8)).sum().backward()
    groups = len(dist.distributed_c10d._world.pg_map)
    handle.remove()
    return said, groups


MISMATCHES = [  # rank 0, the others, what the error says of both
    ({"format": "e5m2"}, {"format": "int8"}, "rank 0 has format=e5m2, rank 1 has format=int8"),
    ({"scale": "aps"}, {"scale": "local"}, "rank 0 has scale=aps, rank 1 has scale=local"),
    ({"reduction": "ring"}, {"reduction": "tree"}, "rank 0 has reduction=ring, rank 1 has reduction=tree"),
    ({"seed": 1}, {"seed": 2}, "rank 0 has seed=1, rank 1 has seed=2"),
    ({"rounding": "stochastic"}, {}, "rank 0 has rounding=stochastic, rank 1 has rounding=nearest"),
    ({"nonfinite": "skip"}, {}, "rank 0 has nonfinite=skip, rank 1 has nonfinite=propagate"),
    ({"sum_format": "fp16"}, {}, "rank 0 has sum_format=fp16, rank 1 has sum_format=None"),
    ({"error_feedback": True}, {}, "rank 0 has error_feedback=True, rank 1 has error_feedback=False"),
    ({"chunk": 100}, {"chunk": 200}, "rank 0 has chunk=100, rank 1 has chunk=200"),
    ({"skip": "1d"}, {}, "skip=["),
    ({"measure": True}, {}, "rank 0 has measure=True, rank 1 has measure=False"),
    ({"format": {0: "fp16", 5: "e5m2"}}, {"format": {0: "fp16", 6: "e5m2"}}, "5:e5m2"),
    ({"format": "topk:0.1"}, {"format": "topk:0.2"}, "topk:0.2"),
    ({"format": lowp.FloatFormat(4, 3, bias=5)}, {"format": lowp.FloatFormat(4, 3, bias=6)}, "rank 0 has format=e4m3b5"),
    ({"layers": {"weight": "fp16"}}, {"layers": {"weight": "bf16"}}, "fp16"),
    ({"format": lowp.FloatFormat(4, 3, subnormals=False)}, {"format": lowp.FloatFormat(4, 3)}, "rank 1 has format=e4m3"),
]


def test_ranks_that_disagree_at_registration():
    results = run(registers, 3, [(ours, theirs, False) for ours, theirs, _ in MISMATCHES], timeout=60)
    for case, *said in zip(MISMATCHES, *(lines for lines, _ in results), strict=True):
        assert "ranks disagree on how to compress" in said[0], case
        assert case[2] in said[0], case
        assert said[0] == said[1] == said[2], case
    assert {groups for _, groups in results} == {2}  # the world and lowp's: none is lost by a failure


def test_models_of_different_shapes():
    said = [lines[0] for lines, _ in run(registers, 2, [({}, {}, True)], timeout=60)]
    assert "parameters=2:" in said[0]
    assert "parameters=3:" in said[0]
    assert said[0] == said[1]


def versions(rank):
    compressor.__version__ = f"0.{rank}"
    try:
        lowp.compress_gradients(DistributedDataParallel(nn.Linear(8, 8)), "e5m2")
    except ValueError as error:
        return str(error), lowp_threads()


def test_different_versions():
    for text, threads in run(versions, 2, timeout=60):
        assert "rank 0 has version=0.0, rank 1 has version=0.1" in text
        assert threads == []


def reduces(rank, cases):
    said = []
    for ours, theirs in cases:
        settings = {"format": "e5m2", "size": 10, **(ours if rank == 0 else theirs)}
        tensor = torch.ones(settings.pop("size"))
        try:
            lowp.all_reduce(tensor, **settings)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    tensor = torch.ones(10)
    lowp.all_reduce(tensor, "e5m2")
    return said, tensor.tolist()


def test_ranks_that_disagree_in_all_reduce():
    cases = [
        ({"format": "int8"}, {}, "rank 0 has format=int8, rank 1 has format=e5m2"),
        ({"scale": "aps"}, {}, "rank 0 has scale=aps, rank 1 has scale=local"),
        ({"op": "mean"}, {}, "rank 0 has op=mean, rank 1 has op=sum"),
        ({"size": 11}, {}, "rank 0 has elements=11, rank 1 has elements=10"),
        ({"reduction": "ring"}, {}, "rank 0 has reduction=ring, rank 1 has reduction=two_shot"),
    ]
    for said, after in run(reduces, 2, [case[:2] for case in cases], timeout=60, group_timeout=TIMEOUT):
        for (_, _, expected), text in zip(cases, said, strict=True):
            assert expected in text
        assert after == [2.0] * 10


def changes_its_mind(rank):
    """Ranks compare what is new to them. What is new to one of them only must end in an error on both, not in a number."""
    lowp.all_reduce(torch.ones(10), "e5m2")
    began = time.monotonic()
    said = complains(lowp.all_reduce, torch.ones(10), "int8" if rank == 0 else "e5m2")
    return said, time.monotonic() - began


def test_ranks_that_disagree_later_in_all_reduce():
    for said, took in run(changes_its_mind, 2, timeout=60, group_timeout=TIMEOUT):
        assert said.startswith(("CollectiveError", "ValueError: ranks disagree"))
        assert took < TIMEOUT + ROLL_CALL_SECONDS + SLACK


def recovers(rank):
    """A rank that was too slow, and not dead: everybody has an error, and what comes next works or fails, but does not hang."""
    tensor = torch.ones(10)
    lowp.all_reduce(tensor, "e5m2")
    if rank == 1:
        time.sleep(TIMEOUT + ROLL_CALL_SECONDS + 1)
    first = complains(lowp.all_reduce, tensor.fill_(1), "e5m2")
    dist.barrier()  # the user's own group is unharmed
    began = time.monotonic()
    second = complains(lowp.all_reduce, tensor.fill_(1), "e5m2")
    return first, second, tensor.tolist(), time.monotonic() - began


def test_after_a_slow_rank():
    slow = run(recovers, 3, timeout=60, group_timeout=TIMEOUT)
    for rank, (first, second, numbers, took) in enumerate(slow):
        assert first.startswith("CollectiveError"), slow
        assert rank == 1 or "rank 1 did not answer" in first, slow
        assert (second, numbers) == ("nothing", [3.0] * 10), slow
        assert took < 2, slow


# What cannot be


def complains(function, *arguments, **settings):
    try:
        function(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_requests(rank):
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4)

        def forward(self, numbers):
            return self.head(self.attention(numbers))

    ddp = DistributedDataParallel(Ours())
    ask, tensor = lowp.compress_gradients, torch.ones(8)
    said = {
        "format": complains(ask, ddp, "e5m3x"),
        "unsigned": complains(ask, ddp, "e8m0fnu"),
        "scale": complains(ask, ddp, "e5m2", scale="global"),
        "block": complains(ask, ddp, "e5m2", scale="block:0"),
        "reduction": complains(ask, ddp, "e5m2", reduction="star"),
        "hierarchical": complains(ask, ddp, "e5m2", reduction="hierarchical(0)"),
        "rounding": complains(ask, ddp, "e5m2", rounding="up-ish"),
        "nonfinite": complains(ask, ddp, "e5m2", nonfinite="ignore"),
        "chunk": complains(ask, ddp, "e5m2", chunk=0),
        "topk": complains(ask, ddp, "topk:many"),
        "topk 0": complains(ask, ddp, "topk:0"),
        "schedule": complains(ask, ddp, {5: "e5m2"}),
        "later in a schedule": complains(ask, DistributedDataParallel(Ours()), {0: "e5m2", 4: "e5m3x"}),
        "skip": complains(ask, ddp, "e5m2", skip="*.norm.*"),
        "layers": complains(ask, ddp, "e5m2", layers={"atention.*": "fp16"}),
        "layer format": complains(ask, ddp, "e5m2", layers={"attention.*": "fp61"}),
        "sum_format": complains(ask, ddp, "e5m2", sum_format="fp99"),
        "not ddp": complains(ask, nn.Linear(2, 2), "e5m2"),
        "sparse model": complains(ask, DistributedDataParallel(nn.Embedding(4, 4, sparse=True)), "e5m2"),
        "complex model": complains(ask, DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)), "e5m2"),
        "integer": complains(lowp.all_reduce, tensor.int(), "e5m2"),
        "complex": complains(lowp.all_reduce, tensor.to(torch.complex64), "e5m2"),
        "bool": complains(lowp.all_reduce, tensor.bool(), "e5m2"),
        "sparse": complains(lowp.all_reduce, tensor.to_sparse(), "e5m2"),
        "list": complains(lowp.all_reduce, [1.0], "e5m2"),
        "op": complains(lowp.all_reduce, tensor, "e5m2", op="max"),
        "feedback": complains(lowp.all_reduce, tensor, "e5m2", error_feedback=True),
        "setting": complains(lowp.all_reduce, tensor, "e5m2", colour="red"),
        "all_reduce scale": complains(lowp.all_reduce, tensor, "e5m2", scale="global"),
    }
    handle = ask(ddp, "e5m2")
    said["second hook"] = complains(ask, ddp, "int8")
    said["threads with one"] = str(lowp_threads())
    ddp(torch.ones(1, 4)).sum().backward()
    handle.remove()
    handle.remove()
    other = ask(ddp, "int8")
    ddp(torch.ones(1, 4)).sum().backward()
    other.remove()
    ddp(torch.ones(1, 4)).sum().backward()
    said["threads at the end"] = str(lowp_threads())
    said["state"] = complains(handle.load_state_dict, {"step": 3})
    return said


BAD_REQUESTS = {  # the error, and words that must be in it
    "format": ("ValueError", "e5m3x"),
    "unsigned": ("ValueError", "e8m0fnu", "sign"),
    "scale": ("ValueError", "unknown scale 'global'", "did you mean 'local'"),
    "block": ("ValueError", "block:0", "1 to 65536"),
    "reduction": ("ValueError", "unknown reduction 'star'", "two_shot", "by_size"),
    "hierarchical": ("ValueError", "at least one rank"),
    "rounding": ("ValueError", "up-ish", "nearest"),
    "nonfinite": ("ValueError", "'ignore'", "propagate, skip, raise"),
    "chunk": ("ValueError", "at least one element"),
    "topk": ("ValueError", "topk:<fraction>", "topk:many"),
    "topk 0": ("ValueError", "0"),
    "schedule": ("ValueError", "begins with step 0"),
    "later in a schedule": ("ValueError", "e5m3x"),
    "skip": ("ValueError", "'*.norm.*'", "attention.weight"),
    "layers": ("ValueError", "'atention.*'", "attention.weight"),
    "layer format": ("ValueError", "fp61"),
    "sum_format": ("ValueError", "fp99"),
    "not ddp": ("TypeError", "DistributedDataParallel", "Linear"),
    "sparse model": ("TypeError", "sparse"),
    "complex model": ("TypeError", "'weight'", "complex64"),
    "integer": ("TypeError", "all_reduce", "float32", "int32"),
    "complex": ("TypeError", "complex64"),
    "bool": ("TypeError", "bool"),
    "sparse": ("TypeError", "dense"),
    "list": ("TypeError", "list"),
    "op": ("ValueError", "'max'", "'mean'"),
    "feedback": ("ValueError", "compress_gradients"),
    "setting": ("TypeError", "colour"),
    "all_reduce scale": ("ValueError", "'global'"),
    "second hook": ("RuntimeError", "compressed already", "remove()"),
    "state": ("ValueError", "does not say whose it is"),
    "threads with one": ("['lowp-comm']",),
    "threads at the end": ("[]",),
}


def test_bad_requests():
    for said in run(bad_requests, 2, timeout=60):
        wrong = {
            what: text
            for what, text in said.items()
            if not text.startswith(BAD_REQUESTS[what][0]) or not all(word in text for word in BAD_REQUESTS[what])
        }
        assert wrong == {}


def test_without_a_process_group():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group"):
        lowp.all_reduce(torch.ones(3), "e5m2")
    with pytest.raises(TypeError, match="DistributedDataParallel model, not Linear"):
        lowp.compress_gradients(nn.Linear(2, 2), "e5m2")


def outsiders(rank):
    group = dist.new_group([0, 1])
    tensor = torch.ones(4)
    return complains(lowp.all_reduce, tensor, "e5m2", group=group), tensor.tolist()


def test_a_rank_outside_the_group():
    inside, also, outside = run(outsiders, 3, timeout=60)
    assert inside == also == ("nothing", [2.0] * 4)
    assert outside == ("ValueError: this rank is not in the group", [1.0] * 4)
