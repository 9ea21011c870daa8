"""From a Python function of tensors to the list of statements that a printer writes down.

The function is elementwise torch code, the same that runs eagerly. It is called on small examples, and every operation that
torch carries out is recorded. The result is a sequence of operations on values of known type, each a *number of the element*
(or of its block, after `amax`), with constants folded in. (`make_fx` records too, but imports torch's compiler: two seconds.)
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.compat import TorchDispatchMode
from lowp.tensor.backend import backend_of, printing

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
    "amax": "amax", "index": "look_up", "reciprocal": "reciprocal",
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
    arguments = [torch.ones(1, 1 if e.of_block else EXAMPLE, dtype=e.dtype, device=device) for e in elements]
    own = torch.ones(numbers, dtype=torch.int32, device=device)
    shared = torch.ones(scalars, dtype=torch.float32, device=device)
    recorder = _TracingMode(arguments, own, shared, tables)
    before, _now.recorder = getattr(_now, "recorder", None), recorder
    try:
        with torch.inference_mode(False), torch.no_grad(), printing(), recorder:
            results = tuple(function(*arguments, own, shared, tuple(tables)))
    finally:
        _now.recorder = before
    return recorder.program(results)


_now = threading.local()  # `recorder`, where this thread is tracing


def shortcut(
    usual: Callable[[], Tensor],
    general: Callable[[], Tensor],
    unless: Callable[[], Tensor],
    numbers: Tensor,
    on_gpu: bool = False,
) -> Tensor:
    """`general()`, which may be replaced by `usual()` for elements for which `unless()` is false.

    A list's kernel on a CPU computes `usual`, and `general` only for vectors of elements of which one needs it. So the
    condition should be rare. On a GPU `general` is computed alone, unless `on_gpu` says that a branch pays there: then all of
    a program's elements take the general way where one of them needs it (parts_triton.py).
    """
    recorder = getattr(_now, "recorder", None)
    if recorder is None or backend_of(numbers).vectors == on_gpu:
        return general()
    return recorder.shortcut(unless(), usual(), general())


def record(operation: str, dtype: torch.dtype, *arguments: Tensor) -> Tensor:
    """An operation of its own name, which the printer must know. For functions that are being traced."""
    recorder = _now.recorder
    result = torch.empty_like(arguments[0], dtype=dtype)
    recorder.know_result(result, operation, arguments)
    return result


def has_shortcuts(program: Program) -> bool:
    return any(s.operation == "shortcut" for s in program.statements)


def usual_and_general(program: Program) -> tuple[Program, tuple[Value, ...], Program]:
    """Of a program with shortcuts: the one that takes them all, their conditions, and the one that takes none."""
    found = [s for s in program.statements if s.operation == "shortcut"]
    conditions: tuple[Value, ...] = tuple(s.arguments[0] for s in found)

    def taken(way: int, results: tuple[Value, ...]) -> Program:
        statements = [
            Statement("convert", s.result, (s.arguments[way],), s.operand) if s.operation == "shortcut" else s
            for s in program.statements
        ]
        return Program(program.elements, program.numbers, program.scalars, needed(statements, results), program.results)

    return taken(1, (*program.results, *conditions)), conditions, taken(2, program.results)


class _TracingMode(TorchDispatchMode):
    """Takes down what is done to the arguments."""

    def __init__(self, elements: Sequence[Tensor], numbers: Tensor, scalars: Tensor, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self._elements = tuple(Value(f"x{i}", element.dtype) for i, element in enumerate(elements))
        self._known: dict[int, Any] = {}  # a tensor's id -> Value, constant, or ("numbers" | "scalars" | "table", index)
        self._alive: list[Tensor] = []  # so that an id stays a tensor's own
        self._numbers: dict[int, Value] = {}
        self._scalars: dict[int, Value] = {}
        self._statements: list[Statement] = []
        for tensor, known in zip(elements, self._elements, strict=True):
            self._know(tensor, known)
        self._know(numbers, ("numbers", 0))
        self._know(scalars, ("scalars", 0))
        for i, table in enumerate(tables):
            self._know(table, ("table", i))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports Dynamo at the first operation, to tell it to stay away (seen in 2.13)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._know(result, self._call(str(func).removeprefix("aten."), args, kwargs or {}, result))
        return result

    def _know(self, tensor: Tensor, known: Any) -> None:
        self._known[id(tensor)] = known
        self._alive.append(tensor)

    def _of(self, argument: Any) -> Any:
        """What stands for an argument: a value or a constant."""
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in self._known:
            raise NotImplementedError("an elementwise function uses a tensor that is none of its arguments")
        return self._known[id(argument)]

    def shortcut(self, condition: Tensor, usual: Tensor, general: Tensor) -> Tensor:
        result = general.clone()
        self._know(result, self._emit("shortcut", result, tuple(map(self._of, (condition, usual, general))), result.dtype))
        return result

    def know_result(self, result: Tensor, operation: str, arguments: Sequence[Tensor]) -> None:
        self._know(result, self._emit(operation, result, tuple(map(self._of, arguments)), arguments[0].dtype))

    def program(self, results: Sequence[Tensor]) -> Program:
        values = tuple(self._as_value(result) for result in results)
        statements = needed(_short_roots(self._statements), values)
        return Program(self._elements, self._numbers, self._scalars, statements, values)

    def _as_value(self, result: Tensor) -> Value:
        known = self._of(result)
        return known if isinstance(known, Value) else self._emit("constant", result, (known,), result.dtype)

    def _emit(self, operation: str, result: Tensor, arguments: tuple, operand: torch.dtype) -> Value:
        value = Value(f"v{len(self._statements)}", result.dtype)
        self._statements.append(Statement(operation, value, arguments, operand))
        return value

    def _call(self, name: str, args: tuple, kwargs: dict, result: Tensor) -> Any:
        first = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        if name in _SAME:
            return first
        if name == "empty_like.default":  # of `record`, which says what it is
            return None
        if name in _FILLED:
            return _FILLED[name]
        if name in ("full_like.default", "full.default"):
            return args[1]
        if name == "select.int":
            assert isinstance(first, tuple), "only numbers and scalars are looked up by place"
            kind, place = first[0], args[2]
            found = self._numbers if kind == "numbers" else self._scalars
            return found.setdefault(place, Value(f"{kind[0]}{place}", result.dtype))
        if name.startswith("arange"):
            return self._emit("index", result, (), torch.int32)
        if name == "view.dtype":
            return self._emit("bitcast", result, (first,), args[0].dtype)
        operation = _OPERATIONS.get(name.split(".")[0])
        if operation is None:
            raise NotImplementedError(f"aten.{name} is not among the elementwise operations that can be printed")
        whole = operation == "div" and not result.is_floating_point() and kwargs == {"rounding_mode": "trunc"}
        if (kwargs and operation != "convert" and not whole) or (operation == "rsub" and len(args) > 2):
            raise NotImplementedError(f"aten.{name} with {', '.join(kwargs) or 'alpha'} cannot be printed")
        if operation == "look_up":
            assert isinstance(first, tuple)
            (index,) = args[1]
            return self._emit(operation, result, (first[1], self._of(index)), torch.int32)
        arguments = [self._of(a) for a in args]
        if operation == "clamp":
            low, high = (*arguments[1:], None, None)[:2]
            arguments = [arguments[0], low, high]
        elif operation == "amax":
            arguments = arguments[:1]
        if operation == "convert":
            operand = args[0].dtype
        elif operation in COMPARE:
            operand = torch.result_type(*args)
        else:
            operand = result.dtype
        if operation != "convert" and operand in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"aten.{name} of {operand}: arithmetic is in float32, 16 bits are for storage")
        return self._emit(operation, result, tuple(arguments), operand)


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
    """Products of floats that only one sum reads become one operation with it, which rounds once.

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

    statements = needed([fuse(s) for s in program.statements], program.results)
    return Program(program.elements, program.numbers, program.scalars, statements, program.results)


