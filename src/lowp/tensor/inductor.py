"""What inductor is told about `lowp::round` (node.py), when it first compiles one.

1. On a GPU it is a pointwise operation (pointwise.py), to be fused with others.
2. On a CPU it is a call of `round_into` (kernels.py) from the code that inductor writes, past torch's dispatcher, into memory
   that inductor plans: a buffer that is free already often serves. An operator that allocates gets fresh pages from the system
   each time, and a page costs as much as rounding its numbers.
3. Rounding is cheap to do again. Without being told, the partition into forward and backward keeps what comes out of a
   quantizer beside what goes in, and what cannot be had without it: the sign of every activation.

All reach into torch's insides. Where these are not as expected, things go on without: slower by a tenth to a third.
(Inductor's cache of compiled graphs knows nothing of what it is told here, but lowp's version, which is in the graph.)
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lowp.tensor.pointwise import lowered, pointwise

_told = False
_pairs = False  # may two numbers be rounded at once (pairs.py)?


def tell_inductor() -> None:
    """Called while a graph is traced. If inductor is to compile it, its modules are there."""
    global _told, _pairs
    if _told or "torch._inductor.lowering" not in sys.modules:
        return
    _told = True
    try:
        from torch._functorch import partitioners
        from torch._inductor.lowering import register_lowering

        register_lowering(torch.ops.lowp.round.default, type_promotion_kind=None)(_lowered)
        partitioners.pointwise_ops().append(torch.ops.lowp.round)  # to its cached result
        _let_numbers_be_alone()
        _pairs = True
    except (ImportError, AttributeError, TypeError):
        return


def _let_numbers_be_alone() -> None:
    """Triton refuses assembly for two numbers in a block of one, which a reduction can end in. There it is used for one number:
    the other half is not looked at. Newer versions of torch than 2.11 take care of it."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.runtime import triton_helpers

    if hasattr(triton_helpers, "inline_asm_pack"):
        return
    written = TritonOverrides.inline_asm_elementwise

    def inline_asm_elementwise(*inputs: Any, pack: Any = 1, **how: Any) -> str:
        return written(*inputs, pack=pack if pack == 1 else f"{pack} if {inputs[0]}.numel > 1 else 1", **how)

    TritonOverrides.inline_asm_elementwise = staticmethod(inline_asm_elementwise)


def _lowered(x: Any, format: str, rounding: str, version: str = "") -> Any:
    """`round` as inductor writes it down. What it cannot be told is left to the operator."""
    from torch._inductor.lowering import fallback_handler

    try:
        result = _called(x, format, rounding) if x.get_device().type == "cpu" else _fused(x, format, rounding)
    except (ImportError, AttributeError, TypeError):  # another inductor than those we know
        result = None
    if result is not None:
        return result
    return fallback_handler(torch.ops.lowp.round.default, add_to_fallback_set=False)(x, format, rounding, version)


def _fused(x: Any, format: str, rounding: str) -> Any:
    operation = pointwise(format, rounding, x.get_dtype())
    return None if operation is None or operation.tables else lowered(x, operation, _pairs)


def _called(x: Any, format: str, rounding: str) -> Any:
    """`round_into`, into memory laid out like x's; None if that has gaps, or if what is written is not Python."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:
        return None
    x: Any = ir.ExternKernel.realize_input(x)
    ir.as_storage_and_layout(x, freeze=True)
    size, stride = x.get_size(), x.get_stride()
    if not _is_dense(size, stride):
        return None

    class RoundInto(ir.ExternKernelOut):
        """`round_into(x, format, rounding, out=result)`, and what makes that name known."""

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once("from lowp.tensor.kernels import round_into")
            super().codegen(wrapper)

    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size, stride)
    return ir.TensorBox.create(RoundInto(layout, [x], (format, rounding), python_kernel_name="round_into"))


def _is_dense(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Do the elements fill their memory, in whatever order of dimensions? (Sizes may be expressions.)"""
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    dimensions = [pair for pair in zip(stride, size, strict=True) if not sizes.statically_known_equals(pair[1], 1)]
    dimensions.sort(key=lambda pair: sizes.optimization_hint(pair[0]))
    return all(
        sizes.statically_known_equals(step, math.prod(length for _, length in dimensions[:place]))
        for place, (step, _) in enumerate(dimensions)
    )
