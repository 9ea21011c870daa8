"""Codes as other libraries hold them: torch's narrow dtypes, and the order in which cuBLAS reads the scales of blocks."""

import torch
from torch import Tensor

from lowp.formats import Format
from lowp.formats.floats import BF16, E2M1FN, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FP16, FP32
from lowp.tensor.core import code_dtype

DTYPE_OF_CODES: dict[Format, torch.dtype] = {
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
    E8M0FNU: torch.float8_e8m0fnu,
    E2M1FN: torch.float4_e2m1fn_x2,
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP32: torch.float32,
}
"""The torch dtype whose bytes are a format's codes."""

PAIRS = (torch.float4_e2m1fn_x2,)  # two codes in a byte, the first in its low bits, as `pack` has them

_ROWS, _COLUMNS = 128, 4


def as_codes(tensor: Tensor, fmt: Format) -> Tensor | None:
    """A tensor of codes, whether it has their integer dtype or the torch dtype that means the same; None: neither."""
    if tensor.dtype == code_dtype(fmt):
        return tensor
    return tensor.view(code_dtype(fmt)) if tensor.dtype == DTYPE_OF_CODES.get(fmt) else None


def to_128x4(scales: Tensor) -> Tensor:
    """The scales of a matrix in the order that cuBLAS reads: tiles of 128 rows and 4 columns, 512 bytes each.

    A tile's rows r, r + 32, r + 64 and r + 96 lie beside each other, 16 bytes for each of 32 values of r; tiles follow each
    other along rows of tiles. Scales of more dimensions are those of a matrix whose rows are all their rows. Missing rows and
    columns are zeros. The result is flat: 512 bytes for each tile.
    """
    if scales.dim() < 2 or scales.element_size() != 1:
        raise ValueError(f"the layout is for matrices of 1-byte scales, not for {tuple(scales.shape)} of {scales.dtype}")
    matrix = scales.view(torch.uint8).flatten(0, -2)
    rows, columns = matrix.shape
    filled = torch.nn.functional.pad(matrix, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    tiles = filled.unflatten(1, (-(-columns // _COLUMNS), _COLUMNS)).unflatten(0, (-(-rows // _ROWS), 4, _ROWS // 4))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def from_128x4(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The `rows` x `columns` scales that `to_128x4` was given (as a matrix)."""
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    if tiles.element_size() != 1 or tiles.numel() != down * across * _ROWS * _COLUMNS:
        raise ValueError(
            f"{rows} x {columns} scales are {down * across} tiles of 512 bytes, not {tiles.numel()} of {tiles.dtype}"
        )
    laid_out = tiles.view(torch.uint8).reshape(down, across, _ROWS // 4, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
    return laid_out.reshape(down * _ROWS, across * _COLUMNS)[:rows, :columns].contiguous().view(tiles.dtype)
