"""Memory of messages is used again, but never while a chunk that took it is under way."""

import torch

from lowp.wire import chunk_scheduler, report
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Bucket, Layer
from lowp.wire.report import Meter
from lowp.wire.scratch import Buffers

CPU = torch.device("cpu")


def test_buffers_are_used_again_when_a_chunk_is_done():
    first, second = Buffers(), Buffers()
    taken = first.take(1_000_000, CPU)
    other = second.take(1_000_000, CPU)
    assert taken.data_ptr() != other.data_ptr()
    first.give_back()
    again = second.take(999_990, CPU)  # the chunks of a bucket differ by some elements
    assert again.data_ptr() == taken.data_ptr()
    assert again.numel() == 999_990
    first.give_back()  # it has nothing to give any more
    assert second.take(1_000_000, CPU).data_ptr() not in (again.data_ptr(), other.data_ptr())


def test_a_chunk_starts_before_the_last_wait_of_the_one_that_it_follows():
    """Without this, ranks could wait for each other (chunk_scheduler.py)."""
    assert chunk_scheduler.DEPTH > chunk_scheduler.SPREAD


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
