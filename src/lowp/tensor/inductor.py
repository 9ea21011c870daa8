"""What inductor is told about `lowp::round` (node.py), when it first compiles one.

1. On a GPU it is a pointwise operation (pointwise.py), to be fused with others.
2. Rounding is cheap to do again. Without being told, the partition into forward and backward keeps what comes out of a
   quantizer beside what goes in.

Both reach into torch's insides. Where these are not as expected things go on without, slower.
"""

import sys
from typing import Any

import torch

from lowp.tensor.pointwise import lowered, pointwise

_told = False


def tell_inductor() -> None:
    """Called while a graph is traced. If inductor is to compile it, its modules are there."""
    global _told
    if _told or "torch._inductor.lowering" not in sys.modules:
        return
    _told = True
    from torch._functorch import partitioners
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.lowp.round.default, type_promotion_kind=None)(_lowered)
    if isinstance(again := getattr(partitioners, "pointwise_ops", list)(), list):  # its cached result
        again.append(torch.ops.lowp.round)


def _lowered(x: Any, format: str, rounding: str) -> Any:
    operation = pointwise(format, rounding, x.get_dtype())
    if operation is not None and x.get_device().type != "cpu":
        return lowered(x, operation)
    return _called(x, format, rounding)


def _called(x: Any, format: str, rounding: str) -> Any:
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(torch.ops.lowp.round.default)(x, format, rounding)
