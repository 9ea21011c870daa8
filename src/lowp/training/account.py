"""What a run has cost so far: time and bytes, over all the processes that have worked on it."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from lowp.health.memory import MEMORY_ROLES, memory
from lowp.training.trainer import Trainer


class Account:
    """Saved in checkpoints as plain numbers, so that a resumed run goes on counting."""

    def __init__(self, trainer: Trainer, saved: dict[str, Any] | None) -> None:
        self._trainer = trainer
        self._before = saved or {"seconds": 0.0, "bytes_sent": 0.0, "bytes_of_fp32": 0.0}
        self.best_accuracy: float | None = self._before.get("best_accuracy")
        self._step_seconds: list[float] = list(self._before.get("step_seconds", ()))  # means of stretches between two records
        # The same by phase (step_clock.py), where it is known; of checkpoints of older versions it is not
        self._phase_seconds: list[dict[str, float]] = list(self._before.get("phase_seconds", ()))
        self._clock = time.perf_counter()
        self._since = (trainer.step, self._clock)  # where the present stretch began

    def state(self) -> dict[str, Any]:
        sent, of_fp32 = self._bytes()
        return {
            "seconds": self._seconds(),
            "bytes_sent": sent,
            "bytes_of_fp32": of_fp32,
            "best_accuracy": self.best_accuracy,
            "step_seconds": self._step_seconds,
            "phase_seconds": self._phase_seconds,
        }

    def _seconds(self) -> float:
        return self._before["seconds"] + time.perf_counter() - self._clock

    def _bytes(self) -> tuple[float, float]:
        """Multiples of 1 / ranks. Written as the nearest float to one, they are the same however the sum was interrupted.

        The ranks of a divided model send different amounts: the mean, for which all of them must ask.
        """
        recipe, world, here = self._trainer.recipe, self._trainer.world, self._trainer.exchange.bytes_sent()
        if self._trainer.placement is not None:
            here = (world.sum(torch.tensor(here, dtype=torch.float64)) / world.ranks).tolist()
        ranks, before = max(recipe.ranks, recipe.virtual_ranks), (self._before["bytes_sent"], self._before["bytes_of_fp32"])
        sent, of_fp32 = (a + b for a, b in zip(before, here, strict=True))
        return round(sent * ranks) / ranks, round(of_fp32 * ranks) / ranks

    def pause(self) -> None:
        """What was done since the last step (a test, a checkpoint) is no part of the steps' time."""
        if self._since[0] == self._trainer.step:
            self._since = (self._trainer.step, time.perf_counter())

    def train_record(self) -> dict[str, Any]:
        """The steps since the last one. Asking for the loss waits for the device, so times are true."""
        trainer, (begin, began) = self._trainer, self._since
        metrics = trainer.take_metrics()
        now = time.perf_counter()
        self._since = (trainer.step, now)
        each = (now - began) / (trainer.step - begin)
        self._step_seconds.append(each)
        phases = trainer.clock.take()
        self._phase_seconds += [phases] if phases else []
        sent, of_fp32 = self._bytes()
        scale = trainer.loss_scale
        return {
            "kind": "train",
            "step": trainer.step,
            "epoch": trainer.epoch,
            **metrics,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "samples_per_second": trainer.recipe.batch / each,
            "seconds": self._seconds(),
            "bytes_sent": round(sent),
            "bytes_of_fp32": round(of_fp32),
            "loss_scale": None if scale is None else scale.value,
            "skipped": 0 if scale is None else scale.skipped,
            "wire": trainer.wire,
            "times_ms": _milliseconds(phases),
        }

    def test_record(self) -> dict[str, Any]:
        found = self._trainer.test()
        self.best_accuracy = max(self.best_accuracy or 0.0, found["accuracy"])
        self.pause()
        return {"kind": "test", "step": self._trainer.step, "epoch": self._trainer.epoch, **found}

    def end_record(self, test: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        counted = memory(trainer.model, trainer.optimizer)
        sent, of_fp32 = self._bytes()
        each = statistics.median(self._step_seconds) if self._step_seconds else None
        on_cuda = trainer.world.device.type == "cuda"
        return {
            "kind": "end",
            "step": trainer.step,
            "epoch": trainer.epoch,
            "accuracy": test["accuracy"],
            "loss": test["loss"],
            "best_accuracy": self.best_accuracy,
            "seconds": self._seconds(),
            "samples_per_second": trainer.recipe.batch / each if each else None,
            "step_ms": each * 1e3 if each else None,
            "bytes_sent": round(sent),
            "bytes_of_fp32": round(of_fp32),
            "memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else counted.total,
            "bytes_per_parameter": counted.bytes_per_parameter,
            "memory": {role: counted.bytes_of(role) for role in MEMORY_ROLES},
            "times_ms": _milliseconds(self._phases()),
            "wire_ms": _milliseconds(trainer.exchange.seconds()),
            "parameters": trainer.parameters_of_model,
            "ranks": trainer.world.ranks,
            "virtual_ranks": trainer.recipe.virtual_ranks,
            "device": trainer.world.device.type,
        }

    def _phases(self) -> dict[str, float]:
        """Medians of the stretches, as of the whole step. They add up to about the step, less what is done between steps."""
        names = dict.fromkeys(name for phases in self._phase_seconds for name in phases)
        return {name: statistics.median(phases.get(name, 0.0) for phases in self._phase_seconds) for name in names}


def _milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * each for name, each in seconds.items()}
