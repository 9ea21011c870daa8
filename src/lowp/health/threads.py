"""Threads that begin during an audit and use torch without taking the audit's mode along.

A dispatch mode belongs to its thread, and nothing tells that another one dispatches operations. But Python can tell a function
of every call in a new thread (`threading.setprofile`): a call of a tensor's method or of one of torch's functions is enough to
know. The function takes itself off a thread as soon as that is known, or the audit is over; other threads never see it.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from lowp import compat
from lowp.compat import TorchDispatchMode


@contextmanager
def noticed(mode: TorchDispatchMode, tell: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, `tell` is told the name of each new thread that uses torch where `mode` does not watch."""
    before, over = threading.getprofile(), False

    def profile(frame: FrameType, event: Any, argument: Any) -> None:
        if over:
            sys.setprofile(before)
        elif event == "c_call" and _is_torchs(argument):
            sys.setprofile(before)
            if not any(each is mode for each in compat.dispatch_modes()):
                tell(threading.current_thread().name)
        if before is not None:
            before(frame, event, argument)

    threading.setprofile(profile)
    try:
        yield
    finally:
        over = True
        threading.setprofile(before)  # type: ignore[arg-type]  # None takes it away


def _is_torchs(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Tensor) or owner is compat.FUNCTIONS_OF_TORCH or owner is Tensor:
        return True
    return getattr(owner, "__name__", None) in compat.MODULES_OF_FUNCTIONS
