"""A step with virtual ranks beside the same batch in as many micro-batches: what do the ranks' sums cost?

Under autocast, which casts the weights once for all of them. All contenders are there at once and take turns.
"""

from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import take_turns
from benchmarks.training.cases import Case
from benchmarks.training.clock import step_ms

from lowp.training.cuda_settings import cuda_settings
from lowp.training.recipe import Recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World, threads_of_a_rank

RANKS = 8
BASE = "accumulated"
CONTENDERS: dict[str, dict[str, Any]] = {
    BASE: {"micro_batches": RANKS},
    "virtual, fp32": {"virtual_ranks": RANKS},
    "virtual, e5m2 aps": {"virtual_ranks": RANKS, "wire": {"format": "e5m2", "scale": "aps"}},
}


def compare(case: Case, device: str, activations: str, rounds: int, seconds: float, data: Path | None) -> dict[str, Any]:
    """Milliseconds a step, one figure of each contender a round."""
    torch.set_num_threads(threads_of_a_rank(0, 1))
    trainers = {}
    plain = case.recipe(device=device)
    scale = {"loss_scale": "1024"} if activations == "fp16" else {}
    for name, more in CONTENDERS.items():
        recipe = Recipe.model_validate(plain.model_dump() | {"precision": {"activations": activations, **scale}} | more)
        trainers[name] = Trainer(recipe, World(0, 1, torch.device(device)), data)
    with cuda_settings(plain, torch.device(device)):
        slowest = max(step_ms(trainer, 3) for trainer in trainers.values() for _ in range(2))
        steps = max(2, round(1e3 * seconds / slowest))
        found = take_turns(trainers, rounds, lambda name: step_ms(trainers[name], steps))
    for trainer in trainers.values():
        trainer.close()
    return {"case": case.name, "batch": case.batch, "activations": activations, "steps": steps, "ms": found}
