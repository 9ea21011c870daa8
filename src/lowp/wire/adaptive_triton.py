"""Adaptive messages (adaptive.py) in Triton: four launches to encode all parts of all messages, two to decode them.

A thread has a group: its 64 numbers are 64 variables, and what a group has one of (scale, width, place) is one number of the
thread. So nothing is exchanged between threads but in `widths`, which walks over the groups of a message.

- scales: of all groups; the largest of each part.
- bytes: part bytes and group bytes.
- widths: one program for each message: a histogram of priorities, the level, widths and places.
- codes: numbers again, to planes. Or numbers: planes of all messages to sums.

Planes are 64 bits. Eight codes are the bytes of a 64-bit number, whose transpose (as 8 x 8 bits) has a byte for each plane.
Multiplications and additions are not fused: the same bits as on a CPU. The text is printed by Python because Triton has no
arrays of variables.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowp.tensor.lists.triton import IMPORTS, TYPES, build
from lowp.tensor.noise import KEY_SIZE
from lowp.wire import adaptive_tables as tables
from lowp.wire.adaptive_tables import GROUP, ITEM, LEVELS, SIGNS

if TYPE_CHECKING:
    from lowp.wire.adaptive_group import AdaptiveTable

_SCAN = 2048  # groups that `widths` looks at at once
_BINS = 2 * LEVELS
_NUMBERS = range(GROUP)
_TRANSPOSE = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def _kernel(arguments: str, lines: list[str]) -> str:
    """A module with the kernel `run`."""
    names = [name.strip() for name in arguments.split(",")]
    head = [*IMPORTS, f"@triton.jit(do_not_specialize={names})", f"def run({arguments}):"]
    return "\n".join([*head, *("    " + line for line in lines)]) + "\n"


_ITEM = f"""
item = tl.program_id(0)
part = tl.load(items + 2 * item)
g = tl.load(items + 2 * item + 1) + tl.arange(0, {ITEM})
count = tl.load(parts + 6 * part)
layer = tl.load(parts + 6 * part + 1)
start = tl.load(parts + 6 * part + 2)
region = tl.load(parts + 6 * part + 3)
group = tl.load(parts + 6 * part + 4) + g
left = count - g.to(tl.int64) * {GROUP}
there = left > 0
begin = tl.load(regions + 7 * region)
part_count = tl.load(regions + 7 * region + 1)
payload = tl.load(regions + 7 * region + 4)
own_part = part - tl.load(regions + 7 * region + 5)
own_group = group - tl.load(regions + 7 * region + 6)
""".strip().split("\n")


def _read(dtype: torch.dtype) -> list[str]:
    lines = [f"base = numbers.to(tl.pointer_type({TYPES[dtype]})) + start + g.to(tl.int64) * {GROUP}"]
    lines.append("factor = tl.load(factors + layer)")
    lines += [f"x{i} = tl.load(base + {i}, mask=left > {i}, other=0.0).to(tl.float32) * factor" for i in _NUMBERS]
    return lines


def _signed() -> list[str]:
    return [f"x{i} = x{i} * -1.0" for i in _NUMBERS if SIGNS >> i & 1]


def _transformed(name: str = "x") -> list[str]:
    lines, distance = [], GROUP // 2
    while distance:
        for i in _NUMBERS:
            if not i & distance:
                one, other = f"{name}{i}", f"{name}{i + distance}"
                lines += [f"a = {one} + {other}", f"{other} = {one} - {other}", f"{one} = a"]
        distance //= 2
    return lines


def _largest() -> list[str]:
    lines = ["largest = x0.to(tl.int32, bitcast=True) & 0x7FFFFFFF"]
    return lines + [f"largest = tl.maximum(largest, x{i}.to(tl.int32, bitcast=True) & 0x7FFFFFFF)" for i in _NUMBERS[1:]]


def _power_of_two(exponent: str) -> str:
    return f"(({exponent} + 127) << 23).to(tl.float32, bitcast=True)"


def _literal(number: float) -> str:
    return repr(float(torch.tensor(number, dtype=torch.float32)))


def scales_text(dtype: torch.dtype, stochastic: bool) -> str:
    """s + LEVELS of each group, 0 for zeros; `tops` have the largest of each part, 1 << 20 where something is not finite."""
    lines = [*_ITEM, *_read(dtype), *_largest(), "found = largest"]
    lines += [
        f"shift = tl.minimum(tl.maximum((largest >> 23) - 127, {tables.LOWEST}), {tables.HIGHEST})",
        f"unit = {_power_of_two('-shift')}",
        *(f"x{i} = x{i} * unit" for i in _NUMBERS),
    ]
    if stochastic:
        lines += [*_signed(), *_transformed(), *_largest(), "bits = largest", "quarter = 4 * ((bits >> 23) - 127) - 12"]
        bounds = tables.quarters(1)
    else:
        lines += [f"e{i} = x{i} * x{i}" for i in _NUMBERS]
        distance = GROUP // 2
        while distance:
            lines += [f"e{i} = e{i} + e{i + distance}" for i in range(distance)]
            distance //= 2
        lines += ["bits = e0.to(tl.int32, bitcast=True)", "quarter = 2 * ((bits >> 23) - 127) - 12"]
        bounds = tables.NEAREST
    lines.append("mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)")
    lines += [f"quarter = quarter + (mantissa > {_literal(bound)}).to(tl.int32)" for bound in bounds]
    lines += [
        f"scale = tl.minimum(4 * shift + quarter, {4 * tables.HIGHEST})",
        f"scale = tl.where((found > 0) & (scale >= {4 * tables.LOWEST}), scale + {LEVELS}, 0)",
        "scale = tl.where(found >= 0x7F800000, 1 << 20, scale)",
        "scale = tl.where(there, scale, 0)",
        "tl.store(scratch + group, scale, mask=there)",
        "tl.atomic_max(tops + part, tl.max(scale, axis=0))",
    ]
    return _kernel("numbers, parts, regions, items, factors, scratch, tops", lines)


def bytes_text() -> str:
    lines = [
        *_ITEM,
        "top = tl.load(tops + part)",
        f"exponent = (top - {LEVELS} + 3) >> 2",
        "usual = (top > 0) & (top < (1 << 20))",
        "scale = tl.load(scratch + group, mask=there, other=0)",
        f"byte = tl.where((scale > 0) & usual, tl.maximum(255 + scale - {LEVELS} - 4 * exponent, 0), 0)",
        "tl.store(out + begin + part_count + own_group, byte.to(tl.uint8), mask=there)",
        f"of_part = tl.where(usual, exponent + {tables.BIAS}, tl.where(top > 0, {tables.NONFINITE}, {tables.ZERO}))",
        "tl.store(out + begin + own_part, of_part.to(tl.uint8))",
        # What fills up the bytes before the planes.
        "end = part_count + tl.load(regions + 7 * region + 2)",
        "place = end + tl.arange(0, 8)",
        "tl.store(out + begin + place, tl.zeros([8], tl.uint8), mask=place < payload)",
    ]
    return _kernel("parts, regions, items, scratch, tops, out", lines)


def _planes(level: str) -> list[str]:
    """`sum`: how many planes a level takes."""
    return [
        f"at = tl.minimum(tl.maximum({level} + steps + {LEVELS}, 0), {_BINS})",
        f"sum = tl.sum(tl.load(at_least + at, mask=at < {_BINS}, other=0), axis=0)",
    ]


def widths_text(stochastic: bool, clears: bool) -> str:
    """`levels` is room for the histogram of each message. `clears`: planes that nobody uses become zero."""
    steps = tables.steps_of(stochastic)
    look = [
        "i = first + tl.arange(0, BLOCK)",
        "inside = i < groups",
        "byte = tl.load(message + part_count + i, mask=inside, other=0).to(tl.int32)",
        "part = tl.load(owners + first_group + i, mask=inside, other=0)",
        "of_part = tl.load(message + (part - first_part), mask=inside, other=0).to(tl.int32)",
        "size = tl.load(parts + 6 * part + 5, mask=inside, other=0).to(tl.int32)",
        "there = byte > 0",
        f"priority = tl.where(there, byte - 255 + 3 * (of_part - {tables.BIAS}) - size, 0)",
    ]
    for_all = 0 if stochastic else tables.MOST_FOR_ALL
    count = " + ".join(
        f"((above >= {step}) | ({k} < least)).to(tl.int32)" if k < for_all else f"(above >= {step}).to(tl.int32)"
        for k, step in enumerate(steps)
    )
    lines = [
        "region = tl.program_id(0)",
        "number = tl.program_id(1)",
        "begin = tl.load(regions + 7 * region)",
        "part_count = tl.load(regions + 7 * region + 1)",
        "groups = tl.load(regions + 7 * region + 2)",
        "planes = tl.load(regions + 7 * region + 3)",
        "payload = tl.load(regions + 7 * region + 4)",
        "first_part = tl.load(regions + 7 * region + 5)",
        "first_group = tl.load(regions + 7 * region + 6)",
        "message = source + number * tl.cast(stride, tl.int64) + begin",
        f"at_least = levels + (number * tl.num_programs(0) + region) * {_BINS}",
        f"counts = tl.zeros([{_BINS}], tl.int32)",
        "for first in range(0, groups, BLOCK):",
        *("    " + line for line in look),
        f"    counts += tl.histogram(priority + {LEVELS}, {_BINS}, mask=there)",
        f"tl.store(at_least + tl.arange(0, {_BINS}), tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts)",
        "tl.debug_barrier()",
        "k = tl.arange(0, 8)",
        f"steps = tl.full([8], {steps[0]}, tl.int32)",
        *(f"steps = tl.where(k == {k}, {step}, steps)" for k, step in enumerate(steps) if k),
        f"least = tl.minimum((planes // tl.maximum(groups, 1) - 1).to(tl.int32), {for_all})",
        f"steps = tl.where(k < least, {tables.FOR_ALL}, steps)",
        f"low = tl.full([], {-LEVELS}, tl.int32)",
        f"high = tl.full([], {LEVELS}, tl.int32)",
        f"for round in range(0, {(2 * LEVELS).bit_length()}):",
        "    middle = (low + high) >> 1",
        *("    " + line for line in _planes("middle")),
        "    enough = sum <= planes",
        "    low = tl.where(enough, low, middle + 1)",
        "    high = tl.where(enough, middle, high)",
        *_planes("low"),
        "left = (planes - sum).to(tl.int32)",
        "used = tl.full([], 0, tl.int32)",
        "for first in range(0, groups, BLOCK):",
        *("    " + line for line in look),
        "    above = priority - low",
        f"    width = {count}",
        "    above = above + 1",
        f"    more = (there & (({count}) > width)).to(tl.int32)",
        "    own = tl.where(there, width + tl.where(tl.cumsum(more, axis=0) <= left, more, 0), 0)",
        "    place = used + tl.cumsum(own, axis=0) - own",
        "    tl.store(places + number * tl.cast(all_groups, tl.int64) + first_group + i, (place << 4) | own, mask=inside)",
        "    left = tl.maximum(left - tl.sum(more, axis=0), 0)",
        "    used = used + tl.sum(own, axis=0)",
    ]
    if clears:
        lines += [
            "rest = (message + payload).to(tl.pointer_type(tl.int64))",
            "for first in range(used, planes, BLOCK):",
            "    i = first + tl.arange(0, BLOCK)",
            "    tl.store(rest + i, tl.zeros([BLOCK], tl.int64), mask=i < planes)",
        ]
    lines = [line.replace("BLOCK", str(_SCAN)) for line in lines]
    return _kernel("source, stride, parts, regions, owners, levels, places, all_groups", lines)


def _bit_transposed(name: str) -> list[str]:
    lines = []
    for shift, mask in _TRANSPOSE:
        lines += [f"t = ({name} ^ ({name} >> {shift})) & {mask}", f"{name} = {name} ^ t ^ (t << {shift})"]
    return lines


_SCALE = [
    "of_part = tl.load(message + own_part).to(tl.int32)",
    "byte = tl.load(message + part_count + own_group, mask=there, other=0).to(tl.int32)",
    f"scale = tl.where(byte > 0, byte - 255 + 4 * (of_part - {tables.BIAS}), 0)",
]


def codes_text(dtype: torch.dtype, stochastic: bool) -> str:
    lines = [*_ITEM, "message = out + begin", *_SCALE, *_read(dtype)]
    lines += [
        "place = tl.load(scratch + group, mask=there, other=0)",
        "width = place & 15",
        f"unit = {_power_of_two('-(scale >> 2)')}",
        *(f"x{i} = x{i} * unit" for i in _NUMBERS),
        *_signed(),
        *_transformed(),
        "factor = tl.load(encode_factors + (scale & 3))",
    ]
    if stochastic:
        lines += ["most = ((1 << width) - 1).to(tl.float32)", "index = tl.load(keys + 5 * all_parts + part) + g * 64"]
        lines += [f"key{i} = tl.load(keys + {i} * all_parts + part)" for i in range(KEY_SIZE - 1)]
    for i in _NUMBERS:
        if stochastic:
            lines += [
                f"place_{i} = (x{i} * factor + 1.0) * (most * 0.5)",
                f"place_{i} = tl.minimum(tl.maximum(place_{i}, 0.0), most)",
                f"below = tl.floor(place_{i})",
                f"low = (index + {i}) & 0xFFFF",
                f"high = ((index + {i}) >> 16) & 0xFFFF",
            ]
            for round in range(KEY_SIZE - 1):
                lines += [
                    f"product = low * {(0x7A35, 0x6E2B)[round % 2]}",
                    f"low = (product >> 16) ^ high ^ key{round}",
                    "high = product & 0xFFFF",
                ]
            lines += [
                "noise = (((high << 14) + (low >> 2)) >> 6).to(tl.float32) * 5.9604644775390625e-08",
                f"c{i} = (below.to(tl.int32) + (noise < place_{i} - below).to(tl.int32)) << (8 - width)",
            ]
        else:
            lines += [
                f"scaled = x{i} * factor",
                "fine = tl.minimum(tl.abs(scaled), 32767.0).to(tl.int32)",
                "line = tl.load(curve + (fine >> 10))",
                "size = ((line & 0xFFFF) + (((line >> 16) * (fine & 1023)) >> 10)) >> 9",
                f"c{i} = size | tl.where(scaled < 0, 128, 0)",
            ]
    for k in range(8):
        lines.append(f"y{k} = " + " | ".join(f"(c{8 * k + j}.to(tl.int64) << {8 * j})" for j in range(8)))
        lines += _bit_transposed(f"y{k}")
    lines.append("planes = (message + payload).to(tl.pointer_type(tl.int64)) + (place >> 4)")
    for p in range(8):
        plane = " | ".join(f"(((y{k} >> {8 * (7 - p)}) & 255) << {8 * k})" for k in range(8))
        lines.append(f"tl.store(planes + {p}, {plane}, mask=there & (width > {p}))")
    arguments = "numbers, parts, regions, items, factors, scratch, out, encode_factors, curve, keys, all_parts"
    return _kernel(arguments, lines)


def numbers_text(dtype: torch.dtype, divides: bool) -> str:
    body = [
        "message = source + number * tl.cast(stride, tl.int64) + begin",
        *_SCALE,
        "place = tl.load(scratch + number * tl.cast(all_groups, tl.int64) + group, mask=there, other=0)",
        "width = place & 15",
        "planes = (message + payload).to(tl.pointer_type(tl.int64)) + (place >> 4)",
        *(f"p{p} = tl.load(planes + {p}, mask=there & (width > {p}), other=0)" for p in range(8)),
        "table = values + width * 256",
    ]
    for k in range(8):
        body.append(f"y{k} = " + " | ".join(f"(((p{p} >> {8 * k}) & 255) << {8 * (7 - p)})" for p in range(8)))
        body += _bit_transposed(f"y{k}")
        body += [f"v{8 * k + j} = tl.load(table + ((y{k} >> {8 * j}) & 255)).to(tl.int32)" for j in range(8)]
    body += _transformed("v")
    body += [
        "unit = tl.load(units + width * 4 + (scale & 3))",
        f"power = {_power_of_two('(scale >> 2)')}",
    ]
    most = _literal(tables.F32_MAX)
    for i in _NUMBERS:
        sign = "0 - " if SIGNS >> i & 1 else ""
        body += [
            f"x = ({sign}v{i}).to(tl.float32) * unit * power",
            f"x = tl.minimum(tl.maximum(x, -{most}), {most})",
            f'sum{i} = sum{i} + tl.where(of_part == {tables.NONFINITE}, float("nan"), x)',
        ]
    lines = [
        *_ITEM,
        *(f"sum{i} = tl.full([{ITEM}], -0.0, tl.float32)" for i in _NUMBERS),  # the first addend, -0.0 too, stays what it is
        "for number in range(0, messages):",
        *("    " + line for line in body),
        "factor = tl.load(factors + layer)",
        f"base = out.to(tl.pointer_type({TYPES[dtype]})) + start + g.to(tl.int64) * {GROUP}",
    ]
    for i in _NUMBERS:
        value = f"tl.div_rn(sum{i} * factor, divided)" if divides else f"sum{i} * factor"
        lines.append(f"tl.store(base + {i}, ({value}).to({TYPES[dtype]}), mask=left > {i})")
    if divides:
        lines.insert(0, f"divided = tl.full([{ITEM}], 0.0, tl.float32) + tl.cast(divisor, tl.float32)")
    arguments = "source, stride, messages, parts, regions, items, factors, scratch, all_groups, out, values, units, divisor"
    return _kernel(arguments, lines)


@lru_cache(maxsize=8)
def curve_table(device: torch.device) -> Tensor:
    """Both numbers of each segment in one: int32."""
    base, rise = tables.curve()
    return torch.tensor([low | high << 16 for low, high in zip(base, rise, strict=True)], dtype=torch.int32).to(device)


@lru_cache(maxsize=8)
def value_table(stochastic: bool, device: torch.device) -> Tensor:
    """What codes stand for, by width and by the byte that has them at its upper end: int16 [9, 256]."""
    every = tables.values(stochastic)
    bytes = torch.arange(256)
    return torch.stack([every[width, bytes >> (8 - width)] for width in range(9)]).contiguous().to(device)


class _Launch:
    """A kernel, compiled at once, to be launched with addresses and integers."""

    def __init__(self, text: str, examples: list[Any], device: torch.device, warps: int = 4) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._compiled = build(text).warmup(*examples, grid=(1,), num_warps=warps, enable_fp_fusion=False)

    def __call__(self, grid: tuple[int, int], *arguments: "Tensor | int") -> None:
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        with torch.cuda.device(self._device):
            self._compiled[*grid, 1](*given)


_U8, _I16, _I32, _I64, _F32 = torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32
_OF_WIDTHS = [_U8, 1, _I64, _I64, _I32, _I32, _I32, 1]


class TritonEncoder:
    """Numbers of a dtype to messages."""

    def __init__(self, dtype: torch.dtype, stochastic: bool, device: torch.device) -> None:
        numbers = [dtype, _I64, _I64, _I32, _F32, _I32]
        self._scales = _Launch(scales_text(dtype, stochastic), [*numbers, _I32], device)
        self._bytes = _Launch(bytes_text(), [_I64, _I64, _I32, _I32, _I32, _U8], device)
        self._widths = _Launch(widths_text(stochastic, clears=True), _OF_WIDTHS, device)
        self._codes = _Launch(codes_text(dtype, stochastic), [*numbers, _U8, _F32, _I32, _I32, 1], device)
        self._factors = tables.encode_factors(stochastic).to(device)
        self._curve = curve_table(device)

    def __call__(
        self, numbers: Tensor, out: Tensor, table: "AdaptiveTable", scratch: Tensor, factors: Tensor, keys: Tensor | None
    ) -> None:
        """`scratch`: int32, `scratch_size` of them, zeros."""
        items, regions = len(table.items), len(table.regions)
        if not items:
            return
        levels, tops = scratch[table.groups :], scratch[table.groups + regions * _BINS :]
        places = table.parts, table.regions, table.items
        self._scales((items, 1), numbers, *places, factors, scratch, tops)
        self._bytes((items, 1), *places, scratch, tops, out)
        self._widths((regions, 1), out, 0, table.parts, table.regions, table.owners, levels, scratch, table.groups)
        noise = self._curve if keys is None else keys
        self._codes(
            (items, 1), numbers, *places, factors, scratch, out, self._factors, self._curve, noise, len(table.parts)
        )  # fmt: skip


class TritonDecoder:
    """Messages to sums of a dtype."""

    def __init__(self, dtype: torch.dtype, stochastic: bool, device: torch.device) -> None:
        self._widths = _Launch(widths_text(stochastic, clears=False), _OF_WIDTHS, device)
        self._dtype, self._device = dtype, device
        self._numbers: dict[bool, _Launch] = {}
        self._values = value_table(stochastic, device)
        self._units = tables.decode_units(stochastic).to(device)

    def _launch(self, divides: bool) -> _Launch:
        if divides not in self._numbers:
            examples = [_U8, 1, 1, _I64, _I64, _I32, _F32, _I32, 1, self._dtype, _I16, _F32, 1]
            self._numbers[divides] = _Launch(numbers_text(self._dtype, divides), examples, self._device)
        return self._numbers[divides]

    def __call__(
        self,
        source: Tensor,
        out: Tensor,
        table: "AdaptiveTable",
        scratch: Tensor,
        factors: Tensor,
        divisor: int,
        messages: int,
        stride: int,
    ) -> None:
        items, regions = len(table.items), len(table.regions)
        if not items:
            return
        levels = scratch[messages * table.groups :]
        places = table.parts, table.regions
        self._widths((regions, messages), source, stride, *places, table.owners, levels, scratch, table.groups)
        self._launch(divisor != 1)(
            (items, 1), source, stride, messages, *places, table.items, factors, scratch, table.groups, out,
            self._values, self._units, divisor,
        )  # fmt: skip
