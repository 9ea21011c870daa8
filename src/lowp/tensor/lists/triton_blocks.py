"""Block formats as Triton kernels: one launch, each program some blocks (a tile with a row for each of them).

The arithmetic is traced (block_stages.py) and printed as functions; what stands around it is written here: where blocks lie,
the largest number of each, and codes of less than 8 bits packed in `lowp.pack`'s order. Formats with a scale for the whole
tensor have another launch before it that looks at all numbers; what it finds stays on the device. Where rounding is in doubt
about an element (stochastic rounding, quotients in float32), its program works on its blocks again, some at a time, exactly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.block_stages import BlockOperation
from lowp.tensor.carrier import CARRIERS, Carrier
from lowp.tensor.lists import triton
from lowp.tensor.lists.tracing import Program
from lowp.tensor.noise import KEY_SIZE
from lowp.tensor.packing import group, packed_size

_TILE = 2048  # elements of a program
_EACH = 16  # elements of a thread
_LONGEST = 8192  # elements of a block
_MEASURED = 8192  # elements that a program looks at

_HEAD = "\n".join(triton.IMPORTS)

_MEASURE = """

@triton.jit
def run(numbers, most, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    stored = tl.load(numbers + place, mask=place < count, other=0)
    tl.atomic_max(most, {found})
"""


Call = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int], None]


def build(operation: BlockOperation, device: torch.device) -> Call:
    """Compile an operation for a GPU. The result takes numbers, elements, scales, the tensor's scale, the noise's key (there or
    on the host), and how far neighbours in a row are apart in the order in which noise counts elements."""
    fmt = operation.program.fmt
    if fmt.size > _LONGEST:
        raise NotImplementedError(f"{fmt}: kernels on a GPU are for blocks of up to {_LONGEST} elements")
    kernel, own = triton.build(source(operation, device)), CARRIERS[operation.dtype]
    measure = None
    if fmt.tensor_scale and operation.kind != "decode":
        measure = triton.build(_HEAD + "\n".join(_LARGEST) + _MEASURE.format(found=_largest_finite(own, axis=0)))
    together = max(1, _TILE // _width(fmt.size))
    warps = min(max(together * _width(fmt.size) // (32 * _EACH), 1), 16)
    settings: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}

    def call(
        numbers: Tensor, elements: Tensor, scales: Tensor | None, whole: Tensor | None, key: Tensor | None, apart: int
    ) -> None:
        length, stored = numbers.shape[-1], numbers.view(own.storage)
        in_row = -(-length // fmt.size)
        blocks = numbers.numel() // length * in_row
        most: Tensor = numbers  # where an address is not used, any will do
        if measure is not None:
            most = torch.zeros(1, dtype=torch.int32, device=numbers.device)
            measure[(-(-numbers.numel() // _MEASURED),)](stored, most, numbers.numel(), SIZE=_MEASURED, num_warps=8)
        kernel[(-(-blocks // together),)](
            stored,
            elements.view(operation.storage if operation.kind == "quantize" else operation.element_storage),
            numbers if scales is None else scales.view(operation.scale_storage),
            numbers if whole is None else whole,
            most,
            blocks,
            length,
            in_row,
            packed_size(length, fmt.element.bits),
            *_noise(operation, key, apart, numbers),
            EVEN=length % fmt.size == 0,
            BLOCKS=together,
            **settings,
        )

    return call


def _noise(operation: BlockOperation, key: Tensor | None, apart: int, unused: Tensor) -> list[Any]:
    """Arguments of a kernel that draws: the key as an address or as numbers, whichever is there."""
    if not operation.stochastic:
        return []
    assert key is not None
    in_memory = key.device == unused.device and key.device.type != "cpu"
    return [apart, *([0] * KEY_SIZE if in_memory else key.tolist()), key if in_memory else unused, in_memory]


def _width(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << (size - 1).bit_length()


_LARGEST = [
    "",
    "",
    "@triton.jit",
    "def largest_finite(bits, SHIFT: tl.constexpr, ABOVE: tl.constexpr, AXIS: tl.constexpr):",
    "    above = tl.full([], ABOVE, tl.uint32)",
    "    found = tl.max((bits.to(tl.int32) << SHIFT).to(tl.uint32, bitcast=True) + above, axis=AXIS)",
    "    return tl.where(found >= above, (found - above) >> SHIFT, 0).to(tl.int32)",
]


def _largest_finite(own: Carrier, axis: int) -> str:
    """Of stored bits: the sign is shifted out, and a sum that infinities and NaN overflow in takes them below all others."""
    shift = 33 - 8 * own.storage.itemsize
    return f"largest_finite(stored, {shift}, {(1 << 32) - (own.infinity << shift)}, {axis})"


def source(operation: BlockOperation, device: torch.device) -> str:
    """The text of a module with the kernel `run`."""
    fmt = operation.program.fmt
    width, bits = _width(fmt.size), fmt.element.bits
    lines = [_HEAD, *_LARGEST]
    stages = operation.stages(device, on_gpu=True)
    doubts = operation.stochastic or operation.by_quotients
    for name, program in stages.items():
        lines += _function(name, program)
    keys = [f"n{i}" for i in range(KEY_SIZE)] if operation.stochastic else []
    plain = ["numbers", "elements", "scales", "whole", "most", "blocks", "length", "in_row", "bytes_in_row"]
    drawn = ["apart", *keys] if keys else []
    lines += [
        "",
        "",
        "@triton.jit",
        f"def tile(block, {', '.join(plain + drawn)}, EVEN: tl.constexpr, BLOCKS: tl.constexpr, SETTLES: tl.constexpr):",
        f"    there, lane, size = block < blocks, tl.arange(0, {width}), {fmt.size}",
        f"    begin, packed_begin = block * {fmt.size}, block * {fmt.size * bits // 8}",
        f"    inside = there[:, None]{f' & (lane < {fmt.size})[None, :]' if width > fmt.size else ''}",
        "    if not EVEN:",
        "        row = block // in_row",
        "        column = block - row * in_row",
        f"        begin = row * length + column * {fmt.size}",
        f"        packed_begin = row * bytes_in_row + column * {fmt.size * bits // 8}",
        f"        size = tl.minimum(length - column * {fmt.size}, {fmt.size})[:, None]",
        "        inside = there[:, None] & (lane[None, :] < size)",
        "    place = begin[:, None] + lane[None, :]",
    ]
    if keys:
        lines += [
            "    row = block // in_row",
            f"    first = row // apart * length * apart + row % apart + (block - row * in_row) * {fmt.size} * apart",
            "    index = first[:, None].to(tl.int32) + lane[None, :] * apart",
        ]
    lines += ["    " + line for line in (_decode(operation) if operation.kind == "decode" else _encode(operation, stages))]
    lines += ["    return doubt"] if doubts else []
    in_memory = "key, KEY_IN_MEMORY: tl.constexpr, " if keys else ""
    call = f"tile(block, {', '.join(plain + drawn)}, EVEN, BLOCKS, False)"
    lines += [
        "",
        "",
        f"@triton.jit(do_not_specialize={keys})",  # a kernel for each key that is a multiple of 16 would be a long wait
        f"def run({', '.join(plain + drawn)}, {in_memory}EVEN: tl.constexpr, BLOCKS: tl.constexpr):",
        *(["    if KEY_IN_MEMORY:"] if keys else []),
        *(f"        {name} = tl.load(key + {i})" for i, name in enumerate(keys)),
        "    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)",
        *([f"    {call}"] if not doubts else []),
    ]
    if doubts:  # few elements a thread: what is done rarely should be short
        few = max(1, _TILE // (_EACH if keys else 4) // width)
        lines += [
            f"    doubt = {call}",
            "    if doubt > 0:",
            f"        for part in range(BLOCKS // {few}):",
            f"            some = tl.program_id(0).to(tl.int64) * BLOCKS + part * {few} + tl.arange(0, {few})",
            f"            tile(some, {', '.join(plain + drawn)}, EVEN, {few}, True)",
        ]
    return "\n".join(lines) + "\n"


def _places(operation: BlockOperation) -> list[str]:
    """Where packed codes lie, and which of their bytes exist."""
    fmt = operation.program.fmt
    width, bits = _width(fmt.size), fmt.element.bits
    per_group, group_bytes = group(bits)
    lines = [
        f"byte = tl.arange(0, {width // per_group}) * {group_bytes}",
        "packed = elements + packed_begin[:, None] + byte[None, :]",
    ]
    for i in range(group_bytes):  # masks that are the same for a whole row let it be read and written in long vectors
        lines += [f"there{i} = there[:, None]"]
        lines += ["if not EVEN:"] if width == fmt.size else ["if True:"]
        lines += [f"    there{i} = there[:, None] & (byte[None, :] + {i} < (size * {bits} + 7) // 8)"]
    return lines


def _function(name: str, program: Program) -> list[str]:
    """A traced function, as one of Triton's."""
    return [
        "",
        "",
        "@triton.jit",
        f"def {name}({', '.join([v.name for v in program.elements] + _of_noise(program))}):",
        *(f"    {s.result.name} = {triton.expression(s)}" for s in program.statements),
        f"    return {', '.join(v.name for v in program.results)}",
    ]


def _of_noise(program: Program) -> list[str]:
    """What a function that draws takes behind its other arguments."""
    return ["index", *(v.name for v in program.numbers.values())] if program.numbers else []


def _encode(operation: BlockOperation, stages: dict[str, Program]) -> list[str]:
    """quantize and encode."""
    own, poisons = CARRIERS[operation.dtype], operation.program.can_poison and operation.kind == "quantize"
    whole = ", tensor_scale" if operation.program.fmt.tensor_scale else ""
    lines = [
        "stored = tl.load(numbers + place, mask=inside, other=0)",
        f"magnitude = stored.to(tl.int32) & {own.magnitude}",
        f"finite = {_largest_finite(own, axis=1)}",
    ]
    lines += ["tensor_scale = tensor_scale_of(tl.load(most))"] if whole else []
    lines += _rounded(operation, stages, whole)
    if operation.kind == "quantize":
        nan = f"tl.full([], {own.nan}, {triton.TYPES[operation.storage]})"
        lines += [f"result = tl.where(poisoned[:, None], {nan}, result)"] if poisons else []
        return [*lines, "tl.store(elements + place, result, mask=inside)"]
    lines += ["tl.store(scales + block, code, mask=there)"]
    lines += ["if tl.program_id(0) == 0:", "    tl.store(whole, tensor_scale)"] if whole else []
    return lines + (
        [*_places(operation), *_pack(operation)] if operation.packed else ["tl.store(elements + place, result, mask=inside)"]
    )


def _rounded(operation: BlockOperation, stages: dict[str, Program], whole: str) -> list[str]:
    """The scale of each block, and what its elements are rounded to; `doubt`, where there may be one, and then nothing is
    stored."""

    def call_for_scale(stage: str) -> tuple[list[str], str]:
        carried = [f"own{i}" for i in range(len(stages[stage].results) - 2)]
        return carried, f"code, poisoned, {', '.join(carried)} = {stage}(finite, tl.max(magnitude, axis=1){whole})"

    carried, block_scale = call_for_scale("block_scale_of")
    of_blocks = [f"{name}[:, None]" for name in carried]
    if not (operation.stochastic or operation.by_quotients):
        return [block_scale, f"result = element_of(stored, {', '.join(of_blocks)})"]
    unsure = "tl.max(tl.max((unsure & inside).to(tl.int32), axis=1), axis=0)"
    if operation.stochastic:  # the first of what is carried is for what is in doubt
        more = {name: ", ".join(_of_noise(stages[name])) for name in ("element_of", "settled")}
        before, settled = [block_scale], [f"result = settled(stored, {of_blocks[0]}{whole}, {more['settled']})"]
        usual = [f"result, unsure = element_of(stored, {', '.join(of_blocks[1:])}, {more['element_of']})", f"doubt = {unsure}"]
    else:  # the first says which blocks are in doubt
        exactly, exact_scale = call_for_scale("exact_scale_of")
        before, settled = [], [exact_scale, f"result = exact_element_of(stored, {', '.join(f'{n}[:, None]' for n in exactly)})"]
        usual = [block_scale, f"result, unsure = element_of(stored, {', '.join(of_blocks[1:])}{whole})"]
        usual += [f"doubt = tl.maximum({unsure}, tl.max(({carried[0]} & there).to(tl.int32), axis=0))"]
    usual += ["there, inside = there & (doubt == 0), inside & (doubt == 0)"]
    branches = ["if SETTLES:", *("    " + line for line in settled), "else:", *("    " + line for line in usual)]
    return [*before, "doubt = 0", *branches]


def _decode(operation: BlockOperation) -> list[str]:
    whole = ", tl.load(whole)" if operation.program.fmt.tensor_scale else ""
    return [
        f"unit = unit_of(tl.load(scales + block, mask=there, other=0){whole})",
        *(
            [*_places(operation), *_unpack(operation)]
            if operation.packed
            else ["codes = tl.load(elements + place, mask=inside, other=0)"]
        ),
        "tl.store(numbers + place, value_of(codes, unit[:, None]), mask=inside)",
    ]


def _pack(operation: BlockOperation) -> list[str]:
    """Codes that fill whole bytes together are taken apart (each half of the rest, again and again) and made one word."""
    bits = operation.program.fmt.element.bits
    per_group, group_bytes = group(bits)
    word = "tl.int64" if group_bytes > 3 else "tl.int32"
    folds = per_group.bit_length() - 1
    shape = f"[BLOCKS, {_width(operation.program.fmt.size) // per_group}, {', '.join(['2'] * folds)}]"
    lines = [f"code_ = tl.reshape(result.to({word}) & {(1 << bits) - 1}, {shape})"]
    names = [("code_", 0, 1)]  # name, first place, step
    while len(names) < per_group:
        lines += [f"{name}0, {name}1 = tl.split({name})" for name, *_ in names]
        names = [(f"{name}{i}", first + i * step, 2 * step) for name, first, step in names for i in (0, 1)]
    lines += [f"word = {' | '.join(f'({name} << {bits * first})' for name, first, _ in names)}"]
    for i in range(group_bytes):
        lines += [f"tl.store(packed + {i}, (word >> {8 * i}).to(tl.int8), mask=there{i})"]
    return lines


def _unpack(operation: BlockOperation) -> list[str]:
    bits = operation.program.fmt.element.bits
    per_group, group_bytes = group(bits)
    word = "tl.int64" if group_bytes > 3 else "tl.int32"
    lines = [f"word = tl.zeros([BLOCKS, {_width(operation.program.fmt.size) // per_group}], {word})"]
    for i in range(group_bytes):
        byte = f"tl.load(packed + {i}, mask=there{i}, other=0)"
        lines += [f"word |= ({byte}.to({word}) & 255) << {8 * i}"]
    names = [f"code{i}" for i in range(per_group)]
    lines += [f"code{i} = (word >> {bits * i} & {(1 << bits) - 1}).to(tl.int8)" for i in range(per_group)]
    while len(names) > 1:  # the first half of the names beside the second: the last dimension but one counts them
        half = len(names) // 2
        lines += [f"{names[i]} = tl.join({names[i]}, {names[half + i]})" for i in range(half)]
        names = names[:half]
    return [*lines, f"codes = tl.reshape(code0, [BLOCKS, {_width(operation.program.fmt.size)}])"]
