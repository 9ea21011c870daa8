"""The audit: a proof, by watching every operation, that training made no tensor of a forbidden dtype.

    with lowp.audit(forbid=(torch.float32, torch.float64)) as report:
        train()
    assert report.clean   # nothing was found, and nothing ran that the audit cannot see

Every operation that torch dispatches, in forward, backward, hooks and the optimizer, is looked at after it ran: its arguments
and its results, and what runs inside of it where that is made of operations (bodies.py). After each call of a model, after each
optimizer step and at the end it also looks at what they hold: parameters, gradients, buffers, states (holdings.py). Not counted
are scalars (0-dim tensors), integers, and tensors without memory (empty ones, the meta device). A complex tensor is of its
real dtype: forbidding float32 forbids complex64.

What is seen is what is dispatched or held, and therefore:

- A kernel's registers, and the scratch memory that a torch kernel takes and frees inside one operation, are not tensors. lowp's
  own kernels (C++, Triton, inductor's) keep their FP32 in registers. Where nothing can be compiled, plain operations run, and
  are seen.
- The inside of a C++ operator that is not torch's own cannot be seen: an entry of `report.unseen`, unless its name is allowed.
- `torch.compile` would hide what it fuses. While the audit lasts, compiled functions run eagerly (stance "force_eager"), in all
  threads. A backward pass whose forward ran compiled *before* the audit began cannot be undone: it is noticed if it dispatches
  anything at all, and is then an error, or an entry of `report.unseen`. Begin the audit before the forward pass.
- A dispatch mode belongs to its thread. Autograd carries it into its device threads, and the wire into the thread on which it
  carries gradients. Any other thread must take it along itself, as wire/comm_thread.py does. One that begins in the audit,
  and uses torch without, is an entry of `report.unseen` (threads.py). Threads that ran before, and other processes, are not
  part of the proof; nor is a CUDA graph that was captured before.
- A tensor from outside (`torch.from_numpy`, a file) is seen when an operation first touches it, or where it is held.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowp import compat
from lowp.compat import TorchDispatchMode
from lowp.health.allowances import Allowance, Sighting, holds, memory_of, parse_allowances, sightings
from lowp.health.bodies import Bodies
from lowp.health.columns import aligned
from lowp.health.holdings import Holding, of_module, of_optimizer
from lowp.health.places import OperationPlace, Places
from lowp.health.threads import noticed

_NOWHERE = "outside any module"
_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PAIRS = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


class ForbiddenTensor(RuntimeError):
    """An operation made or touched a tensor of a forbidden dtype."""

    def __init__(self, message: str, seen: Sighting, place: OperationPlace):
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
    place: OperationPlace
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


class AuditReport:
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

    @property
    def verdict(self) -> str:
        """One line: the heaviest finding, or what was not seen, or that all is well."""
        if findings := self.findings:
            first = findings[0]
            more = f" (and {len(findings) - 1} findings more)" if len(findings) > 1 else ""
            return f"{first.operation}: a {_names((first.dtype,))} tensor, {_in(first.place)}, at {first.line}{more}"
        return f"cannot see {self.unseen[0]}" if self.unseen else "nothing found"

    def __str__(self) -> str:
        findings = self.findings
        lines = [f"audit of {self.operations:,} operations; forbidden are {_names(self.forbidden)}"]
        if findings:
            head = ("bytes", "touched", "calls", "dtype", "operation", "where", "line")
            lines += aligned([head, *(_row(found) for found in findings)], right=(0, 1, 2))
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

    def _miss(self, what: str) -> None:
        with self._lock:
            if what not in self.unseen:
                self.unseen.append(what)

    def _find(self, left: list[Sighting], first: Sighting, place: OperationPlace) -> None:
        with self._lock:
            key = first.operation, place, first.tensor.dtype
            found = self._findings.setdefault(key, Finding(*key))
            found.count += 1
            found.bytes += sum(seen.bytes for seen in left if seen.made)
            found.touched += sum(seen.bytes for seen in left if not seen.made)


def _row(found: Finding) -> tuple[str, ...]:
    numbers = (f"{number:,}" for number in (found.bytes, found.touched, found.count))
    return *numbers, _names((found.dtype,)), found.operation, _where(found.place), found.line


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _where(place: OperationPlace) -> str:
    if place.phase == "optimizer":
        return place.module
    steps = ", ".join(filter(None, (place.phase if place.phase == "backward" else "", place.node)))
    where = place.module or ("lowp.wire" if "wire" in place.lowp_parts else _NOWHERE)
    return where + (f" ({steps})" if steps else "")


def _in(place: OperationPlace) -> str:
    where = _where(place)
    return where if where.startswith(_NOWHERE) else f"in {where}"


def audit(
    forbid: torch.dtype | str | Iterable[torch.dtype | str] = (torch.float32, torch.float64),
    *,
    mode: str = "raise",
    allow: Iterable[str] = (),
) -> AbstractContextManager[AuditReport]:
    """Watch every operation for tensors of forbidden dtypes.

    Args:
        forbid: floating-point or complex dtypes, or names such as "fp32" and "float64".
        mode: "raise" `ForbiddenTensor` at the first one, or "report" them all.
        allow: exceptions, each printed with the report: names from `lowp.health.allowances.ALLOWANCES` ("norm statistics",
            "batch_norm running stats", "attention logsumexp", "wire sums"), and the patterns "module:<glob>", such as
            "module:layer1.*", and "op:<glob>", such as "op:aten.native_*".

    Returns:
        a context manager, once to be entered, that gives the `AuditReport`.

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
    return _watch(AuditReport(forbidden, allowances), allowances, mode == "raise")


