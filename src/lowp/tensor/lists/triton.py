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

from lowp.tensor.grid_words import stochastic_rank_in_assembly
from lowp.tensor.lists import byte_codes, four_bits
from lowp.tensor.lists.tracing import COMPARE, INFIX, Element, Program, Statement, Value
from lowp.tensor.noise import philox_in_assembly

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
    if s.operation in byte_codes.OPERATIONS:
        return byte_codes.triton_expression(s)
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
            return f"tl.max({s.arguments[0].name}, axis=1, keep_dims=True)"
        case "div" if not s.operand.is_floating_point:
            return f"{a[0]} // {a[1]}"  # toward zero
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
        case "sum_cut":  # 2^23 and the whole part of a sum (grid_words.encode_by_words)
            text = "{ .reg .f32 t; add.rz.f32 t, $1, $2; add.rz.f32 $0, t, 0f4B000000; }"
            return f'tl.inline_asm_elementwise("{text}", "=f,f,f", [{a[0]}, {a[1]}], dtype=tl.float32, is_pure=True, pack=1)'
        case operation if operation.startswith("stochastic_rank"):
            text = stochastic_rank_in_assembly(operation)
            given = ", ".join(argument.name for argument in s.arguments)
            return f'tl.inline_asm_elementwise("{text}", "=r,f,r", [{given}], dtype=tl.int32, is_pure=True, pack=1)'
        case "philox0" | "philox1":
            constraints = "=r" + ",r" * len(a)
            text = philox_in_assembly(s.operation, len(a) - 1)
            arguments = ", ".join(map(str, a))
            return f'tl.inline_asm_elementwise("{text}", "{constraints}", [{arguments}], dtype=tl.int32, is_pure=True, pack=1)'
        case "reciprocal":  # an error of up to 2^-23; of subnormal numbers, infinity
            text = '"rcp.approx.ftz.f32 $0, $1;", "=f,f"'
            return f"tl.inline_asm_elementwise({text}, [{a[0]}], dtype=tl.float32, is_pure=True, pack=1)"
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


_OWN = ("constant", "index", "bitcast", "convert", "look_up", "where", "amax")


def source(
    program: Program,
    elements: tuple[Element, ...],
    writes: tuple[int, ...],
    reductions: tuple[str, ...],
    tables: int,
    aside: str = "",
) -> str:
    """The Python text of a module with the kernel `run`.

    A chunk is up to STEPS times ROWS * SIZE elements of one tensor; what a tensor has of its own is looked up once for all of
    them. ROWS is 1 but for blocks, which lie one below the other, each of up to SIZE elements. The program is written twice:
    for steps that are full (all their elements are there; blocks have exactly SIZE elements), where memory is read and written
    in long vectors, each step's numbers while those of the step before are computed; and, with masks, for the rest.
    """
    of_blocks = any(e.of_block for e in elements)
    names = [*(v.name for v in program.scalars.values()), *(f"table{i}" for i in range(tables))]
    lines = [
        *IMPORTS,
        "@triton.jit",
        f"def run(pointers, lengths, widths, numbers, tensors, columns, {''.join(name + ', ' for name in names)}"
        "reduced, skip, aside, limit, chunk_tensor, chunk_start, SIZE: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, "
        "ALIGNED: tl.constexpr):",
        "    chunk = tl.program_id(0)",
        "    known = tl.load(skip)",
        "    tensor = tl.load(chunk_tensor + chunk)",
        "    begin = tl.load(chunk_start + chunk)",
        "    end = tl.load(lengths + tensor)",
        *(["    width = tl.load(widths + tensor).to(tl.int32)"] if of_blocks else []),
    ]
    for i, e in enumerate(elements):
        lines.append(f"    p{i} = tl.load(pointers + tensor * columns + {i}).to(tl.pointer_type({TYPES[e.dtype]}))")
        if not e.of_block:
            lines += ["    if ALIGNED:", f"        p{i} = tl.multiple_of(p{i}, 16)"]
    lines += [f"    {v.name} = tl.load(numbers + {place} * tensors + tensor)" for place, v in program.numbers.items()]
    # Many programs have one address, which takes their atomics one after the other. What was found before shows that most of
    # these are not needed. It is read now, so that nothing waits for it at the end.
    lines += [
        f"    before{i} = tl.load(reduced + {i} * tensors + tensor)" for i, kind in enumerate(reductions) if kind == "max"
    ]
    lines += ["    before_aside = tl.load(aside)"] if aside == "most" else []
    lines += [
        *(["    if chunk == 0:", "        tl.store(aside, known)"] if aside == "skip" else []),
        "    if known >= limit:",  # after all loads that do not depend on it: they wait together
        "        return",
        "    left = tl.minimum(end - begin, STEPS * ROWS * SIZE).to(tl.int32)",
        "    full = left // (ROWS * SIZE)",
        *(["    if width != SIZE:", "        full = 0"] if of_blocks else []),
    ]
    lines += ["    " + line for line in _full(program, elements, writes, reductions, aside, of_blocks)]
    lines += ["    " + line for line in _rest(program, elements, writes, reductions, aside, of_blocks)]
    return "\n".join(lines) + "\n"


