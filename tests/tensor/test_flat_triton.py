"""Eager kernels for CUDA, as text: every operation can be printed. (tests/gpu/test_cuda.py compares their bits.)"""

import ast

import pytest
import torch

import lowp
from lowp.formats import FORMATS, BlockFormat, Rounding
from lowp.tensor import backend, number_kernels
from lowp.tensor.core import decode_operation, encode_operation, quantize_operation
from lowp.tensor.lists import flat_triton
from lowp.tensor.lists.tracing import Element, trace
from lowp.tensor.noise import KEY_SIZE

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Floats do the rounding where they can."""
    monkeypatch.setitem(backend.PRINTED, "cpu", backend.TRITON)


def printed(operation, aligned=True, on_host=True):
    """The program and its text."""
    stored, result = number_kernels._dtypes(operation)
    tables = [table.tensor(CPU) for table in operation.tables]
    run = number_kernels._in_float32(operation)

    def function(x, numbers, scalars, tables):
        return [run(x, tables, numbers if operation.stochastic else None)]

    program = trace(function, [Element(stored)], KEY_SIZE if operation.stochastic else 0, 0, tables, CPU)
    assert program.results[0].dtype == result
    return program, flat_triton.source(program, [stored, result], len(tables), aligned, on_host)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if not isinstance(fmt, BlockFormat)], ids=str)
def test_every_operation_can_be_printed(fmt, as_on_a_gpu):
    for operation in (
        quantize_operation(fmt, F32, "nearest", False, F32),
        encode_operation(fmt, BF16, "stochastic", True, "zero"),
        decode_operation(fmt, F32),
    ):
        ast.parse(printed(operation)[1])


def test_negative_zero():
    """Triton's minus is 0 - x, which makes 0 of 0; no text may have it before a value."""
    program = trace(lambda x, *_: [-x], [Element(F32)], 0, 0, [], CPU)
    text = flat_triton.source(program, [F32, F32], 0, True, True)
    signs = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.UnaryOp)]
    assert all(isinstance(node.operand, ast.Constant) for node in signs)


@pytest.mark.parametrize("mode", list(Rounding), ids=str)
def test_bfloat16_is_worked_on_as_float32(mode, as_on_a_gpu):
    """The function that is printed for a GPU gives the bits of the operation."""
    fmt = lowp.format("e4m3fn")
    stored = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    key = torch.arange(KEY_SIZE, dtype=torch.int32) if mode is Rounding.STOCHASTIC else None
    for operation in (
        quantize_operation(fmt, BF16, mode.value, True, BF16),
        encode_operation(fmt, BF16, mode.value, False, "zero"),
    ):
        assert torch.equal(number_kernels._in_float32(operation)(stored, (), key), operation(stored, (), key))


def test_variants(as_on_a_gpu):
    """Pointers that may be anywhere are not specialised on; numbers are arguments, or read from memory."""
    operation = encode_operation(lowp.format("e5m2"), F32, "stochastic", False, "zero")
    for aligned in (True, False):
        for on_host in (True, False):
            _, text = printed(operation, aligned, on_host)
            decorator, signature = (line for line in text.splitlines() if line.startswith(("@triton.jit", "def run")))
            assert ("'p0'" in decorator) == (not aligned)
            assert ("n0, n1" in signature) == on_host == ("tl.load(numbers" not in text)
            full, rest = text.split("    else:")
            assert "mask=inside" not in full
            assert rest.count("mask=inside") == 2
