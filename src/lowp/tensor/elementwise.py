"""Chains of operations on a few numbers as one kernel: those of scales and of optimizers' counters."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.kernels import SMALL, get_or_build


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A chain of operations on a few numbers: one launch on CUDA instead of one for each; on a CPU it is simply called.

    `arguments` are the dtypes of flat tensors of one length, `results` those of what the function gives, a list. `numbers` is
    how many integers it takes besides, as its last argument. With `long`, a chain with one result is a kernel on a CPU as well.
    """

    function: Callable[..., Sequence[Tensor]]
    arguments: tuple[torch.dtype, ...]
    results: tuple[torch.dtype, ...]
    numbers: int = 0
    long: bool = False

    def __call__(self, tensors: Sequence[Tensor], out: Sequence[Tensor], numbers: Sequence[Any] = ()) -> None:
        """Write the results of flat tensors to `out`, which may be among them."""
        device = tensors[0].device
        if device.type == "cuda":
            kernel = get_or_build(self, device, SMALL, _build_elementwise)
        else:
            kernel = get_or_build(self, device, out[0].numel(), _build_elementwise) if self.long else None
        if kernel is not None:
            kernel(tensors, out, numbers, ())
            return
        for room, found in zip(out, self.function(*tensors, *([numbers] if self.numbers else [])), strict=True):
            room.copy_(found)


def _build_elementwise(what: Elementwise, device: torch.device) -> Any:
    def function(*arguments: Any) -> Sequence[Tensor]:
        *tensors, numbers, _ = arguments
        return what.function(*tensors, *([numbers] if what.numbers else []))

    if device.type == "cpu":
        from lowp.tensor.lists import flat

        run = flat.build(function, what.arguments, what.results[0], what.numbers, ()).run
        key = ctypes.c_int32 * what.numbers

        def call(tensors: Sequence[Tensor], out: Sequence[Tensor], numbers: Sequence[int], *_: Any) -> None:
            run(*(x.data_ptr() for x in (*tensors, *out)), key(*numbers), out[0].numel(), torch.get_num_threads())

        return call

    from lowp.tensor.lists import flat_triton

    with torch.cuda.device(device):
        return flat_triton.build(function, what.arguments, what.results, what.numbers, ())
