"""A traced function as a Triton kernel, for lists of tensors in a GPU's memory: one launch for all of them.

A program works on one chunk: it looks up which tensor it is of and where that tensor's memory is. (A launch for each tensor
would cost more time than the work: 160 parameters of a ResNet-50 take 90 microseconds of memory traffic and 800 of launches.)
Multiplications and additions are not fused, division and square root are correctly rounded: the same bits as on a CPU.
"""

import hashlib
import linecache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lowp.tensor.lists import four_bits
from lowp.tensor.lists.tracing import COMPARE, INFIX, Element, Program, Statement, Value

IMPORTS = ("import triton", "import triton.language as tl", "from triton.language.extra.cuda import libdevice", "", "")
TYPES = {
    torch.int8: "tl.int8", torch.int16: "tl.int16", torch.int32: "tl.int32", torch.int64: "tl.int64", torch.bool: "tl.int1",
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32", torch.float64: "tl.float64",
    torch.uint8: "tl.uint8", torch.float8_e5m2: "tl.float8e5", torch.float8_e4m3fn: "tl.float8e4nv",
}  # fmt: skip


def _literal(constant: Any, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        number = float(np.float32(constant)) if dtype == torch.float32 else float(constant)
        text = repr(number) if np.isfinite(number) else f'float("{number}")'
    else:
        bits = 1 if dtype == torch.bool else dtype.itemsize * 8
        text = str(int(constant)) if bits == 1 else str((int(constant) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1))
    return f"tl.full([], {text}, {TYPES[dtype]})"


def _argument(argument: Any, dtype: torch.dtype) -> str:
    if not isinstance(argument, Value):
        return _literal(argument, dtype)
    return argument.name if argument.dtype == dtype else f"{argument.name}.to({TYPES[dtype]})"


def expression(s: Statement) -> str:
    if s.operation in four_bits.OPERATIONS:
        return four_bits.triton_expression(s)
    a = [None if x is None else _argument(x, s.operand) for x in s.arguments] if s.operation not in _OWN else []
    match s.operation:
        case "constant":
            return _literal(s.arguments[0], s.result.dtype)
        case "index":
            return "index"
        case "bitcast":
            return f"{s.arguments[0].name}.to({TYPES[s.result.dtype]}, bitcast=True)"
        case "convert":
            return _argument(s.arguments[0], s.result.dtype)
        case "look_up":
            table, index = s.arguments
            found = f"tl.load(table{table} + {_argument(index, torch.int32)})"
            return f"{found} != 0" if s.result.dtype == torch.bool else found
        case "where":
            yes, no = (_argument(x, s.operand) for x in s.arguments[1:])
            return f"tl.where({s.arguments[0].name}, {yes}, {no})"
        case "amax":
            return f"tl.max(tl.where(inside, {s.arguments[0].name}, 0.0), axis=1, keep_dims=True)"
        case "div":
            return f"tl.div_rn({a[0]}, {a[1]})" if s.operand == torch.float32 else f"{a[0]} / {a[1]}"
        case operation if operation in INFIX:
            return f"{a[0]} {INFIX[operation]} {a[1]}"
        case operation if operation in COMPARE:
            return f"{a[0]} {COMPARE[operation]} {a[1]}"
        case "rsub":
            return f"{a[1]} - {a[0]}"
        case "fma":
            return f"tl.fma({a[0]}, {a[1]}, {a[2]})"
        case "neg":  # Triton's minus is 0 - x, which makes 0 of 0 where -0 is right
            return f"{a[0]} * {_literal(-1, s.operand)}"
        case "not":
            return f"~{a[0]}"
        case "sqrt":
            return f"tl.sqrt_rn({a[0]})" if s.operand == torch.float32 else f"tl.sqrt({a[0]})"
        case "reciprocal":  # not rounded correctly: to some 22 bits
            return f"1.0 / {a[0]}"
        case "round":
            return f"libdevice.rint({a[0]})"
        case "floor":
            return f"tl.floor({a[0]})"
        case "abs":
            return f"tl.abs({a[0]})"
        case "max" | "min":
            name = "tl.maximum" if s.operation == "max" else "tl.minimum"
            nan = ", propagate_nan=tl.PropagateNan.ALL" if s.operand.is_floating_point else ""
            return f"{name}({a[0]}, {a[1]}{nan})"
        case "clamp":
            nan = ", propagate_nan=tl.PropagateNan.ALL" if s.operand.is_floating_point else ""
            text = str(a[0])
            if a[1] is not None:
                text = f"tl.maximum({text}, {a[1]}{nan})"
            return text if a[2] is None else f"tl.minimum({text}, {a[2]}{nan})"
    raise NotImplementedError(f"{s.operation} in Triton")


_STRETCH = (
    "    begin = tl.multiple_of(begin, SIZE)",
    "    place = begin + tl.arange(0, SIZE)",
    "    index = place.to(tl.int32)",
    "    inside = place < end",
    "    full = begin + SIZE <= end",
)
_BLOCKS = (
    "    width = tl.load(widths + tensor)",
    "    row = tl.arange(0, ROWS)[:, None]",
    "    lane = tl.arange(0, SIZE)[None, :]",
    "    there = begin + row * width < end",
    "    block = begin // width + row",
    "    place = begin + row * width + lane",
    "    index = place.to(tl.int32)",
    "    inside = (lane < width) & there",
    "    full = (width == SIZE) & (begin + ROWS * SIZE <= end)",
)
_OWN = ("constant", "index", "bitcast", "convert", "look_up", "where", "amax")


def source(
    program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], reductions: tuple[str, ...], tables: int
) -> str:
    """The Python text of a module with the kernel `run`.

    The program is written twice: for chunks that are full, where memory is read and written in long vectors, and, with masks,
    for the last chunk of a tensor. A chunk of blocks is ROWS of them, one below the other, each of up to SIZE elements; it is
    full if there are as many, of exactly that length.
    """
    of_blocks = any(e.of_block for e in elements)
    names = [*(v.name for v in program.scalars.values()), *(f"table{i}" for i in range(tables))]
    lines = [
        *IMPORTS,
        "@triton.jit",
        f"def run(pointers, lengths, widths, numbers, tensors, columns, {''.join(name + ', ' for name in names)}"
        "reduced, skip, limit, chunk_tensor, chunk_start, SIZE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):",
        "    if tl.load(skip) >= limit:",
        "        return",
        "    chunk = tl.program_id(0)",
        "    tensor = tl.load(chunk_tensor + chunk)",
        "    begin = tl.load(chunk_start + chunk)",
        "    end = tl.load(lengths + tensor)",
    ]
    lines += _BLOCKS if of_blocks else _STRETCH
    for i, e in enumerate(elements):
        lines.append(f"    p{i} = tl.load(pointers + tensor * columns + {i}).to(tl.pointer_type({TYPES[e.dtype]}))")
        if not e.of_block:
            lines += ["    if ALIGNED:", f"        p{i} = tl.multiple_of(p{i}, 16)"]
    lines += [f"    {v.name} = tl.load(numbers + {place} * tensors + tensor)" for place, v in program.numbers.items()]
    full = ["    if full:", *(["        place = tl.multiple_of(begin, SIZE) + row * SIZE + lane"] if of_blocks else [])]
    for head, mask in ((full, False), (["    else:"], True)):
        body = _body(program, elements, writes, reductions, mask)
        lines += [*head, *("        " + line for line in body)]
    return "\n".join(lines) + "\n"