def _look_up(s: Statement) -> str | None:
    """An entry of a table, by an instruction of ours. For a load of its own Triton has another number of elements a thread, and
    passes indices and entries from thread to thread through shared memory."""
    if s.operation != "look_up" or s.result.dtype not in (torch.int32, torch.int64):
        return None
    table, index = s.arguments
    bits, kind = (32, "r") if s.result.dtype == torch.int32 else (64, "l")
    address = f"(table{table} + {_argument(index, torch.int32)}).to(tl.int64)"
    text = f'"ld.global.nc.b{bits} $0, [$1];", "={kind},l"'
    return f"tl.inline_asm_elementwise({text}, [{address}], dtype={TYPES[s.result.dtype]}, is_pure=True, pack=1)"


def _needed(program: Program) -> list[int]:
    """The elements that are read."""
    names = {a.name for s in program.statements for a in s.arguments if isinstance(a, Value)}
    names |= {v.name for v in program.results}
    return [i for i, v in enumerate(program.elements) if v.name in names]


def _full(
    program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], reductions: tuple, aside: str, of_blocks: bool
) -> list[str]:
    lines = []
    for i, e in enumerate(elements):
        lines.append(f"b{i} = p{i} + {'begin // SIZE' if e.of_block else 'begin // SIZE * SIZE'}")
    if of_blocks:
        lines += ["row = tl.arange(0, ROWS)[:, None]", "lane = row * SIZE + tl.arange(0, SIZE)[None, :]"]
    else:
        lines += ["lane = tl.arange(0, SIZE)"]
    needed = _needed(program)
    lines += [f"x{i} = tl.load(b{i} + {'row' if elements[i].of_block else 'lane'}, mask=full > 0)" for i in needed]
    lines += ["for step in range(full):"]
    inner = []
    for i in needed:
        ahead = "(step + 1) * ROWS + row" if elements[i].of_block else "(step + 1) * (ROWS * SIZE) + lane"
        inner += ["if STEPS > 1:", f"    y{i} = tl.load(b{i} + ({ahead}), mask=step + 1 < full)"]
    inner += ["index = begin.to(tl.int32) + step * (ROWS * SIZE) + lane"]
    inner += [f"{s.result.name} = {_look_up(s) or expression(s)}" for s in program.statements]
    inner += _stored(program, elements, writes, "b", "step * (ROWS * SIZE) + lane", "step * ROWS + row", False)
    inner += _reduced(program, len(writes), reductions, aside, False)
    inner += [line for i in needed for line in ("if STEPS > 1:", f"    x{i} = y{i}")]
    return [*lines, *("    " + line for line in inner)]


