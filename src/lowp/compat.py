"""Every private interface of torch that lowp uses, and nothing else. No other module of lowp names one (a test looks), except
methods and attributes of torch's classes that our subclasses of these work with: `OF_SUBCLASSES` lists them.

All were seen in torch 2.11 and in 2.13. Each entry says what it is for, and what happens in a torch without it. There are three
cases:

- *needed*: lowp cannot work without it. `import lowp` raises an ImportError that names it and the versions that are known.
- *needed there*: one feature cannot work. That feature raises `MissingInTorch` when it is used; the others go on.
- *degrades*: a public way gives the same result, slower.

Modules of torch that take long to import (Dynamo, inductor, FSDP, DTensor) are imported inside the functions.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEEN = "2.11 to 2.13"
_NAMING = threading.Lock()


class MissingInTorch(RuntimeError):
    """The installed torch does not have a private interface that a feature of lowp needs."""

    def __init__(self, name: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {name}, which torch {torch.__version__} does not have; lowp knows torch {SEEN}")


def _found(name: str, purpose: str) -> Any:
    """torch's object of that name, itself: Dynamo knows it by identity. Where there is none, a function that raises."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)

    def missing(*_: Any, **__: Any) -> Any:
        raise MissingInTorch(name, purpose)

    return missing if found is None else found


