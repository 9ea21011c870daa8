"""What is decided by prediction: `reduction="auto"`, and `compress_gradients(ddp, "plan")`.

What predicts (`lowp.predict`) is built on the wire, and stands above it. So it is loaded here by its name, and only where a
decision is asked for.
"""

from importlib import import_module
from typing import Any

import torch

from lowp.wire.communicator import Communicator
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.settings import Settings

PLAN = "plan"  # in place of a format


def choose(
    communicator: Communicator, settings: Settings, device: torch.device, numbers: int, dtype: torch.dtype
) -> Reduction | None:
    """The fastest reduction for gradients of so many numbers, or None where uncompressed they are as fast
    (lowp/predict/auto.py)."""
    return import_module("lowp.predict.auto").choose(communicator, settings, device, numbers, dtype)


def compress_by_plan(ddp: Any, max_error: float | None, cluster: Any, options: dict[str, Any]) -> Any:
    """The handle of a model that decides after its first steps (lowp/predict/ddp_plan.py)."""
    return import_module("lowp.predict.ddp_plan").PlannedHandle(ddp, max_error, cluster, options)


def best_for(world: int) -> Reduction:
    """What `auto` most often chooses where it compresses: on two ranks one_shot sends no more than two_shot, and does less."""
    return OneShot() if world == 2 else TwoShot()