def _body(
    program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], reductions: tuple[str, ...], masked: bool
) -> list[str]:
    lines = []
    needed = {a.name for s in program.statements for a in s.arguments if isinstance(a, Value)}
    needed |= {v.name for v in program.results}
    for i, e in enumerate(elements):
        if f"x{i}" in needed:
            place, there = ("block", "there") if e.of_block else ("place", "inside")
            lines.append(f"x{i} = tl.load(p{i} + {place}{f', mask={there}, other=0' if masked else ''})")
    lines += [f"{s.result.name} = {expression(s)}" for s in program.statements]
    for i, v in zip(writes, program.results, strict=False):
        if elements[i].of_block:
            one = f"tl.max({v.name} + tl.zeros_like(index), axis=1, keep_dims=True).to({TYPES[elements[i].dtype]})"
            lines.append(f"tl.store(p{i} + block, {one}{', mask=there' if masked else ''})")
        else:
            lines.append(f"tl.store(p{i} + place, {v.name}{', mask=inside' if masked else ''})")
    for i, (kind, v) in enumerate(zip(reductions, program.results[len(writes) :], strict=True)):
        amount = _argument(v, torch.int32 if kind == "max" else torch.int64)
        amount = f"tl.where(inside, {amount}, 0)" if masked else amount
        over, atomic = ("max", "max") if kind == "max" else ("sum", "add")
        lines.append(f"tl.atomic_{atomic}(reduced + {i} * tensors + tensor, tl.{over}({amount}).to(tl.int64))")
    return lines


def build(text: str) -> Any:
    """The kernel as a Triton function. Triton asks Python for a kernel's source, and Python finds it in linecache: no file."""
    name = "lowp_" + hashlib.sha256(text.encode()).hexdigest()[:32]
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(name)
    exec(compile(text, file, "exec"), module.__dict__)  # what we have just printed
    return module.run