@contextmanager
def _needed_for(purpose: str, name: str) -> Iterator[None]:
    """Around lazy imports and look-ups: what is not there becomes MissingInTorch."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise MissingInTorch(name, purpose) from error


# Needed, and old: the protocol of dispatch modes, and the base classes of torch's own modules.
try:
    from torch import _VF as RECURRENT  # its lstm, gru_cell and so on are what recurrent modules call: simulate(accumulate=)
    from torch._ops import HigherOrderOperator as HigherOrderOperator  # the class of torch.cond and the like: the audit
    from torch._ops import OpOverload as OpOverload  # the class of operators: the audit
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormNd  # classes of modules, whatever their dimension: simulate
    from torch.nn.modules.conv import _ConvNd as ConvNd
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormNd
    from torch.nn.modules.loss import _Loss as Loss
    from torch.nn.modules.padding import _ConstantPadNd as ConstantPadNd
    from torch.nn.modules.padding import _ReflectionPadNd as ReflectionPadNd
    from torch.nn.modules.padding import _ReplicationPadNd as ReplicationPadNd
    from torch.nn.modules.pooling import _AdaptiveAvgPoolNd as AdaptiveAvgPoolNd
    from torch.nn.modules.pooling import _AvgPoolNd as AvgPoolNd
    from torch.nn.modules.pooling import _LPPoolNd as LPPoolNd
    from torch.nn.modules.pooling import _MaxPoolNd as MaxPoolNd
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # base class of the audit's mode
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass  # holds tensors?
    from torch.utils._pytree import tree_flatten as tree_flatten  # arguments and results of modules, of any structure
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
except ImportError as error:
    raise ImportError(f"lowp knows torch {SEEN}; torch {torch.__version__} lacks what it needs: {error}") from error


# Private attributes of torch's classes that subclasses, or code that rebuilds such objects, read or override where they are.
OF_SUBCLASSES = {
    # The dictionaries of a module, as its own methods use them. Needed: simulate, step graphs and audits of modules.
    "torch.nn.Module": {"_parameters", "_buffers", "_modules", "_forward_pre_hooks"},
    # Names of a recurrent module's weights, and the list of them made anew. Needed there: simulate of recurrent modules.
    "torch.nn.RNNBase": {"_flat_weights_names", "_init_flat_weights"},
    # Starting, watching and ending of ranks, and their processes. Needed there: `lowp train --ranks`, `lowp calibrate --ranks`.
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": {
        "_pcontext", "_start_workers", "_monitor_workers", "_shutdown",
    },
    # torch asks it before each operation in a mode. Degrades: the first kernel imports Dynamo, which takes a second.
    "torch.utils._python_dispatch.TorchDispatchMode": {"_should_skip_dynamo"},
}  # fmt: skip


# Operations on lists of tensors: one launch for all. They degrade to a loop.
def _in_a_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    def over_lists(first: Sequence[Tensor], other: Any, *more: Any) -> list[Any]:
        others = other if isinstance(other, (list, tuple)) else [other] * len(first)
        return [function(a, b, *more) for a, b in zip(first, others, strict=True)]

    return over_lists


foreach_norm: Any = getattr(torch, "_foreach_norm", _in_a_loop(torch.linalg.vector_norm))
foreach_copy_: Any = getattr(torch, "_foreach_copy_", _in_a_loop(Tensor.copy_))
foreach_mul_: Any = getattr(torch, "_foreach_mul_", _in_a_loop(Tensor.mul_))
foreach_zero_: Any = getattr(torch, "_foreach_zero_", lambda tensors: [tensor.zero_() for tensor in tensors])


# Tensors.
# Inside vmap, grad and the other transforms of torch.func? Needed there: rounding cannot look at numbers inside of them.
is_functorch_wrapped_tensor: Any = _found("torch._C._functorch.is_functorch_wrapped_tensor", "rounding under torch.func")
is_batchedtensor: Any = _found("torch._C._functorch.is_batchedtensor", "simulating a model under vmap")
# Fails on the device, without waiting for it. Needed there: for a format without NaN in a compiled function.
assert_async: Any = _found("torch._assert_async", "looking for NaN in a compiled function")
# Do two tensors share memory? Degrades to "perhaps", which costs a copy.
overlaps: Any = getattr(torch._C, "_overlaps", lambda a, b: a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
# Operations on a tensor subclass without its __torch_function__; torch's documentation of subclasses names it. Needed there.
without_torch_function: Any = _found("torch._C.DisableTorchFunctionSubclass", "guarding a simulated weight")


def storage_identity(tensor: Tensor) -> int:
    """The same number for tensors that share memory, also where there is none (fake tensors). Degrades to the address."""
    storage = tensor.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr()


# Does torch.jit.trace record? Degrades to the public question, which takes twice as long.
is_tracing: Any = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)

# Dispatch modes.
dispatch_mode_count: Any = _found("torch._C._len_torch_dispatch_stack", "rounding eagerly")  # 0: no mode sees operations
_MODE_KEYS: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_active_mode: Any = _found("torch._C._get_dispatch_mode", "compiling a kernel")
_TRACERS = tuple(getattr(_MODE_KEYS, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_MODE_KEYS, name))


def on_fake_tensors() -> bool:
    """Does a compiler run operations on tensors without memory now? (A torch without these keys: no.)"""
    return bool(_TRACERS) and _active_mode(_TRACERS[0]) is not None


def becomes_graph() -> bool:
    """Does a compiler, ours or the user's, record the operations that run now? It keeps in registers what tensors are here."""
    for tracer in _TRACERS:  # noqa: SIM110  # any() takes twice as long, and this is asked for every small tensor
        if _active_mode(tracer) is not None:
            return True
    return False


def dispatch_modes() -> list[TorchDispatchMode]:
    """Of this thread, the outermost first."""
    return _get_current_dispatch_mode_stack()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """No mode sees the operations of this thread while this lasts."""
    return _disable_current_modes()


@contextmanager
def in_dispatch_modes(modes: Collection[TorchDispatchMode]) -> Iterator[None]:
    """Enter modes on this thread alone.

    `with mode:` would also set torch's flag "in a mode", which all threads share. A thread that leaves the mode after the
    thread that made it would set the flag again when it leaves, for ever, and torch.compile would not compile any more.
    """
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