def _rest(
    program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], reductions: tuple, aside: str, of_blocks: bool
) -> list[str]:
    if of_blocks:
        lines = [
            "column = tl.arange(0, SIZE)[None, :]",
            "first = begin.to(tl.int32) // width",
            "each = ROWS * width",
            "left = tl.minimum(end - begin, STEPS * each).to(tl.int32)",
        ]
        inner = [
            "there = begin + (step * ROWS + row) * width < end",
            "block = first + step * ROWS + row",
            "place = begin + (step * ROWS + row) * width + column",
            "inside = (column < width) & there",
        ]
    else:
        lines = ["each = SIZE"]
        inner = ["place = begin + step * SIZE + tl.arange(0, SIZE)", "inside = place < end"]
    inner += ["index = place.to(tl.int32)"]
    for i in _needed(program):
        place, there = ("block", "there") if elements[i].of_block else ("place", "inside")
        inner.append(f"x{i} = tl.load(p{i} + {place}, mask={there}, other=0)")
    for s in program.statements:
        text = _look_up(s) or expression(s)
        if s.operation == "amax":
            text = text.replace(s.arguments[0].name, f"tl.where(inside, {s.arguments[0].name}, 0.0)")
        inner.append(f"{s.result.name} = {text}")
    inner += _stored(program, elements, writes, "p", "place", "block", True)
    inner += _reduced(program, len(writes), reductions, aside, True)
    return [*lines, "for step in range(full, (left + each - 1) // each):", *("    " + line for line in inner)]


def _stored(
    program: Program, elements: tuple[Element, ...], writes: tuple[int, ...], base: str, place: str, block: str, masked: bool
) -> list[str]:
    lines = []
    of_block = _of_blocks(program, elements)
    for i, v in zip(writes, program.results, strict=False):
        if elements[i].of_block:
            one = v.name if v.name in of_block else f"tl.max({v.name} + tl.zeros_like(index), axis=1, keep_dims=True)"
            lines.append(
                f"tl.store({base}{i} + ({block}), {one}.to({TYPES[elements[i].dtype]}){', mask=there' if masked else ''})"
            )
        else:
            lines.append(f"tl.store({base}{i} + ({place}), {v.name}{', mask=inside' if masked else ''})")
    return lines


def _of_blocks(program: Program, elements: tuple[Element, ...]) -> set[str]:
    """The values that have one number for each block."""
    found = {v.name for v, e in zip(program.elements, elements, strict=True) if e.of_block}
    alike = found | {v.name for v in (*program.numbers.values(), *program.scalars.values())}
    for s in program.statements:
        arguments = {a.name for a in s.arguments if isinstance(a, Value)}
        if s.operation == "amax" or (arguments <= alike and arguments & found):
            found.add(s.result.name)
            alike.add(s.result.name)
        elif arguments <= alike and s.operation != "index":
            alike.add(s.result.name)
    return found


def _reduced(program: Program, writes: int, reductions: tuple, aside: str, masked: bool) -> list[str]:
    lines = []
    for i, (kind, v) in enumerate(zip(reductions, program.results[writes:], strict=True)):
        amount = _argument(v, torch.int32 if kind == "max" else torch.int64)
        amount = f"tl.where(inside, {amount}, 0)" if masked else amount
        over, atomic = ("max", "max") if kind == "max" else ("sum", "add")
        lines.append(f"found{i} = tl.{over}({amount}).to(tl.int64)")
        mask = f", mask=found{i} > before{i}" if kind == "max" else ""
        lines.append(f"tl.atomic_{atomic}(reduced + {i} * tensors + tensor, found{i}{mask}, sem='relaxed')")
        if i == 0 and aside == "most":
            lines.append("tl.atomic_max(aside, found0, mask=found0 > before_aside, sem='relaxed')")
    return lines


def build(text: str) -> Any:
    """The kernel as a Triton function. Triton asks Python for a kernel's source, and Python finds it in linecache: no file."""
    name = "lowp_" + hashlib.sha256(text.encode()).hexdigest()[:32]
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(name)
    exec(compile(text, file, "exec"), module.__dict__)  # what we have just printed
    return module.run
