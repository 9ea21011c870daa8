"""A function of the parts of a bucket (parts.py) as one Triton launch.

A program works on one item: `rows` tiles of one part. Every vector of a tile is a block [rows, 16]: rows are tiles, and a row's
16 numbers lie side by side in memory. Items whose tiles are all full take a way without masks.
A thread has a few neighbours of a row, and reads or writes them at once, where the part's offsets allow it. For parts whose
offsets do not (those of layers that begin at an odd place) there is another way, with an access for each number.
Multiplications and additions are not fused, divisions are correctly rounded: the same bits as on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists.parts import COUNT, CUDA_ITEM, LANES, LAYER, PartsFunction, PartTable, Stream
from lowp.tensor.lists.tracing import Program, Value, has_shortcuts, usual_and_general
from lowp.tensor.lists.triton import IMPORTS, TYPES, build, expression

_STORED = {**TYPES, torch.bool: "tl.int8"}


WARPS = 4
# Numbers that a thread has of a vector, in all of its memory: 16 bytes of float32. Triton would have a thread read 16 bytes of
# codes at a time, and then pass numbers from thread to thread through shared memory, or leave gaps between what threads read.
_TOGETHER = 4
_TOGETHER_CODES = 8  # where there are codes alone
_REGISTERS = (
    80  # of a thread: 6 programs at once on each processor. A bucket in nvfp4: 177 us with 48, 165 with 64, 159 with 80
)


def _item(what: PartsFunction) -> int:
    """Elements of a program. Twice as many where much is computed for each, or where items share an address (measured)."""
    packed = any(stream.padded for stream in (*what.loads, *what.stores))
    return 2 * CUDA_ITEM if packed or (what.maxima and not what.stores) else CUDA_ITEM


class TritonPartsKernel:
    """Compiled for what is known of the addresses (`warmup`), and launched with addresses.

    Triton's `kernel[grid](...)` looks at every argument in every call, which takes longer than some launches' work.
    """

    def __init__(self, what: PartsFunction, device: torch.device) -> None:
        self._what, self._device = what, device
        self._each, self._finish, self._tables = what.trace(device)
        self._rows = max(1, _item(what) // what.tile)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._addresses = [table.data_ptr() for table in self._tables]
        self._get((), True, True)  # what cannot be compiled is found out here

    def _get(self, loose: tuple[int, ...], aligned: bool, one: bool) -> Any:
        """The kernel for tables whose offsets in the columns `loose` may be any, for arrays that begin at multiples of 16 bytes
        (`aligned`), and for `one` message. (With a loop over messages in it, Triton's kernel passes numbers through shared
        memory.)"""
        found = self._compiled.get((loose, aligned, one))
        if found is None:
            text = _TritonParts(self._what, self._each, self._finish, len(self._tables), self._rows, loose, aligned, one).text()
            kinds = [torch.uint8, torch.uint8, torch.int64, 1, 1, torch.int32, torch.float32, 1, torch.int32, 1, 1]
            examples = [*kinds, *(table.dtype for table in self._tables)]
            # The second way of a shortcut would take more registers than the usual one can spare: it may use memory.
            limit = {"maxnreg": _REGISTERS} if has_shortcuts(self._finish or self._each) else {}
            with torch.cuda.device(self._device):
                found = build(text).warmup(*examples, grid=(1,), num_warps=WARPS, enable_fp_fusion=False, **limit)
            self._compiled[loose, aligned, one] = found
        return found

    def __call__(
        self,
        source: Tensor,
        target: Tensor | None,
        table: PartTable,
        numbers: Tensor | None = None,
        of_layer: Tensor | None = None,
        maxima: Tensor | None = None,
        messages: int = 1,
        message_stride: int = 0,
    ) -> None:
        records, nothing = table.records(self._what.tile, self._rows), self._nothing.data_ptr()
        items = records.shape[1]
        if not items:
            return
        first, second = source.data_ptr(), nothing if target is None else target.data_ptr()
        loose = loose_columns(self._what, table)
        launch = self._get(loose, (first | second) % 16 == 0, messages == 1)[items, 1, 1]
        arguments = (
            first,
            second,
            records.data_ptr(),
            items,
            table.parts,
            nothing if numbers is None else numbers.data_ptr(),
            nothing if of_layer is None else of_layer.data_ptr(),
            0 if of_layer is None else of_layer.shape[-1],
            nothing if maxima is None else maxima.data_ptr(),
            messages,
            message_stride,
            *self._addresses,
        )
        if torch.cuda.current_device() == self._device.index:
            launch(*arguments)
        else:
            with torch.cuda.device(self._device):
                launch(*arguments)


def _together(what: PartsFunction) -> int:
    wide = any(s.of == "lane" and s.unit > 1 for s in (*what.loads, *what.stores))
    return _TOGETHER if wide else _TOGETHER_CODES


def loose_columns(what: PartsFunction, table: PartTable) -> tuple[int, ...]:
    """The columns of a function's vectors in which a table has offsets that are no multiples of what threads have together."""
    columns = sorted({s.column for s in (*what.loads, *what.stores) if s.of == "lane"})
    return tuple(column for column in columns if table.alignment(column) < _together(what))


