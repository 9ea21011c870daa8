"""How long a study will take, before it begins: a few steps of some settings, timed.

A run's time is that of its steps, of its tests, and of getting ready. The first step of a setting may compile kernels (they
are kept on disk, so that this is not lost) and does not count; then some steps are timed, and one test. Settings are tried one
after the other until `BUDGET` seconds are over; those that were not tried are taken to be like the mean of the others. A
setting with real ranks is timed with as many virtual ones: ranks that share cores take as long. Runs that were made before (a
resumed study) tell their own time.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lowp.lab.settings import StudyPlan, StudyRun, StudySetting
from lowp.training.plugins import PluginError
from lowp.training.reading import with_changes
from lowp.training.recipe import Recipe

BUDGET = 15.0  # seconds for all settings together
_STEPS = 3  # that are timed
_LONGEST = 3.0  # seconds of steps of one setting
_START_OF_RANKS = 5.0  # seconds until real ranks, each a new process, have met


def estimated_seconds(plan: StudyPlan, known: Mapping[str, float], threads: int, data: Path | None) -> dict[str, float]:
    """Seconds of one run of each setting. `known` has those of settings of which runs were made before."""
    found, began = dict(known), time.perf_counter()
    for setting in _baseline_first(plan):
        if setting.name not in found and time.perf_counter() - began < BUDGET:
            with suppress(PluginError, RuntimeError):  # of the user's own model, say: its runs will be recorded as failed
                found[setting.name] = run_seconds(setting.recipe, threads, data)
    usual = statistics.fmean(found.values()) if found else 0.0
    return {setting.name: found.get(setting.name, usual) for setting in plan.settings}


def total_seconds(runs: Iterable[StudyRun], each: Mapping[str, float], jobs: int) -> float:
    """Of all runs, `jobs` at a time; a run of several ranks takes as many places."""
    return sum(each[run.setting.name] * min(jobs, run.recipe.ranks) for run in runs) / jobs


def _baseline_first(plan: StudyPlan) -> list[StudySetting]:
    return sorted(plan.settings, key=lambda setting: setting.name != plan.baseline)


def run_seconds(recipe: Recipe, threads: int, data: Path | None) -> float:
    """About how long a run takes. A mistake that shows only in the model (a pattern that matches no layer) raises here."""
    from lowp.training.divergence import DIVERGED
    from lowp.training.torch_settings import torch_defaults
    from lowp.training.trainer import Trainer
    from lowp.training.world import World

    began = time.perf_counter()
    threads = recipe.threads or threads
    real = recipe.ranks if recipe.parallel.kind == "data" else 1
    alone = with_changes(recipe, ranks=1, virtual_ranks=max(recipe.virtual_ranks, real), threads=threads)
    if recipe.parallel.kind != "data":
        alone = with_changes(alone, virtual_ranks=max(recipe.ranks, recipe.virtual_ranks))
    with torch_defaults():
        trainer = Trainer(alone, World.join(alone.device, threads, together=alone.virtual_ranks), data)
        ready = time.perf_counter() - began
        try:
            step = _step_seconds(trainer.train_step)
        except DIVERGED:
            return ready
        began = time.perf_counter()
        trainer.test()
        test = time.perf_counter() - began
        trainer.close()
    tests = recipe.epochs // recipe.test_every if recipe.test_every else 1
    return ready + step * trainer.steps + test * tests + (_START_OF_RANKS if recipe.ranks > 1 else 0.0)


def _step_seconds(step: Callable[[], None]) -> float:
    """The fastest of some steps after the first: what slows one down here will not slow down all of them."""
    step()
    best, began = float("inf"), time.perf_counter()
    for _ in range(_STEPS):
        before = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - before)
        if time.perf_counter() - began > _LONGEST:
            break
    return best
