"""A copy of a model's buffers (running statistics), to go back to."""

import torch
from torch import Tensor, nn

from lowp import compat


class BufferCopies:
    """Room for the values of a model's buffers, made once.

    A step copies them often (virtual ranks: once a rank). One call of torch for each dtype is one launch on CUDA; a call for
    tensors of several dtypes would be a launch for each tensor. Buffers are found by name each time: a model may assign another
    tensor to one (`self.mean = 0.9 * self.mean + ...`).
    """

    def __init__(self, model: nn.Module) -> None:
        seen: set[Tensor] = set()
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer not in seen:
                    groups.setdefault((buffer.dtype, buffer.device), []).append((module, name))
                    seen.add(buffer)
        self._places = list(groups.values())
        self._copies = [[buffer.detach().clone() for buffer in buffers] for buffers in self._now()]

    def _now(self) -> list[list[Tensor]]:
        return [[getattr(module, name) for module, name in places] for places in self._places]

    @torch.no_grad()
    def save(self) -> None:
        for buffers, copies in zip(self._now(), self._copies, strict=True):
            compat.foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        for buffers, copies in zip(self._now(), self._copies, strict=True):
            compat.foreach_copy_(buffers, copies)
