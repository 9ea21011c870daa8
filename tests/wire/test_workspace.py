"""Memory of messages is used again, but never while a chunk that took it is under way; samples."""

import torch

from lowp.wire import report
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Bucket, Layer
from lowp.wire.report import Meter
from lowp.wire.workspace import Workspace, Workspaces

CPU = torch.device("cpu")


def test_memory_is_used_again_when_a_chunk_is_done():
    workspaces = Workspaces()
    first, second = workspaces.take(), workspaces.take()
    taken, other = (workspace.empty((1_000_000,), torch.uint8, CPU) for workspace in (first, second))
    assert taken.data_ptr() != other.data_ptr()
    workspaces.give_back(first)
    again = workspaces.take()
    assert again.empty((1_000_000,), torch.uint8, CPU) is taken
    assert workspaces.take().empty((1_000_000,), torch.uint8, CPU).data_ptr() not in (taken.data_ptr(), other.data_ptr())


def test_what_is_kept_follows_from_the_memory_in_use():
    """In the first round every request may move to larger memory. What was made of a tensor before the move is made again."""
    workspace, owner = Workspace(), object()
    for _ in range(3):
        workspace.begin()
        first, _ = workspace.zeros((2, 3), CPU), workspace.zeros((2, 3), CPU)
        row = workspace.once(owner, "row", lambda first=first: first[1])
        row.fill_(7)
        assert (first[1] == 7).all()


def test_samples_are_counted_over_the_chunks_of_a_bucket(monkeypatch):
    """The first part of each codec is looked at, then one in so many: not one in every message."""
    seen = []
    monkeypatch.setattr(Meter, "_sample", lambda self, codec, *rest: seen.append(str(codec.format)))
    layers = tuple(Layer(f"layer{i}", 100, codec_of("e4m3fn" if i % 2 else "e5m2"), i) for i in range(8))
    (chunk,) = Bucket.of(layers).chunks(1, (800, 100))
    messages = Messages(chunk.shards, lambda part: part.codec)
    meter = Meter()
    for _ in range(report.ONE_PART_IN // 4 + 1):  # each message has four parts of each codec
        meter.see(messages, torch.ones(800), torch.zeros(messages.length, dtype=torch.uint8), None)
    assert sorted(seen) == ["e4m3fn"] * 2 + ["e5m2"] * 2
