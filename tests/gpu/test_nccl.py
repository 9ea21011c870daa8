"""Several NCCL ranks on one GPU give the bits of a virtual world, and survive what goes wrong.

All cases of one number of ranks run in one start of the processes (nccl_driver.py says how). The results lie in a file, so that
workers of pytest-xdist that take tests of the same world do not start it again. The same cases, some of them, run with gloo on
the CPU in the ordinary suite.
"""

import fcntl
import itertools
import os
import pickle
from typing import Any

import pytest
from nccl_cases import Bucket, ddp_steps, disagreement, fsdp_steps, killed, not_finite, sums
from nccl_driver import Case, Failed, World

from lowp.formats import FORMATS
from lowp.wire.faults import ROLL_CALL_SECONDS
from lowp.wire.reductions import REDUCTIONS
from lowp.wire.settings import Settings


def travels(name: str) -> bool:
    try:
        return bool(Settings.of(name))
    except ValueError:
        return False


CODECS = (*(str(fmt) for fmt in FORMATS if travels(str(fmt))), "e5m4", "e3m1", "topk:0.1:e4m3fn", "topk:0.3")
SCALES = ("none", "aps", "aps_delayed", "local", "block:32")
SIZES = (1, 7, 64, 101, 13)
VARIANTS = ({}, {"rounding": "stochastic", "seed": 5}, {"kahan": True, "sum_format": "e6m5"}, {"error_feedback": True})
TURNS = len(SCALES)
ON_CPU = ("two_shot",)  # of the ordinary suite: the ranks' program works. tests/wire/test_worlds.py compares all reductions.
DDP: dict[str, tuple[Any, ...]] = {
    "e5m2 aps": ("e5m2", {"scale": "aps"}),
    "e4m3fn local, stochastic": ("e4m3fn", {"scale": "local", "rounding": "stochastic"}),
    "e2m1fn block:32, error feedback": ("e2m1fn", {"scale": "block:32", "error_feedback": True}),
    "mxfp4, norms and biases in fp32": ("mxfp4", {"skip": "1d"}),
    "e5m2 aps_delayed, ring": ("e5m2", {"scale": "aps_delayed", "reduction": "ring"}),
    "topk": ("topk:0.1:e4m3fn", {"error_feedback": True}),
    "e5m2 aps, recorded": ("e5m2", {"scale": "aps"}, "auto", 8),
    "e4m3fn one_shot, recorded": ("e4m3fn", {"reduction": "one_shot"}, "auto", 8),
    "mxfp4, recorded": ("mxfp4", {"skip": "1d"}, "auto", 8),
}
FSDP = {
    "exact": ("e5m2", "e4m3fn", "none"),
    "reduce alone": ("e4m3fn", None, "local"),
    "gather alone": (None, "e4m3fn", "local"),
    "both, blocks": ("e2m1fn", "e4m3fn", "block:32"),
}
LARGEST_ERROR = {"none": 0.0, "local": 0.05, "block:32": 0.15}
NONFINITE = ("propagate", "skip", "raise")
# Kernels are built in these; in all others plain operations run, which need no building.
LARGE = (300_000, 33, 70_001, 5 * 65_536, 1000)
KERNELS = {
    "e5m2 aps": ("two_shot", "aps", ("e5m2",) * 5),
    "e5m2 none": ("two_shot", "none", ("e5m2",) * 5),
    "e4m3fn local": ("one_shot", "local", ("e4m3fn",) * 5),
    "e2m1fn block:32": ("two_shot", "block:32", ("e2m1fn",) * 5),
    "block formats": ("two_shot", "local", ("mxfp8_e4m3", "mxfp4", "nvfp4", "mxfp4", "nvfp4")),
    "mixed": ("ring", "local", ("e5m2", "fp32", "e2m1fn", "int8", "mxfp4")),
}


def buckets_of(reductions) -> dict[str, Bucket]:
    """Every reduction with every scale, each with one variant and one codec of five: any two of these meet."""
    pairs = itertools.product(enumerate(reductions), enumerate(SCALES))
    return {
        f"{reduction}, {scale}": Bucket(
            2 * i + j, str(reduction), scale, VARIANTS[(j - i) % len(VARIANTS)], CODECS[(i + j) % TURNS :: TURNS], SIZES
        )
        for (i, reduction), (j, scale) in pairs
    }


def kernel_buckets(chunk: int | None) -> dict[str, Bucket]:
    return {
        f"kernels, chunk {chunk}, {name}": Bucket(1, reduction, scale, {}, codecs, LARGE, chunk, "auto")
        for name, (reduction, scale, codecs) in KERNELS.items()
    }


SUMS = buckets_of(REDUCTIONS)
SUMS_OF_KERNELS = kernel_buckets(None) | kernel_buckets(100_000)


def on(backend: str, bucket: Bucket) -> bool:
    return backend == "nccl" or bucket.reduction in ON_CPU


def cases_of(backend: str) -> list[Case]:
    small = {name: bucket for name, bucket in SUMS.items() if on(backend, bucket)}
    reductions = [Case(name, sums, (bucket, n), bucket.reduction) for n, (name, bucket) in enumerate(small.items())]
    return [
        *(case for case in reductions if case.kind == "two_shot"),
        *(Case(f"ddp, {name}", ddp_steps, arguments, "ddp") for name, arguments in DDP.items()),
        *(Case(f"fsdp, {name}", fsdp_steps, arguments, "fsdp") for name, arguments in FSDP.items()),
        *(Case(f"not finite, {mode}", not_finite, (mode,), "not finite") for mode in NONFINITE),
        Case("disagreement", disagreement, (), "disagreement"),
        *(case for case in reductions if case.kind != "two_shot"),
    ]


