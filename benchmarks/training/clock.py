"""The time of steps, with the device waited for on both sides."""

import time

import torch

from lowp.training.trainer import Trainer


def step_ms(trainer: Trainer, steps: int) -> float:
    """Milliseconds a step, over some steps in a row."""
    _wait(trainer.world.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    _wait(trainer.world.device)
    return 1e3 * (time.perf_counter() - began) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
