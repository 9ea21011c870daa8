"""The work on a bucket's numbers and messages as a few kernels, each over all parts at once (tensor/lists/parts.py):

- measure: the largest magnitude of each part;
- encode: numbers times their layer's factor, scaled, rounded, packed; headers, or what they follow from;
- decode: what one message says, or the sum of what several say, in the order of ranks; times a factor, divided;
- fold: messages to the message of their sum; before it, where the codec must know the largest magnitude of all of the sum,
  measure_sum, which decodes them too;
- round: numbers as sending and receiving would make them, in place.

With top-k, this is done to the kept numbers (top_k_group.py).

A codec that has no kernel (blocks that are no multiple of 16) is worked on part by part, by the codec's own operations,
as is everything where no kernel can be compiled. The bytes are the same.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.core import quantize_operation
from lowp.tensor.lists.parts import COUNT, LANES, PartsFunction, PartTable
from lowp.tensor.noise import KEY_SIZE
from lowp.wire.codec import Codec
from lowp.wire.tiles import NUMBERS, Decoder, Encoder, magnitudes, shape_of, vectors_of_numbers

_PLAIN_TILE = 4 * LANES  # where no codec asks for another


@lru_cache(maxsize=64)
def measure_function(dtype: torch.dtype, wanted: tuple[bool, bool]) -> PartsFunction:
    """The largest magnitude of each part (bits of float32), and (or) the largest finite one."""

    def each(*arguments: Any) -> list[Tensor]:
        *numbers, _, _, _ = arguments
        return magnitudes([x.to(torch.float32) for x in numbers], wanted)

    return PartsFunction(each, vectors_of_numbers(dtype, _PLAIN_TILE), (), _PLAIN_TILE, maxima=sum(wanted))


def measure(numbers: Tensor, table: PartTable, wanted: tuple[bool, bool], out: Tensor | None = None) -> Tensor:
    """What `measure_function` finds in the parts of a table: int32 [wanted, parts]; in `out`, if given: zeros before."""
    maxima = torch.zeros(sum(wanted), table.parts, dtype=torch.int32, device=numbers.device) if out is None else out
    kernel = measure_function(numbers.dtype, wanted).kernel(table)
    if kernel is not None:
        kernel(numbers, None, table, maxima=maxima)
        return maxima
    for part, row in enumerate(table.rows):
        own = numbers[row[NUMBERS] : row[NUMBERS] + row[COUNT]].to(torch.float32)
        if own.numel():
            maxima.view(-1, table.parts)[: sum(wanted), part] = torch.stack([each.amax() for each in magnitudes([own], wanted)])
    return maxima


@lru_cache(maxsize=1024)
def encode_function(codec: Codec, dtype: torch.dtype, known: bool = True) -> PartsFunction | None:
    """Numbers of a part, int32: what `codec.measures` asks for, or the header byte of `sends_peaks`; then the noise's key.

    Of its layer: by which factor its numbers are multiplied first. Where that header byte is not `known`, it is not written,
    and the largest magnitude is found: the byte follows from it.
    """
    shape = shape_of(codec)
    if shape is None:
        return None
    encoder, finds = Encoder(codec, shape, known), codec.sends_peaks and not known

    def each(*arguments: Any) -> list[Tensor]:
        *sources, numbers, of_layer, tables = arguments
        own = [source.to(torch.float32) for source in sources]
        stored = encoder([number * of_layer[0] for number in own], numbers, tables, of_layer[0])
        return [*stored, *magnitudes(own, (finds, False))]

    loads = vectors_of_numbers(dtype, shape.tile)
    return PartsFunction(each, loads, encoder.streams, shape.tile, encoder.numbers, 1, encoder.tables, int(finds))


def _addends(decoder: Decoder, first: int = 0) -> Callable[..., list[Tensor]]:
    """`each` of the functions that add messages up: what one of them says. The decoder's tables begin at `first`."""

    def each(*arguments: Any) -> list[Tensor]:
        *read, _, _, tables = arguments
        return decoder(read, tables[first:])

    return each


