"""What an audit lets pass, by name: each exception to "no FP32 tensor" is written down, and printed with the result.

An allowance excuses single tensors, not operations: that layer norm saves its mean in FP32 does not excuse an FP32 output.
A tensor is known by its *slot*: the name of the argument that it is, or "out0", "out1" for results. The slots below were found
by running every layer of torch.nn in FP16 on a CPU, and for CUDA by reading which results torch's kernels allocate in their
accumulation type. What is not a statistic is not here: in FP16, `nn.RMSNorm` on a CPU and the unfused
`scaled_dot_product_attention` (a mask with dropout, say) convert whole activations to FP32. That is theirs to be caught for
(`torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)` stops the latter).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.health.places import OperationPlace
from lowp.names import covers, did_you_mean

_NESTED = (list, tuple)


@dataclass(frozen=True)
class Sighting:
    """One forbidden tensor at one operation. Finding the place takes a walk over the stack, so it is only done when asked."""

    operation: str  # "aten.mm", or what holds the tensor: "buffer running_mean"
    slot: str  # "" for what is held
    tensor: Tensor
    made: bool  # by this operation, not a view of what it was given
    find_place: Callable[[], OperationPlace]

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def holds(values: Any, forbidden: frozenset[torch.dtype]) -> bool:
    """Is there a tensor of a forbidden dtype, in lists and dicts too? Scalars and empty tensors do not count."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in forbidden and value.dim() and value.numel():
                return True
        elif isinstance(value, _NESTED):
            if holds(value, forbidden):
                return True
        elif isinstance(value, dict) and holds(value.values(), forbidden):
            return True
    return False


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return compat.storage_identity(tensor) if _has_memory(tensor) else id(tensor)


def _has_memory(tensor: Tensor) -> bool:
    """Is there one stretch of it? (Sparse and nested tensors have several.)"""
    return tensor.layout == torch.strided and not tensor.is_nested


def sightings(
    func: Any, args: Any, kwargs: Any, out: Any, forbidden: frozenset[torch.dtype], find_place: Callable[[], OperationPlace]
) -> Iterator[Sighting]:
    """The distinct forbidden tensors of a call: what it was given, then what it made or gave back."""
    operation = str(getattr(func, "overloadpacket", func))
    schema = compat.schema_of(func)
    names = [argument.name for argument in schema.arguments] if schema else [f"in{i}" for i in range(len(args))]
    given = [(name, tensor) for name, value in (*zip(names, args, strict=False), *kwargs.items()) for tensor in _flat(value)]
    results = out if isinstance(out, _NESTED) else (out,)
    returned = [(f"out{i}", tensor) for i, value in enumerate(results) for tensor in _flat(value)]
    if operation == "aten.lift_fresh":
        given = []  # torch.tensor() makes its tensor unseen, and shows it to modes by "lifting" it
    given_memory = {memory_of(tensor) for _, tensor in given}
    seen, seen_memory = set(), set()
    for i, (slot, tensor) in enumerate(given + returned):
        memory = memory_of(tensor)
        identity = memory, tensor.storage_offset() if _has_memory(tensor) else 0, tensor.shape
        is_result = i >= len(given)
        if identity in seen or (is_result and memory in seen_memory):  # twice the same, or a view of what was counted
            continue
        if holds((tensor,), forbidden) and not tensor.is_meta:
            seen.add(identity)
            if not is_result:
                seen_memory.add(memory)
            yield Sighting(operation, slot, tensor, is_result and memory not in given_memory, find_place)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*_NESTED, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)


@dataclass(frozen=True)
class Allowance:
    """A reason to let a tensor pass."""

    name: str
    why: str
    matches: Callable[[Sighting], bool]


_STATISTICS = {f"aten.{name}": ("out1", "out2") for name in (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
    "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm", "native_layer_norm", "native_group_norm",
)} | {
    "aten.native_batch_norm_backward": ("save_mean", "save_invstd"),
    "aten.batch_norm_backward": ("save_mean", "save_var"),
    "aten.cudnn_batch_norm_backward": ("save_mean", "save_var"),
    "aten.miopen_batch_norm_backward": ("save_mean", "save_var"),
    "aten.native_layer_norm_backward": ("mean", "rstd"),
    "aten.native_group_norm_backward": ("mean", "rstd"),
    "aten._fused_rms_norm": ("out1",),
    "aten._fused_rms_norm_backward": ("rstd",),
}  # fmt: skip

_FUSED_ATTENTION = tuple(f"aten._{name}" for name in (
    "scaled_dot_product_flash_attention", "scaled_dot_product_efficient_attention", "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_fused_attention_overrideable",
    "flash_attention_forward", "efficient_attention_forward", "cudnn_attention_forward",
    "flash_attention_backward", "efficient_attention_backward", "cudnn_attention_backward",
))  # fmt: skip


def _is_running_statistic(seen: Sighting) -> bool:
    if seen.operation in ("buffer running_mean", "buffer running_var"):
        return True
    return "batch_norm" in seen.operation and seen.slot in ("running_mean", "running_var")


def _is_norm_statistic(seen: Sighting) -> bool:
    return seen.slot in _STATISTICS.get(seen.operation, ())


def _is_logsumexp(seen: Sighting) -> bool:
    if seen.operation.removesuffix("_backward") not in _FUSED_ATTENTION and seen.operation not in _FUSED_ATTENTION:
        return False
    return seen.slot == ("logsumexp" if seen.operation.endswith("_backward") else "out1")


def _is_wire_sum(seen: Sighting) -> bool:
    return "wire" in seen.find_place().lowp_parts


ALLOWANCES = (
    Allowance(
        "batch_norm running stats",
        "the running_mean and running_var of batch norm, kept in FP32: they average over thousands of steps",
        _is_running_statistic,
    ),
    Allowance(
        "norm statistics",
        "the mean and 1/std of each row or channel that batch, layer, group and RMS norm save for backward; FP32 on CUDA",
        _is_norm_statistic,
    ),
    Allowance(
        "attention logsumexp",
        "one number a row that fused attention saves for backward; FP32 on every device",
        _is_logsumexp,
    ),
    Allowance(
        "wire sums",
        "lowp.wire decodes the gradients of all ranks and adds them in FP32, piece by piece; it keeps a layer's scale in FP64",
        _is_wire_sum,
    ),
)


def parse_allowances(names: Iterable[str]) -> tuple[Allowance, ...]:
    """Allowances from their names, "module:<glob>" and "op:<glob>"."""
    if isinstance(names, str):
        raise TypeError(f"allow takes a list of names: allow=[{names!r}]")
    return tuple(_parse(name) for name in names)


def _parse(name: str) -> Allowance:
    if not isinstance(name, str):
        raise TypeError(f"allow takes names, not {type(name).__name__}: {name!r}")
    kind, colon, glob = name.partition(":")
    if colon and kind in ("module", "op"):
        if not glob:
            raise ValueError(f"{name!r} lacks a pattern, such as {'module:layer1.*' if kind == 'module' else 'op:aten.sum'!r}")
        if kind == "op":
            return Allowance(name, "operations of that name", lambda seen: fnmatchcase(seen.operation, glob))
        return Allowance(name, "modules of that name", lambda seen: covers(glob, seen.find_place().module))
    known = {allowance.name: allowance for allowance in ALLOWANCES}
    if name not in known:
        hint = did_you_mean(name, known, f"known are {', '.join(map(repr, known))}")
        raise ValueError(f"unknown allowance {name!r}; {hint} (or a pattern: 'module:<glob>', 'op:<glob>')")
    return known[name]
