"""What inductor is told about `lowp::round` (node.py), when it first compiles one.

1. On a GPU it is a pointwise operation (pointwise.py), to be fused with others.
2. On a CPU it is a call of `round_into` (number_kernels.py) from the code that inductor writes, past torch's dispatcher, into
   memory that inductor plans: a buffer that is free already often serves. An operator that allocates gets fresh pages from the
   system each time, and a page costs as much as rounding its numbers.
3. Rounding is cheap to do again. Without being told, the partition into forward and backward keeps what comes out of a
   quantizer beside what goes in, and what cannot be had without it: the sign of every activation.

All use private parts of inductor (compat.py). Where these are not as expected, compiled code is slower by a tenth to a third.
(Inductor's cache of compiled graphs knows nothing of what it is told here, but lowp's version, which is in the graph.)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from lowp import compat
from lowp.tensor.pointwise import lowered, pointwise

_told = False
_pairs = False  # may two numbers be rounded at once (pairs.py)?


def tell_inductor() -> None:
    """Called while a graph is traced. If inductor is to compile it, its modules are there."""
    global _told, _pairs
    if _told or not compat.inductor_is_used():
        return
    _told = True
    try:
        register = compat.inductor().register_lowering
        register(torch.ops.lowp.round.default, type_promotion_kind=None)(_lowered)
        compat.inductor().cheap_operations().append(torch.ops.lowp.round)  # to its cached result
        compat.let_one_number_be_packed()
        _pairs = True
    except (ImportError, AttributeError, TypeError):
        return


def _lowered(x: Any, format: str, rounding: str, version: str = "", saturate: bool = False) -> Any:
    """`round` as inductor writes it down. What it cannot be told is left to the operator."""
    fallback_handler = compat.inductor().fallback_handler
    try:
        result = (_called if x.get_device().type == "cpu" else _fused)(x, format, rounding, saturate)
    except (ImportError, AttributeError, TypeError):  # another inductor than those we know
        result = None
    if result is not None:
        return result
    return fallback_handler(torch.ops.lowp.round.default, add_to_fallback_set=False)(x, format, rounding, version, saturate)


def _fused(x: Any, format: str, rounding: str, saturate: bool) -> Any:
    operation = pointwise(format, rounding, x.get_dtype(), saturate)
    return None if operation is None or operation.tables else lowered(x, operation, _pairs)


def _called(x: Any, format: str, rounding: str, saturate: bool) -> Any:
    """`round_into`, into memory laid out like x's; None if that has gaps, or if what is written is not Python."""
    ir = compat.inductor().ir
    if compat.inductor().virtual.graph.cpp_wrapper:
        return None
    x: Any = ir.ExternKernel.realize_input(x)
    ir.as_storage_and_layout(x, freeze=True)
    size, stride = x.get_size(), x.get_stride()
    if not _is_dense(size, stride):
        return None

    class RoundInto(ir.ExternKernelOut):
        """`round_into(x, format, rounding, out=result)`, and what makes that name known."""

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once("from lowp.tensor.number_kernels import round_into")
            super().codegen(wrapper)

    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size, stride)
    more = {"saturate": True} if saturate else {}
    return ir.TensorBox.create(RoundInto(layout, [x], (format, rounding), more, python_kernel_name="round_into"))


def _is_dense(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Do the elements fill their memory, in whatever order of dimensions? (Sizes may be expressions.)"""
    sizes = compat.inductor().virtual.graph.sizevars
    dimensions = [pair for pair in zip(stride, size, strict=True) if not sizes.statically_known_equals(pair[1], 1)]
    dimensions.sort(key=lambda pair: sizes.optimization_hint(pair[0]))
    return all(
        sizes.statically_known_equals(step, math.prod(length for _, length in dimensions[:place]))
        for place, (step, _) in enumerate(dimensions)
    )
