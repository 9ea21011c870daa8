"""The audit: a proof, by watching every operation, that training made no tensor of a forbidden dtype.

    with lowp.audit(forbid=(torch.float32, torch.float64)):
        train()

Every operation that torch dispatches, in forward, backward, hooks and the optimizer, is looked at after it ran: its arguments
and its results. Not counted are scalars (0-dim tensors), integers, and tensors without memory (empty ones, the meta device).

What is seen is what is dispatched, and therefore:

- A kernel's registers, and the scratch memory that a torch kernel takes and frees inside one operation, are not tensors. lowp's
  own optimizers keep their FP32 in registers where they run precompiled; where nothing can be compiled they run as plain
  operations, and are seen.
- `torch.compile` would hide what it fuses. While the audit lasts, compiled functions run eagerly (stance "force_eager"), in all
  threads. A backward pass whose forward ran compiled *before* the audit began cannot be undone: it is noticed if it dispatches
  anything at all, and is then an error, or an entry of `report.unseen`. Begin the audit before the forward pass.
- A dispatch mode belongs to its thread. Autograd carries it into its device threads. Any other thread takes it along itself:
  `modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()` where work is handed over, and there `with mode:`
  for each. The report is protected by a lock.
- A tensor from outside (`torch.from_numpy`, a file) is seen when an operation first touches it.
"""

import os
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.health.allowances import Allowance, Place, Sighting, holds, memory_of, parse_allowances, sightings

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class ForbiddenTensor(RuntimeError):
    """An operation made or touched a tensor of a forbidden dtype."""

    def __init__(self, message: str, seen: Sighting, place: Place):
        super().__init__(message)
        self.operation = seen.operation
        self.module = place.module
        self.phase = place.phase
        self.line = place.line
        self.dtype = seen.tensor.dtype
        self.shape = tuple(seen.tensor.shape)


@dataclass
class Finding:
    """The forbidden tensors of one operation at one place, over all calls."""

    operation: str
    place: Place
    dtype: torch.dtype
    count: int = 0  # calls
    bytes: int = 0  # of the forbidden tensors that it made
    touched: int = 0  # bytes of those that it was given

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def phase(self) -> str:
        return self.place.phase

    @property
    def line(self) -> str:
        return self.place.line


class Report:
    """What an audit saw: `operations` watched, `findings`, what was `allowed`, and what ran `unseen`."""

    def __init__(self, forbidden: tuple[torch.dtype, ...], allowances: tuple[Allowance, ...]):
        self.forbidden = forbidden
        self.operations = 0
        self.allowed = {allowance.name: (0, 0) for allowance in allowances}  # tensors, bytes
        self.unseen: list[str] = []
        self._findings: dict[tuple, Finding] = {}
        self._lock = threading.Lock()
        self._open = True

    @property
    def findings(self) -> list[Finding]:
        """The heaviest first."""
        with self._lock:
            return sorted(self._findings.values(), key=lambda found: (found.bytes, found.touched, found.count), reverse=True)

    @property
    def clean(self) -> bool:
        """Was nothing found, and nothing unseen?"""
        return not self._findings and not self.unseen

    def __str__(self) -> str:
        findings = self.findings
        lines = [f"audit of {self.operations:,} operations; forbidden are {_names(self.forbidden)}"]
        if findings:
            head = ("bytes", "touched", "calls", "dtype", "operation", "where", "line")
            rows = [head, *(_row(found) for found in findings)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(_cells(row, widths)).rstrip() for row in rows]
        calls, made, touched = (sum(getattr(f, field) for f in findings) for field in ("count", "bytes", "touched"))
        lines.append(f"total: {calls:,} calls, {made:,} bytes made, {touched:,} touched" if findings else "nothing found")
        lines += [f"not seen: {what}" for what in self.unseen]
        lines += [f"allowed: {name} ({n:,} tensors, {b:,} bytes)" for name, (n, b) in self.allowed.items() if n]
        lines += [f"allowed but never needed: {name}" for name, (n, _) in self.allowed.items() if not n]
        return "\n".join(lines if self.allowed else [*lines, "nothing was allowed"])

    def _count(self) -> None:
        with self._lock:
            self.operations += 1

    def _allow(self, name: str, bytes: int) -> None:
        with self._lock:
            tensors, before = self.allowed[name]
            self.allowed[name] = tensors + 1, before + bytes

    def _find(self, left: list[Sighting], first: Sighting, place: Place) -> None:
        with self._lock:
            key = first.operation, place, first.tensor.dtype
            found = self._findings.setdefault(key, Finding(*key))
            found.count += 1
            found.bytes += sum(seen.bytes for seen in left if seen.made)
            found.touched += sum(seen.bytes for seen in left if not seen.made)


