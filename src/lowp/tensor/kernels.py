"""When kernels of eager calls are built, and where they are kept.

`torch.compile` is made for programs: its guards cost some 100 microseconds a call, and it compiles again when grad mode,
aliasing or sizes change. An operation on flat memory needs none of that: it is traced once, printed (lists/), compiled for any
number of elements, and called directly.

A kernel is built at the first call on a tensor of 64 k elements or more, or at the 32nd on smaller ones. Until then small
tensors take the plain operations, which need no compiler but some 100 microseconds. Where no compiler works the plain
operations serve, and a warning says so, once.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp import compat
from lowp.tensor.lists.cache import UnsafeCache

_CPU = torch.device("cpu")
# Found once: each dot is a look-up of 20 nanoseconds.
_is_wrapped = compat.is_functorch_wrapped_tensor
_modes = compat.dispatch_mode_count
_is_compiling = torch.compiler.is_compiling
_is_traced = compat.is_tracing  # by torch.jit.trace, whose graph would hold what a kernel writes to, and not the kernel

SMALL = 1 << 16  # elements
CALLS_BEFORE_BUILD = 32
MAX_ELEMENTS = 1 << 30  # a call: 32-bit indices stay valid in the kernels
POLICIES = ("auto", "always", "never")


def _checked(policy: str) -> str:
    if policy not in POLICIES:
        raise ValueError(f"unknown kernel policy {policy!r}; it is one of {', '.join(POLICIES)}")
    return policy


@dataclass
class _KernelState:
    policy: str = field(default_factory=lambda: _checked(os.environ.get("LOWP_KERNELS", "auto")))
    kernels: dict[tuple[Any, torch.device], Any] = field(default_factory=dict)
    small_calls: dict[tuple[Any, torch.device], int] = field(default_factory=dict)
    build_seconds: list[float] = field(default_factory=list)
    warned: bool = False
    lock: Any = field(default_factory=threading.RLock)
    now: Any = field(default_factory=threading.local)  # has `building` where a thread builds at the first call


_state = _KernelState()
ready: dict[tuple[Any, ...], Any] = {}  # kernels of calls that were made before, by their arguments (repeated_calls.py)


def set_kernel_policy(policy: str) -> None:
    """When to compile kernels for eager calls: "auto" (large tensors and repeated calls), "always" or "never".

    The environment variable LOWP_KERNELS sets it at start. Results are the same bit for bit in every case.
    """
    _state.policy = _checked(policy)
    ready.clear()


@contextmanager
def building() -> Iterator[None]:
    """Within it, this thread builds each kernel at its first call, whatever the size (with the policy "never": none)."""
    before, _state.now.building = getattr(_state.now, "building", False), True
    try:
        yield
    finally:
        _state.now.building = before


def kernel_policy() -> str:
    return _state.policy


def kernel_info() -> dict[str, Any]:
    """How many kernels were built in this process, in how many seconds each, under which policy."""
    built = sum(kernel is not None for kernel in _state.kernels.values())
    return {"policy": _state.policy, "built": built, "seconds": list(_state.build_seconds)}


def built_kernel(what: Any, device: torch.device = _CPU) -> Any:
    """None where it was not built."""
    return _state.kernels.get((what, device))


def get_or_build(what: Any, device: torch.device, count: int, build: Callable[[Any, torch.device], Any]) -> Any:
    """The compiled kernel, built now if it is time; None to use plain operations."""
    identity = (what, device)
    if identity in _state.kernels:
        return _state.kernels[identity] if _state.policy != "never" else None
    if _state.policy == "never":
        return None
    if _state.policy == "auto" and count < SMALL and not getattr(_state.now, "building", False):
        calls = _state.small_calls[identity] = _state.small_calls.get(identity, 0) + 1
        if calls < CALLS_BEFORE_BUILD:
            return None
    with _state.lock:
        if identity not in _state.kernels:
            began = time.perf_counter()
            try:
                # Users have no use for torch's warnings on importing its compiler; their programs must not see the building.
                with warnings.catch_warnings(), compat.without_dispatch_modes(), torch.inference_mode(False):
                    warnings.simplefilter("ignore")
                    _state.kernels[identity] = build(what, device)
                _state.build_seconds.append(time.perf_counter() - began)
            except UnsafeCache:
                raise  # slow operations would hide it
            except Exception as error:  # whatever the compiler stack raises without a compiler
                _state.kernels[identity] = None
                _warn_once(error)
        return _state.kernels[identity]


def _warn_once(error: Exception) -> None:
    if not _state.warned:
        _state.warned = True
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            f"lowp could not compile a kernel and goes on with plain operations, many times slower "
            f"(same results): {type(error).__name__}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )


def must_be_visible(x: Tensor) -> bool:
    """Must every operation be visible: to a compiler, a function transform, a dispatch mode or a tensor subclass?"""
    return (
        _is_compiling()
        or _is_traced()
        or type(x) not in (Tensor, Parameter)
        or _modes() > 0
        or _is_wrapped(x)
        or x.device.type not in ("cpu", "cuda")
    )


def is_plain(x: Any, device: str = "cpu") -> bool:
    """Is it a tensor on such a device whose numbers lie in memory one after the other, and of which nothing must see
    operations?"""
    kind = type(x)
    return (
        (kind is Tensor or kind is Parameter)
        and (x.is_cpu if device == "cpu" else x.is_cuda)
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_neg()
        and not _is_wrapped(x)
        and x.is_contiguous()
    )


def __getattr__(name: str) -> Any:
    """What code that inductor keeps on disk, made by an earlier version, imports from here."""
    if name == "round_into":
        from lowp.tensor.number_kernels import round_into

        return round_into
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
