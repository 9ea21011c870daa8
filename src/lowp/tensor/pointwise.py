"""A quantizer as one pointwise operation of inductor's, for code compiled for a GPU.

Seen as the fifteen torch operations that it is, a quantizer costs inductor four times the compilation, and the result is worse:
inductor keeps what is read more than once and took many operations to compute, and finds such numbers inside of quantizers,
which then pass through memory half rounded. As one operation it is fused with its neighbours as a whole, or not.

The operations themselves are traced (lists/tracing.py) and handed to inductor, on NVIDIA's chips as assembly (ptx.py) where
they are those of `nearest_in_floats`, else one by one. bfloat16 numbers are rounded two at once where that can be (pairs.py).
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import BlockFormat
from lowp.formats import format as parse_format
from lowp.tensor.carrier import CARRIERS, grid_fits
from lowp.tensor.core import Quantize, quantize_operation
from lowp.tensor.grid import nearest_in_floats
from lowp.tensor.lists.tracing import COMPARE, Element, Program, Statement, Value, fused, trace
from lowp.tensor.pairs import pair_assembly, pair_instructions
from lowp.tensor.ptx import assembly


@lru_cache(maxsize=4096)
def pointwise(format: str, rounding: str, dtype: torch.dtype, saturate: bool = False) -> Quantize | None:
    """The quantizer, if every result depends on its own number alone: without blocks and without noise."""
    fmt = parse_format(format)
    if isinstance(fmt, BlockFormat) or rounding == "stochastic":
        return None
    return quantize_operation(fmt, dtype, rounding, saturate, dtype)


def lowered(x: Any, operation: Quantize, pairs: bool = False) -> Any:
    """Inductor's picture of the rounded tensor, from that of the tensor; for operations without tables. `pairs`: numbers of 16
    bits may be rounded two at once."""
    ir = compat.inductor().ir
    if type(x.data) is ir.View:  # Rounded in the shape that it was computed in: places there are simpler to compute.
        inside = lowered(ir.TensorBox(x.data.data), operation, pairs)
        return ir.TensorBox(dataclasses.replace(x.data, data=inside.data))
    load = x.make_loader()
    on_nvidia = x.get_device().type == "cuda" and torch.version.hip is None
    pairs = pairs and on_nvidia and pair_instructions(operation) is not None
    if pairs and torch.cuda.get_device_capability(x.get_device()) >= (8, 0):
        rounded = _in_pairs(operation)
    else:
        rounded = _by_assembly(operation) if on_nvidia and operation.float_grid is not None else _one_by_one(operation)

    def at(index: Any) -> Any:
        return rounded(load(index))

    return ir.Pointwise.create(device=x.get_device(), dtype=operation.dtype, inner_fn=at, ranges=list(x.get_size()))


def _in_pairs(operation: Quantize) -> Callable[[Any], Any]:
    """Two bfloat16 numbers at once (pairs.py). Of their bits: inductor computes in float32 and would not round first."""
    ops = compat.inductor().ops
    dtype, storage, text = operation.dtype, operation.own.storage, _pair_assembly(operation)

    def rounded(number: Any) -> Any:
        bits = ops.to_dtype_bitcast(number, storage, dtype)
        result = ops.inline_asm_elementwise(bits, asm=text, constraints="=r,r", dtype=storage, pack=2)
        return ops.to_dtype_bitcast(result, dtype, storage)

    return rounded


@lru_cache(maxsize=4096)
def _pair_assembly(operation: Quantize) -> str:
    instructions = pair_instructions(operation)
    assert instructions is not None
    return pair_assembly(instructions)


def _by_assembly(operation: Quantize) -> Callable[[Any], Any]:
    ops = compat.inductor().ops
    dtype, storage, text = operation.dtype, operation.own.storage, _assembly(operation)

    def stored(number: Any) -> Any:
        """16 bits as they are in memory: inductor computes with 32 and would forget to round."""
        if dtype == torch.float32:
            return number
        return ops.to_dtype_bitcast(ops.to_dtype_bitcast(number, storage, dtype), dtype, storage)

    def rounded(number: Any) -> Any:
        result = ops.inline_asm_elementwise(stored(number), asm=text, constraints="=r,r", dtype=torch.float32)
        return result if grid_fits(operation.fmt, CARRIERS[dtype]) else stored(result)  # type: ignore[arg-type]  # a grid

    return rounded


@lru_cache(maxsize=4096)
def _assembly(operation: Quantize) -> str:
    constants = operation.float_grid
    assert constants is not None
    return assembly(fused(traced(lambda x: nearest_in_floats(x, constants), torch.float32)))


def _one_by_one(operation: Quantize) -> Callable[[Any], Any]:
    ops = compat.inductor().ops
    program, dtype, storage = _program(operation), operation.dtype, operation.own.storage

    def rounded(number: Any) -> Any:
        known = {program.elements[0].name: ops.to_dtype_bitcast(number, storage, dtype)}
        for statement in program.statements:
            known[statement.result.name] = _computed(statement, known)
        return ops.to_dtype_bitcast(known[program.results[0].name], dtype, storage)

    return rounded


@lru_cache(maxsize=4096)
def _program(operation: Quantize) -> Program:
    return traced(
        operation.in_floats if operation.float_grid is not None else partial(operation, tables=()), operation.own.storage
    )


def traced(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Program:
    """A function of one tensor of that dtype, as a program."""
    return trace(lambda x, *_: [function(x)], [Element(dtype)], 0, 0, [], torch.device("cpu"))


_OPERATIONS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "shl": "bitwise_left_shift", "shr": "bitwise_right_shift", "not": "bitwise_not", "neg": "neg", "abs": "abs",
    "round": "round", "floor": "floor", "max": "maximum", "min": "minimum", **{name: name for name in COMPARE},
}  # fmt: skip


def _computed(s: Statement, known: dict[str, Any]) -> Any:
    """A statement, carried out by inductor."""
    ops = compat.inductor().ops

    def value(argument: Any, dtype: torch.dtype) -> Any:
        if not isinstance(argument, Value):
            return ops.constant(argument, dtype)
        found = known[argument.name]
        return found if argument.dtype == dtype else ops.to_dtype(found, dtype, src_dtype=argument.dtype)

    first = s.arguments[0]
    match s.operation:
        case "constant" | "convert":
            return value(first, s.result.dtype)
        case "bitcast":
            return ops.to_dtype_bitcast(known[first.name], s.result.dtype, s.operand)
        case "where":
            return ops.where(known[first.name], *(value(x, s.operand) for x in s.arguments[1:]))
        case "rsub":
            return ops.sub(*(value(x, s.operand) for x in reversed(s.arguments)))
        case "clamp":
            result, low, high = (None if x is None else value(x, s.operand) for x in s.arguments)
            result = result if low is None else ops.maximum(result, low)
            return result if high is None else ops.minimum(result, high)
    if s.operation not in _OPERATIONS:
        raise NotImplementedError(f"{s.operation} in inductor")
    return getattr(ops, _OPERATIONS[s.operation])(*(value(x, s.operand) for x in s.arguments))