def _row(found: Finding) -> tuple[str, ...]:
    numbers = (f"{number:,}" for number in (found.bytes, found.touched, found.count))
    return *numbers, _names((found.dtype,)), found.operation, _where(found.place), found.line


def _cells(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if i < 3 else cell.ljust(width)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _where(place: Place) -> str:
    if place.phase == "optimizer":
        return place.module
    steps = ", ".join(filter(None, (place.phase if place.phase == "backward" else "", place.node)))
    return (place.module or "outside any module") + (f" ({steps})" if steps else "")


def audit(
    forbid: torch.dtype | str | Iterable[torch.dtype | str] = (torch.float32, torch.float64),
    *,
    mode: str = "raise",
    allow: Iterable[str] = (),
) -> AbstractContextManager[Report]:
    """Watch every operation for tensors of forbidden dtypes.

    Args:
        forbid: floating-point or complex dtypes, or names such as "fp32" and "float64".
        mode: "raise" `ForbiddenTensor` at the first one, or "report" them all.
        allow: exceptions, each printed with the report: names from `lowp.health.allowances.ALLOWANCES` ("norm statistics",
            "batch_norm running stats", "attention logsumexp", "wire sums"), and the patterns "module:<glob>", such as
            "module:layer1.*", and "op:<glob>", such as "op:aten.native_*".

    Returns:
        a context manager, once to be entered, that gives the `Report`.

    Modules have the names of `named_modules()` of the outermost module that is called. Modules of a second such model have its
    class in front. In backward, an operation belongs to the module whose forward made its autograd node; what a forward hook of
    a module does belongs to the module around it.

    Each operation takes some 25 us longer, half of it torch's own price of a dispatch mode (and a forbidden one 90 us): a step
    of a network of 64-wide layers on a CPU takes 4 times as long, of 512-wide ones 1.3 times.
    """
    forbidden = _parse_dtypes(forbid)
    allowances = parse_allowances(allow)
    if mode not in ("raise", "report"):
        raise ValueError(f"unknown mode={mode!r}; it is 'raise' or 'report'")
    return _watch(Report(forbidden, allowances), allowances, mode == "raise")


@contextmanager
def _watch(report: Report, allowances: tuple[Allowance, ...], strict: bool) -> Iterator[Report]:
    # Without the stance, torch would run compiled functions eagerly under a dispatch mode too, but for ever after (2.13).
    with torch.compiler.set_stance("force_eager"), _Places() as places, _Watcher(report, allowances, strict, places):
        try:
            yield report
        finally:
            report._open = False  # a thread may still be in the mode


def _parse_dtypes(forbid: Any) -> tuple[torch.dtype, ...]:
    dtypes = []
    for dtype in forbid if isinstance(forbid, Iterable) and not isinstance(forbid, str) else (forbid,):
        found = getattr(torch, _NAMES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
        if isinstance(dtype, str) and not isinstance(found, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; give torch.float32 or a name such as 'fp32', 'float32' or 'bf16'")
        if not isinstance(found, torch.dtype):
            raise TypeError(f"forbid takes dtypes, not {type(dtype).__name__}: {dtype!r}")
        if not (found.is_floating_point or found.is_complex):
            raise ValueError(f"forbid takes floating-point and complex dtypes, not {found}: integers are never counted")
        dtypes.append(found)
    if not dtypes:
        raise ValueError("forbid is empty: name at least one dtype, such as torch.float32")
    return tuple(dict.fromkeys(dtypes))


class _Watcher(TorchDispatchMode):
    """Looks at each operation's tensors. Operations that are fine pay for the look alone: no stack is walked for them."""

    supports_higher_order_operators = True  # torch.cond and flex_attention run as one operation, and are seen as one

    def __init__(self, report: Report, allowances: tuple[Allowance, ...], strict: bool, places: "_Places"):
        super().__init__()
        self.report, self.allowances, self.strict, self.places = report, allowances, strict, places
        self.forbidden = frozenset(report.forbidden)
        self.excused_memory: dict[int, Allowance] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # a compiler at work on tensors without memory: lowp's, building a kernel
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # a wrapper: it now unfolds into operations on what it wraps, which come here
        out = func(*args, **kwargs)
        if self.report._open:
            self.report._count()
            if torch._C._current_graph_task_id() != -1:
                self._refuse_compiled_backward()
            if holds((args, out), self.forbidden) or (kwargs and holds(kwargs.values(), self.forbidden)):
                self._judge(func, args, kwargs, out)
        return out

    def _judge(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        find_place = cache(self.places.find)
        left = [seen for seen in sightings(func, args, kwargs, out, self.forbidden, find_place) if not self._excuse(seen)]
        if not left:
            return
        first = max(left, key=lambda seen: seen.made)  # what it made says more than what it was given
        place = find_place()
        self.report._find(left, first, place)
        if self.strict:
            verb = "made" if first.made else "touched"
            what = f"{_names((first.tensor.dtype,))} tensor of shape {tuple(first.tensor.shape)}"
            where = f"in {_where(place)}" if place.module else _where(place)
            message = f"audit: {first.operation} {verb} a {what}, {where}, at {place.line}"
            raise ForbiddenTensor(f"{message}; forbidden are {_names(self.report.forbidden)}", first, place)

    def _excuse(self, seen: Sighting) -> bool:
        """Does an allowance match? What it excused when made stays excused when autograd detaches it to save it."""
        memory = memory_of(seen.tensor)
        allowance = self.excused_memory.get(memory) if seen.operation == "aten.detach" else None
        allowance = allowance or next((allowance for allowance in self.allowances if allowance.matches(seen)), None)
        if allowance is None:
            return False
        if seen.made:
            self.excused_memory[memory] = allowance
        self.report._allow(allowance.name, seen.bytes)
        return True

    def _refuse_compiled_backward(self) -> None:
        node = torch._C._current_autograd_node()
        if type(node).__name__ != "CompiledFunctionBackward":
            return
        message = "a backward pass whose forward ran compiled before the audit began; begin the audit before the forward pass"
        if message not in self.report.unseen:
            self.report.unseen.append(message)
        if self.strict:
            raise RuntimeError(f"audit: cannot see {message}")


class _Places:
    """Knows which module, optimizer or autograd node is at work in each thread.

    Forward and the optimizer: hooks of torch, for all modules and optimizers, keep a stack.

    Backward: autograd numbers its nodes as forward makes them, in each thread from 0. The hooks note the number at which a
    module begins and ends; a node belongs to the module that was at work at its number. This needs no hooks on tensors, costs
    nothing in backward, and also holds for nodes whose results never leave the module. (torch's ModuleTracker hooks the
    gradients of a module's inputs and outputs, and keeps names without an order: it cannot tell which of them is innermost.)
    """

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.knows_a_model = False
        self.stacks: dict[int, list[_Entry]] = {}
        self.owners: dict[int, tuple[list[int], list[str]]] = {}  # by thread: a node's number -> the module from there on

    def __enter__(self) -> "_Places":
        self.hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def find(self) -> Place:
        """The place of the operation that runs now in this thread."""
        trace = _Trace(sys._getframe(1))
        task = torch._C._current_graph_task_id()
        line = trace.line
        if line is None and task != -1:  # a thread of autograd's: the line is where the thread that waits called backward
            line = _Trace(sys._current_frames().get(self.home)).line
        place = partial(Place, line=line or trace.lowp_line or "an unknown line", lowp_parts=frozenset(trace.lowp_parts))
        stack = self.stacks.get(threading.get_ident(), [])
        while stack and stack[-1].frame is not None and stack[-1].frame not in trace.frames:
            stack.pop()  # an optimizer whose step ended with an exception
        node = torch._C._current_autograd_node()
        node_name = "" if node is None else node.name().removeprefix("torch::autograd::")
        if stack and stack[-1].task == task:  # in backward: forward again, for a checkpoint, or an optimizer in a hook
            phase = stack[-1].phase if task == -1 or stack[-1].phase == "optimizer" else "backward"
            return place(stack[-1].name, phase, node=node_name)
        if task != -1:
            return place(self._owner(node, trace.calls_backward), "backward", node=node_name)
        return place("", "other", node="")

    def _owner(self, node: Any, from_here: bool) -> str:
        """The module whose forward made the node, in the thread that called backward: this one, or the audit's."""
        if node is None:
            return ""
        if type(node).__name__ == "AccumulateGrad":  # it adds to a parameter's gradient, and has no number
            named = ((name, module._parameters.values()) for module, name in list(self.names.items()))
            return next((name for name, parameters in named if any(p is node.variable for p in parameters)), "")
        numbers, names = self.owners.get(threading.get_ident() if from_here else self.home, ([], []))
        index = bisect_right(numbers, node._sequence_nr())
        return names[index - 1] if index else ""

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self.names:
            prefix = f"{type(module).__name__}." if self.knows_a_model else ""
            self.knows_a_model = True
            self.names.update((child, prefix + name) for name, child in module.named_modules() if name)
            self.names[module] = type(module).__name__
        self._enter(_Entry(module, self.names[module], "forward"))

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = f"optimizer step ({type(optimizer).__name__})"
        self._enter(_Entry(optimizer, name, "optimizer", frame=sys._getframe(1)))

    def _enter(self, entry: "_Entry") -> None:
        entry.task = torch._C._current_graph_task_id()
        self.stacks.setdefault(threading.get_ident(), []).append(entry)
        self._note_owner(entry.name)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)

    def _leave(self, owner: Any, *_: Any) -> None:
        stack = self.stacks.get(threading.get_ident(), [])
        if any(entry.owner is owner for entry in stack):  # not if the audit began inside it
            while stack.pop().owner is not owner:
                pass
            self._note_owner(stack[-1].name if stack else "")

    def _note_owner(self, name: str) -> None:
        """Nodes made from now on in this thread belong to `name`."""
        numbers, names = self.owners.setdefault(threading.get_ident(), ([], []))
        number = torch.autograd._get_sequence_nr()
        if numbers and numbers[-1] == number:
            names[-1] = name
            return
        numbers.append(number)
        names.append(name)
        if len(numbers) > _OWNERS_KEPT:  # a long audit: what is so old has had its backward
            del numbers[: _OWNERS_KEPT // 2], names[: _OWNERS_KEPT // 2]


_OWNERS_KEPT = 1_000_000


@dataclass
class _Entry:
    """A module or an optimizer at work."""

    owner: Any
    name: str
    phase: str
    frame: FrameType | None = None  # which an optimizer's step runs in: it has no hook for when it fails
    task: int = -1  # the backward pass that it runs inside of


class _Trace:
    """A walk over a thread's stack, innermost frame first."""

    def __init__(self, frame: FrameType | None):
        self.frames: list[FrameType] = []
        self.line: str | None = None  # of the innermost frame outside torch, lowp and the standard library
        self.lowp_line: str | None = None
        self.lowp_parts: set[str] = set()
        self.calls_backward = False
        while frame is not None:
            self.frames.append(frame)
            path = frame.f_code.co_filename
            if path.startswith(_TORCH):
                self.calls_backward |= frame.f_code.co_name == "_engine_run_backward"
            elif path.startswith(_LOWP):
                part = path.removeprefix(_LOWP).split(os.sep)[0]
                if part != "health":
                    self.lowp_parts.add(part)
                    self.lowp_line = self.lowp_line or _line(frame)
            elif self.line is None and not _is_standard(path):
                self.line = _line(frame)
            frame = frame.f_back


_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOWP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _is_standard(path: str) -> bool:
    return path.startswith("<frozen") or (path.startswith(_STANDARD) and "-packages" not in path)


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{frame.f_lineno}"
