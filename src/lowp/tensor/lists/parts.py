"""One function over all parts of a bucket in one call: `PartsFunction` is the function, `PartTable` says where the parts lie.

A part is a stretch of numbers (say, what one layer has in a message) and the bytes that belong to it. It is worked on in tiles.
A tile is a few vectors of 16 numbers (`LANES`). The function is written for one tile, in torch operations on its vectors. It
runs as

- one C++ loop over all tiles of all parts on a CPU (parts_cpp.py),
- one Triton launch over them on CUDA (parts_triton.py),
- plain operations, part by part, where nothing can be compiled: the caller has these. The bits are the same.

Two forms:

1. `each` alone: loads -> stores, e.g. numbers -> bytes of a message.
2. `each` and `finish`, for `messages` messages of one layout: `each` turns a message's loads into addends; these are added in
   the order of the messages, in float32; `finish` turns the sums into stores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lowp.tensor import kernels
from lowp.tensor.lists.tracing import Element, Program, Statement, Value, trace
from lowp.tensor.table import Table

LANES = 16
COUNT, LAYER = 0, 1  # the first columns of a table: how many numbers a part has, and of which layer it is
CPU_ITEM = 1 << 13  # elements that a thread takes at once
CUDA_ITEM = 1 << 11  # elements of a program


@dataclass(frozen=True)
class Stream:
    """A vector of a tile: where its 16 numbers (or the one number that its tile, or its part, has) lie in an array.

    The address is the array's + `unit` bytes * the part's offset (column `column` of the table)
    + itemsize * (tile * `stride` + `place` + lane). `first` is the element of the tile that lane 0 stands for. What stands for
    elements behind the part's end is not read or written; of a `padded` stream, all 16 are there where the first is.
    """

    dtype: torch.dtype
    column: int
    stride: int = 0
    place: int = 0
    first: int = 0
    unit: int = 1
    of: str = "lane"  # or "tile" or "part"
    padded: bool = False


@dataclass(frozen=True, eq=False)
class PartsFunction:
    """`each(*loads, numbers, of_layer, tables)` gives the stores and then the maxima; or the addends, which `finish` takes.

    `numbers` are int32, `of_layer` float32 of the part's layer. `finish(*sums, numbers, of_layer, tables)` gives the stores and
    then the maxima (int32, not negative): of each, a value for every vector, one maximum's after the other's. What is loaded
    behind a part's end, and sums there, count as zeros.
    """

    each: Callable[..., Sequence[Tensor]]
    loads: tuple[Stream, ...]
    stores: tuple[Stream, ...]
    tile: int  # elements
    numbers: int = 0
    of_layer: int = 0
    tables: tuple[Table, ...] = ()
    maxima: int = 0
    finish: Callable[..., Sequence[Tensor]] | None = None

    def trace(self, device: torch.device) -> tuple[Program, Program | None, list[Tensor]]:
        tables = [table.tensor(device) for table in self.tables]
        elements = [Element(load.dtype, of_block=load.of != "lane") for load in self.loads]
        each = trace(self.each, elements, self.numbers, self.of_layer, tables, device)
        if self.finish is None:
            return each, None, tables
        sums = [Element(torch.float32) for _ in each.results]
        finish = trace(self.finish, sums, self.numbers, self.of_layer, tables, device)
        return renamed(each, "a"), renamed(finish, "b"), tables

    def kernel(self, table: "PartTable") -> "PartsKernel | None":
        """None where plain operations should serve: on a CPU, few elements so far (elsewhere each is a launch); no compiler."""
        count = table.elements if table.device.type == "cpu" else kernels.SMALL
        return kernels.get_or_build(self, table.device, count, _build)


def renamed(program: Program, prefix: str) -> Program:
    """The same with other names, so that two programs can stand in one text. (Numbers keep theirs: they are the same.)"""

    def new(value: Any) -> Any:
        shared = isinstance(value, Value) and value.name[0] in "ns"
        return Value(prefix + value.name, value.dtype) if isinstance(value, Value) and not shared else value

    statements = tuple(
        Statement(s.operation, new(s.result), tuple(new(a) for a in s.arguments), s.operand) for s in program.statements
    )
    elements, results = (tuple(new(v) for v in values) for values in (program.elements, program.results))
    return Program(elements, program.numbers, program.scalars, statements, results)


class PartsKernel(Protocol):
    """What a backend builds. Arrays: `source` is read, `target` written; both are addressed through the table."""

    def __call__(
        self,
        source: Tensor,
        target: Tensor | None,
        table: "PartTable",
        numbers: Tensor | None = None,
        of_layer: Tensor | None = None,
        maxima: Tensor | None = None,
        messages: int = 1,
        message_stride: int = 0,
    ) -> None:
        """`numbers`: int32 [numbers, parts]. `of_layer`: float32 [of_layer, layers]. `maxima`: int32 [maxima, parts], zeros
        before. `message_stride`: bytes from one message in `source` to the next."""


def _build(what: PartsFunction, device: torch.device) -> PartsKernel:
    if device.type == "cpu":
        from lowp.tensor.lists.parts_cpp import CppPartsKernel

        return CppPartsKernel(what)
    from lowp.tensor.lists.parts_triton import TritonPartsKernel

    return TritonPartsKernel(what, device)


class PartTable:
    """Where the parts of some messages lie: int64 [columns, parts]. Work items of a tile size are made once."""

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self.rows = [tuple(row) for row in rows]
        self.parts = len(self.rows)
        self.elements = sum(row[COUNT] for row in self.rows)
        self._items: dict[tuple[int, int], Tensor] = {}
        self._alignments: dict[int, int] = {}

    @cached_property
    def columns(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64).t().contiguous().to(self.device)

    def alignment(self, column: int) -> int:
        """The largest power of two, up to 16, that divides all offsets in a column."""
        if column not in self._alignments:
            offsets = 16
            for row in self.rows:
                offsets |= row[column]
            self._alignments[column] = offsets & -offsets
        return self._alignments[column]

    def items(self, tile: int, tiles: int) -> Tensor:
        """(part, first tile) of stretches of `tiles` tiles: int32 [items, 2]."""
        if (tile, tiles) not in self._items:
            found = [(part, first) for part, row in enumerate(self.rows) for first in range(0, -(-row[COUNT] // tile), tiles)]
            self._items[tile, tiles] = torch.tensor(found, dtype=torch.int32).reshape(-1, 2).to(self.device)
        return self._items[tile, tiles]

    def records(self, tile: int, tiles: int) -> Tensor:
        """The same with the part's columns beside each: int64 [2 + columns, items]. A GPU finds an address by one read then."""
        if (tile, -tiles) not in self._items:
            items = self.items(tile, tiles).to(torch.int64).cpu()
            columns = torch.tensor(self.rows, dtype=torch.int64).t()[:, items[:, 0]]
            self._items[tile, -tiles] = torch.cat([items.t(), columns]).contiguous().to(self.device)
        return self._items[tile, -tiles]
