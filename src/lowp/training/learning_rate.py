"""The learning rate as a function of the step, from a recipe's epochs."""

import math
from collections.abc import Callable

import torch

from lowp.optim import schedules
from lowp.training.recipe import LearningRate


def factor_of(settings: LearningRate, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """What optimizer.lr is multiplied with, by step. The formulas are those of `lowp.optim.schedules`."""
    nobody = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # a schedule wants an optimizer; we want its formula
    warmup, start = round(settings.warmup * steps_per_epoch), settings.start
    points = [point * steps_per_epoch for point in settings.points]
    if settings.kind == "poly":
        schedule = schedules.poly(nobody, steps, settings.power, warmup, start)
    elif settings.kind == "linear":
        schedule = schedules.piecewise_linear(nobody, points, settings.factors, warmup, start)
    elif settings.kind == "steps":
        schedule = schedules.piecewise_constant(nobody, [round(p) for p in points], settings.factor, warmup, start)
    elif settings.kind == "cosine":
        schedule = schedules.warmup(nobody, warmup, start, lambda step: _cosine(step, warmup, steps))
    else:
        schedule = schedules.warmup(nobody, warmup, start)
    return schedule.lr_lambdas[0]


def _cosine(step: int, warmup: int, steps: int) -> float:
    return (1 + math.cos(math.pi * min(1.0, max(0, step - warmup) / max(1, steps - warmup)))) / 2
