"""Looking into an operation that is made of operations.

While a dispatch mode handles an operation, torch switches the mode off. So what runs *inside* is not seen: the Python body of a
custom operator, the branches of `torch.cond`. Here such an operation is started again below the key that modes sit at, with the
mode switched on, so that everything it does comes to the mode as if the user had called it.

Which operations have an inside:

- An operator with a body in Python (`torch.library.custom_op`, `torch.library.impl`), lowp's or anyone's.
- An operator of torch that is only a composition of others ("CompositeImplicitAutograd"). Autograd takes it apart before a mode
  is asked; in inference mode, and inside another operator's body, it arrives whole.
- An operator of higher order (`torch.cond`, `flex_attention`): its body, or where that refuses to run under a mode, the
  functions that it was given.
- A C++ operator of another library is started in the same way, so that operations of torch in it are seen. But it may take
  memory without asking torch, which cannot be seen: it is `opaque`.

Torch's own kernels are leaves: what they take and free inside of one operation is scratch memory, not tensors.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lowp import compat
from lowp.compat import HigherOrderOperator, OpOverload, TorchDispatchMode, tree_map

_KEY = compat.DispatchKey
_BELOW_MODES = compat.keys_below(_KEY.Python)
_BACKENDS = tuple(getattr(_KEY, name) for name in ("CPU", "CUDA", "XPU", "MPS", "BackendSelect"))
_FOR_ALL_BACKENDS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
_REFUSAL = "Mode should never be enabled"  # what some operators of higher order say to a mode (torch 2.11 to 2.13)
_TORCHS_OWN = frozenset((
    "aten", "prim", "prims", "rngprims", "debugprims", "inductor_prims", "inductor", "export", "profiler", "higher_order",
    "quantized", "_quantized", "quantization", "sparse", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "static_runtime",
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "cuda", "_native",
    "debug_mode_ops",
))  # fmt: skip


class Bodies:
    """Runs operations so that a watching mode sees their inside. `hidden` is told the operators whose inside stays unseen."""

    def __init__(self, hidden: Callable[[Any], None]) -> None:
        self._hidden = hidden
        self._leaves: dict[Any, bool] = {}

    def run(self, mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """`func(*args, **kwargs)`, called by a mode that is switched off for it; and is it an operation of its own?

        A composition is none: all that it is given and gives back is seen at the operations that it is made of.
        """
        if self._is_leaf(func):
            return func(*args, **kwargs), True
        backend = _backend(func, args, kwargs)
        higher = isinstance(func, HigherOrderOperator)
        composed = not higher and _is_composition(func, backend)
        if compat.dispatch_mode_count() > 0:  # others want to see the operation; the last of them looks into it
            with _aside(mode):
                return func(*args, **kwargs), not composed
        if higher:
            return _run_higher_order(mode, func, backend, args, kwargs), True
        python = _is_python(func, backend)
        if func.namespace in _TORCHS_OWN and not (composed or python):
            return func(*args, **kwargs), True
        if func.namespace == "aten":
            return self._run_aten(mode, func, args, kwargs, python), not composed
        if not python:
            self._hidden(func)
        with _switched_on(mode):
            return func.redispatch(compat.DispatchKeySet(backend), *args, **kwargs), not composed

    def _run_aten(self, mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any, python: bool) -> Any:
        """Operators of torch's take numbers for tensors (`x.true_divide(2)`); `decompose` knows that, `redispatch` does not."""
        if python:  # somebody has replaced one of torch's kernels
            self._hidden(func)
            return func(*args, **kwargs)
        with _switched_on(mode):
            return func.decompose(*args, **kwargs)

    def _is_leaf(self, func: Any) -> bool:
        """A kernel of torch's on every device? (Remembered: this is asked for every operation.)"""
        if func not in self._leaves:
            self._leaves[func] = (
                isinstance(func, OpOverload)
                and func.namespace in _TORCHS_OWN
                and not compat.has_kernel(func.name(), _KEY.CompositeImplicitAutograd)
                and not any(_is_python(func, key) for key in _BACKENDS)
            )
        return self._leaves[func]


def _entry(func: OpOverload) -> str:
    """How torch notes down that a kernel of an operator was registered in Python, without the dispatch key at its end."""
    return func.name().replace("::", "/", 1) + "/"


def _backend(func: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key that a call goes to after the modes: its tensors' backend, normally."""
    if isinstance(func, HigherOrderOperator):
        return compat.keys_of_call(args, kwargs, func.non_fallthrough_keys & _BELOW_MODES).highestPriorityTypeId()
    if _entry(func) + "BackendSelect" in compat.python_kernels:
        return _KEY.BackendSelect
    return compat.keys_of_call(args, kwargs, _BELOW_MODES.remove(_KEY.BackendSelect)).highestPriorityTypeId()


def _is_composition(func: OpOverload, backend: Any) -> bool:
    return compat.has_kernel(func.name(), _KEY.CompositeImplicitAutograd) and not compat.has_kernel(func.name(), backend)


def _is_python(func: OpOverload, backend: Any) -> bool:
    """Is the kernel for tensors of this backend written in Python?"""
    return any(_entry(func) + key in compat.python_kernels for key in (backend.name, *_FOR_ALL_BACKENDS))


def _run_higher_order(mode: TorchDispatchMode, func: Any, backend: Any, args: Any, kwargs: Any) -> Any:
    try:
        with _switched_on(mode):
            return func.dispatch(backend, *args, **kwargs)
    except AssertionError as error:
        if _REFUSAL not in str(error):
            raise

    def watched(value: Any) -> Any:
        if not callable(value) or isinstance(value, Tensor):
            return value

        def call(*inner_args: Any, **inner_kwargs: Any) -> Any:
            with _switched_on(mode):
                return value(*inner_args, **inner_kwargs)

        return call

    return func(*tree_map(watched, args), **tree_map(watched, kwargs))


_waiting = threading.local()  # .modes: those of this thread that have passed an operation on to the next, the first first


@contextmanager
def _aside(mode: TorchDispatchMode) -> Iterator[None]:
    """While another mode of the stack handles the operation that `mode` was shown."""
    before: Sequence[TorchDispatchMode] = getattr(_waiting, "modes", ())
    _waiting.modes = (*before, mode)
    try:
        yield
    finally:
        _waiting.modes = before


@contextmanager
def _switched_on(mode: TorchDispatchMode) -> Iterator[None]:
    """The mode, and those that passed the operation on to it, watch again. (See `compat.in_dispatch_modes`.)"""
    before: Sequence[TorchDispatchMode] = getattr(_waiting, "modes", ())
    _waiting.modes = ()
    try:
        with compat.in_dispatch_modes((mode, *reversed(before))):
            yield
    finally:
        _waiting.modes = before
