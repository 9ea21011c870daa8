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


def warm_up_seconds(trainer: Trainer, steps: int) -> float:
    """Until the first steps are over, with all that is compiled and recorded in them."""
    began = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    trainer.take_metrics()  # waits for the device
    return time.perf_counter() - began


def steps_within(trainer: Trainer, seconds: float) -> tuple[int, float]:
    """Steps in a row for about so many seconds: how many there were, and how long they took."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        trainer.train_step()
        steps += 1
    trainer.take_metrics()
    return steps, time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
