"""A run's state, from all ranks into one checkpoint and back.

Rank 0 has the files. What a rank has for itself (error feedback's residuals) travels to it to be saved; to resume, it reads the
checkpoint, checks it, and sends it to all. So ranks on other hosts need no shared disk, and a run that was saved by real ranks
can go on with as many virtual ones.
"""

import hashlib
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from lowp import former_names
from lowp.training import checkpoint
from lowp.training.recipe import Recipe
from lowp.training.stored_state import pack, unpack
from lowp.training.trainer import Trainer

FREE = {"name", "description", "ranks", "virtual_ranks", "device", "threads", "test_every", "test_flip", "checkpoints", "log"}
"""Keys that may change between a run and its resumption: they do not change what the next step computes."""
BY_EPOCHS = ("poly", "cosine")  # learning rates that depend on how many epochs there are; with others, a run can be prolonged


def fingerprint(recipe: Recipe) -> str:
    """Names what a checkpoint belongs to: everything that decides the numbers, and into how many shares a step is divided.

    It is made of the keys' first names (lowp/former_names.py), so that checkpoints from before a name changed still belong.
    """
    free = FREE if recipe.learning_rate.kind in BY_EPOCHS else FREE | {"epochs"}
    if recipe.parallel.kind != "data":
        free = free - {"ranks", "virtual_ranks"}  # each rank has a part of the model
    document = former_names.with_former_names(recipe.model_dump(mode="json", exclude=free), former_names.KEYS_OF_A_RECIPE)
    wire = former_names.with_former_names(document["wire"], former_names.ARGUMENTS_OF_THE_WIRE)
    wire["reduction"] = former_names.former(wire["reduction"], former_names.REDUCTIONS)
    text = f"{recipe.shares} {to_json(document | {'wire': wire}).decode()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(trainer: Trainer, directory: Path | None, log: dict[str, Any]) -> None:
    """All ranks call this; rank 0 has a directory. A failure to write is an error on every rank."""
    trainer.confirm()
    trainer.share_buffers()
    gathered = trainer.world.gather(pack({"ranks": trainer.state_of_ranks()}))
    problem = b""
    if directory is not None:
        of_ranks = [entry for message in gathered for entry in unpack(message)["ranks"]]
        state = {"shared": trainer.state(), "ranks": of_ranks, "log": log}
        try:
            checkpoint.save(
                directory,
                trainer.step,
                state,
                fingerprint=fingerprint(trainer.recipe),
                keep=trainer.recipe.checkpoints.keep,
            )
        except (OSError, TypeError) as error:  # TypeError: a state that cannot be stored
            problem = str(error).encode()
    answer = trainer.world.tell(problem if trainer.world.first else None)
    if answer:
        raise checkpoint.CheckpointError(answer.decode())


def restore(trainer: Trainer, directory: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Load the newest whole checkpoint on all ranks. Returns what the log had saved (None: there is no checkpoint), and one
    line for each checkpoint that was refused."""
    answer: dict[str, Any] = {}
    if directory is not None:
        answer = _read(directory, trainer.recipe)
    answer = unpack(trainer.world.tell(pack(answer) if trainer.world.first else None))
    if "problem" in answer:
        raise checkpoint.CheckpointError(answer["problem"])
    if answer["state"] is None:
        return None, answer["refused"]
    state = answer["state"]
    trainer.load_state(state["shared"], state["ranks"])
    return state["log"], answer["refused"]


def _read(directory: Path, recipe: Recipe) -> dict[str, Any]:
    try:
        found = checkpoint.latest(directory, fingerprint=fingerprint(recipe))
    except OSError as error:
        return {"problem": str(error)}
    return {"state": None if found is None else found.state, "refused": [] if found is None else found.refused}
