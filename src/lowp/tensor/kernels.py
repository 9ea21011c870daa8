"""Eager calls at the speed of compiled code.

`torch.compile` is made for programs: its guards cost some 100 microseconds a call, and it compiles again when grad mode,
aliasing or sizes change. An elementwise operation on a flat integer tensor needs none of that. It is traced once, and compiled
for any number of elements; the result is called directly.

1. A kernel is built at the first call on a tensor of 64 k elements or more, or at the 32nd on smaller ones. Until then small
   tensors take the plain operations, which need no compiler but some 100 microseconds.
2. On a CPU the traced program is printed as C++ (lists/flat.py): built in a second, half a microsecond a call. (inductor's
   C++ for the same program takes 2 to 5 times as long on numbers in the cache, since its vectors pass through memory wherever
   bits are seen as floats, and 5 to 10 seconds to build.)
3. On CUDA it is printed as Triton (lists/flat_triton.py): one launch, in a second or two as well.
   On both, a call whose arguments but the data are those of an earlier call goes to its kernel at once (`run_ready`): of 15
   microseconds on a CPU, checking arguments and making views took 12.
4. No working compiler: the plain operations serve, piece by piece through the cache, and a warning says so, once.
"""

import ctypes
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp import compat
from lowp.formats import format as parse_format
from lowp.tensor.core import (
    Decode,
    Encode,
    Operation,
    Quantize,
    code_dtype,
    code_storage,
    encode_operation,
    quantize_operation,
    tables_on,
)
from lowp.tensor.lists.cache import UnsafeCache
from lowp.tensor.memory import flat_memory, in_large_pages
from lowp.tensor.noise import KEY_SIZE, Domain, Noise, begun, blocks, in_one_block, key_tensor

_CPU = torch.device("cpu")
_USER = Domain.USER  # for which nothing has begun
# Found once: each dot is a look-up of 20 nanoseconds.
_is_wrapped = compat.is_functorch_wrapped_tensor
_modes = compat.dispatch_mode_count
_is_compiling = torch.compiler.is_compiling
_is_traced = compat.is_tracing  # by torch.jit.trace, whose graph would hold what a kernel writes to, and not the kernel
_threads = torch.get_num_threads

SMALL = 1 << 16  # elements
CALLS_BEFORE_BUILD = 32
MOST_READY = 4096  # calls
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
    ready: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # by the arguments of a call
    small_calls: dict[tuple[Any, torch.device], int] = field(default_factory=dict)
    build_seconds: list[float] = field(default_factory=list)
    warned: bool = False
    lock: Any = field(default_factory=threading.RLock)
    now: Any = field(default_factory=threading.local)  # has `building` where a thread builds at the first call


_state = _KernelState()


def set_kernel_policy(policy: str) -> None:
    """When to compile kernels for eager calls: "auto" (large tensors and repeated calls), "always" or "never".

    The environment variable LOWP_KERNELS sets it at start. Results are the same bit for bit in every case.
    """
    _state.policy = _checked(policy)
    _state.ready.clear()


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


def run(
    operation: Operation,
    stored: Tensor,
    noise: Noise | None,
    out: Tensor,
    check: Callable[[int, int], None] | None = None,
) -> None:
    """Apply an operation to flat, contiguous integer tensors of the same length (`out` may be the input itself).

    `check(start, stop)` raises where the operation refuses what is in a piece. Kernels on a CPU find that out as they go (they
    return 1); otherwise it is called on each piece before it is worked on.
    """
    count = stored.numel()
    if count == 0:
        return
    kernel = _kernel(operation, stored.device, count)
    tables = tables_on(operation, stored.device)
    looks = isinstance(kernel, _CppKernel)
    for start, stop in _pieces(count, noise, SMALL if kernel is None else MAX_ELEMENTS):
        if check is not None and not looks:
            check(start, stop)
        whole = stop - start == count
        source, target = (stored, out) if whole else (stored[start:stop], out[start:stop])
        home = stored.device if kernel is None or noise is None else noise.home(stored.device)
        key = None if noise is None else key_tensor(noise, start, home)
        if kernel is not None:
            if kernel(source, tables, key, target) and check is not None:
                check(start, stop)
        else:
            target.copy_(operation(source, tables, key))


