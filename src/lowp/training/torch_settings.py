"""What torch is told for a whole process or thread: a run takes none of it from its caller, and leaves none of it behind.

A run is a function of its recipe. The caller's default dtype, autocast or precision of products would give it other bits; so
would what another run's plugin has set in the same process. `torch_defaults` is around a run: inside, all is as in a new
process. `torch_unchanged` is around the import of a plugin: a module is imported once in a process, whichever run comes first,
so that what it sets then holds for no run. (What a plugin's function sets, it sets in every run, and it ends with the run.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

_AUTOCAST = ("cpu", "cuda")


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any
    other_default: Any = None  # means the same; None: not known, and left alone

    def reset(self) -> None:
        if self.get() not in (self.default, self.other_default):
            self.set(self.default)

    def restore(self, before: Any) -> None:
        if before is not None and self.get() != before:
            self.set(before)


def _precision_of(products: Any) -> _Setting:
    """Of oneDNN's products of one kind."""
    get, set_to = partial(getattr, products, "fp32_precision"), partial(setattr, products, "fp32_precision")
    return _Setting(get, set_to, "ieee", "none")


def _precision_of_all() -> str | None:
    """As the older functions of torch say it. They refuse to, where the newer ones have said something else: None."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


# In this order, and back in the other: the precision of all products includes oneDNN's.
_SETTINGS = (
    *(_precision_of(getattr(torch.backends.mkldnn, kind)) for kind in ("matmul", "conv", "rnn")),
    _Setting(_precision_of_all, torch.set_float32_matmul_precision, "highest"),
    _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    *(
        _Setting(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), False)
        for kind in _AUTOCAST
    ),
)


@contextmanager
def torch_defaults(device: torch.device | None = None) -> Iterator[None]:
    """As in a new process; afterwards as before, the generators of the CPU and of `device` too."""
    with torch_unchanged(device), torch.inference_mode(mode=False):
        for setting in _SETTINGS:
            setting.reset()
        with _outside_of_autocast(), _on_cpu():
            yield


@contextmanager
def torch_unchanged(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is set inside: afterwards it is as before. So are the generators of the CPU and of `device`."""
    before = [(setting, setting.get()) for setting in _SETTINGS]
    threads, default_device = torch.get_num_threads(), torch.get_default_device()
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if torch.get_default_device() != default_device:
                _set_default_device(default_device)
            for setting, value in reversed(before):
                setting.restore(value)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """A context of torch's costs time at every call of torch: only where there is another default."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


@contextmanager
def _outside_of_autocast() -> Iterator[None]:
    """Autocast forgets the weights that it has cast where the outermost of its contexts ends. Inside of a caller's it would
    keep them from step to step."""
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
