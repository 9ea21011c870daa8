"""aps takes log2(ranks) binades of a format as headroom for the sum. Where too few are left, it says so."""

import logging

import pytest
import ranks
import torch

import lowp
from lowp.wire import scale_warnings
from lowp.wire.compressor import Compressor


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch):
    monkeypatch.setattr(scale_warnings, "_said", set())


def gradient(rank):
    return torch.randn(512, generator=torch.Generator().manual_seed(rank))


def error(world, format, scale):
    exact = sum(gradient(rank).double() for rank in range(world))
    return float((lowp.VirtualWorld(world).all_reduce(gradient, format, scale=scale) - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("world", "format", "scale", "warns"),
    [
        (8, "int8", "aps", True),
        (64, "int8", "aps", True),
        (2, "e2m1fn", "aps", True),
        (4, "int8", "aps_delayed", True),
        (4, "int8", "aps", False),
        (8, "e4m3fn", "aps", False),
        (64, "e5m2", "aps", False),
        (1, "int8", "aps", False),
        (8, "int8", "local", False),
        (8, "mxfp4", "aps", False),
    ],
)
def test_it_warns_where_a_quarter_of_the_sum_is_lost(world, format, scale, warns, caplog):
    found = error(world, format, scale)
    assert bool(caplog.records) == warns
    assert (found > 0.25) == (warns and scale == "aps")  # the first step of aps_delayed is agreed on


def test_what_it_says_and_only_once(caplog):
    for _ in range(2):
        error(8, "int8", "aps")
    (record,) = caplog.records
    assert record.getMessage() == (
        "scale='aps' leaves 3 of the 6 binades of int8 to gradients on 8 ranks: the others are headroom for the sum. "
        "Most numbers round to zero; take scale='local' or 'block:<n>'"
    )
    error(2, {0: "fp16", 500: "e2m1fn"}, "aps")  # a format that comes later
    assert "for e2m1fn" in caplog.records[1].getMessage()


def registered(rank, call):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lowp").addHandler(handler)
    if call == "all_reduce":
        lowp.all_reduce(gradient(rank), "e2m1fn", scale="aps")
    else:
        Compressor({"weight": torch.Size([3, 3])}, "e5m2", layers={"last": "e2m1fn"}, scale="aps").close()
    return said


@pytest.mark.parametrize("call", ["all_reduce", "Compressor"])
def test_one_real_rank_says_so(call):
    first, second = ranks.run(registered, 2, call)
    assert ["for e2m1fn" in text for text in first] == [True]
    assert second == []
