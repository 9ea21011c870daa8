"""Ray Train: compression in the loop of a `TorchTrainer`, with a state that outlives its workers.

>>> def loop(config):
...     model, handle = prepare_model(Net(), "e5m2", scale="aps")
...     checkpoint = ray.train.get_checkpoint()
...     if checkpoint:
...         with checkpoint.as_directory() as directory:
...             load(handle, directory)
...     ...
...     with tempfile.TemporaryDirectory() as directory:            # on every rank: Ray puts the files of all ranks together
...         save(handle, directory)
...         ray.train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(directory))
"""

import os
from typing import Any

import ray.train.torch
from torch import nn

from lowp.integrations.rank_files import load_rank, save_rank
from lowp.integrations.request import CompressionRequest, alone
from lowp.wire.ddp import Handle


def prepare_model(
    model: nn.Module, format: Any, *, prepare: dict[str, Any] | None = None, **options: Any
) -> "tuple[nn.Module, Handle | None]":
    """`ray.train.torch.prepare_model`, and then `lowp.compress_gradients` with `format` and `options`.

    Args:
        prepare: arguments of `ray.train.torch.prepare_model`, such as {"parallel_strategy_kwargs": {"bucket_cap_mb": 50}}.

    Returns the wrapped model and the handle. On a single worker the handle is None, and the logger `lowp` says so once.
    """
    request = CompressionRequest(format, options)
    wrapped = ray.train.torch.prepare_model(model, **(prepare or {}))
    return wrapped, None if alone() else request.start(wrapped)


def save(handle: "Handle | None", directory: "str | os.PathLike[str]") -> None:
    """Write this rank's state. Every rank reports a checkpoint with its own file."""
    if handle is not None:
        save_rank(handle, directory)


def load(handle: "Handle | None", directory: "str | os.PathLike[str]", step_only: bool = False) -> None:
    """Take this rank's state, as `Handle.load_state_dict` does. All ranks call it.

    With `step_only` residuals and delayed scales are left out: for another number of workers than at the time of `save`.
    """
    if handle is not None:
        load_rank(handle, [directory], step_only=step_only)
