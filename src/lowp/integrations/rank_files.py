"""Every rank's state in a file of its own, in a directory that a trainer made for its checkpoint.

All ranks find out together whether all could load: one that raised alone would leave the others waiting for it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowp.wire.ddp import Handle


def name_of(rank: int) -> str:
    return f"lowp_wire_{rank}.pt"


def save_rank(handle: Handle, directory: "str | os.PathLike[str]", label: Mapping[str, Any] | None = None) -> None:
    """Write this rank's state. A `label` says to which checkpoint it belongs."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)  # rank 0 may not have been here yet
    file = directory / name_of(dist.get_rank())
    unfinished = file.with_suffix(".tmp")
    torch.save({"label": dict(label or {}), "wire": handle.state_dict()}, unfinished)
    unfinished.replace(file)


def load_rank(
    handle: Handle,
    directories: "Sequence[str | os.PathLike[str]]",
    label: Mapping[str, Any] | None = None,
    *,
    step_only: bool = False,
) -> None:
    """Take this rank's state from the first directory that has it, with this label. All ranks call it; if one raises, all do.

    With `step_only` rank 0's file will do for all: it needs no residuals.
    """
    problem = None
    try:
        handle.load_state_dict(_read(directories, dict(label or {}), 0 if step_only else dist.get_rank()), step_only)
    except (ValueError, OSError) as error:
        problem = str(error)
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, problem)
    for rank, found in enumerate(everyones):
        if found is not None:
            raise ValueError(f"rank {rank} cannot go on with its compression of gradients: {found}")


def _read(directories: "Sequence[str | os.PathLike[str]]", label: dict[str, Any], rank: int) -> dict[str, Any]:
    for directory in directories:
        file = Path(directory) / name_of(rank)
        if file.exists():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            if saved["label"] == label:
                return saved["wire"]
    raise ValueError(f"{name_of(rank)} of this checkpoint is not in {' or in '.join(map(str, directories))}")
