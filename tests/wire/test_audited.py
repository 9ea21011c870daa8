"""An audit sees what the wire does on its own thread, and an error that it raises there ends the step on all ranks."""

import threading
import time

import pytest
import ranks
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode

import lowp
from lowp.compat import in_dispatch_modes
from lowp.wire.comm_thread import _watching_modes
from lowp.wire.faults import blames_this_rank

WORLD = 2
SECONDS = 20  # by which nobody may still be waiting; the group's timeout is 60

CASES = {
    "local": {"scale": "local"},
    "ring": {"scale": "aps", "reduction": "ring", "error_feedback": True},
    "one_shot": {"format": "e4m3fn", "scale": "block:32", "reduction": "one_shot"},
}


def network() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    return DistributedDataParallel(layers.to(torch.bfloat16), bucket_cap_mb=0.0001)  # several buckets


def compressed(case="local"):
    ddp, options = network(), dict(CASES[case])
    return ddp, lowp.compress_gradients(ddp, options.pop("format", "e5m2"), **options)


def backward(ddp, rank) -> dict[str, torch.Tensor]:
    ddp.zero_grad()
    numbers = torch.Generator().manual_seed(rank)
    ddp(torch.randn(6, 12, generator=numbers, dtype=torch.bfloat16)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}


def seconds_until(error, function, *arguments) -> tuple[Exception, float]:
    began = time.monotonic()
    with pytest.raises(error) as caught:
        function(*arguments)
    return caught.value, time.monotonic() - began


# --- what is seen ---------------------------------------------------------------------------------------------------------


def report_of(rank, case):
    """Gradients of two unwatched steps and of one that is watched, once without and once with the allowance."""
    ddp, handle = compressed(case)
    before = backward(ddp, rank)
    with lowp.audit(mode="report") as found:
        first = backward(ddp, rank)
    with lowp.audit(allow=["wire sums"]) as allowed:
        backward(ddp, rank)
    seen = found.operations, allowed.operations
    backward(ddp, rank)
    after = found.operations, allowed.operations
    assert len(handle.buckets) > 1
    handle.remove()
    places = {
        (f.module, f.phase, "wire" in f.place.lowp_parts, f.line.split(":")[0].split("lowp/")[-1]) for f in found.findings
    }
    sizes = sum(f.bytes for f in found.findings)
    return (
        before,
        first,
        places,
        sizes,
        str(found),
        (allowed.clean, allowed.allowed),
        seen == after,
        is_in_torch_dispatch_mode(),
    )


@pytest.mark.parametrize("case", CASES)
def test_the_pieces_of_the_wire_are_found_and_can_be_allowed(case):
    for before, first, places, sizes, table, (clean, allowed), ended, flag in ranks.run(report_of, WORLD, case):
        if not CASES[case].get("error_feedback"):  # which remembers the step before
            assert all(torch.equal(first[name], before[name]) for name in before)
        assert {(module, phase, wire) for module, phase, wire, _ in places} == {("", "other", True)}
        assert "wire/exchange.py" in {file for *_, file in places}
        parameters = sum(gradient.numel() for gradient in before.values())
        assert sizes >= 4 * parameters  # each number was float32 at least once
        assert " lowp.wire " in table
        assert clean
        assert allowed["wire sums"][0] > 0
        assert allowed["wire sums"][1] >= sizes
        assert ended  # nobody watches any more
        assert not flag


# --- what is forbidden ----------------------------------------------------------------------------------------------------


def strictly(rank, who):
    """A strict audit on the ranks `who`; afterwards another model trains on the same ranks."""
    ddp, handle = compressed()
    backward(ddp, rank)

    def watched():
        with lowp.audit():
            backward(ddp, rank)

    error, seconds = seconds_until(RuntimeError, watched if rank in who else backward, *(() if rank in who else (ddp, rank)))
    again, _ = seconds_until(RuntimeError, backward, ddp, rank)
    without = all(parameter.grad is None for parameter in ddp.parameters())
    handle.remove()
    fresh, other = compressed()
    gradients = backward(fresh, rank)
    other.remove()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lowp")]
    known = type(error).__name__, str(error), getattr(error, "__notes__", []), again is error
    return known, seconds, without, gradients, threads, is_in_torch_dispatch_mode()


def check_defined_state(found):
    (*_, again), seconds, without, gradients, threads, flag = found
    assert again  # the next step says so too
    assert seconds < SECONDS
    assert without  # an optimizer would pass over the step
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert threads == []
    assert not flag


def test_a_strict_audit_ends_the_step_on_all_ranks():
    for rank, found in enumerate(ranks.run(strictly, WORLD, (0, 1))):
        kind, text, notes, _ = found[0]
        assert kind == "ForbiddenTensor"
        assert "float32 tensor" in text
        assert "in lowp.wire, at " in text
        assert notes == [
            f"lowp: two_shot of bucket 1 in step 1 on rank {rank} ended with this; no gradient is sent any more",
        ]
        check_defined_state(found)


def test_an_audit_of_one_rank_does_not_leave_the_others_waiting():
    mine, other = ranks.run(strictly, WORLD, (0,))
    assert mine[0][0] == "ForbiddenTensor"
    kind, text, *_ = other[0]
    assert kind == "CollectiveError"
    assert text.startswith("two_shot of bucket 1 in step 1 failed on rank 1")  # while receiving, or before it could begin to
    assert text.endswith(f": rank 0 raised ForbiddenTensor: {mine[0][1]}")
    for found in (mine, other):
        check_defined_state(found)


# --- modes on the way -----------------------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


def test_no_modes_no_cost():
    assert _watching_modes() == ()


def test_only_modes_that_watch_travel():
    with Counts() as outer, FakeTensorMode(), Counts() as inner:
        assert _watching_modes() == (outer, inner)


def test_modes_are_entered_on_one_thread_alone_and_left_after_an_error():
    mode, states = Counts(), []

    def fail():
        with in_dispatch_modes([mode]):
            torch.ones(2)
            states.append((_get_current_dispatch_mode_stack(), is_in_torch_dispatch_mode()))
            raise ZeroDivisionError

    def work():
        with pytest.raises(ZeroDivisionError):
            fail()
        states.append((_get_current_dispatch_mode_stack(), is_in_torch_dispatch_mode()))
        torch.ones(2)

    thread = threading.Thread(target=work, name="elsewhere")
    thread.start()
    thread.join()
    assert states == [([mode], False), ([], False)]
    assert set(mode.seen) == {"elsewhere"}
    assert len(mode.seen) == 1


def test_whose_fault_it_is():
    class Forbidden(RuntimeError):
        pass

    assert blames_this_rank(Forbidden())
    assert blames_this_rank(torch.OutOfMemoryError())
    for error in (RuntimeError("Connection closed by peer"), ValueError(), torch.distributed.DistNetworkError()):
        assert not blames_this_rank(error)
