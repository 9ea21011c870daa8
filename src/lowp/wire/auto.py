"""`reduction="auto"`: measure the link, and compress only where that is faster."""

import logging
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.communicator import Communicator
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import Meter
from lowp.wire.settings import Settings
from lowp.wire.warm_up import warm_up

logger = logging.getLogger("lowp")

ELEMENTS = 1 << 21
ROUNDS = 3
GAIN = 1.05  # compression must be this much faster to be worth what it loses


def choose(communicator: Communicator, settings: Settings, device: torch.device) -> Reduction | None:
    """Two-shot (one-shot on two ranks), or None where plain float32 is as fast.

    The same 8 MB are reduced both ways, three times each, in turns. All ranks come to the same answer: the slowest one's times
    count.
    """
    known, asked = communicator.link.chosen, settings.describe()
    if asked not in known:
        if communicator.world == 1:
            known[asked] = None
            return None
        plain, compressed = _times(communicator, settings, device)
        pays = plain > GAIN * compressed
        known[asked] = best_for(communicator.world) if pays else None
        if communicator.rank == 0:
            codec = settings.codec_at(settings.format, 0)
            found = f"8 MB took {1e3 * plain:.1f} ms in fp32 and {1e3 * compressed:.1f} ms in {codec}"
            if pays:
                logger.info("reduction='auto': %s: compressing, %s", found, known[asked])
            else:
                logger.warning("reduction='auto': %s: compression does not pay on this link, gradients travel in fp32", found)
    return known[asked]


def best_for(world: int) -> Reduction:
    """On two ranks one_shot sends no more than two_shot, and does less."""
    return OneShot() if world == 2 else TwoShot()


def _times(communicator: Communicator, settings: Settings, device: torch.device) -> tuple[float, float]:
    numbers = torch.randn(ELEMENTS, device=device)
    layer = Layer("probe", ELEMENTS, settings.codec_at(settings.format, 0), 0)
    warm_up({layer.codec}, device)

    def plain() -> None:
        dist.all_reduce(numbers.clone(), group=communicator.parent)

    def compressed() -> None:
        _reduce(numbers.clone(), layer, settings, communicator)

    times: dict[Callable[[], None], list[float]] = {plain: [], compressed: []}
    for number in range(ROUNDS + 1):
        for way, found in times.items():
            seconds = _timed(way, device)
            if number:  # the first is for getting ready
                found.append(seconds)
    medians = torch.tensor([statistics.median(found) for found in times.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX, group=communicator.parent)
    first, second = medians.tolist()
    return first, second


def _reduce(numbers: Tensor, layer: Layer, settings: Settings, communicator: Communicator) -> None:
    meter, scheduler = Meter(), ChunkScheduler()
    link, state = communicator.link, State()
    BucketExchange(
        numbers, Bucket.of((layer,)), settings, best_for(link.world), link, state, meter, False, lambda marks: None
    ).start(scheduler)
    scheduler.run()


def _timed(way: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
