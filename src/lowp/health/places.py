"""Where an operation runs: in which module, optimizer step or autograd node, and at which line of whose code."""

import os
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp import compat

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOWP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_OWNERS_KEPT = 1_000_000


@dataclass(frozen=True)
class OperationPlace:
    """Where an operation ran."""

    module: str  # "layer1.0.conv1", "optimizer step (SGD)", or "" outside of them
    phase: str  # "forward", "backward", "optimizer" or "other"
    line: str  # "train.py:41"
    node: str  # in backward, the autograd node: "ConvolutionBackward0"
    lowp_parts: frozenset[str]  # the parts of lowp among the callers: {"wire", "tensor"}


class Places:
    """Which module, optimizer or autograd node runs in each thread.

    Forward and the optimizer: hooks of torch, for all modules and optimizers, keep a stack.

    Backward: autograd numbers its nodes as forward makes them, in each thread from 0. The hooks note the number at which a
    module begins and ends; a node belongs to the module that ran at its number. This needs no hooks on tensors, costs
    nothing in backward, and also holds for nodes whose results never leave the module. (torch's ModuleTracker hooks the
    gradients of a module's inputs and outputs, and keeps names without an order: it cannot tell which of them is innermost.)
    """

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.knows_a_model = False
        self.models: WeakSet[nn.Module] = WeakSet()  # outermost modules
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.at_border: Callable[[nn.Module | Optimizer], None] = lambda owner: None
        self.stacks: dict[int, list[_ActiveOwner]] = {}
        self.owners: dict[int, tuple[list[int], list[str]]] = {}  # by thread: a node's number -> the module from there on

    def __enter__(self) -> "Places":
        self.hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def find(self) -> OperationPlace:
        """The place of the operation that runs now in this thread."""
        trace = _Trace(sys._getframe(1))
        task = compat.backward_id()
        line = trace.line
        if line is None and task != -1:  # a thread of autograd's: the line is where the thread that waits called backward
            line = _Trace(sys._current_frames().get(self.home)).line
        place = partial(
            OperationPlace, line=line or trace.lowp_line or "an unknown line", lowp_parts=frozenset(trace.lowp_parts)
        )
        stack = self.stacks.get(threading.get_ident(), [])
        while stack and stack[-1].frame is not None and stack[-1].frame not in trace.frames:
            stack.pop()  # an optimizer whose step ended with an exception
        node = compat.current_node()
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
        index = bisect_right(numbers, compat.number_of_node(node))
        return names[index - 1] if index else ""

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self.names:
            prefix = f"{type(module).__name__}." if self.knows_a_model else ""
            self.knows_a_model = True
            self.models.add(module)
            self.names.update((child, prefix + name) for name, child in module.named_modules() if name)
            self.names[module] = type(module).__name__
        self._enter(_ActiveOwner(module, self.names[module], "forward"))

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers.add(optimizer)
        self._enter(_ActiveOwner(optimizer, self.name_of(optimizer), "optimizer", frame=sys._getframe(1)))

    def name_of(self, owner: nn.Module | Optimizer) -> str:
        if isinstance(owner, Optimizer):
            return f"optimizer step ({type(owner).__name__})"
        return self.names.get(owner, type(owner).__name__)

    def _enter(self, entry: "_ActiveOwner") -> None:
        entry.task = compat.backward_id()
        self.stacks.setdefault(threading.get_ident(), []).append(entry)
        self._note_owner(entry.name)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)
        # Also called when forward has raised: then torch turns what is raised here into a warning. The next border will do.
        if module in self.models and sys.exc_info()[0] is None:
            self.at_border(module)

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.at_border(optimizer)
        self._leave(optimizer)

    def _leave(self, owner: Any) -> None:
        stack = self.stacks.get(threading.get_ident(), [])
        if any(entry.owner is owner for entry in stack):  # not if the audit began inside it
            while stack.pop().owner is not owner:
                pass
            self._note_owner(stack[-1].name if stack else "")

    def _note_owner(self, name: str) -> None:
        """Nodes made from now on in this thread belong to `name`."""
        numbers, names = self.owners.setdefault(threading.get_ident(), ([], []))
        number = compat.next_node_number()
        if numbers and numbers[-1] == number:
            names[-1] = name
            return
        numbers.append(number)
        names.append(name)
        if len(numbers) > _OWNERS_KEPT:  # a long audit: what is so old has had its backward
            del numbers[: _OWNERS_KEPT // 2], names[: _OWNERS_KEPT // 2]


@dataclass
class _ActiveOwner:
    """A module or an optimizer that runs now."""

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
            elif self.line is None and "cli" not in self.lowp_parts and not _is_standard(path):
                self.line = _line(frame)  # not further out than the `lowp` command: only what started it is there
            frame = frame.f_back


def _is_standard(path: str) -> bool:
    return path.startswith("<frozen") or (path.startswith(_STANDARD) and "-packages" not in path)


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{frame.f_lineno}"
