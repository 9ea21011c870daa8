"""What is recorded as CUDA graphs, and when. (That replayed steps give the same bits: tests/gpu/test_wire_cuda.py.)"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from lowp.tensor import kernels
from lowp.wire import replay
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.reductions import reduction_of
from lowp.wire.report import Meter
from lowp.wire.settings import Parameters, Settings

SHAPES = {"first": torch.Size([300]), "second": torch.Size([7, 100])}
NAMES = tuple(SHAPES)


class Flat:
    """Of a tensor on CUDA, what is asked."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, address):
        self.data_ptr = lambda: address


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels, "kernel_policy", lambda: "auto")


def replays_of(format="e5m2", reduction="two_shot", **options):
    settings = Settings.of(format, reduction=reduction, **options)
    return replay.Replays(settings, settings.reduction), Parameters(SHAPES, settings, None).bucket(NAMES, 0)


def found(replays, bucket, addresses):
    """Was there a recording in each of these steps?"""
    return [replays.find(Flat(address), NAMES, bucket, lambda: SimpleNamespace()) is not None for address in addresses]


def test_a_bucket_is_recorded_when_it_has_been_in_one_place_for_some_steps(on_cuda):
    replays, bucket = replays_of()
    assert found(replays, bucket, [16] * 5) == [False, False, False, True, True]
    assert found(replays, bucket, [32] * 5) == [False, False, False, True, True]


def test_a_bucket_that_moves_again_and_again_is_no_longer_recorded(on_cuda):
    replays, bucket = replays_of()
    recorded = [found(replays, bucket, [address] * 4)[-1] for address in (16, 32, 48, 64, 80)]
    assert recorded == [True, True, True, False, False]


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "stochastic"},
        {"error_feedback": True},
        {"measure": True},
        {"kahan": True},
        {"sum_format": "bf16"},
        {"scale": "aps_delayed"},
        {"reduction": "ring"},
        {"format": "topk:0.1"},
    ],
    ids=str,
)
def test_what_depends_on_the_step_is_not_recorded(on_cuda, options):
    assert not any(found(*replays_of(**options), [16] * 6))


class Graph:
    """A graph that records nothing: what is launched runs at once, and once."""

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == "thread_local"

    def capture_end(self):
        pass


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"format": "e5m2", "scale": "local"}, [1, 0]),
        ({"format": "e5m2", "scale": "aps"}, [1, 1, 0]),
        ({"format": "mxfp4", "chunk": 600}, [2, 0]),
    ],
    ids=str,
)
def test_graphs_end_where_messages_are_started(monkeypatch, options, messages):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    settings = Settings.of(reduction="one_shot", **options)
    bucket = Parameters(SHAPES, settings, None).bucket(NAMES, 0)
    other = SimpleNamespace(group=None, rank=0, world=2, tagged=False)
    link, marks = replay.RecordingLink(other), []
    arguments = (torch.randn(1000), bucket, settings, reduction_of("one_shot"), link, State(), Meter(samples=False), True)
    scheduler = replay._GraphScheduler(link)
    scheduler.record(BucketExchange(*arguments, marks.append))
    assert [len(begins) for _, begins in scheduler.segments] == messages
    assert len(marks) == 1


class ReplayedGraph(Graph):
    """A graph that says when it is launched."""

    said: ClassVar[list[str]] = []

    def replay(self):
        self.said.append("graph")


def bucket_of_one_shot(monkeypatch, graph):
    """A recorded bucket on the first of two ranks, whose messages say that they were started and waited for."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    settings = Settings.of("e5m2", scale="aps", reduction="one_shot")
    bucket = Parameters(SHAPES, settings, None).bucket(NAMES, 0)
    other, flat = SimpleNamespace(group=None, rank=0, world=2, tagged=False, bytes_sent=0), torch.randn(1000)

    class Link(replay.RecordingLink):
        def start(self, begin):
            said = ReplayedGraph.said
            work = SimpleNamespace(wait=lambda: said.append("wait"))

            def started():
                said.append("message")
                return [replay.Pending(work, "a message")]

            return super().start(started)

    monkeypatch.setattr(replay, "RecordingLink", Link)

    def make(link, done, meter):
        return BucketExchange(flat, bucket, settings, reduction_of("one_shot"), link, State(), meter, True, done)

    return replay.ReplayedBucket(make, other, State().workspaces, flat), other


def test_messages_are_started_between_graphs(monkeypatch):
    """The agreement of `aps`, then the numbers; what comes after a message waits for it."""
    ReplayedGraph.said = []
    recorded, link = bucket_of_one_shot(monkeypatch, ReplayedGraph)
    for step in (1, 2):
        assert recorded.launch()
        assert ReplayedGraph.said == ["graph", "message", "wait", "graph", "message", "wait", "graph"] * step
    assert link.bytes_sent == 2 * (2 * len(NAMES) + 304 + 704)  # the agreement, and codes to multiples of 8 bytes
    assert recorded.future.done()
    assert recorded.marks is not None


def test_what_cannot_be_recorded_is_launched_in_the_usual_way(monkeypatch, on_cuda, caplog):
    class NoGraph(Graph):
        def capture_end(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    recorded, link = bucket_of_one_shot(monkeypatch, NoGraph)
    assert not recorded.launch()
    assert link.bytes_sent == 0
    assert "cannot be recorded" in caplog.text
    replays, bucket = replays_of()
    assert found(replays, bucket, [16] * 4)[-1]
    replays.give_up(NAMES)
    assert not any(found(replays, bucket, [16] * 6))
