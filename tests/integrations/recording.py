"""What a trainer's loop did with gradients, and whether virtual ranks give the same bits."""

import logging
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lowp.integrations import request
from lowp.wire.virtual import VirtualExchange

SINGLE = "gradients are not compressed: this is a single process, which sends none (torchrun starts several)"


class Recorder:
    """By step: this rank's own gradients, as backward computed them, and those that the optimizer was given."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.own: list[dict[str, torch.Tensor]] = []
        self.got: list[dict[str, torch.Tensor]] = []
        self._now: dict[str, torch.Tensor] = {}
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.register_hook(lambda gradient, name=name: self._now.__setitem__(name, gradient.clone()))
        optimizer.register_step_post_hook(self._step)  # Lightning computes gradients within step()

    def _step(self, *_) -> None:
        self.own.append(self._now)
        self.got.append({name: parameter.grad.clone() for name, parameter in self._parameters.items()})
        self._now = {}

    def equals_virtual(self, handle, *settings, **options) -> bool:
        """Do as many virtual ranks, given every rank's own gradients, get what the optimizers got? All ranks call it."""
        world = dist.get_world_size()
        everyones = [None] * world
        dist.all_gather_object(everyones, self.own)
        virtual = VirtualExchange(world, self.shapes, *settings, **options)
        same = len(self.got) > 0
        for step, got in enumerate(self.got):
            virtual.buckets = handle.buckets_at(step)
            means = virtual.reduce(lambda rank, step=step: everyones[rank][step])
            same &= all(torch.equal(means[name], got[name]) for name in got)
        return same


def same_state(first: dict, second: dict) -> bool:
    """Two states of a compression: the same numbers, bit for bit, and residuals that are not all zero."""
    flat = [_flat(first), _flat(second)]
    tensors = [key for key, value in flat[0].items() if isinstance(value, torch.Tensor)]
    assert any(flat[0][key].any() for key in tensors)
    return flat[0].keys() == flat[1].keys() and all(
        torch.equal(value, flat[1][key]) if key in tensors else value == flat[1][key] for key, value in flat[0].items()
    )


def _flat(state: dict, at: str = "") -> dict:
    found = {}
    for key, value in state.items():
        found |= _flat(value, f"{at}/{key}") if isinstance(value, dict) else {f"{at}/{key}": value}
    return found


def names_of_torchvision() -> torch.library.Library:
    """transformers imports torchvision, which needs these names where its wheel is not built for this torch (see
    tests/simulation/test_real_models.py). They are there as long as what this returns is."""
    names = torch.library.Library("torchvision", "FRAGMENT")
    if not torch.backends.cuda.is_built():
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return names


def as_a_launcher_would(rank: int, world: int = 2) -> None:
    """What torchrun tells a process. The group is there already: trainers take it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")


@contextmanager
def single_process():
    """From here on this process is the only one. Gives the list of what the logger `lowp` says."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    request._said.clear()
    logging.getLogger("lowp").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("lowp").removeHandler(handler)
