"""A traced function of 32-bit numbers as NVIDIA's assembly: one instruction, as far as a compiler around it is concerned.

Why, where there is Triton: inductor counts operations. A value of more than 100 goes to memory and comes back, and so does one
of more than 30 that is read twice; four quantizers, with which a step of training rounds errors between two layers, are 80
instructions. They take no longer than the memory they save.
"""

import struct
from typing import Any

import torch

from lowp.tensor.lists.tracing import COMPARE, Program, Statement, Value

# Those of `nearest_in_floats`, and their like
_INTEGERS = {"and": "and.b32", "or": "or.b32", "max": "max.s32", "min": "min.s32"}
_FLOATS = {"add": "add.rn.f32", "sub": "sub.rn.f32", "mul": "mul.rn.f32", "fma": "fma.rn.f32", "abs": "abs.f32"}
_TABLES = {torch.int32: _INTEGERS, torch.float32: _FLOATS}


def assembly(program: Program) -> str:
    """The function of one number, in a line: $1 comes in, $0 goes out."""
    registers: dict[str, str] = {program.elements[0].name: "$1"}
    lines: list[str] = []
    for statement in program.statements:
        name = f"lowp_{statement.result.name}"
        registers[statement.result.name] = name
        lines.append(f".reg .{'pred' if statement.result.dtype == torch.bool else 'b32'} {name}")
        lines += _instructions(statement, registers, name)
    lines.append(f"mov.b32 $0, {registers[program.results[0].name]}")
    return "{ " + "; ".join(lines) + "; }"


def _instructions(s: Statement, registers: dict[str, str], result: str) -> list[str]:
    def operand(argument: Any, dtype: torch.dtype) -> str:
        if not isinstance(argument, Value):
            return _literal(argument, dtype)
        if argument.dtype != dtype:
            raise NotImplementedError(f"{argument.dtype} as {dtype} in assembly")
        return registers[argument.name]

    first = s.arguments[0]
    if s.operation == "bitcast":
        return [f"mov.b32 {result}, {operand(first, s.operand)}"]
    if s.operation == "constant":
        return [f"mov.b32 {result}, {_literal(first, s.result.dtype)}"]
    if s.operation == "where":
        yes, no = (operand(x, s.operand) for x in s.arguments[1:])
        return [f"selp.b32 {result}, {yes}, {no}, {registers[first.name]}"]
    arguments = [None if x is None else operand(x, s.operand) for x in s.arguments]
    if s.operation in COMPARE:
        kind = "f32" if s.operand == torch.float32 else "s32"
        name = "neu" if s.operation == "ne" and kind == "f32" else s.operation  # what differs from NaN is everything
        return [f"setp.{name}.{kind} {result}, {arguments[0]}, {arguments[1]}"]
    table = _TABLES.get(s.operand, {})
    if s.operation == "clamp":
        lines = []
        for name, bound in (("max", arguments[1]), ("min", arguments[2])):
            if bound is not None:
                lines.append(f"{table[name]} {result}, {result if lines else arguments[0]}, {bound}")
        return lines
    if s.operation not in table:
        raise NotImplementedError(f"{s.operation} of {s.operand} in assembly")
    return [f"{table[s.operation]} {result}, {', '.join(str(argument) for argument in arguments)}"]


def _literal(number: Any, dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"
    return str((int(number) + (1 << 31)) % (1 << 32) - (1 << 31))
