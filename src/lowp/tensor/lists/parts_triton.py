"""A function of the parts of a bucket (parts.py) as one Triton launch.

A program works on one item: some tiles of one part, `rows` of them at a time. Every vector of a tile is a block [rows, 16]:
rows are tiles, and a row's 16 numbers lie side by side in memory. Steps whose tiles are all full take a way without masks, and
read what the next step needs while they compute.
Multiplications and additions are not fused, divisions are correctly rounded: the same bits as on a CPU.
"""

import os
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


_REGISTERS = 64  # of a thread: 8 programs at once on each processor
STEPS = int(os.environ.get("LOWP_PART_STEPS", "8"))  # of a program, at most
PROGRAMS = 1 << 10  # at least, before one of them takes more steps
AHEAD = os.environ.get("LOWP_PART_AHEAD", "1") == "1"  # does a step read the next one's numbers?


def _item(what: PartsFunction, program: Program) -> int:
    """Elements of a program. Twice as many where much is computed for each, or where items share an address (measured)."""
    packed = any(stream.padded for stream in (*what.loads, *what.stores)) and not has_shortcuts(program)
    return 2 * CUDA_ITEM if packed or (what.maxima and not what.stores) else CUDA_ITEM


class TritonPartsKernel:
    """Compiled for what is known of the addresses (`warmup`), and launched with addresses.

    Triton's `kernel[grid](...)` looks at every argument in every call, which takes longer than some launches' work.
    """

    def __init__(self, what: PartsFunction, device: torch.device) -> None:
        self._what, self._device = what, device
        self._each, self._finish, self._tables = what.trace(device)
        self._rows = max(1, _item(what, self._finish or self._each) // what.tile)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self._compiled: dict[tuple[int, bool, bool, int], Any] = {}
        self._addresses = [table.data_ptr() for table in self._tables]
        self._get(8, True, True, STEPS)  # what cannot be compiled is found out here

    def _steps(self, table: PartTable) -> int:
        """Of a program: many where there are many elements, so that every processor still gets several programs."""
        return STEPS if table.elements >= STEPS * PROGRAMS * self._rows * self._what.tile else 1

    def _get(self, alignment: int, aligned: bool, one: bool, steps: int) -> Any:
        """The kernel for tables whose offsets are multiples of `alignment`, for arrays that begin at multiples of 16 bytes
        (`aligned`), and for `one` message. (With a loop over messages in it, Triton's kernel passes numbers through shared
        memory.)"""
        found = self._compiled.get((alignment, aligned, one, steps))
        if found is None:
            text = _TritonParts(
                self._what, self._each, self._finish, len(self._tables), self._rows, alignment, aligned, one, steps
            ).text()
            kinds = [torch.uint8, torch.uint8, torch.int64, 1, 1, torch.int32, torch.float32, 1, torch.int32, 1, 1]
            examples = [*kinds, *(table.dtype for table in self._tables)]
            # The second way of a shortcut would take more registers than the usual one can spare: it may use memory.
            limit = {"maxnreg": _REGISTERS} if has_shortcuts(self._finish or self._each) else {}
            with torch.cuda.device(self._device):
                found = build(text).warmup(*examples, grid=(1,), num_warps=WARPS, enable_fp_fusion=False, **limit)
            self._compiled[alignment, aligned, one, steps] = found
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
        steps = self._steps(table)
        records, nothing = table.records(self._what.tile, self._rows * steps), self._nothing.data_ptr()
        items = records.shape[1]
        if not items:
            return
        first, second = source.data_ptr(), nothing if target is None else target.data_ptr()
        launch = self._get(table.alignment, (first | second) % 16 == 0, messages == 1, steps)[items, 1, 1]
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


class _TritonParts:
    """The text of a module with the kernel `run`, piece by piece."""

    def __init__(
        self,
        what: PartsFunction,
        each: Program,
        finish: Program | None,
        tables: int,
        rows: int,
        alignment: int = 8,
        aligned: bool = True,
        one: bool = False,
        steps: int = 1,
    ) -> None:
        self.what, self.each, self.finish, self.tables = what, each, finish, tables
        self.rows, self.alignment, self.aligned, self.one, self.steps = rows, alignment, aligned, one, steps
        # What waits in registers is not for programs that use up all of them.
        self.ahead = AHEAD and steps > 1 and not has_shortcuts(finish or each)

    def text(self) -> str:
        tile, rows = self.what.tile, self.rows
        names = ["source", "target", "records", "items", "parts", "numbers", "of_layer", "layers"]
        names += ["maxima", "messages", "message_stride"]
        names += [f"table{i}" for i in range(self.tables)]
        lines = [
            *IMPORTS,
            f"@triton.jit(do_not_specialize={names[2 if self.aligned else 0 :]})",
            f"def run({', '.join(names)}):",
            "    item = tl.program_id(0)",
            "    part = tl.load(records + item)",
            "    begin = tl.load(records + items + item)",
            f"    count = tl.load(records + {2 + COUNT} * items + item)",
            f"    layer = tl.load(records + {2 + LAYER} * items + item)",
            *self._pointers(),
            *self._numbers(),
            # Thousands of items have one address, which takes their atomics one after the other. Most of these are not needed,
            # as what was found before shows. It is read at once, so that nothing waits for it.
            *(f"    known{i} = tl.load(maxima + {i} * parts + part)" for i in range(self.what.maxima)),
            f"    stride = tl.multiple_of(tl.cast(message_stride, tl.int64), {min(8, self.alignment)})",
            f"    row = tl.arange(0, {rows})[:, None]",
            f"    lane = tl.arange(0, {LANES})[None, :]",
            f"    left = tl.minimum(count - begin * {tile}, {self.steps * rows * tile}).to(tl.int32)",
            f"    full = left // {rows * tile}",
            *(f"    most{i} = tl.zeros([{rows}, {LANES}], tl.int32)" for i in range(self.what.maxima)),
            *("    " + line for line in self._first()),
            "    for step in range(full):",
            f"        tile = step * {rows} + row",
            *("        " + line for line in self._body(masked=False)),
            f"    for step in range(full, (left + {rows * tile - 1}) // {rows * tile}):",
            f"        tile = step * {rows} + row",
            *("        " + line for line in self._body(masked=True)),
            *("    " + line for line in self._maxima()),
        ]
        return "\n".join(lines) + "\n"

    def _pointers(self) -> list[str]:
        lines = []
        for name, array, streams in (("in", "source", self.what.loads), ("out", "target", self.what.stores)):
            for i, s in enumerate(streams):
                offset = f"tl.multiple_of(tl.load(records + {2 + s.column} * items + item), {self.alignment})"
                lines.append(f"    {name}{i} = ({array} + {s.unit} * {offset}).to(tl.pointer_type({_STORED[s.dtype]}))")
                if s.of != "part":
                    lines.append(f"    {name}{i} += begin * {s.stride}")
        return lines

    def _numbers(self) -> list[str]:
        programs = [self.each] if self.finish is None else [self.each, self.finish]
        numbers = {place: v for program in programs for place, v in program.numbers.items()}
        scalars = {place: v for program in programs for place, v in program.scalars.items()}
        lines = [f"    {v.name} = tl.load(numbers + {p} * parts + part)" for p, v in numbers.items()]
        return lines + [f"    {v.name} = tl.load(of_layer + {p} * layers + layer)" for p, v in scalars.items()]

    def _place(self, s: Stream) -> str:
        if s.of == "part":
            return ""
        if s.of == "tile":
            return f" + (tile * {s.stride} + {s.place})"
        place = f"tile * {s.stride} + {s.place} + lane"
        return f" + tl.max_contiguous({place}, [1, {_TOGETHER}])" if s.dtype.itemsize < 4 else f" + ({place})"

    def _mask(self, s: Stream) -> str:
        lane = " + lane" if s.of == "lane" and not s.padded else ""
        return f"(tile * {self.what.tile} + {s.first}{lane} < left)"

    def _read(self, program: Program, masked: bool, more: str = "") -> list[str]:
        lines = []
        for i, (s, v) in enumerate(zip(self.what.loads, program.elements, strict=True)):
            base = f"in{i}"
            if more:
                base = f"({base}.to(tl.pointer_type(tl.uint8)) + {more}).to(tl.pointer_type({_STORED[s.dtype]}))"
            mask = f", mask={self._mask(s)}, other=0" if masked and s.of != "part" else ""
            lines.append(f"{v.name} = tl.load({base}{self._place(s)}{mask})")
        return lines

    def _first(self) -> list[str]:
        """The first step's numbers, where steps read ahead."""
        if not self.ahead:
            return []
        return ["tile = row", *self._read_ahead("full > 0")]

    def _read_ahead(self, mask: str) -> list[str]:
        loads = zip(self.what.loads, self.each.elements, strict=True)
        return [f"next_{v.name} = tl.load(in{i}{self._place(s)}, mask={mask})" for i, (s, v) in enumerate(loads)]

    def _numbers_ahead(self) -> list[str]:
        """This step's numbers, which are there, and a start for the next one's."""
        names = [v.name for v in self.each.elements]
        return [
            *(f"{name} = next_{name}" for name in names),
            f"tile = (step + 1) * {self.rows} + row",
            *self._read_ahead("step + 1 < full"),
            f"tile = step * {self.rows} + row",
        ]

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
                lines += ["if begin + step == 0:", f"    tl.store(out{i}, ({v.name}).to({_STORED[s.dtype]}))"]
                continue
            value = f"{v.name}.to({_STORED[s.dtype]})" if v.dtype != s.dtype else v.name
            mask = f", mask={self._mask(s)}" if masked else ""
            lines.append(f"tl.store(out{i}{self._place(s)}, {value}{mask})")
        values = [v.name for v in results[len(self.what.stores) :]]
        each = len(values) // max(self.what.maxima, 1)
        for i in range(self.what.maxima):
            lines += [f"most{i} = tl.maximum(most{i}, {value})" for value in values[i * each : (i + 1) * each]]
        return lines

    def _maxima(self) -> list[str]:
        """Those of all steps, together with what other programs have found."""
        lines = []
        for i in range(self.what.maxima):
            lines += [
                f"most = tl.max(tl.reshape(most{i}, [{self.rows * LANES}], can_reorder=True))",
                f'tl.atomic_max(maxima + {i} * parts + part, most, mask=most > known{i}, sem="relaxed")',
            ]
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
        read = self._numbers_ahead() if self.ahead and not masked else self._read(self.each, masked)
        if self.finish is None:
            return read
        sums = [v.name for v in self.finish.elements]
        more = [
            "for message in range(1, messages):",
            *("    " + line for line in self._read(self.each, masked, "message * stride")),
            *("    " + line for line in self._statements(self.each)),
            *(f"    {s} = {s} + {v.name}" for s, v in zip(sums, self.each.results, strict=True)),
        ]
        return [
            *read,
            *self._statements(self.each),
            *(f"{s} = {v.name}" for s, v in zip(sums, self.each.results, strict=True)),
            *([] if self.one else more),
            *(self._inside(i, s) for i, s in enumerate(sums) if masked),
        ]
