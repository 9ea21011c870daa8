"""A tile of a message part: how many vectors of numbers it has, where its bytes lie, and how one becomes the other.

`Encoder` and `Decoder` are torch operations on the vectors of one tile. part_kernels.py makes kernels of them.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.formats import BlockFormat, Format
from lowp.formats.floats import FP32
from lowp.tensor import block_steps
from lowp.tensor.backend import backend_of
from lowp.tensor.block_programs import BlockProgram, block_program
from lowp.tensor.carrier import F32
from lowp.tensor.core import code_storage, decode_operation, encode_operation
from lowp.tensor.lists import four_bits
from lowp.tensor.lists.parts import LANES, LAYER, Stream
from lowp.tensor.lists.tracing import shortcut
from lowp.tensor.noise import KEY_SIZE
from lowp.tensor.packing import group
from lowp.tensor.table import Table
from lowp.wire import scaling
from lowp.wire.adaptive import Adaptive
from lowp.wire.codec import Codec, placed_bits

NUMBERS, PAYLOAD, HIGH, SCALES, TENSOR_SCALE, HEADER = range(LAYER + 1, LAYER + 7)  # columns of the tables
LONGEST_BLOCK = 512  # elements: a tile has all of a block


class TileShape(NamedTuple):
    """How a codec's tile looks: its elements; the block that shares a scale (0: none); the packed bits (0: whole bytes)."""

    element: Format
    tile: int
    block: int
    packed: int

    @property
    def vectors(self) -> range:
        return range(self.tile // LANES)


@lru_cache(maxsize=1024)
def shape_of(codec: Codec) -> TileShape | None:
    """None where there is no kernel."""
    fmt = codec.format
    if isinstance(fmt, Adaptive):  # which has its own (adaptive_group.py)
        return None
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    block = fmt.size if isinstance(fmt, BlockFormat) else codec.scale.block
    if codec.keep < 1 or (isinstance(fmt, BlockFormat) and (codec.scale.block or fmt.scale.bits > 8)):
        return None
    if block % LANES or block > LONGEST_BLOCK:
        return None
    if isinstance(fmt, BlockFormat) and _block_program(codec) is None:  # only integers of 64 bits will do
        return None
    packed = element.bits % 8
    codes = group(packed)[0] if packed else 1
    return TileShape(element, lcm(LANES * codes, block or LANES), block, packed)


def _block_program(codec: Codec) -> BlockProgram | None:
    """What becomes of a block that is not finite does not matter: its part says so, or its own header, and it is NaN."""
    return block_program(codec.format, codec.rounding, nan="any") if isinstance(codec.format, BlockFormat) else None


def vectors_of_numbers(dtype: torch.dtype, tile: int) -> tuple[Stream, ...]:
    """The numbers of a tile, vector by vector."""
    return tuple(Stream(dtype, NUMBERS, tile, first, first, unit=dtype.itemsize) for first in range(0, tile, LANES))


def _codes(shape: TileShape) -> tuple[Stream, ...]:
    """Where a tile's codes lie: whole bytes of each vector, then the packed bits of each group."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(shape.element.bits // 8)
    found = []
    if whole is not None:
        found += [Stream(whole, PAYLOAD, shape.tile, LANES * v, LANES * v) for v in shape.vectors]
    if shape.packed:
        per_group, width = group(shape.packed)
        groups, column = shape.tile // (per_group * LANES), PAYLOAD if whole is None else HIGH
        found += [
            Stream(torch.int8, column, groups * width * LANES, (g * width + byte) * LANES, g * per_group * LANES, padded=True)
            for g in range(groups)
            for byte in range(width)
        ]
    return tuple(found)


def _of_blocks(shape: TileShape, column: int) -> tuple[Stream, ...]:
    blocks = shape.tile // shape.block
    return tuple(Stream(torch.int8, column, blocks, b, b * shape.block, of="tile") for b in range(blocks))


def _packed(codes: list[Tensor], bits: int) -> list[Tensor]:
    """Vectors of int32 codes as the bytes of their groups."""
    per_group, width = group(bits)
    own = [code & ((1 << bits) - 1) for code in codes]
    found = []
    for first in range(0, len(codes), per_group):
        found += _moved(own[first : first + per_group], width, placed_bits(bits))
    return [byte.to(torch.int8) for byte in found]


def _unpacked(stored: Sequence[Tensor], bits: int) -> list[Tensor]:
    """The inverse."""
    per_group, width = group(bits)
    own = [byte.to(torch.int32) & 0xFF for byte in stored]
    moves = [(vector, byte, -shift) for byte, vector, shift in placed_bits(bits)]
    found = []
    for first in range(0, len(stored), width):
        found += _moved(own[first : first + width], per_group, moves)
    return [code & ((1 << bits) - 1) for code in found]


def _moved(vectors: Sequence[Tensor], count: int, moves: Iterable[tuple[int, int, int]]) -> list[Tensor]:
    """`count` vectors, put together by moves: (to which, from which, shifted to the left by so many bits)."""
    found: dict[int, Tensor] = {}
    for target, source, shift in moves:
        piece = vectors[source] << shift if shift >= 0 else vectors[source] >> -shift
        found[target] = found[target] | piece if target in found else piece
    return [found[target] for target in range(count)]


def _magnitude(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32) & F32.magnitude


def _finite(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude < F32.infinity, magnitude, torch.zeros_like(magnitude))


def magnitudes(numbers: Sequence[Tensor], wanted: tuple[bool, bool]) -> list[Tensor]:
    """Of each vector, as bits: magnitudes; then finite ones, with zero for the others."""
    kinds = [kind for kind, wants in zip((_magnitude, lambda x: _finite(_magnitude(x))), wanted, strict=True) if wants]
    return [kind(number) for kind in kinds for number in numbers]


def _largest(vectors: Sequence[Tensor]) -> Tensor:
    """Lane by lane."""
    most = vectors[0]
    for more in vectors[1:]:
        most = torch.maximum(most, more)
    return most


def _largest_magnitude(vectors: Sequence[Tensor]) -> Tensor:
    """Lane by lane, as float32; NaN where there is one. (A GPU compares magnitudes of floats by one instruction.)"""
    if backend_of(vectors[0]).assembly:
        return _largest([number.abs() for number in vectors])
    return _largest(magnitudes(vectors, (True, False))).view(torch.float32)


class Encoder:
    """From vectors of float32 numbers to what is stored: the bytes of codes, then headers and scales.

    The header of `codec.sends_peaks` is stored if it is `known`.
    """

    def __init__(self, codec: Codec, shape: TileShape, known: bool = True) -> None:
        self._codec, self._shape = codec, shape
        self._local, self._whole = codec.measures
        self._peak = codec.sends_peaks and known
        self._first_key = self._local + self._whole + self._peak
        self._blocks = _block_program(codec)
        self._code = _Coder(shape.element, codec.rounding) if self._blocks is None else None
        self.numbers = self._first_key + (KEY_SIZE if codec.stochastic else 0)
        self.tables: tuple[Table, ...] = () if self._code is None else self._code.tables

    @property
    def streams(self) -> tuple[Stream, ...]:
        stores = [*_codes(self._shape)]
        if self._local or self._peak:
            stores.append(Stream(torch.int8, HEADER, of="part"))
        if self._whole:
            stores.append(Stream(torch.int32, TENSOR_SCALE, of="part"))
        if self._shape.block:
            stores += _of_blocks(self._shape, HEADER if self._blocks is None else SCALES)
        return tuple(stores)

    def __call__(self, x: list[Tensor], numbers: Tensor, tables: Any, unit: Tensor | None = None) -> list[Tensor]:
        """`unit` is by what the numbers were multiplied since their largest was found."""
        codec, extra = self._codec, []
        if self._local:
            byte = scaling.fitting_numbers(numbers[0].view(torch.float32), codec.format)
            factor = scaling.power_of_two(scaling.shifts_of(byte))
            x = [number * factor for number in x]
            unit = factor if unit is None else unit * factor
            extra.append(byte.to(torch.int8))
        elif self._peak:
            extra.append(numbers[int(self._whole)].to(torch.int8))
        if self._blocks is not None:
            largest = numbers[int(self._local)] if self._whole else None
            codes = len(_codes(self._shape))
            stored = _stored_blocks(self._blocks, self._shape, x, largest, unit, near_one=self._local)
            return [*stored[:codes], *extra, *stored[codes:]]
        direct = codec.rounding == "nearest" and four_bits.suits(self._shape.element, x[0])
        if self._shape.block:
            blocks = _blocks_of(self._shape, x, marks=True)
            factors, headers = _factors_of_blocks(codec, blocks)
            extra += headers
            if direct:
                return [*_four_bits(factors, blocks), *extra]
            x = [number * factor for factor, (_, mine) in zip(factors, blocks, strict=True) for number in mine]
        key: Any = [numbers[self._first_key + i] for i in range(KEY_SIZE)] if codec.stochastic else None
        assert self._code is not None
        if direct:
            return [*(four_bits.to_bytes(*pair) for pair in _pairs(x)), *extra]
        return [*_stored([self._code(number, key, tables) for number in x], self._shape), *extra]


def _stored(codes: list[Tensor], shape: TileShape) -> list[Tensor]:
    """Vectors of int32 codes as `_codes` has them."""
    if not shape.packed:
        return codes
    if shape.element.bits < 8:
        return _packed(codes, shape.packed)
    return [*((code & 0xFF).to(torch.int8) for code in codes), *_packed([code >> 8 for code in codes], shape.packed)]


class _Coder:
    """From a float32 number to its code; what is too large saturates."""

    def __init__(self, fmt: Format, rounding: str) -> None:
        self._fmt = fmt
        self._operation = None if fmt == FP32 else encode_operation(fmt, torch.float32, rounding, True, "any")
        self.tables: tuple[Table, ...] = () if self._operation is None else self._operation.tables
        self._whole = fmt.bits % 8 == 0

    def __call__(self, number: Tensor, key: Tensor | None, tables: Any) -> Tensor:
        bits = number.view(torch.int32)
        if self._operation is None:
            return bits
        code = self._operation(bits, tables, key)
        return code if self._whole else code.to(torch.int32)


def _blocks_of(shape: TileShape, vectors: Sequence[Tensor], marks: bool = False) -> "_Blocks":
    """The largest magnitude of each block (float32), and its vectors. `marks`: NaN, which a maximum of floats loses, counts as
    infinity."""
    step = shape.block // LANES
    found = []
    for first in range(0, len(vectors), step):
        mine = list(vectors[first : first + step])
        most = _largest_magnitude(mine)
        if marks:
            most = torch.where(most.view(torch.int32) < F32.infinity, most, torch.full_like(most, float("inf")))
        found.append((most.amax(-1, keepdim=True), mine))
    return found


def _factors_of_blocks(codec: Codec, blocks: "_Blocks") -> tuple[list[Tensor], list[Tensor]]:
    """By what the numbers of each block are multiplied, and its header byte. (A block that is not finite says so: 255.)"""
    factors, headers = [], []
    for most, _ in blocks:
        byte = scaling.fitting_numbers(most, codec.format)
        factors.append(scaling.power_of_two(scaling.shifts_of(byte)))
        headers.append(byte.to(torch.int8))
    return factors, headers


def _stored_blocks(
    program: BlockProgram, shape: TileShape, x: list[Tensor], largest: Tensor | None, factor: Tensor | None, near_one: bool
) -> list[Tensor]:
    """What is stored of a block format: codes; the part's scale, where there is one; the blocks'. `near_one`: is the part's?"""
    tensor_scale = None
    if largest is not None:
        most = largest.view(torch.float32)
        tensor_scale = program.tensor_scale(most if factor is None else most * factor)
    blocks = _blocks_of(shape, x)
    if program.fmt.power_of_two_scale and four_bits.suits(shape.element, x[0]):
        scales = [program.scale(most) for most, _ in blocks]
        stored = _four_bits([program.inverse(scale) for scale in scales], blocks)
    elif tensor_scale is not None and near_one and program.suits_about and four_bits.suits(shape.element, x[0]):
        stored, scales = _four_bits_about(program, shape, blocks, tensor_scale)
    else:
        stored, scales = _exact_blocks(program, shape, blocks, tensor_scale, near_one)
    whole = [] if tensor_scale is None else [tensor_scale.view(torch.int32)]
    return [*stored, *whole, *(scale.to(torch.int8) for scale in scales)]


_Blocks = list[tuple[Tensor, list[Tensor]]]  # the largest magnitude of each, and its vectors
_Stored = tuple[list[Tensor], list[Tensor]]  # codes as `_codes` has them, and the codes of the blocks' scales


def _exact_blocks(
    program: BlockProgram, shape: TileShape, blocks: _Blocks, tensor_scale: Tensor | None, near_one: bool
) -> _Stored:
    """Few elements are found by steps on a CPU. (On a GPU every thread would compute steps for few elements.)"""
    fmt, codes, scales = program.fmt, [], []
    by_steps = backend_of(blocks[0][0]).vectors and block_steps.suits(fmt) and (near_one or not fmt.tensor_scale)
    for most, x in blocks:
        scale = program.scale(most, tensor_scale)
        if by_steps:
            whole = [] if tensor_scale is None else [tensor_scale]
            steps = block_steps.steps(fmt, program.scale_value(scale), whole, torch.float32)
            codes += [block_steps.code(program, number, steps) for number in x]
        else:
            inverse = program.inverse(scale, tensor_scale)
            codes += [program.code(number, inverse) for number in x]
        scales.append(scale)
    if not shape.packed:
        codes = [code.to(code_storage(shape.element)) for code in codes]
    return _stored(codes, shape), scales


def _four_bits(factors: Sequence[Tensor], blocks: _Blocks) -> list[Tensor]:
    """Codes of e2m1fn with scales that are powers of two, on CUDA."""
    return [four_bits.to_bytes(*pair) for pair in _pairs_with(factors, [mine for _, mine in blocks])]


def _four_bits_about(program: BlockProgram, shape: TileShape, blocks: _Blocks, tensor_scale: Tensor) -> _Stored:
    """e2m1fn with other scales, on CUDA: quotients with some 20 bits; where that leaves a code in doubt, exact ones."""
    about = [program.scale_about(most, tensor_scale) for most, _ in blocks]
    factors = [program.inverse_about(scale, tensor_scale) for scale, _ in about]
    pairs = _pairs_with(factors, [mine for _, mine in blocks])
    found = [*(four_bits.to_bytes_about(*pair) for pair in pairs), *about]
    stored, scales = _exact_blocks(program, shape, blocks, tensor_scale, near_one=True)
    chosen = [
        shortcut(lambda code=code: code, lambda known=known: known, lambda unsure=unsure: unsure, code, on_gpu=True)
        for (code, unsure), known in zip(found, [*stored, *scales], strict=True)
    ]
    return chosen[: len(stored)], chosen[len(stored) :]


def _pairs(vectors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def _pairs_with(of_blocks: Sequence[Tensor], blocks: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Two vectors after the other, and what their blocks have of each."""
    vectors = [vector for block in blocks for vector in block]
    theirs = [number for number, block in zip(of_blocks, blocks, strict=True) for _ in block]
    return [(*pair, *more) for pair, more in zip(_pairs(vectors), _pairs(theirs), strict=True)]


class Decoder:
    """From what is stored to vectors of float32 numbers."""

    def __init__(self, codec: Codec, shape: TileShape) -> None:
        self._shape = shape
        self._local, self._whole = codec.measures
        self._blocks = _block_program(codec)
        self._value = _Values(shape.element) if self._blocks is None else None
        self.tables: tuple[Table, ...] = () if self._value is None else self._value.tables

    @property
    def streams(self) -> tuple[Stream, ...]:
        loads = [*_codes(self._shape)]
        if self._local:
            loads.append(Stream(torch.int8, HEADER, of="part"))
        if self._whole:
            loads.append(Stream(torch.float32, TENSOR_SCALE, of="part"))
        if self._shape.block:
            loads += _of_blocks(self._shape, HEADER if self._blocks is None else SCALES)
        return tuple(loads)

    def __call__(self, read: Sequence[Tensor], tables: Any) -> list[Tensor]:
        shape = self._shape
        codes = len(_codes(shape))
        rest = list(read[codes:])
        unit = scaling.units_of(rest.pop(0).to(torch.int32) & 0xFF) if self._local else None
        tensor_scale = rest.pop(0) if self._whole else None
        direct = four_bits.suits(shape.element, read[0])
        if direct:
            vectors = [number for byte in read[:codes] for number in four_bits.to_numbers(byte)]
        else:
            vectors = _loaded(read[:codes], shape)
        if self._blocks is not None:
            scales = [scale.to(torch.int32) & 0xFF for scale in rest]
            found = self._numbers_of_blocks(vectors, scales, tensor_scale, direct)
        else:
            assert self._value is not None
            found = vectors if direct else [self._value(code, tables) for code in vectors]
            if shape.block:
                step = shape.block // LANES
                units = [scaling.units_of(byte.to(torch.int32) & 0xFF) for byte in rest]
                found = [number * units[v // step] for v, number in enumerate(found)]
        return found if unit is None else [number * unit for number in found]

    def _numbers_of_blocks(
        self, vectors: list[Tensor], scales: list[Tensor], tensor_scale: Tensor | None, direct: bool
    ) -> list[Tensor]:
        """`vectors` are codes, or (`direct`) the elements that they stand for."""
        program, step = self._blocks, self._shape.block // LANES
        assert program is not None
        if tensor_scale is not None and not program.exact_in_float32:
            units, tensor_scale = [program.unit(scale, tensor_scale) for scale in scales], None
        else:
            units = [program.scale_value(scale) if tensor_scale is not None else program.unit(scale) for scale in scales]
        found = []
        for v, vector in enumerate(vectors):
            if direct:
                found.append(program.product(vector, units[v // step], tensor_scale))
            else:
                found.append(program.value(vector.to(torch.int32), units[v // step], tensor_scale=tensor_scale))
        return found


def _loaded(stored: Sequence[Tensor], shape: TileShape) -> list[Tensor]:
    if not shape.packed:
        return list(stored)
    if shape.element.bits < 8:
        return _unpacked(stored, shape.packed)
    vectors = len(shape.vectors)
    high = _unpacked(stored[vectors:], shape.packed)
    return [(low.to(torch.int32) & 0xFF) | (more << 8) for low, more in zip(stored[:vectors], high, strict=True)]


class _Values:
    """From a code to the float32 number that it stands for."""

    def __init__(self, fmt: Format) -> None:
        self._operation = None if fmt == FP32 else decode_operation(fmt, torch.float32, finite=True)
        self._storage = code_storage(fmt)
        self.tables: tuple[Table, ...] = () if self._operation is None else self._operation.tables

    def __call__(self, code: Tensor, tables: Any) -> Tensor:
        if self._operation is None:
            return code.view(torch.float32)
        return self._operation(code.to(self._storage), tables).view(torch.float32)
