"""The bytes that a virtual rank would send are those that a real one sends: every reduction, every rank, up to 5 of them. And
those that a real one says it has sent are those that leave the network interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import interface_bytes
import pytest
import ranks
import torch

from lowp.wire import traffic
from lowp.wire.compressor import Compressor
from lowp.wire.reductions import REDUCTIONS
from lowp.wire.rules import Stage
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

SHAPES = {"weight": torch.Size([37, 5]), "bias": torch.Size([11]), "head": torch.Size([3, 40])}
BUCKETS = [["head", "bias"], ["weight"]]
CASES = [
    {"format": "e5m2", "scale": "aps"},
    {"format": "topk:0.1:e4m3fn", "scale": "local"},
    {"format": "e2m1fn", "scale": "aps_delayed", "sum_format": "e6m5", "kahan": True},
    {"format": "e4m3fn", "scale": "block:16", "skip": "1d"},
    {"format": "adaptive:3.5", "layers": {"head": "e5m2"}},
]
IN_TURNS = [{"reduction": str(r), **CASES[i % len(CASES)]} for i, r in enumerate(REDUCTIONS)]


def gradients(rank):
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sent_by(rank):
    """In two steps: delayed scales are agreed on in the first."""
    found = []
    for case in IN_TURNS:
        compressor = Compressor(SHAPES, Settings.of(**case, chunk=96))
        for _ in range(2):
            compressor.reduce(gradients(rank), BUCKETS)
            found.append((compressor.report().bytes_sent, compressor.report().bytes_of_fp32))
        compressor.close()
    return found


@pytest.mark.parametrize("world", [2, 4, 5])
def test_real_and_virtual_ranks_send_the_same_bytes(world):
    real = [iter(found) for found in ranks.run(sent_by, world)]
    for case in IN_TURNS:
        exchange = VirtualExchange(world, SHAPES, Settings.of(**case, chunk=96), buckets=BUCKETS)
        for step in range(2):
            found = [exchange.bytes_sent(rank) for rank in range(world)]
            assert found == [next(sent) for sent in real], (case, step)
            exchange.reduce(gradients)


def test_one_rank_sends_nothing():
    for reduction in REDUCTIONS:
        assert VirtualExchange(1, SHAPES, "e5m2", scale="aps", reduction=reduction).bytes_sent()[0] == 0


def test_one_shot_sends_everything_to_everybody():
    shapes = {"weight": torch.Size([1 << 12, 31])}
    sent, of_fp32 = VirtualExchange(4, shapes, "fp16", scale="none", reduction="one_shot").bytes_sent()
    assert sent == pytest.approx(3 * 2 * 31 * 4096, rel=1e-3)
    assert of_fp32 == 1.5 * 4 * 31 * 4096


def in_a_network_of_its_own(program: str) -> str:
    """What a program prints where nothing else sends anything."""
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("this system allows no network namespaces")
    paths = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*unshare, sys.executable, program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def most_for(reported):
    """TCP adds headers of some 60 bytes to packets of up to 64 KiB, and acknowledgements; barriers are some hundred bytes."""
    return 1.02 * reported + 20_000


def test_the_interface_counts_the_bytes_that_are_reported():
    """On a busy machine TCP sends a packet again now and then: what counts is the least of up to three measurements."""
    times: list[list[tuple[int, int]]] = []
    while len(times) < 3 and (not times or any(sent > most_for(reported) for sent, reported in times[-1])):
        times.append(json.loads(in_a_network_of_its_own(interface_bytes.__file__)))
    for case, *found in zip(interface_bytes.CASES, *times, strict=True):
        on_the_interface, reported = min(found)
        shapes = {"tensor": torch.Size([interface_bytes.ELEMENTS])}
        exchange = VirtualExchange(interface_bytes.WORLD, shapes, **case)
        assert reported == sum(exchange.bytes_sent(rank)[0] for rank in range(interface_bytes.WORLD)), case
        assert reported <= on_the_interface <= most_for(reported), case


def test_messages_of_too_many_shards_are_refused():
    """Beyond 16,384 shards, the bytes that mark a total reach into the numbers."""
    shard = 4 * traffic._NUMBERS + traffic._STEP * traffic._MARKS[Stage.TOTAL]
    assert traffic._counted_message(1, 16_383 * shard) == traffic.CountedMessage(1, Stage.TOTAL, 16_383)
    with pytest.raises(ValueError, match="ranks: too many to count"):
        traffic._counted_message(1, 150_000 * shard)
