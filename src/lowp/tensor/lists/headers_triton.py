"""Two small kernels on the bytes that parts of messages begin or end with, for CUDA: one launch of one program each.

As operations of torch each would be a handful of launches. Parts without such a byte have the place -1.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists.triton import IMPORTS, build

_BLOCK = 1024  # parts or layers that a program looks at at once

_PEAKS = f"""
@triton.jit(do_not_specialize=["source", "places", "parts", "out", "messages", "stride"])
def run(source, places, parts, out, messages, stride):
    for first in range(0, parts, {_BLOCK}):
        part = first + tl.arange(0, {_BLOCK})
        at = tl.load(places + part, mask=part < parts, other=-1)
        most = tl.zeros([{_BLOCK}], tl.int32)
        for message in range(0, messages):
            byte = tl.load(source + message * tl.cast(stride, tl.int64) + at, mask=at >= 0, other=0)
            most = tl.maximum(most, byte.to(tl.int32))
        tl.store(out + part, most, mask=part < parts)
"""

_UNITS = f"""
@triton.jit(do_not_specialize=["source", "places", "owners", "parts", "usual", "out", "layers", "messages", "stride"])
def run(source, places, owners, parts, usual, out, layers, messages, stride):
    for first in range(0, layers, {_BLOCK}):
        layer = first + tl.arange(0, {_BLOCK})
        tl.store(out + layer, tl.load(usual + layer, mask=layer < layers, other=0.0), mask=layer < layers)
    tl.debug_barrier()
    for first in range(0, parts, {_BLOCK}):
        part = first + tl.arange(0, {_BLOCK})
        at = tl.load(places + part, mask=part < parts, other=-1)
        owner = tl.load(owners + part, mask=part < parts, other=0)
        for message in range(0, messages):
            byte = tl.load(source + message * tl.cast(stride, tl.int64) + at, mask=at >= 0, other=0)
            tl.store(out + owner, float("nan"), mask=byte.to(tl.int32) == 255)
"""
_PEAKS_ARGUMENTS = (torch.uint8, torch.int64, 1, torch.int32, 1, 1)
_UNITS_ARGUMENTS = (torch.uint8, torch.int64, torch.int64, 1, torch.float32, torch.float32, 1, 1, 1)


@lru_cache(maxsize=16)
def _compiled(text: str, arguments: tuple[Any, ...], device: torch.device) -> Any:
    """To be launched with addresses: Triton's own call looks at every argument, which takes longer than the work."""
    with torch.cuda.device(device):
        return build("\n".join([*IMPORTS, text])).warmup(*arguments, grid=(1,), num_warps=4)[1, 1, 1]


def largest_headers(source: Tensor, places: Tensor, out: Tensor, messages: int, stride: int) -> None:
    """The largest byte at each place of `source` in any of the messages, `stride` bytes apart: int32 `out`; 0 at place -1."""
    run = _compiled(_PEAKS, _PEAKS_ARGUMENTS, source.device)
    with torch.cuda.device(source.device):
        run(source.data_ptr(), places.data_ptr(), places.numel(), out.data_ptr(), messages, stride)


def units_of_layers(
    source: Tensor, places: Tensor, owners: Tensor, usual: Tensor, out: Tensor, messages: int, stride: int
) -> None:
    """`usual`, a number for each layer; NaN where a byte at a place is 255 in one of the messages, for the place's owner."""
    run = _compiled(_UNITS, _UNITS_ARGUMENTS, source.device)
    with torch.cuda.device(source.device):
        run(
            source.data_ptr(), places.data_ptr(), owners.data_ptr(), places.numel(), usual.data_ptr(), out.data_ptr(),
            usual.numel(), messages, stride,
        )  # fmt: skip
