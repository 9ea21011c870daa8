"""A few steps of every setting of a study: does it run here, and about how long would a run take?"""

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from lowp.health.audit import audit
from lowp.lab.settings import StudySetting, plan_of_study
from lowp.lab.study import read_study
from lowp.training.cuda_settings import cuda_settings
from lowp.training.reading import with_overrides
from lowp.training.run import AUDIT_ALLOWS
from lowp.training.trainer import Trainer
from lowp.training.world import World

STEPS = 3


def smoke(studies: Iterable[Path], data: Path | None, changes: Sequence[str]) -> int:
    """A line for each setting; 1 if one failed."""
    world, failed = World.join("auto", 1), 0
    for path in studies:
        print(f"# {path}", flush=True)
        for setting in plan_of_study(read_study(path)).settings:
            try:
                line = _steps(setting, world, data, changes)
            except Exception as error:  # whatever it is, the other settings are tried
                failed, line = 1, f"FAILED {type(error).__name__}: {error}"[:400]
            print(f"{setting.name:50} {line}", flush=True)
    return failed


def _steps(setting: StudySetting, world: World, data: Path | None, changes: Sequence[str]) -> str:
    recipe = with_overrides(setting.recipe, list(changes))
    with cuda_settings(recipe, world.device):
        trainer = Trainer(recipe, world, data)
        began = time.perf_counter()
        if recipe.precision.audit:
            with audit(mode="report", allow=AUDIT_ALLOWS) as report:
                trainer.train_step()
            if not report.clean:
                raise ValueError(f"the audit found tensors of 32 bits: {report.verdict}")
        else:
            trainer.train_step()
        first, began = time.perf_counter() - began, time.perf_counter()
        for _ in range(STEPS):
            trainer.train_step()
        loss = trainer.take_metrics()["loss"]
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        each = (time.perf_counter() - began) / STEPS
        trainer.close()
    whole = each * trainer.steps
    return f"first {first:6.2f} s, step {1e3 * each:8.1f} ms, {trainer.steps} steps: about {whole:6.1f} s, loss {loss:.3f}"


if __name__ == "__main__":
    sys.exit(smoke(map(Path, sys.argv[2:]), Path(sys.argv[1]), ()))
