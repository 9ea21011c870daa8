"""From a Python function of tensors to the list of statements that a printer writes down.

The function is elementwise torch code, the same that runs eagerly. `make_fx` records what it does to small examples; here the
record is checked and cleaned: what remains is a sequence of operations on values of known type, each a *number of the element*
(or of its block, after `amax`), with constants folded in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EXAMPLE = 64  # elements; any number will do


@dataclass(frozen=True)
class Element:
    """An argument with one number for each element, or for each block of elements: the dtype in which it is stored."""

    dtype: torch.dtype
    of_block: bool = False


@dataclass(frozen=True)
class Value:
    """A variable of the program: its name and the dtype of its numbers."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Statement:
    """`result = operation(*arguments)`; arguments are values, or constants that take their type from `operand`."""

    operation: str
    result: Value
    arguments: tuple[Any, ...]
    operand: torch.dtype  # in which the operation is carried out


@dataclass(frozen=True)
class Program:
    """`elements`, `numbers` and `scalars` are the variables read; `results` those that the function returns."""

    elements: tuple[Value, ...]
    numbers: dict[int, Value]
    scalars: dict[int, Value]
    statements: tuple[Statement, ...]
    results: tuple[Value, ...]


INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SAME = {"view.default", "detach.default", "alias.default", "clone.default", "expand.default", "lift_fresh_copy.default"}
_FILLED = {"zeros_like.default": 0, "ones_like.default": 1}
_OPERATIONS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "sqrt": "sqrt", "neg": "neg", "abs": "abs", "rsub": "rsub",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not", "logical_and": "and",
    "logical_or": "or", "logical_not": "not", "__lshift__": "shl", "__rshift__": "shr", "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "where": "where",
    "clamp": "clamp", "maximum": "max", "minimum": "min", "round": "round", "floor": "floor", "_to_copy": "convert",
    "amax": "amax", "index": "look_up",
}  # fmt: skip