@lru_cache(maxsize=1024)
def fold_function(codec: Codec) -> PartsFunction | None:
    """Messages to one message: decode, add in their order, in float32, encode the sum. Numbers are the encoder's."""
    shape = shape_of(codec)
    if shape is None:
        return None
    encoder, decoder = Encoder(codec, shape), Decoder(codec, shape)

    def finish(*arguments: Any) -> list[Tensor]:
        *sums, numbers, _, tables = arguments
        return encoder(sums, numbers, tables[: len(encoder.tables)])

    tables = (*encoder.tables, *decoder.tables)
    each = _addends(decoder, len(encoder.tables))
    return PartsFunction(each, decoder.streams, encoder.streams, shape.tile, encoder.numbers, 0, tables, finish=finish)


@lru_cache(maxsize=256)
def measure_sum_function(codec: Codec) -> PartsFunction | None:
    """What `codec.measures` asks of the sum of some messages. The sum is not kept."""
    shape = shape_of(codec)
    if shape is None:
        return None
    decoder = Decoder(codec, shape)

    def finish(*arguments: Any) -> list[Tensor]:
        *sums, _, _, _ = arguments
        return magnitudes(sums, codec.measures)

    each, kinds = _addends(decoder), sum(codec.measures)
    return PartsFunction(each, decoder.streams, (), shape.tile, tables=decoder.tables, maxima=kinds, finish=finish)


@lru_cache(maxsize=1)
def largest_byte_function() -> PartsFunction:
    """The largest byte of each part: of a table whose parts are bytes."""

    def each(*arguments: Any) -> list[Tensor]:
        *read, _, _, _ = arguments
        return [byte.to(torch.int32) & 0xFF for byte in read]

    return PartsFunction(each, vectors_of_numbers(torch.int8, _PLAIN_TILE), (), _PLAIN_TILE, maxima=1)


@lru_cache(maxsize=1024)
def decode_function(
    codec: Codec, dtype: torch.dtype, wanted: tuple[bool, bool] = (False, False), divides: bool = False
) -> PartsFunction | None:
    """Sums of messages in float32, times the first number of the layer, divided (`divides`) by the second; in `dtype`.

    `wanted` are maxima of these sums, as for `measure_function`.
    """
    shape = shape_of(codec)
    if shape is None:
        return None
    decoder = Decoder(codec, shape)

    def finish(*arguments: Any) -> list[Tensor]:
        *sums, _, of_layer, _ = arguments
        found = [number * of_layer[0] for number in sums]
        if divides:
            found = [number / of_layer[1] for number in found]
        return [*(number.to(dtype) for number in found), *magnitudes(found, wanted)]

    return PartsFunction(
        _addends(decoder),
        decoder.streams,
        vectors_of_numbers(dtype, shape.tile),
        shape.tile,
        0,
        1 + divides,
        decoder.tables,
        sum(wanted),
        finish,
    )


@lru_cache(maxsize=256)
def round_function(codec: Codec) -> PartsFunction:
    """Float32 numbers of elementwise codecs, rounded as `codec.round_` rounds them; `numbers` are the noise's key."""
    assert codec.elementwise
    fmt: Any = codec.format
    operation = quantize_operation(fmt, torch.float32, codec.rounding, True, torch.float32)

    def each(*arguments: Any) -> list[Tensor]:
        *read, numbers, _, tables = arguments
        key = numbers if codec.stochastic else None
        return [operation(x, tables, key) for x in read]

    streams = vectors_of_numbers(torch.int32, _PLAIN_TILE)
    return PartsFunction(each, streams, streams, _PLAIN_TILE, KEY_SIZE if codec.stochastic else 0, tables=operation.tables)


@lru_cache(maxsize=16)
def scale_function(dtype: torch.dtype, divides: bool) -> PartsFunction:
    """Numbers in float32, times the first number of their layer, divided (`divides`) by the second."""

    def each(*arguments: Any) -> list[Tensor]:
        *read, _, of_layer, _ = arguments
        found = [x.to(torch.float32) * of_layer[0] for x in read]
        return [number / of_layer[1] for number in found] if divides else found

    loads, stores = (vectors_of_numbers(kind, _PLAIN_TILE) for kind in (dtype, torch.float32))
    return PartsFunction(each, loads, stores, _PLAIN_TILE, 0, 1 + divides)
