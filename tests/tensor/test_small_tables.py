"""Staircases whose tables a C++ kernel keeps in registers, and blocks of every bfloat16 number."""

import pytest
import torch

import lowp
from lowp.formats.base import Rounding
from lowp.tensor import block
from lowp.tensor.carrier import F32, F64
from lowp.tensor.table import staircase


@pytest.mark.parametrize("mode", [Rounding.NEAREST, Rounding.TOWARD_ZERO])
@pytest.mark.parametrize("carrier", [F32, F64], ids=["float32", "float64"])
def test_cells_of_a_staircase_end_where_its_steps_do(carrier, mode):
    stairs = staircase(lowp.format("nf4"), carrier, mode, False)
    cells = stairs.tables[0].values
    assert len(cells) <= 64  # four registers; with cells for all magnitudes it was 2,048
    tables = tuple(table.tensor(torch.device("cpu")) for table in stairs.tables)
    ends = torch.tensor([0, stairs.lowest - 1, stairs.lowest, stairs.highest, stairs.highest + 1, carrier.infinity])
    for negative in (0, -1):
        sign = torch.full((2,), negative, dtype=carrier.compute)
        for below, above in ((0, 2), (3, 5)):
            pair = ends[[below, above]].to(carrier.compute)
            first, second = stairs.find(pair, sign, tables)
            assert first == second


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "mxint8"])
def test_blocks_of_all_bfloat16_numbers(name):
    """Also beside numbers of other magnitudes, so that a block's scale is not the number's own."""
    fmt = lowp.format(name)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    finite = every[(every & 0x7FFF) < 0x7F80].view(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    mixed = finite[torch.randperm(len(finite), generator=generator)]
    near = finite.view(torch.int16).sort().values.view(torch.bfloat16)
    for x in (mixed, near):
        x = x[: len(x) // 32 * 32].view(-1, 32)
        lowp.set_kernel_policy("always")
        found = lowp.quantize(x, name)
        wanted = block.quantize(x, fmt, "nearest", None, False, -1, False)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