def run_ready(call: tuple[Any, ...], x: Any, out: Any, seed: int | Noise | None = None) -> Tensor | None:
    """The result of a call that was made before on other data; None: it must be made in full.

    `call` holds the arguments but x, out and the seed. They were checked in the call that `remember` recorded, so what is left
    to look at are the tensors, and whether something must see every operation. The result of such a call needs no gradient:
    that x requires one makes no difference.
    """
    if not is_plain(x):
        return _run_ready_on_cuda(call, x, out) if seed is None else None
    if _modes() or _is_compiling() or _is_traced():
        return None
    try:
        kernel = _state.ready.get((call, x.dtype, None if out is None else out.dtype, seed is None))
    except (TypeError, AttributeError):  # a format that is no name, an `out` that is no tensor: checked in full
        return None
    if kernel is None:
        return None
    count, numbers = x.numel(), None
    if seed is not None and (numbers := _numbers_of(seed, count)) is None:
        return None
    try:
        if kernel.of_blocks:
            return kernel.run_ready(x, numbers) if out is None else None
        return _run_flat(kernel, x, out, count, numbers)
    except ctypes.ArgumentError:  # a seed or a step that is a tensor
        return None


def _run_ready_on_cuda(call: tuple[Any, ...], x: Any, out: Any) -> Tensor | None:
    if not is_plain(x, "cuda") or _modes() or _is_compiling() or _is_traced():
        return None
    device, count = x.device, x.numel()
    try:
        kernel = _state.ready.get((call, x.dtype, None if out is None else out.dtype, device))
    except (TypeError, AttributeError):  # as in run_ready
        return None
    if kernel is None or not 0 < count <= MAX_ELEMENTS or torch.cuda.current_device() != device.index:
        return None
    result = _room(kernel.dtype, x, out, count)
    if result is None:
        return None
    kernel.run(x.data_ptr(), result.data_ptr(), count)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def _run_flat(kernel: "_CppKernel", x: Tensor, out: Any, count: int, numbers: tuple[Any, ...] | None) -> Tensor | None:
    result = _room(kernel.dtype, x, out, count)
    if result is None:
        return None
    target = result.data_ptr()
    if numbers is None:
        refused = kernel.run(x.data_ptr(), target, None, *kernel.tables, count, _threads())
    else:
        refused = kernel.run_drawn(x.data_ptr(), target, *numbers, *kernel.tables, count, _threads())
    if refused:
        return None  # with an error
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def _room(dtype: torch.dtype, x: Tensor, out: Any, count: int) -> Tensor | None:
    """Where a kernel may write what it makes of a plain tensor: to `out` if there is one; None where it does not suit."""
    if out is None:
        return in_large_pages(torch.empty_like(x) if dtype is x.dtype else torch.empty_like(x, dtype=dtype))
    if type(out) is not Tensor or out.shape != x.shape or out.device != x.device or not out.is_contiguous() or out.is_neg():
        return None
    if out.requires_grad or _is_wrapped(out):
        return None
    source, target = x.data_ptr(), out.data_ptr()
    apart = source + count * x.itemsize <= target or target + count * out.itemsize <= source
    return out if apart or (source == target and out.dtype is x.dtype) else None


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


def run_ready_codes(call: tuple[Any, ...], codes: tuple[Any, ...]) -> Tensor | None:
    """`run_ready` for the codes of a block format: elements, scales and the tensor's scale, which may be None."""
    elements, scales, whole = codes
    if not is_plain(elements) or not is_plain(scales) or _modes() or _is_compiling() or _is_traced():
        return None
    try:
        kernel = _state.ready.get((call, elements.dtype, scales.dtype, whole is None))
    except TypeError:
        return None
    return None if kernel is None else kernel.run_ready_codes(elements, scales, whole)


def _numbers_of(seed: Any, count: int) -> tuple[Any, ...] | None:
    """What the key of the noise is made of, as `run_drawn` takes it; None where it must be looked at in full."""
    if type(seed) is int:
        return (0, seed, 0, 0, 0) if -(1 << 63) <= seed < 1 << 64 and count <= MAX_ELEMENTS else None
    offset = seed.offset  # of a Noise, whose numbers have up to 64 bits
    if offset >= 1 << 62 or not in_one_block(seed, count):
        return None
    domain = seed.domain
    return 0 if domain is _USER else begun(int(domain)), seed.seed, seed.step, seed.stream, offset