# The dispatcher, for an audit that looks into operators (health/bodies.py). Needed there.
_AUDIT = "auditing the inside of operators"
DispatchKey: Any = getattr(torch._C, "DispatchKey", None)
DispatchKeySet: Any = _found("torch._C.DispatchKeySet", _AUDIT)
keys_below: Any = _found("torch._C._dispatch_keyset_full_after", _AUDIT)  # the keys after one, in the dispatcher's order
has_kernel: Any = _found("torch._C._dispatch_has_kernel_for_dispatch_key", _AUDIT)  # (operator's name, key)
keys_of_call: Any = _found("torch._ops._compute_keyset", _AUDIT)  # (args, kwargs, allowed keys): those that a call goes to
python_kernels: Any = getattr(torch.library, "_impls", frozenset())  # "aten/add.Tensor/CPU"; degrades: none are known


def schema_of(operator: Any) -> Any:
    """Names of an operator's arguments, and more. None: operators of higher order have no schema. Degrades to that."""
    return getattr(operator, "_schema", None)


# What torch's functions in C++ are called by Python's profiler: those of `torch`, and of these modules. Degrades: some unseen.
FUNCTIONS_OF_TORCH: Any = getattr(torch._C, "_VariableFunctions", None)
MODULES_OF_FUNCTIONS = tuple(f"torch._C._{name}" for name in ("nn", "linalg", "fft", "special", "sparse", "nested"))

# Attention as GPUs compute it, without a matrix of all scores: predict/tracing.py counts it. Degrades: that matrix is counted.
fused_attention: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)


# Autograd.
backward_id: Any = _found("torch._C._current_graph_task_id", "telling a backward pass")  # of the one that runs now; or -1
current_node: Any = _found("torch._C._current_autograd_node", "telling the layer of a gradient")  # that runs now, or None
next_node_number: Any = _found("torch.autograd._get_sequence_nr", "telling the layer of a gradient")  # nodes count upwards


def number_of_node(node: Any) -> int:
    """When the node was made: compare `next_node_number`. Needed there: to tell the layer of a gradient."""
    with _needed_for("telling the layer of a gradient", "Node._sequence_nr"):
        return node._sequence_nr()


def after_backward(function: Callable[[], None]) -> None:
    """Call it at the end of the backward pass that runs now, where it may raise. Needed there: DDP and FSDP on the wire."""
    with _needed_for("reducing gradients", "torch.autograd.Variable._execution_engine"):
        engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


# Dynamo and torch.compile.
# Do not trace a function. Degrades to the public decorator, which imports Dynamo at once: a second of `import lowp`.
disable_dynamo: Any = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable


def constant_for_dynamo(function: Any) -> Any:
    """A function that Dynamo runs while it traces, and whose result is a constant of its graph.

    This is all that `torch.compiler.assume_constant_result` does, which imports Dynamo. Without it: graph breaks.
    """
    function._dynamo_marked_constant = True
    return function


def let_dynamo_break_graphs() -> None:
    """Dynamo breaks no graph with functions that were put into it whole (allow_in_graph): tell it that it may in this one.

    Degrades: an operation that a compiler cannot take is an error, instead of a graph break.
    """
    with contextlib.suppress(AttributeError):
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        tracer.output.has_user_defined_allowed_in_graph = False


def is_compiled_module(module: nn.Module) -> bool:
    """Is it what torch.compile makes of a module? (Where Dynamo was not imported, there are none.)"""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def uncompiled(module: Any) -> Any:
    """The module that torch.compile was given, or the module itself."""
    return getattr(module, "_orig_mod", module)


# Inductor, for the quantizer in compiled graphs. Degrades: the quantizer is an operator call, slower by a tenth to a third.
def inductor_is_used() -> bool:
    """Has anybody imported what lowers graphs?"""
    return "torch._inductor.lowering" in sys.modules


