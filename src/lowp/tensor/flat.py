"""Functions of flat tensors, compiled once: `out = function(*sized, *small)`.

What kernels.py does for the three operations, for any other chain of elementwise operations on flat tensors of one length, with
a few small tensors (a table, a shift) beside them. Until it pays to compile, and where nothing can, the function is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.kernels import get_or_build, to_inductor

_EXAMPLE = (1 << 20) + 3  # elements: large, so that inductor chooses for large tensors


@dataclass(frozen=True, eq=False)
class FlatFunction:
    """`sized` are the dtypes of the long arguments, `small` dtype and length of the others, `out` the result's dtype.

    A small argument of one element is a number (int32 or float32, at most one of each), a longer one is a table.
    """

    function: Callable[..., Tensor]
    sized: tuple[torch.dtype, ...]
    small: tuple[tuple[torch.dtype, int], ...]
    out: torch.dtype

    def __call__(self, sized: Sequence[Tensor], small: Sequence[Tensor], out: Tensor) -> None:
        """All of one length; `out` may be one of the arguments."""
        if out.numel() == 0:
            return
        kernel = get_or_build(self, out.device, out.numel(), _build)
        if kernel is None:
            out.copy_(self.function(*sized, *small))
        else:
            kernel([*sized, *small, out])


def _build(what: FlatFunction, device: torch.device) -> Any:
    return (_print_cpp if device.type == "cpu" else _compile)(what, device)


def _print_cpp(what: FlatFunction, device: torch.device) -> Any:
    """On a CPU: as C++ (lists/flat.py). The result takes what inductor's takes."""
    from lowp.tensor.lists import flat

    count = len(what.sized)
    tables = [place for place, (_, length) in enumerate(what.small) if length > 1]
    numbers = [place for place, kind in enumerate(what.small) if kind == (torch.int32, 1)]
    scalars = [place for place, kind in enumerate(what.small) if kind == (torch.float32, 1)]
    assert len(tables) + len(numbers) + len(scalars) == len(what.small), "a number is an int32 or a float32"
    assert max(len(numbers), len(scalars)) <= 1, "one of each at most"

    def function(*arguments: Any) -> Tensor:
        *sized, own, shared, looked_up = arguments
        small: list[Any] = [None] * len(what.small)
        for places, found in ((numbers, own), (scalars, shared), (tables, looked_up)):
            for i, place in enumerate(places):
                small[place] = found[i]
        return what.function(*sized, *small)

    examples = [torch.zeros(what.small[place][1], dtype=what.small[place][0]) for place in tables]
    kernel = flat.build(function, what.sized, what.out, len(numbers), len(scalars), examples)

    def call(arguments: Sequence[Tensor]) -> None:
        small = arguments[count:-1]
        one = [small[places[0]] if places else None for places in (numbers, scalars)]
        kernel(arguments[:count], arguments[-1], *one, [small[place] for place in tables])

    return call


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
        return to_inductor(body, arguments, mode)
