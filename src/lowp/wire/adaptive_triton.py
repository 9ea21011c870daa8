"""Adaptive messages (adaptive.py) on a GPU: six launches to encode all parts of all messages, five to decode them.

    encode    find_scales, widths, write_codes    (adaptive_kernels.py)
    decode    widths, add_numbers
    widths    find_priorities, find_levels, sum_blocks, find_places    (adaptive_widths.py)

Nothing depends on what the host sees, and all memory is the workspace's: launches can be recorded.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowp.wire import adaptive_kernels, adaptive_widths
from lowp.wire import adaptive_tables as tables

if TYPE_CHECKING:
    from lowp.wire.adaptive_group import AdaptiveTable
    from lowp.wire.workspace import NewMemory

_U8, _I16, _I32, _I64, _F32 = torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32


class Launch:
    """A kernel, compiled at once, to be launched with addresses and integers (of which 1 is an example)."""

    def __init__(self, kernel: Any, examples: list[Any], device: torch.device, warps: int = 4, **constants: bool) -> None:
        self._device, self._constants = device, tuple(constants.values())
        options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
        with torch.cuda.device(device):
            self._compiled = kernel.warmup(*examples, **constants, grid=(1,), **options)

    def __call__(self, grid: tuple[int, int], *arguments: "Tensor | int") -> None:
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        if torch.cuda.current_device() == self._device.index:
            self._compiled[*grid, 1](*given, *self._constants)
        else:
            with torch.cuda.device(self._device):
                self._compiled[*grid, 1](*given, *self._constants)


@lru_cache(maxsize=8)
def curve_lines(device: torch.device) -> Tensor:
    """Of each segment, a and b of a + b * fine, 2^10 times the curve's value, in the lower and upper half of 64 bits."""
    base, rise = tables.curve()
    lines = [tables.SEGMENT * (low - k * high) | high << 32 for k, (low, high) in enumerate(zip(base, rise, strict=True))]
    return torch.tensor(lines, dtype=_I64).to(device)


@lru_cache(maxsize=8)
def value_heap(stochastic: bool, device: torch.device) -> Tensor:
    """What codes stand for, int16: a code of w bits is at 2^w + code. So those of a few widths are in one line of a cache."""
    values = tables.values(stochastic)
    return torch.cat([values[0, :1], *(values[width, : 1 << width] for width in range(tables.WIDEST + 1))]).to(device)


class _Widths:
    """`places` of all groups of some messages: 16 * the planes before each + its width."""

    def __init__(self, stochastic: bool, device: torch.device) -> None:
        examples = [_U8, 1, _I64, _I32, 1, _I32, 1, _I32]
        self._priorities = {
            writes: Launch(adaptive_widths.find_priorities, examples, device, writes=writes) for writes in (False, True)
        }
        of_blocks = [_I64, _I32, 1, _I32, 1, _I32]
        self._levels = Launch(adaptive_widths.find_levels, [_I64, _I32, _I32], device, warps=16, stochastic=stochastic)
        self._sums = Launch(adaptive_widths.sum_blocks, of_blocks, device, stochastic=stochastic)
        self._places = Launch(adaptive_widths.find_places, [*of_blocks, _U8, 1], device, stochastic=stochastic)

    def __call__(
        self,
        source: Tensor,
        stride: int,
        messages: int,
        table: "AdaptiveTable",
        places: Tensor,
        tops: Tensor | None,
        workspace: "NewMemory",
    ) -> None:
        """With `tops`, `places` are scales, and the bytes of `source` before its planes are written."""
        device, regions, blocks = source.device, len(table.regions), len(table.blocks)
        counts = workspace.zeros((messages * regions * tables.BINS,), device)
        levels = workspace.empty((messages * regions * tables.LEVEL_ROW,), _I32, device)
        sums = workspace.empty((messages * blocks,), _I32, device)
        self._priorities[tops is not None](
            (len(table.stretches), messages), source, stride, table.stretches, places, table.groups, counts,
            regions, places if tops is None else tops,
        )  # fmt: skip
        self._levels((regions, messages), table.regions, counts, levels)
        of_blocks = table.blocks, places, table.groups, levels, regions, sums
        self._sums((blocks, messages), *of_blocks)
        self._places((blocks, messages), *of_blocks, source, int(tops is not None))


_widths = lru_cache(maxsize=8)(_Widths)  # an encoder and a decoder share them


class TritonEncoder:
    """Numbers of a dtype to messages."""

    def __init__(self, dtype: torch.dtype, stochastic: bool, device: torch.device) -> None:
        numbers, noted = [dtype, _I64, _F32, _I32], {"stochastic": stochastic}
        self._scales = Launch(adaptive_kernels.find_scales, [*numbers, _I32], device, **noted)
        self._codes = Launch(adaptive_kernels.write_codes, [*numbers, _U8, _F32, _I64, _I32, 1], device, **noted)
        self._widths = _widths(stochastic, device)
        self._factors, self._curve = tables.encode_factors(stochastic).to(device), curve_lines(device)

    def __call__(
        self,
        numbers: Tensor,
        out: Tensor,
        table: "AdaptiveTable",
        factors: Tensor,
        keys: Tensor | None,
        workspace: "NewMemory",
    ) -> None:
        items, parts, device = len(table.rows), len(table.parts), numbers.device
        if not items:
            return
        places = workspace.empty((table.groups,), _I32, device)
        tops = workspace.zeros((parts,), device)
        self._scales((items, 1), numbers, table.rows, factors, places, tops)
        self._widths(out, 0, 1, table, places, tops, workspace)
        given = numbers, table.rows, factors, places, out, self._factors, self._curve
        self._codes((items, 1), *given, tops if keys is None else keys, parts)


class TritonDecoder:
    """Messages to sums of a dtype."""

    def __init__(self, dtype: torch.dtype, stochastic: bool, device: torch.device) -> None:
        examples = [_U8, 1, 1, _I64, _F32, _I32, 1, dtype, _I16, _F32, 1]
        self._numbers = {one: Launch(adaptive_kernels.add_numbers, examples, device, one=one) for one in (False, True)}
        self._widths = _widths(stochastic, device)
        self._values, self._units = value_heap(stochastic, device), tables.decode_units(stochastic).to(device)

    def __call__(
        self,
        source: Tensor,
        out: Tensor,
        table: "AdaptiveTable",
        factors: Tensor,
        divisor: int,
        messages: int,
        stride: int,
        workspace: "NewMemory",
    ) -> None:
        if not len(table.rows):
            return
        places = workspace.empty((messages * table.groups,), _I32, source.device)
        self._widths(source, stride, messages, table, places, None, workspace)
        self._numbers[messages == 1](
            (len(table.rows), 1), source, stride, messages, table.rows, factors, places, table.groups, out,
            self._values, self._units, divisor,
        )  # fmt: skip
