"""Functions of flat tensors, compiled once: `out = function(*sized, *small)`.

What kernels.py does for the three operations, for any other chain of elementwise operations on flat tensors of one length, with
a few small tensors (a table, a shift) beside them. Until it pays to compile, and where nothing can, the function is called.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.kernels import get_or_build


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
    """As C++ (lists/flat.py) or as Triton (lists/flat_triton.py). The result takes [*sized, *small, out]."""
    from lowp.tensor.lists import flat, flat_triton

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

    examples = [torch.zeros(what.small[place][1], dtype=what.small[place][0], device=device) for place in tables]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        build = flat.build if device.type == "cpu" else flat_triton.build
        kernel = build(function, what.sized, what.out, len(numbers), len(scalars), examples)

    def call(arguments: Sequence[Tensor]) -> None:
        small = arguments[count:-1]
        one = [small[places[0]] if places else None for places in (numbers, scalars)]
        kernel(arguments[:count], arguments[-1], *one, [small[place] for place in tables])

    return call