def remember(call: tuple[Any, ...], operation: Operation, x: Tensor, out: Tensor | None, noise: Noise | None) -> None:
    """Let `run_ready` make this call from now on, if there is a kernel for it. (On CUDA not where a call draws noise, or has
    to look for NaN first.)"""
    kernel = _state.kernels.get((operation, x.device))
    known_by = call, x.dtype, None if out is None else out.dtype
    if isinstance(kernel, _CppKernel):
        remember_kernel((*known_by, noise is None), kernel)
    elif isinstance(kernel, _TritonKernel) and noise is None and not (isinstance(operation, Encode) and operation.refuses_nan):
        remember_kernel((*known_by, x.device), kernel)


def remember_kernel(known_by: tuple[Any, ...], kernel: Any) -> None:
    if _state.policy != "never":
        if len(_state.ready) >= MOST_READY:
            _state.ready.clear()
        _state.ready[known_by] = kernel


def built_kernel(what: Any) -> Any:
    """The kernel on a CPU; None where it was not built."""
    return _state.kernels.get((what, _CPU))


def _pieces(count: int, noise: Noise | None, most: int) -> list[tuple[int, int]]:
    """Where one call of a kernel starts and stops: at most `most` elements, all with one key of the noise."""
    whole = [(0, count)] if noise is None else blocks(noise, count)
    return [(start, min(start + most, end)) for first, end in whole for start in range(first, end, most)]


def _kernel(operation: Operation, device: torch.device, count: int) -> "_CppKernel | _TritonKernel | None":
    return get_or_build(operation, device, count, _build)


def _build(operation: Operation, device: torch.device) -> "_CppKernel | _TritonKernel":
    return _CppKernel(operation) if device.type == "cpu" else _TritonKernel(operation, device)


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


def round_into(x: Tensor, format: str, rounding: str, out: Tensor, saturate: bool = False) -> None:
    """`quantize(x, ..., out=out)` without its checks, for what a graph compiled for a CPU calls (inductor.py).

    Dense tensors on a CPU of the same dtype, laid out alike, and apart; formats without blocks, roundings without noise.
    """
    operation = _quantizer(format, rounding, saturate, x.dtype)
    kernel = get_or_build(operation, _CPU, SMALL, _build)  # whatever the size: a graph calls it in every step
    if kernel is not None:
        kernel(x, tables_on(operation, _CPU), None, out)
    else:
        storage = operation.own.storage
        run(operation, flat_memory(x, storage), None, flat_memory(out, storage))


@lru_cache(maxsize=4096)
def _quantizer(format: str, rounding: str, saturate: bool, dtype: torch.dtype) -> Quantize:
    return quantize_operation(parse_format(format), dtype, rounding, saturate, dtype)


class _CppKernel:
    """One operation on a CPU, for any number of elements. `run` takes addresses; it returns 1 if it met what is refused."""

    of_blocks = False

    def __init__(self, operation: Operation) -> None:
        refuses = isinstance(operation, Encode) and operation.refuses_nan

        def function(stored: Tensor, numbers: Tensor, tables: tuple[Tensor, ...]) -> list[Tensor]:
            result = operation(stored, tables, numbers if operation.stochastic else None)
            return [result, operation.is_nan(stored)] if refuses else [result]  # type: ignore[union-attr]  # it encodes

        from lowp.tensor.lists import flat  # what compiles is loaded when something is compiled

        source, target = _dtypes(operation)
        keys = KEY_SIZE if operation.stochastic else 0
        # A quantizer in floats multiplies by powers of two only.
        exact = isinstance(operation, Quantize)
        self._tables = tables_on(operation, _CPU)  # kept: the kernel knows their addresses
        words = range(KEY_SIZE - 1) if keys else ()  # of a key; its last number is an index
        self._call = flat.build(function, [source], target, keys, self._tables, exact, words)
        self.run, self.run_drawn = self._call.run, self._call.run_drawn
        self.tables = [table.data_ptr() for table in self._tables]
        self.dtype = _result_dtype(operation)

    def __call__(self, stored: Tensor, tables: tuple[Tensor, ...], key: Tensor | None, out: Tensor) -> int:
        return self._call([stored], out, key, tables)


