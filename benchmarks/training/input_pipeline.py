"""Does the input limit the step? Steps on real batches beside the same steps on one batch that is there already.

Blocks of steps of both kinds take turns in one process. The first step of a block is not counted: there the stream of an
epoch's batches is opened again, since steps on the ready batch have gone past it.
"""

from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import take_turns
from benchmarks.training.cases import Case
from benchmarks.training.clock import step_ms

from lowp.training.cuda_settings import cuda_settings
from lowp.training.trainer import Trainer
from lowp.training.world import World, threads_of_a_rank


def compare(case: Case, device: str, rounds: int, seconds: float, data: Path | None) -> dict[str, Any]:
    """Milliseconds a step, one figure of each kind a round."""
    torch.set_num_threads(threads_of_a_rank(0, 1))
    recipe = case.recipe(device=device)
    trainer = Trainer(recipe, World(0, 1, torch.device(device)), data)
    with cuda_settings(recipe, trainer.world.device):
        found = _blocks(trainer, rounds, seconds)
    trainer.close()
    return {"case": case.name, "batch": case.batch} | found


def _blocks(trainer: Trainer, rounds: int, seconds: float) -> dict[str, Any]:
    real, ready = trainer.micro_batches, trainer.micro_batches(0)
    kinds = {"real": real, "ready": lambda rank: ready}
    for micro_batches in kinds.values():
        trainer.micro_batches = micro_batches
        _block_ms(trainer, 3)
    steps = max(1, round(1e3 * seconds / _block_ms(trainer, 5)))

    def measure(kind: str) -> float:
        trainer.micro_batches = kinds[kind]
        return _block_ms(trainer, steps)

    return {"steps": steps, "ms": take_turns(kinds, rounds, measure)}


def _block_ms(trainer: Trainer, steps: int) -> float:
    trainer.train_step()
    return step_ms(trainer, steps)
