"""NaN and infinity in one rank's gradient: every rank knows in the same step, and never by a silent number.

Ranks collect what they find wrong instead of raising, so that a failure on one rank is not a hang of the others. Gradients are
exactly what a test says: the loss is the sum of parameter * gradient.
"""

import itertools
import math

import pytest
import torch
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire.reductions import REDUCTIONS

WORLD = 4  # hierarchical(2) needs nodes
SIZES = {"first": (67, 3), "middle": (61,), "last": (5, 40)}
SCALES = ("none", "aps", "aps_delayed", "local", "block:64")
FORMATS = ("e5m2", "int8", "e2m1fn", "posit8")  # with infinity and NaN; with neither; 4 bits with neither; with NaR
MORE_FORMATS = (
    *("fp32", "bf16", "fp16", "mxfp4", "nvfp4", "topk:0.1", "topk:0.1:int8", "e4m3fn", "int4", "mxint8", "mxfp8_e5m2"),
    "adaptive:4",
)
BAD = (  # value, rank, layer, element
    (math.nan, 0, "first", 0),
    (math.inf, 2, "middle", 60),
    (-math.inf, 3, "last", 77),
)


class Dictated(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self, sizes=SIZES):
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, gradients):
        return sum((parameter * gradients[name]).sum() for name, parameter in self.named_parameters())