def trace(
    function: Callable[..., Sequence[Tensor]],
    elements: Sequence[Element],
    numbers: int,
    scalars: int,
    tables: Sequence[Tensor],
    device: torch.device,
) -> Program:
    """Record `function(*elements, numbers, scalars, tables)`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    arguments = [torch.ones(1, 1 if e.of_block else EXAMPLE, dtype=e.dtype, device=device) for e in elements]
    arguments.append(torch.ones(numbers, dtype=torch.int32, device=device))
    arguments.append(torch.ones(scalars, dtype=torch.float32, device=device))

    def call(*flat: Tensor) -> tuple[Tensor, ...]:
        count = len(elements) + 2
        return tuple(function(*flat[:count], flat[count:]))

    with torch.inference_mode(False), torch.no_grad():
        graph = make_fx(call)(*arguments, *tables).graph
    return _Reader(len(elements), len(tables)).read(graph)


class _Reader:
    """Walks through a graph once."""

    def __init__(self, elements: int, tables: int) -> None:
        self._kinds = ["element"] * elements + ["numbers", "scalars"] + ["table"] * tables
        self._known: dict[Any, Any] = {}  # node -> Value, constant, or ("numbers" | "scalars" | "table", index)
        self._numbers: dict[int, Value] = {}
        self._scalars: dict[int, Value] = {}
        self._statements: list[Statement] = []

    def read(self, graph: Any) -> Program:
        elements: list[Value] = []
        results: tuple[Value, ...] = ()
        kinds = iter(self._kinds)
        first_table = self._kinds.index("table") if "table" in self._kinds else 0
        for position, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                kind = next(kinds)
                if kind == "element":
                    self._known[node] = Value(f"x{len(elements)}", node.meta["val"].dtype)
                    elements.append(self._known[node])
                else:
                    self._known[node] = (kind, position - first_table)
            elif node.op == "call_function":
                self._known[node] = self._call(node)
            elif node.op == "output":
                results = tuple(self._as_value(result) for result in node.args[0])
            else:
                raise NotImplementedError(f"{node.op} in an elementwise function: {node.format_node()}")
        statements = _needed(_short_roots(self._statements), results)
        return Program(tuple(elements), self._numbers, self._scalars, statements, results)

    def _as_value(self, node: Any) -> Value:
        known = self._known[node]
        if isinstance(known, Value):
            return known
        return self._emit("constant", node, (known,), node.meta["val"].dtype)

    def _emit(self, operation: str, node: Any, arguments: tuple, operand: torch.dtype) -> Value:
        result = Value(f"v{len(self._statements)}", node.meta["val"].dtype)
        self._statements.append(Statement(operation, result, arguments, operand))
        return result

    def _call(self, node: Any) -> Any:
        name = str(node.target).removeprefix("aten.")
        first = self._known.get(node.args[0]) if node.args and hasattr(node.args[0], "op") else None
        if name in _SAME:
            return first
        if name in _FILLED:
            return _FILLED[name]
        if name == "full_like.default":
            return node.args[1]
        if name == "full.default":
            return node.args[1]
        if name == "select.int":
            assert isinstance(first, tuple), "only numbers and scalars are looked up by place"
            kind, place = first[0], node.args[2]
            found = self._numbers if kind == "numbers" else self._scalars
            return found.setdefault(place, Value(f"{kind[0]}{place}", node.meta["val"].dtype))
        if name.startswith("arange"):
            return self._emit("index", node, (), torch.int32)
        if name == "view.dtype":
            return self._emit("bitcast", node, (first,), node.args[0].meta["val"].dtype)
        operation = _OPERATIONS.get(name.split(".")[0])
        if operation is None:
            raise NotImplementedError(f"aten.{name} is not among the elementwise operations that can be printed")
        if (node.kwargs and operation != "convert") or (operation == "rsub" and len(node.args) > 2):
            raise NotImplementedError(f"aten.{name} with {', '.join(node.kwargs) or 'alpha'} cannot be printed")
        if operation == "look_up":
            assert isinstance(first, tuple)
            (index,) = node.args[1]
            return self._emit(operation, node, (first[1], self._known[index]), torch.int32)
        arguments = [self._known[a] if hasattr(a, "op") else a for a in node.args]
        if operation == "clamp":
            low, high = (*arguments[1:], None, None)[:2]
            arguments = [arguments[0], low, high]
        elif operation == "amax":
            arguments = arguments[:1]
        if operation == "convert":
            operand = node.args[0].meta["val"].dtype
        elif operation in COMPARE:
            operand = torch.result_type(*(_alike(a.meta["val"]) if hasattr(a, "op") else a for a in node.args))
        else:
            operand = node.meta["val"].dtype
        if operation != "convert" and operand in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"aten.{name} of {operand}: arithmetic is in float32, 16 bits are for storage")
        return self._emit(operation, node, tuple(arguments), operand)


def _alike(example: Tensor) -> Tensor:
    """Another tensor of that type: examples that were recorded at different times do not meet in one operation."""
    return torch.empty(example.shape, dtype=example.dtype, device="meta")


def _short_roots(statements: list[Statement]) -> list[Statement]:
    """A float32's square root taken in float64 and rounded is the correctly rounded one, which chips have an instruction for.

    (It is written with the detour because torch.sqrt itself, on a CPU, is one unit off for one number in two hundred.)
    """
    made_by = {s.result.name: s for s in statements}

    def short(s: Statement) -> Statement:
        if s.operation != "convert" or s.operand != torch.float64 or s.result.dtype != torch.float32:
            return s
        root = made_by.get(s.arguments[0].name)
        if root is None or root.operation != "sqrt":
            return s
        widened = made_by.get(root.arguments[0].name)
        if widened is None or widened.operation != "convert" or widened.operand != torch.float32:
            return s
        return Statement("sqrt", s.result, widened.arguments, torch.float32)

    return [short(s) for s in statements]


def fused(program: Program) -> Program:
    """Products of floats that nobody reads but one sum become one operation with it, which rounds once.

    The same bits where products are exact; elsewhere other ones, which the caller must want.
    """
    made_by = {s.result.name: s for s in program.statements if s.operation == "mul" and s.operand.is_floating_point}
    reads = [a.name for s in program.statements for a in s.arguments if isinstance(a, Value)]
    reads += [value.name for value in program.results]

    def fuse(s: Statement) -> Statement:
        if s.operation != "add" or not all(isinstance(a, Value) for a in s.arguments):
            return s
        for product, other in (s.arguments, s.arguments[::-1]):
            if product.name in made_by and reads.count(product.name) == 1:
                return Statement("fma", s.result, (*made_by[product.name].arguments, other), s.operand)
        return s

    statements = _needed([fuse(s) for s in program.statements], program.results)
    return Program(program.elements, program.numbers, program.scalars, statements, program.results)


def _needed(statements: Sequence[Statement], results: tuple[Value, ...]) -> tuple[Statement, ...]:
    """Without what nobody reads."""
    read = {value.name for value in results}
    kept = []
    for s in reversed(statements):
        if s.result.name in read:
            kept.append(s)
            read |= {a.name for a in s.arguments if isinstance(a, Value)}
    return tuple(reversed(kept))