def in_one_start(tmp_path_factory, worker_id, key: str, world: World, cases) -> dict[str, list[Any]]:
    """What the cases gave: from the file of whoever ran them first."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent
    path = folder / f"{key}.pickle"
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(world.run(cases)))
        return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """results(backend, world)[case]: what each rank returned. Fails for a rank that failed."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "master")

    def of(backend: str, world: int, name: str, cases=None, key: str = "cases") -> list[Any]:
        cases = cases_of(backend) if cases is None else cases
        started = World(world, backend, float(os.environ.get("LOWP_TEST_SECONDS", "250")))
        found = in_one_start(tmp_path_factory, worker, f"{backend}-{world}-{key}", started, cases)[name]
        failed = {rank: value.why for rank, value in enumerate(found) if isinstance(value, Failed)}
        assert not failed, f"{name}:\n" + "\n".join(f"rank {rank}: {why}" for rank, why in failed.items())
        return found

    return of


WORLDS = [
    pytest.param("gloo", 2, id="gloo-2"),
    *(pytest.param("nccl", world, id=f"nccl-{world}", marks=pytest.mark.gpu) for world in (2, 4, 8)),
]
worlds = pytest.mark.parametrize(("backend", "world"), WORLDS)


def assert_sums_are_right(found) -> None:
    assert [text for _, wrong in found for text in wrong] == []
    assert len({digest for digest, _ in found}) == 1, "ranks have different sums"


@pytest.mark.parametrize(
    ("backend", "world", "name"),
    [
        pytest.param(*param.values, name, id=f"{param.id}-{name}", marks=param.marks)
        for param in WORLDS
        for name, bucket in SUMS.items()
        if on(param.values[0], bucket)
    ],
)
def test_sums_are_those_of_a_virtual_world(results, backend, world, name):
    assert_sums_are_right(results(backend, world, name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUMS_OF_KERNELS)
def test_kernels_give_the_sums_of_a_virtual_world(results, name):
    cases = [Case(each, sums, (bucket, number), each) for number, (each, bucket) in enumerate(SUMS_OF_KERNELS.items())]
    assert_sums_are_right(results("nccl", 2, name, cases, "kernels"))


@worlds
@pytest.mark.parametrize("name", DDP)
def test_gradients_of_ddp_are_those_of_a_virtual_world(results, backend, world, name):
    found = results(backend, world, f"ddp, {name}")
    assert [text for _, _, wrong in found for text in wrong] == []
    assert len({digest for _, digest, _ in found}) == 1, "ranks have different gradients"
    assert min(buckets for buckets, _, _ in found) > 2


@worlds
@pytest.mark.parametrize("name", FSDP)
def test_fsdp_sends_rounded_numbers(results, backend, world, name):
    reduce, gather, scale = FSDP[name]
    for errors in results(backend, world, f"fsdp, {name}"):
        assert errors.keys() == {kind for kind, format in (("reduce", reduce), ("gather", gather)) if format}
        assert max(errors.values()) <= LARGEST_ERROR[scale]
        assert scale == "none" or min(errors.values()) > 0  # something was rounded


@worlds
@pytest.mark.parametrize("mode", NONFINITE)
def test_a_nan_on_one_rank(results, backend, world, mode):
    for found in results(backend, world, f"not finite, {mode}"):
        assert found.pop("after")
        if mode == "raise":
            assert found.pop("said").startswith("NonFiniteGradient: step 0: the gradient of 'second'")
            assert found == {"skipped": 1}
        else:
            assert found == {"said": "nothing", "skipped": int(mode == "skip"), "first": True, "second": False}


@worlds
def test_ranks_that_disagree(results, backend, world):
    everybody = results(backend, world, "disagreement")
    assert all(texts == everybody[0] for texts in everybody)
    *texts, works = everybody[0]
    assert works == "True"
    words = ("format=int8", "scale=aps", "reduction=ring", "chunk=100", "elements=11")
    for text, word in zip(texts, words, strict=True):
        assert text.startswith("ValueError: ranks disagree"), text
        assert f"rank 0 has {word}" in text


TIMEOUT = 8.0  # of the group, in seconds
SLACK = 10.0
# Without this torch ends the process of a rank whose peer is gone, before anybody can be told.
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


def survivors_of(backend: str, how: str, environment=None, patience=TIMEOUT + ROLL_CALL_SECONDS + SLACK) -> list[Any]:
    world = World(2, backend, 100, TIMEOUT, silence=patience, grace=patience, environment=environment or {})
    return world.run([Case("killed", killed, (1, how))])["killed"]


@pytest.mark.parametrize("how", ["all_reduce", "ddp"])
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=pytest.mark.gpu)])
def test_survivors_name_the_rank_that_was_killed(backend, how):
    survivor, victim = survivors_of(backend, how, BLOCKING)
    assert victim == Failed("the process ended with exit code -9")
    assert not isinstance(survivor, Failed), survivor.why
    assert survivor["kind"] == "CollectiveError", survivor
    assert "rank 1 did not answer" in survivor["text"]
    assert survivor["ranks"] == (1,)
    assert survivor["took"] < TIMEOUT + ROLL_CALL_SECONDS + SLACK


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["all_reduce", "ddp"])
def test_survivors_do_not_wait_for_ever(how):
    """As torch sets NCCL up: a rank is told, or torch ends its process."""
    survivor, victim = survivors_of("nccl", how, patience=60.0)  # torch's watchdog takes up to half a minute
    assert victim == Failed("the process ended with exit code -9")
    ended = isinstance(survivor, Failed) and survivor.why.startswith("the process ended with exit code")
    assert ended or survivor["kind"] == "CollectiveError", survivor