# Bytes that a tile has one of are read and written by instructions of our own. For Triton's, a thread would have to have all of
# a row, and numbers would pass through shared memory to be so. Threads that share a row all read its byte, and all write it.
# (Where threads have single numbers, 16 of them would.)
def _read_byte(base: str, place: str, mask: str) -> str:
    text = '"ld.global.u8 $0, [$1];", "=r,l"'
    place = f"tl.where({mask}, {place}, 0)" if mask else place  # behind the end the first tile's is read instead
    found = f"tl.inline_asm_elementwise({text}, [({base} + {place}).to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)"
    return f"tl.where({mask}, {found}, 0).to(tl.int8)" if mask else f"{found}.to(tl.int8)"


def _write_byte(base: str, place: str, value: str, mask: str) -> str:
    arguments, kinds = [f"({base} + {place}).to(tl.int64)", f"{value}.to(tl.int32)"], "=r,l,r"
    text = "st.global.u8 [$1], $2; mov.u32 $0, 0;"
    if mask:
        arguments, kinds = [*arguments, f"({mask}).to(tl.int32)"], "=r,l,r,r"
        text = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p " + text + " }"
    return f'tl.inline_asm_elementwise("{text}", "{kinds}", [{", ".join(arguments)}], dtype=tl.int32, is_pure=False, pack=1)'


