"""Which algorithm rounds: `grid.rounding_for` decides it from the format's grid and from the backend that operations go to."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowp.formats import FORMATS, Rounding
from lowp.tensor import backend
from lowp.tensor.backend import (
    CPP,
    GPU_GRAPH,
    GRAPH,
    PLAIN,
    TRITON,
    TRITON_8_BITS,
    TRITON_BEFORE_8_0,
    backend_of,
    printing,
)
from lowp.tensor.carrier import F32, F64, grid_fits, is_grid
from lowp.tensor.grid import Algorithm, grid, rounding_for
from lowp.tensor.lists import byte_codes, four_bits

GRIDS = [fmt for fmt in FORMATS if is_grid(fmt) and grid_fits(fmt, F32)]


def how(name, becomes, mode=Rounding.NEAREST, carrier=F32):
    (fmt,) = (fmt for fmt in GRIDS if str(fmt) == name)
    return rounding_for(grid(fmt, carrier, mode, True), becomes)


@pytest.mark.parametrize("mode", list(Rounding), ids=str)
def test_integers_where_floats_cost_something(mode):
    for fmt in GRIDS:
        for becomes in (PLAIN, GRAPH):
            assert rounding_for(grid(fmt, F32, mode, True), becomes) is Algorithm.CUT
    assert how("e4m3fn", TRITON_8_BITS, mode, F64) is Algorithm.CUT  # floats of 32 bits would round twice


@pytest.mark.parametrize("becomes", [CPP, TRITON, GPU_GRAPH], ids=["C++", "Triton", "graph"])
def test_floats_where_they_are_faster(becomes):
    assert how("e4m3fn", becomes) is how("e5m2", becomes) is how("int8", becomes) is Algorithm.SUM
    assert how("e3m0", becomes) is Algorithm.CUT  # without a mantissa, the last bit of a sum is not the last of a code
    assert how("e4m3fn", becomes, Rounding.STOCHASTIC) is Algorithm.STEPS
    assert how("fp32", becomes, Rounding.STOCHASTIC) is Algorithm.CUT  # nothing is rounded
    for mode in set(Rounding) - {Rounding.NEAREST, Rounding.STOCHASTIC}:
        assert how("e4m3fn", becomes, mode) is Algorithm.CUT


def test_instructions_for_two_formats():
    converted = {str(fmt) for fmt in GRIDS if how(str(fmt), TRITON_8_BITS) is Algorithm.CONVERSION}
    assert converted == {"e5m2", "e4m3fn"}
    assert how("e5m2", TRITON_8_BITS, Rounding.STOCHASTIC) is Algorithm.STEPS


def test_what_operations_become(monkeypatch):
    x = torch.zeros(3)
    assert backend_of(x) is PLAIN
    with printing():
        assert backend_of(x) is CPP
        monkeypatch.setitem(backend.PRINTED, "cpu", TRITON)
        assert backend_of(x) is TRITON
    with FakeTensorMode():  # as compilers have it
        assert backend_of(torch.zeros(3)) is GRAPH
        assert backend_of(torch.zeros(3, device="cuda")) is GPU_GRAPH
    assert backend_of(x) is PLAIN


@pytest.mark.parametrize(
    ("chip", "becomes", "assembled"),
    [
        ((7, 5), TRITON_BEFORE_8_0, set()),  # ptxas refuses cvt.rn.f16x2.f32 and min.f16x2
        ((8, 0), TRITON, {"e2m1fn"}),
        ((8, 6), TRITON, {"e2m1fn"}),
        ((8, 9), TRITON_8_BITS, {"e2m1fn", "e4m3fn"}),
        ((9, 0), TRITON_8_BITS, {"e2m1fn", "e4m3fn"}),
    ],
)
def test_what_a_chip_can(chip, becomes, assembled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with printing():
        assert backend_of(on_gpu) is becomes
        assert {str(fmt) for fmt in FORMATS if byte_codes.suits(fmt, on_gpu)} == assembled
        assert {str(fmt) for fmt in FORMATS if four_bits.suits(fmt, on_gpu)} == assembled & {"e2m1fn"}
