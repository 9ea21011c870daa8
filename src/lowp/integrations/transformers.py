"""Hugging Face's Trainer: compression as a callback.

>>> compression = GradientCompression("e5m2", scale="aps")
>>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[compression])
>>> trainer.train()                                     # or train(resume_from_checkpoint=True)
>>> compression.handle.total()

The Trainer wraps the model when training begins, and gives callbacks the model without its wrapper. `wrappers.py` finds it.

Every rank's state is saved in the checkpoint's folder, beside the states of the random number generators. The Trainer does not
tell callbacks from where it resumes. So the checkpoint's `trainer_state.json` names the training that wrote it, and a file is
taken only if it has the same name and step.
"""

import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lowp.integrations.rank_files import load_rank, save_rank
from lowp.integrations.request import CompressionRequest, alone, figures, say_once
from lowp.integrations.wrappers import wrapper_of
from lowp.wire.ddp import Handle

_KEY = "lowp.integrations.transformers"  # in TrainerState.stateful_callbacks, which is part of trainer_state.json


class GradientCompression(TrainerCallback):
    """Arguments of `lowp.compress_gradients`, and:

    Args:
        resume_from: the checkpoint's directory, where it is neither in `output_dir` nor `args.resume_from_checkpoint`. False:
            resume without the state of the compression, which begins anew.

    `handle` is that of the training that runs or ran last. It is None before, and in a single process: nothing is compressed
    there, and the logger `lowp` says so once.
    """

    def __init__(self, format: Any, *, resume_from: "str | Path | bool | None" = None, **options: Any) -> None:
        self._request, self._resume_from = CompressionRequest(format, options), resume_from
        self.handle: Handle | None = None
        self._label: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **others: Any
    ) -> None:
        self._stop()  # a training that ended with an exception
        self.handle = None
        if alone():
            return
        ddp = wrapper_of(model)
        if ddp is None:
            raise TypeError(
                f"GradientCompression found no DistributedDataParallel around {type(model).__name__}: import it before the "
                "first train(); it is not for FSDP (lowp.fsdp.compress is) or DeepSpeed"
            )
        self.handle = self._request.start(ddp)
        self._resume(args, state, self.handle)
        training = [uuid.uuid4().hex]
        dist.broadcast_object_list(training, src=0)
        self._label = {"training": training[0]}
        _kept(state)[_KEY] = {"args": {}, "attributes": self._label}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Add `report()`'s figures to the line of the log that has the loss, and to `state.log_history`."""
        if self.handle is not None and logs is not None and "loss" in logs:
            found = figures(self.handle)
            logs.update(found)
            state.log_history[-1].update(found)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if self.handle is None or args.save_only_model:
            return
        if state.is_hyper_param_search:
            say_once("the state of compressed gradients is not saved during a search of hyperparameters")
            return
        save_rank(self.handle, _checkpoint(args, state), self._label | {"step": state.global_step})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def _resume(self, args: TrainingArguments, state: TrainerState, handle: Handle) -> None:
        if state.global_step == 0 or self._resume_from is False:
            return
        saved = _kept(state).get(_KEY)
        if saved is None:
            say_once("the checkpoint was saved without compressed gradients: their compression begins at step 0")
            return
        named = [self._resume_from, args.resume_from_checkpoint, _checkpoint(args, state)]
        places = [place for place in named if isinstance(place, (str, Path))]
        try:
            load_rank(handle, places, saved["attributes"] | {"step": state.global_step})
        except ValueError as error:
            handle.remove()
            otherwise = "GradientCompression(resume_from=DIRECTORY) says where it is, resume_from=False begins anew"
            raise ValueError(f"{error}. {otherwise}") from None


def _kept(state: TrainerState) -> dict[str, Any]:
    """What trainer_state.json keeps for callbacks. (It is annotated as the list that the constructor takes.)"""
    assert isinstance(state.stateful_callbacks, dict)
    return state.stateful_callbacks


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
