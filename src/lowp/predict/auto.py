"""`reduction="auto"`: is compression faster on this link, and which reduction is the fastest? As `lowp plan` decides it.

The links and the codec at hand are measured for a second or two, by all ranks at once (probes/). Then one reduction of the
gradients is predicted uncompressed, in their own dtype, and in the user's format with every reduction that may be the fastest
(candidates.py), and chosen as a plan is (planning.py), without a budget: the format is the user's choice. Rank 0 decides, and
tells the others.
"""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from lowp.predict.candidates import reductions_for
from lowp.predict.cluster import Cluster, Device
from lowp.predict.planning import GAIN, PlanOption, chosen_of
from lowp.predict.prediction import BUCKET_MB, MEGABYTE, predict
from lowp.predict.probes.codec_times import codec_speed
from lowp.predict.probes.link import link_levels
from lowp.predict.probes.meeting import Meeting
from lowp.predict.wires import WireChoice, uncompressed, wire_of
from lowp.predict.workload import ModelLayer, Work, Workload
from lowp.wire.communicator import Communicator
from lowp.wire.reductions import reduction_of
from lowp.wire.reductions.base import Reduction
from lowp.wire.settings import Settings

logger = logging.getLogger("lowp")

LINK_SECONDS, CODEC_SECONDS = 1.0, 0.5
MOST_NUMBERS = int(BUCKET_MB * MEGABYTE / 4)  # of a bucket


def choose(
    communicator: Communicator, settings: Settings, device: torch.device, numbers: int, dtype: torch.dtype = torch.float32
) -> Reduction | None:
    """The reduction for gradients of so many numbers, or None where uncompressed ones are as fast. All ranks get the same."""
    if communicator.world == 1:
        return None
    known, size = communicator.link.chosen, min(numbers, MOST_NUMBERS)
    asked = f"{settings.describe()} of {size} {dtype}"
    if asked not in known:
        cluster = _measured(communicator, settings, device)
        option, plain = fastest(settings, cluster, communicator.world, size, dtype)
        said = first_says(communicator.parent, "" if option.choice.plain else option.step.reduction)
        known[asked] = reduction_of(said) if said else None
        if communicator.rank == 0:
            _tell(option, plain, size * dtype.itemsize)
    return known[asked]


def first_says(group: Any, mine: Any) -> Any:
    """What rank 0 has."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said[0]


def fastest(
    settings: Settings, cluster: Cluster, ranks: int, numbers: int, dtype: torch.dtype = torch.float32
) -> tuple[PlanOption, PlanOption]:
    """Of uncompressed gradients and the user's format with every reduction; and the former. No computation hides anything."""
    layer = ModelLayer("numbers", (numbers,), Work(), Work(), 0)
    workload = Workload("numbers", (layer,))
    text = str(settings.codec_at(settings.format, 0))
    wires = [wire_of(uncompressed(dtype))]
    wires += [WireChoice(f"{text}@{way}", settings, way, False) for way in reductions_for(cluster.arrange(ranks))]
    steps = predict(workload, cluster, wires, ranks, batch=1).steps
    options = [PlanOption(wire, BUCKET_MB, step, 0.0, True, wire is wires[0]) for wire, step in zip(wires, steps, strict=True)]
    return chosen_of(options), options[0]


def _measured(communicator: Communicator, settings: Settings, device: torch.device) -> Cluster:
    """This machine's links, and the codec; computation is left out. Links are measured once, each codec once."""
    meeting = Meeting(device, communicator=communicator)
    known, codec = communicator.link.chosen, settings.codec_at(settings.format, 0)
    if "links" not in known:
        here = min(meeting.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        known["links"] = tuple(link_levels(meeting, here if meeting.ranks % here == 0 else 1, LINK_SECONDS))
    if (name := f"codec {codec}") not in known:
        known[name] = codec_speed(meeting, settings, CODEC_SECONDS)
    speed, chunk = known[name]
    bare = Device("this", device.type, flops=1.0, bandwidth=1.0, codecs={str(codec): speed}, chunk_overhead=chunk)
    return Cluster("this machine", bare, known["links"])


def _tell(option: PlanOption, first: PlanOption, size_in_bytes: int) -> None:
    plain, ours = 1e3 * first.step.step, 1e3 * option.step.step
    size, name = f"{size_in_bytes / 1e6:.3g} MB", first.wire
    if option.choice.plain:
        logger.warning(
            "reduction='auto': %s take %.2f ms in %s, nothing is predicted to be %.0f %% faster: compression does not pay on "
            "this link, gradients travel in %s",
            size, plain, name, 100 * (GAIN - 1), name,
        )  # fmt: skip
    else:
        logger.info(
            "reduction='auto': %s take %.2f ms in %s and %.2f ms in %s: compressing", size, plain, name, ours, option.wire
        )