def gradients(rank, size=1.0, seed=0, sizes=SIZES):
    """Another for each rank, and layers of different magnitudes."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    magnitudes = {"first": 1.0, "middle": 0.25, "last": 3.0}
    return {name: torch.randn(shape, generator=generator) * size * magnitudes[name] for name, shape in sizes.items()}


def spoiled(rank, bad, size=1.0):
    value, where, layer, element = bad
    found = gradients(rank, size)
    if rank == where:
        found[layer].view(-1)[element] = value
    return found


class Ward:
    """A compressed model on one rank, and what was wrong with it."""

    def __init__(self, rank, label, format, bucket_cap_mb=25, **settings):
        self.rank, self.label, self.wrong = rank, label, []
        # Without unused parameters DDP makes its buckets anew after the first step, and bits could not be compared.
        self.ddp = DistributedDataParallel(Dictated(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=True)
        self.handle = lowp.compress_gradients(self.ddp, format, **settings)

    def expect(self, condition, what):
        if not condition:
            self.wrong.append(f"rank {self.rank}, {self.label}: {what}")

    def step(self, given):
        """The gradients after a backward pass, copies of them; or the error that it raised."""
        self.ddp.zero_grad()
        try:
            self.ddp(given).backward()
        except lowp.NonFiniteGradient as error:
            return error
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.ddp.module.named_parameters()}

    def clean(self, size=1.0):
        return self.step(gradients(self.rank, size))

    def usual(self):
        """What clean steps give. (The first of aps_delayed has no headroom.)"""
        if str(self.handle._compressor.settings.scale) == "aps_delayed":
            self.clean()
        return self.clean()

    def expect_stopped(self, found, nonfinite, bad):
        if nonfinite == "raise":
            self.expect(isinstance(found, lowp.NonFiniteGradient), f"{bad}: nothing raised")
            self.expect(repr(bad[2]) in str(found), f"{bad}: the error does not name the parameter: {found}")
            self.expect(f"step {self.handle.step - 1}:" in str(found), f"{bad}: the error names another step: {found}")
        else:
            self.expect(not isinstance(found, Exception), f"{bad}: raised {found}")
        self.expect(all(p.grad is None for p in self.ddp.parameters()), f"{bad}: gradients are left")


def same(left, right):
    return left is not None and right is not None and torch.equal(left.view(torch.int32), right.view(torch.int32))


def bits(found):
    return b"".join(found[name].numpy().tobytes() for name in SIZES)


CROSS = [(scale, format, str(reduction)) for scale in SCALES for format in FORMATS for reduction in REDUCTIONS]
PAIRS = [  # every scale with every reduction; formats take turns, so that each meets every scale and every reduction
    (scale, FORMATS[(i + j) % len(FORMATS)], str(reduction))
    for (i, scale), (j, reduction) in itertools.product(enumerate(SCALES), enumerate(REDUCTIONS))
]


def propagates(rank, cases, count):
    """`count` bad steps for each case. What every rank got is returned, to be compared."""
    wrong, seen = [], []
    bad_ones = itertools.cycle(BAD)
    for scale, format, reduction in cases:
        ward = Ward(rank, f"{format} {scale} {reduction}", format, scale=scale, reduction=reduction)
        usual = ward.usual()
        for bad in itertools.islice(bad_ones, count):
            _, _, layer, element = bad
            found = ward.step(spoiled(rank, bad))
            seen.append(bits(found))
            ward.expect(found[layer].view(-1)[element].isnan(), f"{bad}: {found[layer].view(-1)[element]}, not NaN")
            ward.expect(not found[layer].isinf().any(), f"{bad}: infinity in the bad layer")
            for name in SIZES:
                # Bits that an adaptive message does not need for the bad layer go to others.
                kept = found[name].isfinite().all() if format.startswith("adaptive") else same(found[name], usual[name])
                ward.expect(name == layer or kept, f"{bad}: {name} has changed")
            again = ward.clean()
            for name in SIZES:
                ward.expect(same(again[name], usual[name]), f"{bad}: the step after it is not as before in {name}")
        ward.expect(ward.handle.total().skipped == 0, "a step was skipped")
        ward.handle.remove()
        wrong += ward.wrong
    return wrong, seen


def check_all(results):
    """Nothing wrong on any rank, and the same bits on all."""
    assert [line for wrong, _ in results for line in wrong] == []
    for _, seen in results[1:]:
        assert seen == results[0][1]


def test_propagate_makes_the_layer_nan_everywhere_and_harms_no_other():
    results = run(propagates, WORLD, PAIRS, 1)
    assert len(results[0][1]) == len(SCALES) * len(REDUCTIONS)
    check_all(results)


@pytest.mark.slow
def test_propagate_all_combinations():
    check_all(run(propagates, WORLD, CROSS, 3, timeout=250))


def test_propagate_in_other_formats():
    turns = itertools.cycle(SCALES)
    check_all(run(propagates, WORLD, [(next(turns), format, "two_shot") for format in MORE_FORMATS], 1))


@pytest.mark.slow
def test_propagate_in_other_formats_with_every_scale():
    check_all(run(propagates, WORLD, [(scale, format, "two_shot") for scale in SCALES for format in MORE_FORMATS], 3))


def skips_and_raises(rank, cases, count):
    """A momentum optimizer stands still in a bad step, and the next step is as if it had not been."""
    wrong = []
    bad_ones = itertools.cycle(BAD)
    for (scale, format, reduction), nonfinite in cases:
        ward = Ward(
            rank, f"{nonfinite} {format} {scale} {reduction}", format, scale=scale, reduction=reduction, nonfinite=nonfinite
        )
        optimizer = torch.optim.SGD(ward.ddp.parameters(), lr=0.1, momentum=0.9)
        usual = ward.usual()
        optimizer.step()
        for number, bad in enumerate(itertools.islice(bad_ones, count), 1):
            before = [p.detach().clone() for p in ward.ddp.parameters()]
            momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in ward.ddp.parameters()]
            ward.expect_stopped(ward.step(spoiled(rank, bad)), nonfinite, bad)
            optimizer.step()
            for p, old, momentum in zip(ward.ddp.parameters(), before, momenta, strict=True):
                ward.expect(same(p.detach(), old), f"{bad}: a parameter has changed")
                ward.expect(same(optimizer.state[p]["momentum_buffer"], momentum), f"{bad}: momentum has changed")
            ward.expect(ward.handle.total().skipped == number, f"{bad}: skipped is {ward.handle.total().skipped}")
            ward.expect(ward.handle.report().skipped == 1, f"{bad}: the step's report does not say that it was skipped")
            again = ward.clean()
            for name in SIZES:
                ward.expect(same(again[name], usual[name]), f"{bad}: the step after it is not as before in {name}")
        ward.handle.remove()
        wrong += ward.wrong
    return wrong, []


MODES = ("skip", "raise")


def test_skip_and_raise_leave_no_trace():
    check_all(run(skips_and_raises, WORLD, list(zip(PAIRS, itertools.cycle(MODES), strict=False)), 1))


@pytest.mark.slow
def test_skip_and_raise_leave_no_trace_in_any_combination():
    check_all(run(skips_and_raises, WORLD, list(itertools.product(CROSS, MODES)), 1, timeout=280))


def several_buckets(rank):
    """The mark of one bucket stops the whole step, whichever bucket it is."""
    wrong, seen = [], []
    for nonfinite, bad in itertools.product(("skip", "raise", "propagate"), BAD[::2]):
        ward = Ward(rank, f"{nonfinite} {bad}", "e5m2", bucket_cap_mb=1e-4, scale="aps", nonfinite=nonfinite)
        usual = ward.usual()
        found = ward.step(spoiled(rank, bad))
        seen.append(len(ward.handle.buckets))
        if nonfinite == "propagate":
            ward.expect(found[bad[2]].isnan().any(), "no NaN")
            ward.expect(all(same(found[n], usual[n]) for n in SIZES if n != bad[2]), "another layer has changed")
        else:
            ward.expect_stopped(found, nonfinite, bad)
        again = ward.clean()
        ward.expect(all(same(again[name], usual[name]) for name in SIZES), "the next step is not as before")
        ward.handle.remove()
        wrong += ward.wrong
    return wrong, seen


def test_several_buckets():
    results = run(several_buckets, WORLD, timeout=60)
    assert set(results[0][1]) == {3}
    check_all(results)


def memories(rank, cases):
    """A skipped step leaves nothing behind in residuals and scales: not even numbers that are finite, and senseless.

    A loss that overflows makes one element infinite, and others huge.
    """
    wrong = []
    for scale, format, reduction, feedback, first in cases:
        label = f"{format} {scale} {reduction} error_feedback={feedback} first={first}"
        ward = Ward(rank, label, format, scale=scale, reduction=reduction, error_feedback=feedback, nonfinite="skip")
        fresh = Ward(rank, label, format, scale=scale, reduction=reduction, error_feedback=feedback, nonfinite="skip")
        size = 2.0**-20  # invisible to e2m1fn and int8 unless it is scaled
        for _ in range(0 if first else 2):
            ward.clean(size)
            fresh.clean(size)
        ward.expect_stopped(ward.step(spoiled(rank, BAD[0], size=2.0**60)), "skip", BAD[0])
        for name, residual in ward.handle.state_dict()["residuals"].get(str(rank), {}).items():
            ward.expect(residual.isfinite().all(), f"the residual of {name} is not finite")
            ward.expect(residual.abs().max() < 1, f"the residual of {name} comes from the skipped step: {residual.abs().max()}")
        for number in range(2):
            after, expected = ward.clean(size), fresh.clean(size)
            for name in SIZES:
                ward.expect(same(after[name], expected[name]), f"step {number} after it: {name} is not as without it")
        ward.handle.remove()
        fresh.handle.remove()
        wrong += ward.wrong
    return wrong, []


def test_a_skipped_step_leaves_nothing_in_residuals():
    cases = [(scale, "e2m1fn", "two_shot", True, False) for scale in ("none", "aps", "local")]
    check_all(run(memories, 2, [*cases, ("aps", "int8", "ring", True, True)], timeout=60))


def test_a_skipped_step_teaches_delayed_scales_nothing():
    check_all(
        run(memories, 2, [("aps_delayed", "e2m1fn", "two_shot", feedback, False) for feedback in (False, True)], timeout=60)
    )


def test_a_skipped_first_step_is_no_first_step_for_delayed_scales():
    check_all(run(memories, 2, [("aps_delayed", "e2m1fn", "two_shot", False, True)], timeout=60))


def all_reduces(rank, cases):
    wrong, seen = [], []
    for scale, format, reduction in cases:
        for value, where in ((math.nan, 0), (math.inf, 1)):
            for nonfinite in ("propagate", "skip", "raise"):
                tensor = torch.linspace(-1, 1, 301) * (rank + 1)
                if rank == where:
                    tensor[100] = value
                label = f"rank {rank}: {format} {scale} {reduction} {value} {nonfinite}: "
                try:
                    report = lowp.all_reduce(tensor, format, scale=scale, reduction=reduction, nonfinite=nonfinite)
                except lowp.NonFiniteGradient:
                    wrong += [] if nonfinite == "raise" else [label + "raised"]
                    continue
                wrong += [label + "did not raise"] if nonfinite == "raise" else []
                wrong += [label + f"skipped {report.skipped}"] if report.skipped != (nonfinite == "skip") else []
                seen.append(tensor.numpy().tobytes())
                good = tensor[100].isnan() if nonfinite == "propagate" else not tensor.any()
                wrong += [] if good else [label + f"got {tensor[100]}"]
        tensor = torch.full((301,), 0.5)
        lowp.all_reduce(tensor, format, scale=scale, reduction=reduction)
        wrong += [] if bool((tensor == 0.5 * 3).all()) else [f"{format} {scale} {reduction}: the next sum is {tensor}"]
    return wrong, seen


def test_all_reduce():
    check_all(run(all_reduces, 3, [(scale, "e5m2", "two_shot") for scale in SCALES] + [("aps", "int8", "ring")]))


def too_large_for_float32(rank):
    """float64 gradients are rounded to float32 first: what becomes infinite there is as infinite as any."""
    wrong = []
    for scale in SCALES:
        tensor = torch.ones(70, dtype=torch.float64)
        if rank == 1:
            tensor[3] = 1e300
        lowp.all_reduce(tensor, "e5m2", scale=scale)
        wrong += [] if tensor[3].isnan() else [f"{scale}: {tensor[3]}"]
    return wrong, []


def test_float64_that_becomes_infinite_in_float32():
    check_all(run(too_large_for_float32, 2, timeout=60))