@contextmanager
def _watch(report: AuditReport, allowances: tuple[Allowance, ...], strict: bool) -> Iterator[AuditReport]:
    # Without the stance, torch would run compiled functions eagerly under a dispatch mode too, but for ever after (2.13).
    with torch.compiler.set_stance("force_eager"), Places() as places, _Watcher(report, allowances, strict, places) as watcher:
        try:
            with noticed(watcher, watcher.miss_thread):
                yield report
            for owner in (*places.models, *places.optimizers):
                watcher.check_holdings(owner)
            if strict and report.unseen:  # by a thread, where nothing could be raised
                raise RuntimeError(f"audit: cannot see {report.unseen[0]}")
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

    supports_higher_order_operators = True

    def __init__(self, report: AuditReport, allowances: tuple[Allowance, ...], strict: bool, places: Places):
        super().__init__()
        self.report, self.allowances, self.strict, self.places = report, allowances, strict, places
        self.forbidden = frozenset(report.forbidden) | {_PAIRS[dtype] for dtype in report.forbidden if dtype in _PAIRS}
        self.excused_memory: dict[int, Allowance] = {}
        self.bodies = Bodies(self._refuse_hidden_body)
        self.known_holdings: set[tuple] = set()
        places.at_border = self.check_holdings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.on_fake_tensors():
            return func(*args, **kwargs)  # a compiler at work on tensors without memory: lowp's, building a kernel
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # a wrapper: it now unfolds into operations on what it wraps, which come here
        if not self.report._open:
            return func(*args, **kwargs)
        out, own = self.bodies.run(self, func, args, kwargs)
        if own and self.report._open:
            self.report._count()
            if compat.backward_id() != -1:
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
        self._find(left, first, find_place(), "made" if first.made else "touched")

    def _find(self, left: list[Sighting], first: Sighting, place: OperationPlace, verb: str) -> None:
        self.report._find(left, first, place)
        if self.strict:
            what = f"{_names((first.tensor.dtype,))} tensor of shape {tuple(first.tensor.shape)}"
            message = f"audit: {first.operation} {verb} a {what}, {_in(place)}, at {place.line}"
            raise ForbiddenTensor(f"{message}; forbidden are {_names(self.report.forbidden)}", first, place)

    def check_holdings(self, owner: nn.Module | Optimizer) -> None:
        """Judge what a module or an optimizer holds, each tensor once. No operation need ever touch it."""
        if self.report._open:
            for held in of_optimizer(owner) if isinstance(owner, Optimizer) else of_module(owner):
                identity = held.what, held.owner, memory_of(held.tensor), held.tensor.dtype
                if identity not in self.known_holdings and holds((held.tensor,), self.forbidden) and not held.tensor.is_meta:
                    self.known_holdings.add(identity)
                    self._judge_holding(held)

    def _judge_holding(self, held: Holding) -> None:
        place = replace(self.places.find(), module=self.places.name_of(held.owner), node="")
        seen = Sighting(held.what, "", held.tensor, False, lambda: place)
        if not self._excuse(seen):
            self._find([seen], seen, place, "is")

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
        node = compat.current_node()
        if type(node).__name__ != "CompiledFunctionBackward":
            return
        self._unseen(
            "a backward pass whose forward ran compiled before the audit began; begin the audit before the forward pass"
        )

    def _refuse_hidden_body(self, func: Any) -> None:
        name = str(func.overloadpacket)
        if not self._excuse(Sighting(name, "inside", torch.empty(0), False, cache(self.places.find))):
            self._unseen(
                f"the inside of {name}, which is no operator of torch's and has no body in Python; "
                f"its arguments and results were seen (to trust it: allow=['op:{name}'])"
            )

    def miss_thread(self, name: str) -> None:
        self.report._miss(
            f"the operations of thread {name!r}; it must take the audit's mode along, as lowp/wire/comm_thread.py does"
        )

    def _unseen(self, what: str) -> None:
        self.report._miss(what)
        if self.strict:
            raise RuntimeError(f"audit: cannot see {what}")
