"""One elementwise function over many tensors in one call: `ListFunction` is the function, `Lists` what it is applied to.

A step of an optimizer touches hundreds of tensors, each with a few numbers of its own (a scale, a key for its noise). The
function is written once, in torch operations on one tensor; it runs as

- one C++ loop over all tensors on a CPU (cpp.py),
- one Triton launch over all of them on CUDA (triton.py),
- plain operations, tensor by tensor, where nothing can be compiled. The bits are the same.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowp.compat import dispatch_mode_count
from lowp.tensor import kernels
from lowp.tensor.lists import cpp, triton
from lowp.tensor.lists.tracing import Element, in_words, trace
from lowp.tensor.memory import flat_memory
from lowp.tensor.table import Table

_CPU_CHUNK, _CPU_CHUNKS = 1 << 16, 32  # elements of a chunk, at most; chunks, at least, so that threads end together
_CPU_BLOCKS = 1 << 14  # elements of a chunk of blocks
_CPU_OVERHEAD = 1 << 12  # elements that a tensor counts as beside its own: plain operations take as long for few as for so many
_WORTH_THREADS = 1 << 16  # elements
# Measured on an H200 (docs/LOG.md). A program of several steps looks up once what a tensor has of its own.
_CUDA_CHUNK, _CUDA_STEPS = 1 << 9, 16  # elements of a step; steps of a program, at most
_CUDA_EACH = 128  # elements of a warp: 4 a thread
_CUDA_BLOCKS, _CUDA_BLOCK_STEPS = 1 << 10, 4  # the same for steps of several blocks
_CUDA_BLOCK_EACH = 256  # so that a warp has a whole block, and finds its largest number by itself
_CUDA_BLOCK_REGISTERS = 128  # of a thread, at most
_CUDA_REDUCED_REGISTERS = 40  # where little is computed: 6 programs at once on each processor
_CUDA_REDUCED = 1 << 13  # where only reductions come out: fewer of them wait for each other at the end
_CUDA_FEW = 8  # blocks that would take less than this part of all lanes are worked on with wider ones
_CUDA_PROGRAMS = 1 << 10  # at least, before one of them takes more steps
LIMIT = 0x7F800000  # float32's infinity, as bits: nothing happens if what `skip` holds is not below it


@dataclass(frozen=True)
class Chunks:
    """The chunks of one launch: the tensor that each is of, its first element; how many elements a chunk of each tensor has.

    On CUDA a chunk has up to `steps` times `rows` stretches of up to `size` elements.
    """

    tensors: Any
    starts: Any
    sizes: Any
    size: int = 0
    rows: int = 1
    steps: int = 1


class Lists:
    """The arguments: a row of dense tensors, laid out alike, for each tensor of the list, one for each element argument.

    A function may take fewer arguments than a row has tensors: the first ones.
    `widths` are the lengths of the tensors' blocks (which divide them); only functions that ask something of blocks need them.
    `work` is what a call stands for (`work_of`), if not for these: a kernel is built when there is enough of it. Arrays are
    numpy's on a CPU and tensors on a device; they are made once, and stay where they are.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor]], widths: Sequence[int] | None = None, work: int | None = None) -> None:
        self._rows: list[list[Any]] = [list(row) for row in rows]
        self._given: dict[int, Sequence[Any]] = {}  # by column, where other tensors were given
        self.tensors = len(self._rows)
        self.device = self._rows[0][0].device
        self.lengths = [row[0].numel() for row in self._rows]
        self.elements = sum(self.lengths)
        self.work = work_of(self.lengths) if work is None else work
        self.widths = list(widths) if widths is not None else [max(length, 1) for length in self.lengths]
        self.columns = len(self._rows[0])
        self._pointers = np.array([[x.data_ptr() for x in row] for row in self._rows], dtype=np.int64)
        self.arrays = tuple(self._put(x) for x in (self._pointers, np.array(self.lengths), np.array(self.widths)))
        self.aligned = _are_aligned(self._pointers)
        self._replaced: dict[int, list[int]] = {}
        self._chunks: dict[tuple[bool, bool], list[Chunks]] = {}
        self._room: dict[int, Tensor] = {}
        self.prepared: dict[Any, Any] = {}  # by kernel: what it has found out about these lists

    def _put(self, array: np.ndarray) -> Any:
        if self.device.type == "cpu":
            return array
        return torch.from_numpy(array.copy()).to(self.device, non_blocking=True)  # small: the driver takes it over at once

    def replace(self, column: int, tensors: Sequence[Tensor], pointers: list[int]) -> None:
        """Other tensors for one argument: gradients are new ones in every step, mostly at the same addresses as before."""
        self._own(column, tensors)
        if pointers != self._replaced.get(column):
            self._replaced[column] = pointers
            self._pointers[:, column] = pointers
            self.aligned = _are_aligned(self._pointers)
            if self.device.type != "cpu":
                self.arrays[0].copy_(torch.from_numpy(self._pointers.copy()), non_blocking=True)

    def release(self, column: int) -> None:
        """Keep no tensor of this argument alive. It must be replaced before the next call."""
        self._own(column, (None,) * self.tensors)

    def _own(self, column: int, tensors: Sequence[Any]) -> None:
        if column not in self._given:  # what was there at first is not kept alive
            for row in self._rows:
                row[column] = None
        self._given[column] = tensors

    @property
    def rows(self) -> list[list[Any]]:
        """The tensors, for who does not use their addresses."""
        return [
            [self._given.get(c, row)[i if c in self._given else c] for c in range(len(row))] for i, row in enumerate(self._rows)
        ]

    def room(self, reductions: int) -> Tensor:
        """For reductions, int64 [reductions, tensors]; the next call with as many uses it again."""
        if reductions not in self._room:
            self._room[reductions] = torch.zeros((reductions, self.tensors), dtype=torch.int64, device=self.device)
        return self._room[reductions]

    def chunks(self, of_blocks: bool, writes: bool = True) -> list[Chunks]:
        """One launch or, for blocks on CUDA, one for each power of two that many of their widths fit into."""
        if (of_blocks, writes) not in self._chunks:
            self._chunks[of_blocks, writes] = self._cut(of_blocks, writes)
        return self._chunks[of_blocks, writes]

    def _cut(self, of_blocks: bool, writes: bool) -> list[Chunks]:
        if self.device.type == "cpu":
            size = max(1 << 12, min(_CPU_CHUNK, self.elements // _CPU_CHUNKS // 64 * 64))
            steps = [width * max(1, _CPU_BLOCKS // width) if of_blocks else size for width in self.widths]
            return [self._starts(range(self.tensors), steps)]
        return self.cut_for_cuda(of_blocks, writes)

    def cut_for_cuda(self, of_blocks: bool, writes: bool) -> list[Chunks]:
        everyone = range(self.tensors)
        backwards = writes  # it begins where what measured has ended: that is still in the cache
        size, most = (_CUDA_BLOCKS, _CUDA_BLOCK_STEPS) if of_blocks else (_CUDA_CHUNK, _CUDA_STEPS)

        def steps_of(elements: int) -> int:
            return max(1, min(most, elements // (size * _CUDA_PROGRAMS))) if writes else 1

        if not of_blocks:
            steps, size = steps_of(self.elements), size if writes else _CUDA_REDUCED
            size = min(size, max(32, 1 << (max(self.lengths) - 1).bit_length()))  # a table of a few tensors is short
            return [self._starts(everyone, [steps * size] * self.tensors, size, 1, steps, backwards)]
        sizes = self._sizes_of_blocks()
        found = []
        for own in sorted(set(sizes)):
            rows = max(1, size // own)
            members = [i for i in everyone if sizes[i] == own]
            steps = steps_of(sum(self.lengths[i] for i in members))
            found.append(self._starts(members, [steps * rows * width for width in self.widths], own, rows, steps, backwards))
        return found

    def _sizes_of_blocks(self) -> list[int]:
        """For each tensor, the power of two that its blocks fit into; or the largest of all where so few are narrower that a
        launch of their own would take longer than lanes with nothing to do."""
        sizes = [max(32, 1 << (width - 1).bit_length()) for width in self.widths]
        lanes: dict[int, int] = {}  # by size: how many it would take
        for size, length, width in zip(sizes, self.lengths, self.widths, strict=True):
            lanes[size] = lanes.get(size, 0) + length // width * max(sizes)
        return [max(sizes) if lanes[size] <= self.elements // _CUDA_FEW else size for size in sizes]

    def _starts(
        self, members: Sequence[int], each: Sequence[int], size: int = 0, rows: int = 1, steps: int = 1, backwards: bool = False
    ) -> Chunks:
        starts = [np.arange(0, self.lengths[i], each[i], dtype=np.int64) for i in members]
        tensors = [np.full(len(own), i, dtype=np.int32) for i, own in zip(members, starts, strict=True)]
        order = slice(None, None, -1 if backwards else 1)
        cut = np.concatenate(tensors)[order], np.concatenate(starts)[order], np.array(each, dtype=np.int64)
        there = [self._put(part) for part in cut]
        return Chunks(there[0], there[1], there[2], size, rows, steps)


def work_of(lengths: Sequence[int]) -> int:
    """How much there is to do for tensors of these lengths, in elements."""
    return sum(lengths) + _CPU_OVERHEAD * len(lengths)


def _are_aligned(pointers: np.ndarray) -> bool:
    return not (pointers % 16).any()


@dataclass(frozen=True, eq=False)
class ListFunction:
    """`function(*elements, numbers, scalars, tables)` gives what is written to the elements `writes`, then what is reduced.

    Elements come as stored integers of shape [1, n], or [blocks, width] (and [blocks, 1] for those with one number a block).
    `numbers` are a tensor's own (int32), `scalars` the call's (float32). Of the rest of the results the "max" (int32, not
    negative) or the "sum" (int64) over each tensor is returned.
    """

    function: Callable[..., Sequence[Tensor]]
    elements: tuple[Element, ...]
    writes: tuple[int, ...]
    numbers: int
    scalars: int
    tables: tuple[Table, ...] = ()
    reductions: tuple[str, ...] = ()
    words: int = 0  # of the first numbers, that have 16 bits and no sign: the keys of noise
    aside: str = ""  # what else is written: "most" of the first reduction over all tensors, or what "skip" holds

    @property
    def of_blocks(self) -> bool:
        return any(element.of_block for element in self.elements)

    def __call__(
        self,
        lists: Lists,
        numbers: Tensor,
        scalars: Sequence[float],
        skip: Tensor | None = None,
        into: Tensor | None = None,
        aside: Tensor | None = None,
        clear: bool = True,
    ) -> Tensor:
        """Apply to all. `numbers` is [numbers, tensors]. `skip` is one integer; if it is not below LIMIT, nothing happens.

        Returns the reductions, int64 [reductions, tensors]: `into`, or memory that the next call for these lists may use again.
        Without `clear` they are added to what is there. `aside` is one integer (int64): of "most" the larger one of what is
        there and what is found; what `skip` holds is written there in any case, and may be written to pinned memory.
        """
        reduced = lists.room(len(self.reductions)) if into is None else into
        if self.reductions and clear:
            reduced.zero_()
        if lists.elements == 0:
            return reduced
        # At once where plain operations would be a hundred launches, or where an audit would see their temporaries.
        at_once = lists.device.type == "cuda" or dispatch_mode_count() > 0
        kernel = kernels.get_or_build(self, lists.device, kernels.SMALL if at_once else lists.work, _build)
        if isinstance(kernel, _TritonListKernel):
            kernel(lists, numbers, scalars, skip, reduced, aside)
            return reduced
        (kernel or self._plain)(lists, numbers, scalars, skip, reduced)
        if aside is not None and self.aside == "most":
            torch.maximum(aside, reduced[0].amax(), out=aside)
        elif aside is not None and skip is not None:
            aside.copy_(skip, non_blocking=True)
        return reduced

    def shaped(self, row: Sequence[Tensor], width: int) -> list[Tensor]:
        """One tensor's arguments as the function takes them."""
        shape = (-1, width) if self.of_blocks else (1, -1)
        stored = (flat_memory(x.detach(), e.dtype) for x, e in zip(row, self.elements, strict=False))
        return [x.view((-1, 1) if e.of_block else shape) for x, e in zip(stored, self.elements, strict=True)]

    def _plain(self, lists: Lists, numbers: Tensor, scalars: Sequence[float], skip: Tensor | None, reduced: Tensor) -> None:
        shared = torch.tensor(scalars, dtype=torch.float32).to(lists.device, non_blocking=True)
        tables = tables_on(self, lists.device)
        for i, (row, width) in enumerate(zip(lists.rows, lists.widths, strict=True)):
            if row[0].numel() == 0:
                continue
            shaped = self.shaped(row, width)
            results = self.function(*shaped, numbers[:, i], shared, tables)
            for place, result in zip(self.writes, results, strict=False):
                result = result.expand_as(shaped[place]).to(shaped[place].dtype)
                shaped[place].copy_(result if skip is None else torch.where(skip.view(()) < LIMIT, result, shaped[place]))
            for number, (kind, result) in enumerate(zip(self.reductions, results[len(self.writes) :], strict=True)):
                if kind == "max":
                    reduced[number, i].clamp_(min=result.to(torch.int64).amax())
                else:
                    reduced[number, i] += result.sum(dtype=torch.int64)


def plain_because(device: torch.device) -> str | None:
    """Why functions of lists will run as plain operations on this device; None where kernels can be compiled."""
    if kernels.kernel_info()["policy"] == "never":
        return "kernels are switched off (LOWP_KERNELS=never)"
    if device.type == "cpu":
        try:
            cpp.compiler()
        except FileNotFoundError as error:
            return str(error)
    elif importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@lru_cache(maxsize=256)
def tables_on(what: ListFunction, device: torch.device) -> tuple[Tensor, ...]:
    """A function's tables as tensors, kept for the next call."""
    return tuple(table.tensor(device) for table in what.tables)


def _build(what: ListFunction, device: torch.device) -> Callable[..., None]:
    tables = list(tables_on(what, device))
    program = trace(what.function, what.elements, what.numbers, what.scalars, tables, device)
    for place, result in zip(what.writes, program.results, strict=False):
        if result.dtype != what.elements[place].dtype:
            raise TypeError(f"result {place} is {result.dtype}, and what it is written to is {what.elements[place].dtype}")
    return (_CppListKernel if device.type == "cpu" else _TritonListKernel)(what, program, tables)


class _CppListKernel:
    def __init__(self, what: ListFunction, program: Any, tables: list[Tensor]) -> None:
        self._what = what
        self._tables = np.array([table.data_ptr() for table in tables], dtype=np.int64)
        self._kept = tables
        program = in_words(program, [place for place in program.numbers if place < what.words])
        text = cpp.source(program, what.elements, what.writes, what.reductions, [table.dtype for table in tables])
        self._run = cpp.build_parallel(text)

    def __call__(self, lists: Lists, numbers: Tensor, scalars: Sequence[float], skip: Tensor | None, reduced: Tensor) -> None:
        if skip is not None and int(skip) >= LIMIT:
            return
        if self not in lists.prepared:
            (chunks,) = lists.chunks(self._what.of_blocks)
            threads = lists.elements > _WORTH_THREADS
            where = [x.ctypes.data for x in (*lists.arrays, self._tables, chunks.tensors, chunks.starts, chunks.sizes)]
            lists.prepared[self] = where, len(chunks.starts), threads
        where, chunks, threads = lists.prepared[self]
        shared = np.array(scalars, dtype=np.float32)
        self._run(
            *where[:3], numbers.data_ptr(), lists.tensors, lists.columns, shared.ctypes.data, where[3], reduced.data_ptr(),
            *where[4:], chunks, torch.get_num_threads() if threads else 1,
        )  # fmt: skip


class _TritonListKernel:
    """Triton's own launch of a kernel costs 50 microseconds of Python: which variant of it these arguments need is found out
    from their types and addresses, in each call. Here that is done once for lists and the addresses beside them; the compiled
    kernel that was found is then launched directly, with addresses as integers."""

    def __init__(self, what: ListFunction, program: Any, tables: list[Tensor]) -> None:
        self._what = what
        self._tables = tables
        self._places = list(program.scalars)
        self._run = triton.build(triton.source(program, what.elements, what.writes, what.reductions, len(tables), what.aside))
        self._nothing: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        lists: Lists,
        numbers: Tensor,
        scalars: Sequence[float],
        skip: Tensor | None,
        reduced: Tensor,
        aside: Tensor | None = None,
    ) -> None:
        if skip is None or aside is None:
            if lists.device not in self._nothing:  # a zero, and memory that nobody reads
                zero = torch.zeros(1, dtype=torch.int64, device=lists.device)
                self._nothing[lists.device] = zero, torch.zeros_like(zero)
            skip = self._nothing[lists.device][0] if skip is None else skip
            aside = self._nothing[lists.device][1] if aside is None else aside
        shared = [float(scalars[place]) for place in self._places]
        addresses = numbers.data_ptr(), skip.data_ptr(), reduced.data_ptr(), aside.data_ptr(), lists.aligned
        found, launches = lists.prepared.get(self, (None, []))
        with nullcontext() if torch.cuda.current_device() == lists.device.index else torch.cuda.device(lists.device):
            if found != addresses or not launches:
                lists.prepared[self] = addresses, self._first(lists, numbers, shared, skip, reduced, aside)
                return
            for launch, before, after in launches:
                launch(*before, *shared, *after)

    def _first(
        self, lists: Lists, numbers: Tensor, shared: list[float], skip: Tensor, reduced: Tensor, aside: Tensor
    ) -> list[Any]:
        """Launch, and say how to launch again: a function, and its arguments before and after the scalars.

        Nothing, where there is no compiled kernel (Triton's interpreter).
        """
        launches = []
        there = aside if aside.is_cuda else torch.zeros_like(aside, device=lists.device)  # Triton wants a GPU's memory
        of_blocks = self._what.of_blocks
        each = _CUDA_BLOCK_EACH if of_blocks else _CUDA_EACH
        limit = {"maxnreg": _CUDA_BLOCK_REGISTERS} if of_blocks and self._what.writes else {}
        if not self._what.writes and not self._what.scalars:  # nothing but largest numbers
            limit = {"maxnreg": _CUDA_REDUCED_REGISTERS}
        for chunks in lists.chunks(of_blocks, bool(self._what.writes)):
            before = [*lists.arrays, numbers, lists.tensors, lists.columns]
            after = [*self._tables, reduced if self._what.reductions else skip, skip, there, LIMIT]
            after += [chunks.tensors, chunks.starts]
            constants = {"SIZE": chunks.size, "ROWS": chunks.rows, "STEPS": chunks.steps, "ALIGNED": lists.aligned}
            grid = (chunks.tensors.numel(), 1, 1)
            compiled = self._run[grid](
                *before, *shared, *after, **constants,
                num_warps=min(8, max(1, chunks.size * chunks.rows // each)), enable_fp_fusion=False, **limit,
            )  # fmt: skip
            if compiled is not None:
                known = [[aside if x is there else x for x in part] for part in (before, after)]
                ends = [[x.data_ptr() if isinstance(x, Tensor) else x for x in part] for part in known]
                launches.append((compiled[grid], ends[0], [*ends[1], *constants.values()]))
        if there is not aside:
            aside.copy_(there, non_blocking=True)
        return launches