class _TritonKernel:
    """One operation on CUDA, for any number of elements."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        shortest = _in_float32(operation)

        def function(stored: Tensor, numbers: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
            return shortest(stored, tables, numbers if operation.stochastic else None)

        from lowp.tensor.lists import flat_triton  # what compiles is loaded when something is compiled

        source, target = _dtypes(operation)
        keys = KEY_SIZE if operation.stochastic else 0
        exact = isinstance(operation, Quantize)  # as in _CppKernel
        self._tables = tables_on(operation, device)  # kept: their addresses are
        with torch.cuda.device(device):
            self._call = flat_triton.build(function, [source], target, keys, self._tables, exact)
        self._addresses = [table.data_ptr() for table in self._tables]
        self.dtype = _result_dtype(operation)

    def __call__(self, stored: Tensor, tables: tuple[Tensor, ...], key: Tensor | None, out: Tensor) -> None:
        self._call([stored], out, key, tables)

    def run(self, source: int, target: int, count: int) -> None:
        """For `run_ready`: addresses on the current device, nothing drawn."""
        self._call.launch(count, (source, target), self._addresses)


def _result_dtype(operation: Operation) -> torch.dtype:
    """Of the result, as users see it."""
    if isinstance(operation, Decode):
        return operation.dtype
    return operation.out_dtype if isinstance(operation, Quantize) else code_dtype(operation.fmt)


def _in_float32(operation: Operation) -> Callable[..., Tensor]:
    """The operation; if it works on the bits of bfloat16, the same on those of float32, whose upper half they are.

    GPUs round float32 in floats, and 16 bits in integers, which takes twice as many instructions. The result is a bfloat16
    again without rounding: a format is rounded to on bfloat16's own bits only where bfloat16 holds its numbers.
    """
    if isinstance(operation, Decode) or operation.dtype != torch.bfloat16 or operation.carrier is not operation.own:
        return operation
    how = operation.mode.value, operation.saturate
    if isinstance(operation, Encode):
        codes = encode_operation(operation.fmt, torch.float32, *how, operation.nan_to)
        return lambda stored, tables, key: codes(stored.to(torch.int32) << 16, tables, key)
    if operation.float_grid is not None or operation.out_dtype != torch.bfloat16:
        return operation
    rounded = quantize_operation(operation.fmt, torch.float32, *how, torch.float32)
    return lambda stored, tables, key: (rounded(stored.to(torch.int32) << 16, tables, key) >> 16).to(torch.int16)


def _dtypes(operation: Operation) -> tuple[torch.dtype, torch.dtype]:
    """The stored dtypes of input and output."""
    if isinstance(operation, Decode):
        return code_storage(operation.fmt), operation.target.storage
    return operation.own.storage, operation.storage if isinstance(operation, Encode) else operation.target.storage


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A chain of operations on a few numbers: one launch on CUDA instead of one for each; on a CPU it is simply called.

    `arguments` are the dtypes of flat tensors of one length, `results` those of what the function gives, a list. `numbers` is
    how many integers it takes besides, as its last argument. With `long`, a chain with one result is a kernel on a CPU as well.
    """

    function: Callable[..., Sequence[Tensor]]
    arguments: tuple[torch.dtype, ...]
    results: tuple[torch.dtype, ...]
    numbers: int = 0
    long: bool = False

    def __call__(self, tensors: Sequence[Tensor], out: Sequence[Tensor], numbers: Sequence[Any] = ()) -> None:
        """Write the results of flat tensors to `out`, which may be among them."""
        device = tensors[0].device
        if device.type == "cuda":
            kernel = get_or_build(self, device, SMALL, _build_elementwise)
        else:
            kernel = get_or_build(self, device, out[0].numel(), _build_elementwise) if self.long else None
        if kernel is not None:
            kernel(tensors, out, numbers, ())
            return
        for room, found in zip(out, self.function(*tensors, *([numbers] if self.numbers else [])), strict=True):
            room.copy_(found)


def _build_elementwise(what: Elementwise, device: torch.device) -> Any:
    def function(*arguments: Any) -> Sequence[Tensor]:
        *tensors, numbers, _ = arguments
        return what.function(*tensors, *([numbers] if what.numbers else []))

    if device.type == "cpu":
        from lowp.tensor.lists import flat

        run = flat.build(function, what.arguments, what.results[0], what.numbers, ()).run
        key = ctypes.c_int32 * what.numbers

        def call(tensors: Sequence[Tensor], out: Sequence[Tensor], numbers: Sequence[int], *_: Any) -> None:
            run(*(x.data_ptr() for x in (*tensors, *out)), key(*numbers), out[0].numel(), _threads())

        return call

    from lowp.tensor.lists import flat_triton

    with torch.cuda.device(device):
        return flat_triton.build(function, what.arguments, what.results, what.numbers, ())
