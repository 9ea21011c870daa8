"""Lightning: compression as a callback, or as the hook of a `DDPStrategy`.

>>> compression = GradientCompression("e5m2", scale="aps")
>>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[compression])
>>> trainer.fit(model)                                  # checkpoints have the state of every rank
>>> compression.handle.total()

Where only a strategy can be given:

>>> DDPStrategy(ddp_comm_state=CompressionState("e5m2", scale="aps"), ddp_comm_hook=compression_hook)

Lightning (2.6) registers hooks of strategies on CUDA alone, passes over them elsewhere without a word, and does not save their
states. The callback has none of these limits.

`lightning.pytorch` and the older package `pytorch_lightning` have classes of their own. This module takes the one that the
program has imported, and `lightning` if it has imported none.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.integrations.request import CompressionRequest, alone, figures
from lowp.integrations.wrappers import wrapper_with
from lowp.wire.ddp import Handle, HookSwitch, adopt_switch, reduce_bucket

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    _package = "lightning.pytorch"
    if _package not in sys.modules and "pytorch_lightning" in sys.modules:
        _package = "pytorch_lightning"
    Callback = import_module(_package).Callback


class GradientCompression(Callback):
    """Arguments of `lowp.compress_gradients`. The figures of `report()` are logged as often as the trainer logs.

    `handle` is that of the training that runs or ran last. It is None before, and in a single process: nothing is compressed
    there, and the logger `lowp` says so once.
    """

    def __init__(self, format: Any, **options: Any) -> None:
        self._request = CompressionRequest(format, options)
        self.handle: Handle | None = None
        self._saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._stop()  # a training that ended with an exception
        self.handle = None
        if alone():
            return
        self.handle = self._request.start(trainer.strategy.model)
        saved, self._saved = self._saved, None
        if saved is not None:
            self.handle.load_state_dict(saved)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.handle is not None and trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(figures(self.handle), step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank. Lightning calls this on all ranks, and saves what rank 0 has."""
        return {} if self.handle is None else self.handle.state_dict(all_ranks=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this before the model is wrapped."""
        self._saved = state_dict

    def _stop(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class CompressionState(HookSwitch):
    """The state for `compression_hook`: arguments of `lowp.compress_gradients`. `handle` is there from the first step on."""

    def __init__(self, format: Any, **options: Any) -> None:
        super().__init__()
        self._request: CompressionRequest | None = CompressionRequest(format, options)

    def start(self, bucket: dist.GradBucket) -> None:
        """In the first bucket of the first step, where all ranks are at the same place."""
        request, self._request = self._request, None
        if request is None or alone():
            return
        ddp = wrapper_with(bucket.parameters()[0])
        if ddp is None:
            raise RuntimeError("CompressionState must be made before the model is wrapped in DistributedDataParallel")
        adopt_switch(ddp, self)
        request.start(ddp)


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of a DistributedDataParallel model: `ddp.register_comm_hook(CompressionState("e5m2"), compression_hook)`."""
    if state.handle is None:
        state.start(bucket)
    return reduce_bucket(state, bucket)
