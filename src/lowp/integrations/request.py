"""A compression that is asked for before there is a wrapped model: what all integrations have in common."""

import inspect
import logging
from typing import Any

import torch.distributed as dist

from lowp.former_names import ARGUMENTS_OF_THE_WIRE, with_current_names
from lowp.wire.auto import PLAN
from lowp.wire.ddp import Handle, compress_gradients
from lowp.wire.settings import Settings

logger = logging.getLogger("lowp")
_said: set[str] = set()


class CompressionRequest:
    """The arguments of `compress_gradients` without the model. Mistakes are found here, before a trainer has started ranks."""

    def __init__(self, format: Any, options: dict[str, Any]) -> None:
        options = with_current_names(options, ARGUMENTS_OF_THE_WIRE, "argument")
        inspect.signature(compress_gradients).bind(None, format, **options)  # a TypeError names an argument that is unknown
        if format != PLAN:
            known = inspect.signature(Settings.of).parameters
            Settings.of(format, **{name: value for name, value in options.items() if name in known})
        self._format, self._options = format, options

    def start(self, ddp: Any) -> Handle:
        return compress_gradients(ddp, self._format, **self._options)


def alone(world: int | None = None) -> bool:
    """Is there only one process? Then there is nothing to compress, and the logger `lowp` says so once.

    Args:
        world: the number of processes, where there is no process group that could tell.
    """
    if world is None:
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        say_once("gradients are not compressed: this is a single process, which sends none (torchrun starts several)")
    return world == 1


def say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def figures(handle: Handle) -> dict[str, float]:
    """The last step's report as numbers for a log."""
    report = handle.report()
    found = {
        "wire_bytes_sent": float(report.bytes_sent),
        "wire_ratio": report.ratio,
        "wire_saturated": report.saturated,
        "wire_underflowed": report.underflowed,
    }
    return found if report.relative_error is None else found | {"wire_relative_error": report.relative_error}