class _TritonParts:
    """The text of a module with the kernel `run`, piece by piece."""

    def __init__(
        self,
        what: PartsFunction,
        each: Program,
        finish: Program | None,
        tables: int,
        rows: int,
        loose: tuple[int, ...] = (),
        aligned: bool = True,
        one: bool = False,
    ) -> None:
        self.what, self.each, self.finish, self.tables = what, each, finish, tables
        self.rows, self.loose, self.aligned, self.one = rows, loose, aligned, one
        self.together, self.apart = _together(what), False  # does a thread have single numbers?

    def text(self) -> str:
        tile, rows = self.what.tile, self.rows
        names = ["source", "target", "records", "items", "parts", "numbers", "of_layer", "layers"]
        names += ["maxima", "messages", "message_stride"]
        names += [f"table{i}" for i in range(self.tables)]
        columns = sorted({s.column for s in (*self.what.loads, *self.what.stores)})
        lines = [
            *IMPORTS,
            f"@triton.jit(do_not_specialize={names[2 if self.aligned else 0 :]})",
            f"def run({', '.join(names)}):",
            "    item = tl.program_id(0)",
            "    part = tl.load(records + item)",
            "    begin = tl.load(records + items + item)",
            f"    count = tl.load(records + {2 + COUNT} * items + item)",
            f"    layer = tl.load(records + {2 + LAYER} * items + item)",
            *(f"    at{column} = tl.load(records + {2 + column} * items + item)" for column in columns),
            *self._numbers(),
            # Thousands of items have one address, which takes their atomics one after the other. Most of these are not needed,
            # as what was found before shows. It is read at once, so that nothing waits for it.
            *(f"    known{i} = tl.load(maxima + {i} * parts + part)" for i in range(self.what.maxima)),
            f"    tile = tl.arange(0, {rows})[:, None]",
            f"    lane = tl.arange(0, {LANES})[None, :]",
            f"    left = tl.minimum(count - begin * {tile}, {rows * tile}).to(tl.int32)",
            *("    " + line for line in self._ways()),
            *(
                f'    tl.atomic_max(maxima + {i} * parts + part, found{i}, mask=found{i} > known{i}, sem="relaxed")'
                for i in range(self.what.maxima)
            ),
        ]
        return "\n".join(lines) + "\n"

    def _ways(self) -> list[str]:
        """Where what is read is loose, and nothing of what is written, there are two ways: for parts whose offsets are
        multiples of what threads have together, and for others.

        What is written to loose columns is written number by number, by neighbours (a thread that has several would write
        pieces of everything that memory is written in); and reading alone is as fast so.
        """
        if self.loose and (not self.what.stores or set(self.loose) & {s.column for s in self.what.stores}):
            self.apart = True
            return self._way(bits=0)
        bits = _together(self.what).bit_length() - 1
        if not self.loose:
            return self._way(bits)
        condition = " | ".join(f"at{column}" for column in self.loose)
        return [
            f"if (({condition}) & {(1 << bits) - 1}) == 0:",
            *("    " + line for line in self._way(bits)),
            "else:",
            *("    " + line for line in self._way(bits, self.loose)),
        ]

    def _way(self, bits: int, loose: tuple[int, ...] = ()) -> list[str]:
        """Offsets are multiples of 2^`bits`, but in the columns `loose`."""
        size, rows = self.rows * self.what.tile, self.rows
        pointers = [
            f"stride = tl.multiple_of(tl.cast(message_stride, tl.int64), {min(8, 1 << bits)})",
            *self._pointers(bits, loose),
            *(f"most{i} = tl.zeros([{rows}, {LANES}], tl.int32)" for i in range(self.what.maxima)),
        ]
        found = [f"found{i} = tl.max(tl.reshape(most{i}, [{rows * LANES}], can_reorder=True))" for i in range(self.what.maxima)]
        return [
            *pointers,
            f"if left == {size}:",
            *("    " + line for line in self._body(masked=False)),
            "else:",
            *("    " + line for line in self._body(masked=True)),
            *found,
        ]

    def _pointers(self, bits: int, loose: tuple[int, ...]) -> list[str]:
        """Where the item's numbers lie. Shifted to the right and back, so that Triton knows of what an offset is a multiple."""
        lines = []
        for name, array, streams in (("in", "source", self.what.loads), ("out", "target", self.what.stores)):
            for i, s in enumerate(streams):
                known = bits and s.of == "lane" and s.column not in loose
                offset = f"(at{s.column} >> {bits} << {bits})" if known else f"at{s.column}"
                lines.append(f"{name}{i} = ({array} + {s.unit} * {offset}).to(tl.pointer_type({_STORED[s.dtype]}))")
                if s.of != "part":
                    lines.append(f"{name}{i} += begin * {s.stride}")
        return lines

    def _numbers(self) -> list[str]:
        programs = [self.each] if self.finish is None else [self.each, self.finish]
        numbers = {place: v for program in programs for place, v in program.numbers.items()}
        scalars = {place: v for program in programs for place, v in program.scalars.items()}
        lines = [f"    {v.name} = tl.load(numbers + {p} * parts + part)" for p, v in numbers.items()]
        return lines + [f"    {v.name} = tl.load(of_layer + {p} * layers + layer)" for p, v in scalars.items()]

    def _place(self, s: Stream) -> str:
        """Counted from the item's first tile. Nothing, for what a part has one of."""
        if s.of == "tile":
            return f"(tile * {s.stride} + {s.place})"
        place = f"tile * {s.stride} + {s.place} + lane"
        return f"tl.max_contiguous({place}, [1, {self.together}])" if s.dtype.itemsize < 4 else f"({place})"

    def _mask(self, s: Stream) -> str:
        lane = " + lane" if s.of == "lane" and not s.padded else ""
        return f"(tile * {self.what.tile} + {s.first}{lane} < left)"

    def _read(self, program: Program, masked: bool, more: str = "") -> list[str]:
        lines = []
        for i, (s, v) in enumerate(zip(self.what.loads, program.elements, strict=True)):
            base = f"in{i}"
            if more:
                base = f"({base}.to(tl.pointer_type(tl.uint8)) + {more}).to(tl.pointer_type({_STORED[s.dtype]}))"
            if s.of == "tile" and not self.apart:
                lines.append(f"{v.name} = {_read_byte(base, self._place(s), self._mask(s) if masked else '')}")
                continue
            mask = f", mask={self._mask(s)}, other=0" if masked and s.of != "part" else ""
            place = "" if s.of == "part" else f" + {self._place(s)}"
            lines.append(f"{v.name} = tl.load({base}{place}{mask})")
        return lines

    def _statements(self, program: Program) -> list[str]:
        lines, indices = [], 0
        for s in program.statements:
            if s.operation == "index":
                text = f"(begin.to(tl.int32) + tile) * {self.what.tile} + {LANES * indices} + lane"
                indices += 1  # vectors of numbers are counted one after the other
            elif s.operation == "amax":
                text = f"tl.max({s.arguments[0].name}, axis=1, keep_dims=True)"
            else:
                text = expression(s)
            lines.append(f"{s.result.name} = {text}")
        return lines

    def _write(self, results: tuple[Value, ...], masked: bool) -> list[str]:
        lines = []
        for i, (s, v) in enumerate(zip(self.what.stores, results, strict=False)):
            if s.of == "part":
                lines += ["if begin == 0:", f"    tl.store(out{i}, ({v.name}).to({_STORED[s.dtype]}))"]
                continue
            if s.of == "tile":
                lines.append(_write_byte(f"out{i}", self._place(s), v.name, self._mask(s) if masked else ""))
                continue
            value = f"{v.name}.to({_STORED[s.dtype]})" if v.dtype != s.dtype else v.name
            mask = f", mask={self._mask(s)}" if masked else ""
            lines.append(f"tl.store(out{i} + {self._place(s)}, {value}{mask})")
        values = [v.name for v in results[len(self.what.stores) :]]
        each = len(values) // max(self.what.maxima, 1)
        for i in range(self.what.maxima):
            lines += [f"most{i} = tl.maximum(most{i}, {value})" for value in values[i * each : (i + 1) * each]]
        return lines

    def _inside(self, i: int, name: str) -> str:
        """A sum; what is behind the end counts as zero."""
        return f"{name} = tl.where(tile * {self.what.tile} + {LANES * i} + lane < left, {name}, 0.0)"

    def _body(self, masked: bool) -> list[str]:
        """Read, compute and store.

        Where there are shortcuts, and one element of the item must not take one, everything is read again: what is kept for
        that would take registers from the usual way.
        """
        read, program = self._numbers_read(masked), self.finish or self.each
        if not has_shortcuts(program):
            return [*read, *self._statements(program), *self._write(program.results, masked)]
        usual, conditions, general = usual_and_general(program)
        return [
            *read,
            *self._statements(usual),
            f"rare = tl.max(({' | '.join(value.name for value in conditions)}).to(tl.int32))",
            "if rare == 0:",
            *("    " + line for line in self._write(usual.results, masked)),
            "else:",
            *("    " + line for line in (*read, *self._statements(general), *self._write(general.results, masked))),
        ]

    def _numbers_read(self, masked: bool) -> list[str]:
        """What is read, or the sums of what messages say."""
        if self.finish is None:
            return self._read(self.each, masked)
        sums = [v.name for v in self.finish.elements]
        more = [
            "for message in range(1, messages):",
            *("    " + line for line in self._read(self.each, masked, "message * stride")),
            *("    " + line for line in self._statements(self.each)),
            *(f"    {s} = {s} + {v.name}" for s, v in zip(sums, self.each.results, strict=True)),
        ]
        return [
            *self._read(self.each, masked),
            *self._statements(self.each),
            *(f"{s} = {v.name}" for s, v in zip(sums, self.each.results, strict=True)),
            *([] if self.one else more),
            *(self._inside(i, s) for i, s in enumerate(sums) if masked),
        ]
