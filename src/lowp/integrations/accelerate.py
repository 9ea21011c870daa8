"""Hugging Face accelerate: compression as one more setting of DistributedDataParallel.

>>> compression = GradientCompression("e5m2", scale="aps", bucket_cap_mb=50)
>>> accelerator = Accelerator(kwargs_handlers=[compression])
>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)   # here the gradients of `model` are compressed
>>> accelerator.register_for_checkpointing(compression)                        # save_state, load_state: every rank's state
>>> compression.handle.total()

`Accelerator` looks up what kind of settings an object holds by its exact `__class__` (1.15), and makes another one of that
class to compare with the defaults. So this one answers, as mock objects do, that it is what it extends.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs, get_int_from_env

from lowp.integrations.request import CompressionRequest, alone
from lowp.wire.ddp import Handle

_OF_DDP = {field.name for field in fields(DistributedDataParallelKwargs)}
_OF_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")
_WORLD = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]  # where accelerate looks


class GradientCompression(DistributedDataParallelKwargs):
    """Arguments of `lowp.compress_gradients`, and those of `DistributedDataParallelKwargs` (bucket_cap_mb, static_graph ...).

    Every model that `accelerator.prepare` wraps is compressed. In a single process nothing is wrapped, and the logger `lowp`
    says so once.
    """

    def __init__(self, format: Any, **options: Any) -> None:
        for name in _OF_HOOKS:
            if name in options:
                raise TypeError(f"{name}: a model has one communication hook, and this is it")
        super().__init__(**{name: options.pop(name) for name in sorted(_OF_DDP & options.keys())})
        self._request = CompressionRequest(format, options)
        self._handles: list[Handle] = []
        if not dist.is_initialized():  # else `register_comm_hook` is called, or the group has one rank
            alone(get_int_from_env(_WORLD, 1))
        else:
            alone()

    @property
    def __class__(self) -> type:
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = _OF_HOOKS) -> dict[str, Any]:
        """What DistributedDataParallel is given."""
        return {name: getattr(self, name) for name in sorted(_OF_DDP) if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """`accelerator.prepare` calls this with every model that it has wrapped."""
        if not alone():
            self._handles.append(self._request.start(model))

    @property
    def handles(self) -> list[Handle]:
        """One for each model that was prepared and still exists, in that order; none in a single process."""
        self._handles = [handle for handle in self._handles if handle.model is not None]
        return self._handles

    @property
    def handle(self) -> Handle:
        """The only one."""
        if len(self.handles) != 1:
            raise RuntimeError(
                f"{len(self.handles)} models are compressed: see `handles`"
                if self.handles
                else "no model is compressed: accelerator.prepare(model) does it, where there are several processes"
            )
        return self.handles[0]

    def state_dict(self) -> dict[str, Any]:
        """Every rank's state of every model. All ranks call it, as `accelerator.save_state` does."""
        return {"models": [handle.state_dict(all_ranks=True) for handle in self.handles]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if len(saved["models"]) != len(self.handles):
            raise ValueError(
                f"the checkpoint has the compression of {len(saved['models'])} models, here are {len(self.handles)}: "
                "load it after accelerator.prepare, on several processes if it was saved by several"
            )
        for handle, state in zip(self.handles, saved["models"], strict=True):
            handle.load_state_dict(state)