@cache
def inductor() -> Any:
    """`ir`, `ops` (operations on its pictures of numbers), `virtual` (`.graph` is the one being compiled),
    `register_lowering`, `fallback_handler`, `cheap_operations` (which the partition into forward and backward repeats)."""
    from torch._functorch import partitioners
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V, ops

    return SimpleNamespace(
        ir=ir,
        ops=ops,
        virtual=V,
        register_lowering=register_lowering,
        fallback_handler=fallback_handler,
        cheap_operations=partitioners.pointwise_ops,
    )


def let_one_number_be_packed() -> None:
    """Triton refuses assembly for two numbers in a block of one, which a reduction can end in. There it is used for one number:
    the other half is not looked at. Newer versions of torch than 2.11 take care of it."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.runtime import triton_helpers

    if hasattr(triton_helpers, "inline_asm_pack"):
        return
    written = TritonOverrides.inline_asm_elementwise

    def inline_asm_elementwise(*inputs: Any, pack: Any = 1, **how: Any) -> str:
        return written(*inputs, pack=pack if pack == 1 else f"{pack} if {inputs[0]}.numel > 1 else 1", **how)

    TritonOverrides.inline_asm_elementwise = staticmethod(inline_asm_elementwise)


# Distributed.
def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Of a process group. Needed there: for a group of lowp's own with the same timeout."""
    with _needed_for("the wire", "ProcessGroup._get_backend(device).options._timeout"):
        return group._get_backend(device).options._timeout


def new_group(name: str, ranks: Sequence[int], timeout: timedelta, backend: str) -> Any:
    """A process group of some of the ranks, which these alone make. torch names it after the number of groups that this process
    knows: where that differs between its ranks they wait for ever. Degrades: to torch's name."""
    c10d = dist.distributed_c10d
    with _NAMING:
        own = getattr(c10d, "_process_group_name", None)
        if own is not None:
            c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        try:
            return dist.new_group(
                list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc="lowp"
            )
        finally:
            if own is not None:
                c10d._process_group_name = own


def default_store() -> Any:
    """The store of the default process group, where ranks answer after a failure. Needed there."""
    with _needed_for("asking which ranks are alive", "torch.distributed.distributed_c10d._get_default_store"):
        return dist.distributed_c10d._get_default_store()


def joins(ddp: Any) -> bool:
    """Is a DDP model within `ddp.join()`? Degrades: no, and a rank without inputs is waited for."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def divides_by_initial_world_size(ddp: Any) -> bool:
    return bool(getattr(ddp, "_divide_by_initial_world_size", True))


def has_no_buckets(ddp: Any) -> bool:
    """Does Dynamo reduce gradients one by one, `torch._dynamo.config.optimize_ddp = "python_reducer"`? Degrades: no."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def first_element_of_shard(parameter: Any) -> int:
    """The place of this rank's first element in a DTensor that is split along its first dimension. Needed there."""
    with _needed_for("an optimizer of sharded parameters", "torch.distributed.tensor._utils"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    row = parameter.shape[1:].numel() if parameter.dim() else 1
    return offsets[0] * row if offsets else 0


def fsdp_collectives() -> Any:
    """FSDP2's `AllGather` and `ReduceScatter`, of which to make subclasses, and `Default...`, its own. Needed there."""
    with _needed_for("lowp.fsdp", "torch.distributed.fsdp._fully_shard"):
        from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives

        return SimpleNamespace(
            AllGather=_fsdp_api.AllGather,
            ReduceScatter=_fsdp_api.ReduceScatter,
            DefaultAllGather=_fsdp_collectives.DefaultAllGather,
            DefaultReduceScatter=_fsdp_collectives.DefaultReduceScatter,
        )


def fsdp_parameters(module: Any) -> Any:
    """The parameters of one `fully_shard`: `mesh_info` and `all_reduce_grads`; None for a module without any. Needed there."""
    with _needed_for("lowp.fsdp", "FSDPModule._get_fsdp_state()._fsdp_param_group"):
        return module._get_fsdp_state()._fsdp_param_group
