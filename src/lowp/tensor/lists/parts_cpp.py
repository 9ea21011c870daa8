"""A function of the parts of a bucket (parts.py) as C++.

A vector of a tile has 16 numbers. As many of them are worked on at a time as a register holds (preamble.py): `lane` is the
first of these. Lanes have nothing to do with each other, but for the largest number of a block.

Threads (OpenMP's, which torch's own kernels have started) share the work items. An item is a few tiles of one part. Of several
messages, some tiles of the first are read, then the same ones of the next: sums stay in the cache, and what depends on a
message's header alone is computed once for all of them.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists import cpp
from lowp.tensor.lists.parts import COUNT, CPU_ITEM, LANES, LAYER, PartsFunction, PartTable, Stream
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.lists.tracing import Program, Statement, Value
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer

_ARGUMENTS = (*[ctypes.c_void_p] * 2, *[ctypes.c_void_p, ctypes.c_long] * 2, *[ctypes.c_void_p] * 2, ctypes.c_long,
              *[ctypes.c_void_p] * 2, *[ctypes.c_long] * 3)  # fmt: skip
_STORED = {torch.float16: "int16_t", torch.bfloat16: "int16_t", **SCALARS}
_HEAD = """
static void raise_to(int32_t* place, int32_t value) {
    int32_t found = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (found < value && !__atomic_compare_exchange_n(place, &found, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
#if LANES == 16
#define OVER_LANES constexpr long lane = 0;
#else
#define OVER_LANES for (long lane = 0; lane < 16; lane += LANES)
#endif
static inline long limited(long n) { return n < 0 ? 0 : n < LANES ? n : LANES; }
extern "C" void run(const char* source, char* target, const int64_t* table, long parts, const int32_t* items, long item_count,
                    const int32_t* numbers, const float* of_layer, long layers, int32_t* maxima, const int64_t* tables,
                    long messages, long message_stride, long threads) {"""


class CppPartsKernel:
    def __init__(self, what: PartsFunction) -> None:
        each, finish, tables = what.trace(torch.device("cpu"))
        self._what = what
        self._tables = tables
        self._addresses = torch.tensor([table.data_ptr() for table in tables], dtype=torch.int64)
        self._tiles = max(1, CPU_ITEM // what.tile)
        text = _CppParts(what, each, finish, [table.dtype for table in tables], self._tiles).text()
        self._run = cpp.build_parallel(text, _ARGUMENTS)

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
        items = table.items(self._what.tile, self._tiles)
        self._run(
            source.data_ptr(),
            None if target is None else target.data_ptr(),
            table.columns.data_ptr(),
            table.parts,
            items.data_ptr(),
            len(items),
            None if numbers is None else numbers.data_ptr(),
            None if of_layer is None else of_layer.data_ptr(),
            0 if of_layer is None else of_layer.shape[-1],
            None if maxima is None else maxima.data_ptr(),
            self._addresses.data_ptr(),
            messages,
            message_stride,
            torch.get_num_threads() if table.elements >= 1 << 15 else 1,
        )


class _CppParts:
    """The text, piece by piece."""

    def __init__(
        self, what: PartsFunction, each: Program, finish: Program | None, tables: list[torch.dtype], tiles: int
    ) -> None:
        self.what, self.each, self.finish, self.tables, self.tiles = what, each, finish, tables, tiles
        self.printer = Printer()

    def text(self) -> str:
        lines = [_HEAD]
        lines += [f"    const {SCALARS[d]}* table{i} = (const {SCALARS[d]}*)tables[{i}];" for i, d in enumerate(self.tables)]
        lines += [
            "    #pragma omp parallel for num_threads(threads) if(threads > 1 && item_count > 1)",
            "    for (long item = 0; item < item_count; item++) {",
            "        const Subnormals subnormals;",
            "        const long part = items[2 * item], begin = items[2 * item + 1];",
            f"        const long count = table[{COUNT} * parts + part], layer = table[{LAYER} * parts + part];",
            f"        const long tiles = (count + {self.what.tile - 1}) / {self.what.tile};",
            f"        const long end = begin + {self.tiles} < tiles ? begin + {self.tiles} : tiles;",
        ]
        body = self._loop() if self.finish is not None else self._simple()
        # What is kept in memory (printer.constants) is known when everything has been printed.
        lines += [f"        const auto constant{place} = ::constant{place};" for place in self.printer.constants.values()]
        lines += [*self._numbers(), *self._pointers(), *body, *self._raise(), "    }", "}"]
        return "\n".join([preamble(), *self.printer.declarations(), *lines])

    def _numbers(self) -> list[str]:
        programs = [self.each] if self.finish is None else [self.each, self.finish]
        numbers = {place: v for program in programs for place, v in program.numbers.items()}
        scalars = {place: v for program in programs for place, v in program.scalars.items()}
        lines = [f"        const i32 {v.name} = splat<i32>(numbers[{p} * parts + part]);" for p, v in numbers.items()]
        lines += [f"        const f32 {v.name} = splat<f32>(of_layer[{p} * layers + layer]);" for p, v in scalars.items()]
        return lines + [f"        i32 most{i} = {{}};" for i in range(self.what.maxima)]

    def _pointers(self) -> list[str]:
        lines = []
        for array, streams in (("const char* in{} = source", self.what.loads), ("char* out{} = target", self.what.stores)):
            for i, s in enumerate(streams):
                lines.append(f"        {array.format(i)} + {s.unit} * table[{s.column} * parts + part];")
        return lines

    def _address(self, name: str, s: Stream, more: str = "") -> str:
        kind = _STORED[s.dtype]
        place = f"tile * {s.stride} + {s.place}"
        at = {"part": "", "tile": f" + ({place})", "lane": f" + ({place} + lane)"}[s.of]
        return f"({kind}*)({name}{more}){at}"

    def _read(self, program: Program, names: set[str], more: str = "") -> list[str]:
        """The vectors of a tile that have one of these names."""
        lines = []
        for i, (s, v) in enumerate(zip(self._sources(program), program.elements, strict=True)):
            if v.name not in names or s.of != "lane":
                continue
            if program is self.finish:  # a sum; what is behind the end counts as zero
                left = f"splat<i32>((int32_t)(count - (tile * {self.what.tile} + {s.first} + lane)))"
                lines.append(f"f32 {v.name} = {self._sum(i)};")
                lines.append(f"if constexpr (!full) {v.name} = LANE_NUMBERS < {left} ? {v.name} : f32{{}};")
                continue
            kind, address = TYPES[s.dtype], self._address(f"in{i}", s, more)
            lines.append(f"const {kind} {v.name} = load<{kind}>({address}, {self._room(s)});")
        return lines

    def _sources(self, program: Program) -> Sequence[Stream]:
        """Where a program's elements come from: memory, or the sums so far."""
        if program is not self.finish:
            return self.what.loads
        return [Stream(torch.float32, 0, first=LANES * i) for i in range(len(program.elements))]

    def _of_part(self, program: Program, more: str) -> list[str]:
        """What a part has one of: loads, and what follows from these and from the numbers."""
        lines = []
        for i, (s, v) in enumerate(zip(self._sources(program), program.elements, strict=True)):
            if s.of == "part":
                lines.append(
                    f"const {TYPES[s.dtype]} {v.name} = splat<{TYPES[s.dtype]}>(*({self._address(f'in{i}', s, more)}));"
                )
        return ["        " + line for line in (*lines, *self._statements(_levels(self._sources(program), program)["part"]))]

    def _room(self, s: Stream) -> str:
        if s.padded:
            return f"(full ? LANES : count - (tile * {self.what.tile} + {s.first}) > 0 ? LANES : 0)"
        return f"(full ? LANES : limited(count - (tile * {self.what.tile} + {s.first} + lane)))"

    def _sum(self, i: int) -> str:
        return f"sums[tile - begin][lane / LANES][{i}]"

    def _statements(self, statements: Sequence[Statement], first_index: int = 0) -> list[str]:
        lines, indices = [], first_index
        for s in statements:
            if s.operation == "index":
                text = f"splat<i32>((int32_t)(tile * {self.what.tile} + {LANES * indices} + lane)) + LANE_NUMBERS"
                indices += 1  # vectors of numbers are counted one after the other
            else:
                text = self.printer.expression(s)
            lines.append(f"const {TYPES[s.result.dtype]} {s.result.name} = {text};")
        return lines

    def _pass(self, program: Program, last: list[str], of_tile: Sequence[str] = (), more: str = "") -> list[str]:
        """A loop over the tiles of an item: loads, statements, then `last`; then `of_tile`, once a tile.

        What belongs to a tile as a whole (the scale of its block, from the largest number in it) is computed for as many tiles
        at once as a vector holds, a lane for each: first a look at their numbers, then these statements, then the tiles again.
        """
        sources = list(zip(self._sources(program), program.elements, strict=True))
        levels = _levels(self._sources(program), program)
        tile_level = {v.name for s, v in sources if s.of == "tile"} | {s.result.name for s in levels["tile"]}
        self.printer.begin()
        of_part = self._of_part(program, more)
        if not tile_level:
            lanes = [*self._read(program, _everything(program), more), *self._statements(levels["lane"]), *last]
            return [*of_part, *self._over_tiles([], lanes, of_tile, "begin", "end")]
        maxima = [s for s in levels["tile"] if s.operation == "amax"]
        looked = _closure(program, [m.arguments[0].name for m in maxima], tile_level)
        ours = [s for s in levels["tile"] if s.operation != "amax"]
        rest = levels["lane"]
        look = [*self._read(program, looked, more), *self._statements([s for s in rest if s.result.name in looked])]
        for m in maxima:
            top, value = f"top_{m.result.name}", m.arguments[0].name
            look.append(f"{top} = lane ? larger({top}, {value}) : {value};")
        found = [f"g_{m.result.name}[tile - group] = largest_of(top_{m.result.name});" for m in maxima]
        for i, (s, v) in enumerate(sources):
            if s.of == "tile":
                there = f"full || tile * {self.what.tile} + {s.first} < count"
                found.append(f"g_{v.name}[tile - group] = {there} ? *({self._address(f'in{i}', s, more)}) : 0;")
        rooms = [*(v for s, v in sources if s.of == "tile"), *(m.result for m in maxima)]
        shared = self._statements([_with_names(s, tile_level) for s in ours])
        needed = _names_read(rest) | {v.name for v in program.results}
        values = [v for v in _values(program) if v.name in tile_level and v.name in needed]
        own = [f"const {TYPES[v.dtype]} {v.name} = splat<{TYPES[v.dtype]}>(g_{v.name}[tile - group]);" for v in values]
        lanes = [*self._read(program, _everything(program), more), *self._statements(rest), *last]
        return [
            *of_part,
            "        for (long group = begin; group < end; group += LANES) {",
            "            const long stop = group + LANES < end ? group + LANES : end;",
            *(f"            {TYPES[v.dtype]} g_{v.name} = {{}};" for v in rooms),
            *self._over_tiles([f"f32 top_{m.result.name};" for m in maxima], look, found, "group", "stop"),
            *("            " + line for line in shared),
            *self._over_tiles(own, lanes, of_tile, "group", "stop"),
            "        }",
        ]

    def _write(self, results: tuple[Value, ...]) -> tuple[list[str], list[str]]:
        """What is written for each lane, and what once a tile."""
        lines, of_tile = [], []
        for i, (s, v) in enumerate(zip(self.what.stores, results, strict=False)):
            address, value = self._address(f"out{i}", s), self.printer.argument(v, s.dtype)
            if s.of == "lane":
                lines.append(f"store({address}, {value}, {self._room(s)});")
            else:
                wanted = "tile == 0" if s.of == "part" else f"full || tile * {self.what.tile} + {s.first} < count"
                of_tile.append(f"if ({wanted}) *({address}) = ({value})[0];")
        values = results[len(self.what.stores) :]
        for i, v in enumerate(values):
            most = f"most{i * self.what.maxima // len(values)}"
            lines.append(f"{most} = larger({most}, {self.printer.argument(v, torch.int32)});")
        return lines, of_tile

    def _simple(self) -> list[str]:
        return self._pass(self.each, *self._write(self.each.results))

    def _over_tiles(self, before: Sequence[str], lanes: Sequence[str], after: Sequence[str], begin: str, end: str) -> list[str]:
        """Tiles that are full first, without a question for each number."""
        return [
            "        {",
            "            const auto body = [&](long tile, auto is_full) __attribute__((always_inline)) {",
            "                constexpr bool full = decltype(is_full)::value;",
            *("                " + line for line in before),
            "                OVER_LANES {",
            *("                    " + line for line in lanes),
            "                }",
            *("                " + line for line in after),
            "            };",
            f"            long tile = {begin};",
            f"            const long filled = count / {self.what.tile} < {end} ? count / {self.what.tile} : {end};",
            "            for (; tile < filled; tile++) body(tile, std::true_type{});",
            f"            for (; tile < {end}; tile++) body(tile, std::false_type{{}});",
            "        }",
        ]

    def _loop(self) -> list[str]:
        assert self.finish is not None
        sums = [self._sum(i) for i in range(len(self.each.results))]
        values = [v.name for v in self.each.results]
        first = [f"{s} = {v};" for s, v in zip(sums, values, strict=True)]
        more = [f"{s} = {s} + {v};" for s, v in zip(sums, values, strict=True)]
        there = " + message * message_stride"
        first_pass, next_pass = self._pass(self.each, first, more=there), self._pass(self.each, more, more=there)
        last_pass = self._pass(self.finish, *self._write(self.finish.results))
        return [
            f"        f32 sums[{self.tiles}][{LANES} / LANES][{len(sums)}];",
            "        {",
            "        const long message = 0;",
            *first_pass,
            "        }",
            "        for (long message = 1; message < messages; message++) {",
            *next_pass,
            "        }",
            *last_pass,
        ]

    def _raise(self) -> list[str]:
        return [
            f"        {{ int32_t top = 0; for (int l = 0; l < LANES; l++) top = most{i}[l] > top ? most{i}[l] : top; "
            f"raise_to(maxima + {i} * parts + part, top); }}"
            for i in range(self.what.maxima)
        ]


def _levels(sources: Sequence[Stream], program: Program) -> dict[str, list[Statement]]:
    """The statements by what their results belong to: a part (of which there are numbers and loads), a tile, or each lane."""
    level = {v.name: s.of for s, v in zip(sources, program.elements, strict=True)}
    found: dict[str, list[Statement]] = {"part": [], "tile": [], "lane": []}
    for s in program.statements:
        read = {level.get(a.name, "part") for a in s.arguments if isinstance(a, Value)}
        if s.operation == "amax":
            own = "tile"
        else:
            own = "lane" if s.operation == "index" or "lane" in read else "tile" if "tile" in read else "part"
        level[s.result.name] = own
        found[own].append(s)
    return found


def _closure(program: Program, names: Sequence[str], tile_level: set[str]) -> set[str]:
    """These values and everything that they are computed from."""
    made_by = {s.result.name: s for s in program.statements}
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            assert name not in tile_level, "a maximum over what follows from another maximum"
            found.add(name)
            waiting += [a.name for a in made_by[name].arguments if isinstance(a, Value)] if name in made_by else []
    return found


def _with_names(s: Statement, tile_level: set[str]) -> Statement:
    """The same on vectors of tiles."""

    def new(value: Any) -> Any:
        return Value(f"g_{value.name}", value.dtype) if isinstance(value, Value) and value.name in tile_level else value

    return Statement(s.operation, new(s.result), tuple(new(a) for a in s.arguments), s.operand)


def _names_read(statements: Sequence[Statement]) -> set[str]:
    return {a.name for s in statements for a in s.arguments if isinstance(a, Value)}


def _values(program: Program) -> list[Value]:
    return [*program.elements, *(s.result for s in program.statements)]


def _everything(program: Program) -> set[str]:
    return {v.name for v in program.elements}