WORD = torch.uint16  # values of the program only: no function sees it


def in_words(program: Program, numbers: Collection[int]) -> Program:
    """What is known to have 16 bits, and no sign, is computed in 16 bits: vectors are half as long then.

    For Philox (noise.py), which multiplies words of 16 bits and takes the product apart. `numbers` are the places of those that
    are words. A word is: one of them; x & 0xFFFF; the upper half of a word times a constant below 2^15; what bit operations,
    shifts and sums make of words, as long as 16 bits are sure to hold it.
    """
    made_by = {s.result.name: s for s in program.statements}
    words = {program.numbers[place].name: Value(program.numbers[place].name, WORD) for place in numbers}
    most = dict.fromkeys(words, 0xFFFF)  # the largest number that a word may be
    statements: list[Statement] = []

    def word(argument: Any) -> Value | None:
        return words.get(argument.name) if isinstance(argument, Value) else None

    def product(argument: Any) -> tuple[Value, int] | None:
        """The word and the constant that were multiplied."""
        made = made_by.get(argument.name) if isinstance(argument, Value) else None
        if made is None or made.operation != "mul" or made.operand != torch.int32 or isinstance(made.arguments[1], Value):
            return None
        factor, constant = word(made.arguments[0]), made.arguments[1]
        return (factor, constant) if factor is not None and 0 <= constant < 1 << 15 else None

    def shortened(s: Statement) -> tuple[str, tuple, int] | None:
        """Operation and arguments of the same in words, and the largest number that comes out."""
        if s.operand != torch.int32:
            return None
        first, second = (*s.arguments, None, None)[:2]
        factors, one, other = product(first), word(first), word(second)
        constant = second if isinstance(second, int) and second >= 0 else None
        match s.operation:
            case "and" if factors is not None and constant == 0xFFFF:
                return "mul", factors, 0xFFFF
            case "and" if one is None and constant == 0xFFFF:
                return "convert", (first,), 0xFFFF
            case "and" if one is not None and constant is not None:
                return "and", (one, constant & 0xFFFF), min(most[one.name], constant)
            case "shr" if factors is not None and constant == 16:
                return "mul_high", factors, 0xFFFF * factors[1] >> 16
            case "shr" if one is not None and constant is not None and constant < 16:
                return "shr", (one, constant), most[one.name] >> constant
            case "shl" if one is not None and constant is not None and most[one.name] << constant <= 0xFFFF:
                return "shl", (one, constant), most[one.name] << constant
            case "add" if one is not None and other is not None and most[one.name] + most[other.name] <= 0xFFFF:
                return "add", (one, other), most[one.name] + most[other.name]
            case "xor" if one is not None and other is not None:
                return "xor", (one, other), 0xFFFF
        return None

    for s in program.statements:
        found = shortened(s)
        if found is None:
            arguments = tuple(words.get(a.name, a) if isinstance(a, Value) else a for a in s.arguments)
            statements.append(Statement(s.operation, s.result, arguments, s.operand))
        else:
            operation, arguments, most[s.result.name] = found
            words[s.result.name] = Value(s.result.name, WORD)
            operand = torch.int32 if operation == "convert" else WORD
            statements.append(Statement(operation, words[s.result.name], arguments, operand))
    own = {place: words.get(value.name, value) for place, value in program.numbers.items()}
    kept = needed(statements, program.results)
    return Program(program.elements, own, program.scalars, kept, program.results)


def needed(statements: Sequence[Statement], results: tuple[Value, ...]) -> tuple[Statement, ...]:
    """Without statements whose results are not read."""
    read = {value.name for value in results}
    kept = []
    for s in reversed(statements):
        if s.result.name in read:
            kept.append(s)
            read |= {a.name for a in s.arguments if isinstance(a, Value)}
    return tuple(reversed(kept))
