"""Statements in GCC's vector types, whose lengths preamble.py chooses.

What costs, and is avoided: a constant written into the code takes an instruction each time, one in memory none; with AVX-512, a
comparison that becomes numbers takes two more than one that selects.
"""

from typing import Any

import numpy as np
import torch

from lowp.tensor.lists.tracing import COMPARE, INFIX, Statement, Value

TYPES = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float32: "f32", torch.float64: "f64",
    torch.float16: "i16", torch.bfloat16: "i16", torch.bool: "i32", torch.uint16: "u16",
}  # fmt: skip
SCALARS = {
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float",
    torch.float64: "double", torch.bool: "uint8_t", torch.uint16: "uint16_t",
}  # fmt: skip


class Printer:
    """Expressions of statements, in vector types. A truth value is a 32-bit integer, all ones or zero."""

    def __init__(self) -> None:
        self.begin()
        self.constants: dict[tuple[str, str], int] = {}  # type and text -> place

    def begin(self) -> None:
        """Another program, whose names have nothing to do with those of the last; constants are shared."""
        self._comparisons: dict[str, tuple[str, int]] = {}  # their text, and the width of what they compare
        self._above: dict[str, str] = {}  # of comparisons of int32: is it so for one of the vector?
        self._shifted: dict[str, str] = {}  # int32 numbers that were shifted right by 16 bits: those before

    def kept(self, kind: str, text: str) -> str:
        """A constant in memory, from where instructions take it as they go. Written out, each would cost one of its own."""
        place = self.constants.setdefault((kind, text), len(self.constants))
        return f"splat<{kind}>(constant{place})"

    def declarations(self) -> list[str]:
        """Of the constants in memory, which all expressions printed so far need."""
        return [
            f'__attribute__((visibility("hidden"))) {"int32_t" if kind == "i32" else "float"} constant{place} = {text};'
            for (kind, text), place in self.constants.items()
        ]

    def literal(self, constant: Any, dtype: torch.dtype, shift: bool = False) -> str:
        kind = TYPES[dtype]
        if dtype == torch.bool:
            return f"splat<i32>({-int(bool(constant))})"
        if dtype in (torch.float32, torch.float64):
            number = float(np.float32(constant)) if dtype == torch.float32 else float(constant)
            text = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}.get(str(number), number.hex())
            text = f"({SCALARS[dtype]}){text}"
            return self.kept(kind, text) if dtype == torch.float32 else f"splat<{kind}>({text})"
        bits = dtype.itemsize * 8
        wrapped = (int(constant) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        if dtype == torch.int32 and not shift and wrapped not in (0, -1):
            return self.kept(kind, str(wrapped))
        return f"splat<{kind}>(({SCALARS[dtype]}){wrapped}LL)"

    def argument(self, argument: Any, dtype: torch.dtype) -> str:
        if not isinstance(argument, Value):
            return self.literal(argument, dtype)
        return argument.name if argument.dtype == dtype else self.converted(argument, dtype)

    def converted(self, value: Value, dtype: torch.dtype) -> str:
        source, name = value.dtype, value.name
        if source == torch.bool:
            return _converted(f"{name} & 1", dtype)
        if dtype == torch.bool:
            return _converted(f"{name} != 0", torch.int32)
        if source in _HALVES:
            single = f"{_HALVES[source]}_to_float({name})"
            return single if dtype == torch.float32 else _converted(single, dtype)
        if dtype in _HALVES:
            single = name if source == torch.float32 else _converted(name, torch.float32)
            return f"float_to_{_HALVES[dtype]}({single})"
        return f"converted<{TYPES[dtype]}>({name})"

    def any_of(self, condition: str) -> str:
        """Is a comparison (lt or gt of int32) true for an element of the vector?"""
        return self._above[condition]

    def expression(self, s: Statement) -> str:
        a = [None if x is None else self.argument(x, s.operand) for x in s.arguments] if s.operation not in _OWN else []
        match s.operation:
            case "constant":
                return self.literal(s.arguments[0], s.result.dtype)
            case "index":
                return "index"
            case "bitcast":
                return f"({TYPES[s.result.dtype]}){s.arguments[0].name}"
            case "convert" if s.result.dtype == torch.int16 and getattr(s.arguments[0], "name", None) in self._shifted:
                return f"upper_words({self._shifted[s.arguments[0].name]})"
            case "convert":
                return self.argument(s.arguments[0], s.result.dtype)
            case "look_up":
                table, index = s.arguments
                at = self.argument(index, torch.int32)
                found = f"look_up_{TYPES[s.result.dtype]}(table{table}, {at})"
                return f"-({found})" if s.result.dtype == torch.bool else found
            case "where":
                mask, yes, no = s.arguments[0].name, *(self.argument(x, s.operand) for x in s.arguments[1:])
                width = 4 if s.operand == torch.bool else s.operand.itemsize
                if mask in self._comparisons and self._comparisons[mask][1] == width:
                    return _chosen(self._comparisons[mask][0], yes, no, width)  # a mask register, never a vector
                if width != 4:
                    mask = _converted(mask, {1: torch.int8, 2: torch.int16, 8: torch.int64}[width])
                return _chosen(mask, yes, no, width)
            case "shl" | "shr" if not isinstance(s.arguments[1], Value):  # by a constant that is part of the instruction
                if s.operation == "shr" and s.arguments[1] == 16 and s.operand == torch.int32:
                    self._shifted[s.result.name] = str(a[0])
                return f"{a[0]} {INFIX[s.operation]} {self.literal(s.arguments[1], s.operand, shift=True)}"
            case operation if operation in INFIX:
                return f"{a[0]} {INFIX[operation]} {a[1]}"
            case operation if operation in COMPARE:
                text = f"{a[0]} {COMPARE[operation]} {a[1]}"
                self._comparisons[s.result.name] = (text, s.operand.itemsize)
                if s.operand == torch.int32 and operation in ("lt", "gt"):
                    self._above[s.result.name] = f"any_above({', '.join(map(str, a if operation == 'gt' else a[::-1]))})"
                return _converted(text, torch.int32)
            case "mul_high":
                return f"upper_half({a[0]}, {a[1]})"
            case "rsub":
                return f"{a[1]} - {a[0]}"
            case "fma":
                return f"fused({a[0]}, {a[1]}, {a[2]})"
            case "neg":
                return f"-{a[0]}"
            case "not":
                return f"~{a[0]}"
            case "reciprocal":
                return f"{self.literal(1.0, s.operand)} / {a[0]}"
            case "sqrt":
                return f"square_root({a[0]})"
            case "round":
                return f"nearest_integer({a[0]})"
            case "floor":
                return f"integer_below({a[0]})"
            case "abs" if s.operand == torch.float32:
                return f"(f32)((i32){a[0]} & 0x7FFFFFFF)"
            case "abs" if s.operand == torch.float64:
                return f"(f64)((i64){a[0]} & 0x7FFFFFFFFFFFFFFFLL)"
            case "abs":
                return _chosen(f"{a[0]} < 0", f"-{a[0]}", a[0], s.operand.itemsize)
            case "max" | "min":
                sign = ">" if s.operation == "max" else "<"
                return _chosen(f"({a[0]} {sign} {a[1]}) | ({a[0]} != {a[0]})", a[0], a[1], s.operand.itemsize)
            case "clamp":
                text = str(a[0])
                if a[1] is not None:
                    text = f"larger({a[1]}, {text})"  # where it is NaN, the second
                if a[2] is not None:
                    text = f"smaller({a[2]}, {text})"
                return text
        raise NotImplementedError(f"{s.operation} in C++")


class SinglePrinter(Printer):
    """The same for single numbers, between `SINGLES` of preamble.py: for what is done rarely, and is too long for vectors."""

    def kept(self, kind: str, text: str) -> str:
        return f"splat<{kind}>({text})"

    def expression(self, s: Statement) -> str:
        if s.operation == "bitcast":
            return f"seen_as<{TYPES[s.result.dtype]}>({s.arguments[0].name})"
        return super().expression(s)


def _chosen(mask: str, yes: Any, no: Any, width: int) -> str:
    """A selection among numbers of `width` bytes. Vectors of 64-bit numbers may be two registers (preamble.py)."""
    return f"CHOOSE({mask}, {yes}, {no})" if width == 8 else f"({mask}) ? {yes} : {no}"


def _converted(text: str, dtype: torch.dtype) -> str:
    return f"CONVERT({text}, {TYPES[dtype]})"


_HALVES = {torch.float16: "half", torch.bfloat16: "bfloat"}
_OWN = ("constant", "index", "bitcast", "convert", "look_up", "where", "amax")
