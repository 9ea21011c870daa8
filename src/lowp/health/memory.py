"""The memory that training needs for every parameter: weights, gradients, optimizer state, buffers, by dtype.

Counted from the tensors themselves, not from what a recipe promises: a state that is FP32 somewhere shows here as four bytes.
Activations are not counted, for they depend on the batch; on CUDA the peak that was measured stands beside the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowp.health.columns import aligned
from lowp.health.measures import named_tensors

MEMORY_ROLES = ("weights", "gradients", "state", "buffers")


@dataclass(frozen=True)
class MemoryPart:
    """The bytes of one role in one dtype. Gradients that do not exist yet are `expected`, in their parameters' dtype."""

    role: str
    dtype: torch.dtype
    bytes: int
    expected: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank by role and dtype; `str()` is a table."""

    parts: tuple[MemoryPart, ...]
    parameters: int  # elements on this rank, tied ones once
    measured_peak: int | None  # torch.cuda.max_memory_allocated of the parameters' devices; None without CUDA

    def bytes_of(self, role: str) -> int:
        """Bytes of "weights", "gradients", "state" or "buffers"."""
        if role not in MEMORY_ROLES:
            raise ValueError(f"unknown role {role!r}; it is one of {', '.join(MEMORY_ROLES)}")
        return sum(part.bytes for part in self.parts if part.role == role)

    @property
    def weights(self) -> int:
        return self.bytes_of("weights")

    @property
    def gradients(self) -> int:
        return self.bytes_of("gradients")

    @property
    def state(self) -> int:
        return self.bytes_of("state")

    @property
    def buffers(self) -> int:
        return self.bytes_of("buffers")

    @property
    def by_role(self) -> dict[str, int]:
        return {role: self.bytes_of(role) for role in MEMORY_ROLES}

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def bytes_per_parameter(self) -> float:
        """All bytes, divided by the number of parameters (0 without parameters)."""
        return self.total / max(self.parameters, 1)

    @property
    def bytes_per_parameter_by_role(self) -> dict[str, float]:
        return {role: self.bytes_of(role) / max(self.parameters, 1) for role in MEMORY_ROLES}

    def __str__(self) -> str:
        rows = [("role", "dtype", "bytes", "bytes/parameter", "")]
        for part in self.parts:
            note = "expected: not made yet" if part.expected else ""
            rows.append((part.role, str(part.dtype).removeprefix("torch."), *self._figures(part.bytes), note))
        rows.append(("total", "", *self._figures(self.total), f"{self.parameters:,} parameters"))
        if self.measured_peak is not None:
            rows.append(("measured peak", "", *self._figures(self.measured_peak), "activations included"))
        return "\n".join(aligned(rows, right=(2, 3)))

    def _figures(self, count: int) -> tuple[str, str]:
        return f"{count:,}", f"{count / max(self.parameters, 1):.3f}"


def memory(model: nn.Module, optimizer: Optimizer | None = None) -> Memory:
    """Count the bytes of a model's weights, gradients and buffers and of its optimizer's state, as they are now.

        print(lowp.health.memory(model, optimizer))
        assert lowp.health.memory(model, optimizer).bytes_per_parameter <= 8

    Optimizers make their state in the first step: call this after it. Memory that two names share counts once, a DTensor counts
    with its local part, and other tensor subclasses with the tensors that they are made of.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory takes the model, an nn.Module, first; not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"memory takes a torch.optim.Optimizer or None second, not {type(optimizer).__name__}")
    parameters = dict.fromkeys(model.parameters())
    if optimizer is not None:
        parameters |= dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    seen: set[tuple] = set()
    count = sum(_local(parameter).numel() for parameter in parameters if _is_new(_local(parameter), seen))
    seen.clear()  # what was counted in elements is now counted in bytes
    sizes: dict[tuple[str, torch.dtype, bool], int] = {}
    for role, tensor, expected in _tensors(list(parameters), model, optimizer):
        for part in _parts(tensor):
            if expected or _is_new(part, seen):
                key = role, part.dtype, expected
                sizes[key] = sizes.get(key, 0) + part.numel() * part.dtype.itemsize
    parts = tuple(MemoryPart(role, dtype, size, expected) for (role, dtype, expected), size in sizes.items())
    devices = {parameter.device for parameter in parameters if parameter.device.type == "cuda"}
    peak = sum(torch.cuda.max_memory_allocated(device) for device in devices) if devices else None
    return Memory(parts, count, peak)


def _tensors(parameters: list[Tensor], model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor, bool]]:
    """Role, tensor, and whether it only stands for one that will be made."""
    yield from (("weights", parameter, False) for parameter in parameters)
    expected: set[tuple] = set()
    for parameter in parameters:
        if parameter.grad is not None:
            yield "gradients", parameter.grad, False
        elif parameter.requires_grad and _is_new(_local(parameter), expected):
            yield "gradients", parameter, True
    if optimizer is not None:
        yield from (("state", tensor, False) for kept in optimizer.state.values() for _, tensor in named_tensors(kept))
    yield from (("buffers", buffer, False) for buffer in model.buffers())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors in which a tensor's bytes lie."""
    tensor = _local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def _is_new(tensor: Tensor, seen: set[tuple]) -> bool:
    """Has this memory not been counted before? (Tensors without memory of their own, empty ones say, are only themselves.)"""
    place = 0 if hasattr(tensor, "__tensor_flatten__") else tensor.untyped_storage().data_ptr()
    identity = (str(tensor.device), place, tensor.storage_offset()) if place else (id(tensor),)
    if identity in seen:
        return False
    seen.add(identity)
    return True
