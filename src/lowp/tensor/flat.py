"""Functions of flat tensors, compiled once: `out = function(*sized, *small)`.

What kernels.py does for the three operations, for any other chain of elementwise operations on flat tensors of one length, with
a few small tensors (a table, a shift) beside them. Until it pays to compile, and where nothing can, the function is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.kernels import built, to_inductor

_EXAMPLE = (1 << 20) + 3  # elements: large, so that inductor chooses for large tensors


@dataclass(frozen=True, eq=False)
class FlatFunction:
    """`sized` are the dtypes of the long arguments, `small` dtype and length of the others, `out` the result's dtype.

    `looks_up`: the work is looking up, which the C++ compiler does with gather instructions if inductor leaves vectors to it.
    """

    function: Callable[..., Tensor]
    sized: tuple[torch.dtype, ...]
    small: tuple[tuple[torch.dtype, int], ...]
    out: torch.dtype
    looks_up: bool = False

    def __call__(self, sized: Sequence[Tensor], small: Sequence[Tensor], out: Tensor) -> None:
        """All of one length; `out` may be one of the arguments."""
        if out.numel() == 0:
            return
        kernel = built(self, out.device, out.numel(), _compile)
        if kernel is None:
            out.copy_(self.function(*sized, *small))
        else:
            kernel([*sized, *small, out])


def _compile(what: FlatFunction, device: torch.device) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def body(*arguments: Tensor) -> tuple[()]:
        arguments[-1].copy_(what.function(*arguments[:-1]))
        return ()

    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        mode = FakeTensorMode(shape_env=ShapeEnv())

        def fake(dtype: torch.dtype, count: int, dynamic: bool) -> Tensor:
            context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC])
            return mode.from_tensor(torch.empty(count, dtype=dtype, device=device), symbolic_context=context)

        arguments = [fake(dtype, _EXAMPLE, True) for dtype in what.sized]
        arguments += [fake(dtype, count, False) for dtype, count in what.small]
        arguments += [fake(what.out, _EXAMPLE, True)]
        return to_inductor(body, arguments, mode, what.looks_up)
