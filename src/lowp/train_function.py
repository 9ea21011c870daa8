"""`lowp.train`: what `lowp train` does, as a function. The command calls the same parts.

It stands outside of `lowp.training`, since `wire=plan` needs `lowp.predict`, which is built on that.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowp.lab.train_on_ray import check_on_ray, train_on_ray
from lowp.training.check import check
from lowp.training.json_lines import read_lines
from lowp.training.launch import is_rank, is_restart
from lowp.training.mistakes import RecipeError
from lowp.training.plugins import is_plugin
from lowp.training.reading import read_recipe, with_changes, with_overrides
from lowp.training.recipe import PLAN, Recipe
from lowp.training.run import run
from lowp.training.rundir import RECIPE, next_directory
from lowp.training.runs import Run, flat
from lowp.training.torch_settings import torch_defaults

Changes = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class TrainingResult:
    """What came of a training.

    Attributes:
        path: the run's directory; `lowp runs PATH` and `lowp report PATH` read it.
        state: "finished", or "stopped" by a signal: `lowp.train(path, resume=True)` goes on.
        metrics: the last record: loss, accuracy, best_accuracy, bytes_sent, bytes_of_fp32, step_ms, seconds, memory_bytes ...
    """

    path: Path
    state: str
    metrics: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Of the last test, a fraction."""
        return self.metrics.get("accuracy")

    @property
    def loss(self) -> float | None:
        """Of the last test."""
        return self.metrics.get("loss")

    @property
    def run(self) -> Run:
        """Everything that the run's directory says: the recipe, all records, the figures of `lowp runs`."""
        return Run.read(self.path)

    @property
    def health(self) -> list[dict[str, Any]]:
        """The samples of numeric health, in order; none unless the recipe asks for them (`log.health`: steps between two)."""
        path = self.path / "health.jsonl"
        return read_lines(path) if path.exists() else []

    def _repr_html_(self) -> str:
        return self.run._repr_html_()


@torch_defaults()  # also where a plan is made; threads are restored
def train(
    recipe: str | os.PathLike[str] | Recipe,
    changes: Changes = (),
    *,
    ranks: int | None = None,
    virtual_ranks: int | None = None,
    out: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    resume: bool = False,
    max_restarts: int = 0,
    on: str = "local",
    quiet: bool = False,
) -> TrainingResult:
    """Train a recipe, as `lowp train` does.

        result = lowp.train("aps8", {"epochs": 3, "wire.format": "e4m3fn"}, ranks=2)
        result.accuracy, result.metrics["bytes_sent"], result.path

    With one rank, or as one of the processes that torchrun has started, in this process. Otherwise `ranks` processes are
    started on this machine. They are new interpreters, which do not run this program again: a script needs no
    `if __name__ == "__main__"`, and a notebook can do it. But they cannot import what the program has defined itself.

    Args:
        recipe: a name of `lowp recipes`, a TOML file, `module:function`, the directory of a run, or a `lowp.Recipe`.
        changes: keys of the recipe with other values: {"optimizer.lr": 0.1}, or texts as `--set` takes them.
        ranks: processes on this machine. Default: the recipe's.
        virtual_ranks: ranks that one process stands in for. Default: the recipe's.
        out: the run's directory. Default: runs/NAME-001, -002 ...; under torchrun it must be given.
        data: where data sets lie. Default: $LOWP_DATA, or the cache.
        resume: go on from the last whole checkpoint in `out`.
        max_restarts: how often to start the ranks again when one dies.
        on: "local", or "ray": ranks are workers of Ray Train, on the cluster that RAY_ADDRESS names or on one that is started
            here. All nodes must see `out`.
        quiet: print only the end.

    Raises:
        ValueError: a mistake in the recipe (RecipeError), or ranks that cannot be started from here.
        lowp.Diverged: the run cannot go on; the message names layer and step. What was there before the step is saved.
        RanksFailed: a rank was killed, and `max_restarts` is used up.
    """
    if on not in ("local", "ray"):
        raise ValueError(f"on={on!r}: a run is trained on 'local' processes or on 'ray'")
    target = None if out is None else Path(out)
    chosen, target = chosen_recipe(recipe, changes, ranks, virtual_ranks, target)
    place = None if data is None else Path(data)
    _check_place(chosen, ranks)
    if on == "ray":
        check_on_ray(chosen)
    if is_rank():
        if target is None:
            raise ValueError("under torchrun, say with out= where the run's directory is: a restart must find it")
        resume = resume or is_restart()
    chosen = planned(chosen, target if resume else None, place, lambda text: None if quiet else print(text))
    check(chosen)
    if target is None:
        if resume:
            raise ValueError("resume=True needs the run's directory: lowp.train('runs/NAME-001', resume=True)")
        target = next_directory(Path("runs"), chosen.name)
    if on == "ray":
        say = (lambda text: None) if quiet else print
        end = train_on_ray(chosen, target, resume=resume, data=place, max_restarts=max_restarts, say=say)
        return TrainingResult(target, "finished", end)
    end = run(chosen, target, resume=resume, data=place, quiet=quiet, max_restarts=max_restarts)
    return TrainingResult(target, "stopped" if end["kind"] == "stopped" else "finished", end)


def chosen_recipe(
    recipe: str | os.PathLike[str] | Recipe,
    changes: Changes,
    ranks: int | None,
    virtual_ranks: int | None,
    out: Path | None,
) -> tuple[Recipe, Path | None]:
    """The recipe with its changes, and the directory: of a run that is named by its directory, that one."""
    counts = {"ranks": ranks, "virtual_ranks": virtual_ranks}
    wanted = {key: value for key, value in counts.items() if value is not None}
    if isinstance(recipe, (str, os.PathLike)):
        folder = Path(recipe)
        if (folder / RECIPE).is_file():
            recipe, out = folder / RECIPE, folder if out is None else out
        texts = list(changes) if not isinstance(changes, Mapping) else []
        chosen = read_recipe(str(recipe), [*texts, *(f"{key}={value}" for key, value in wanted.items())])
    elif isinstance(recipe, Recipe):
        chosen = with_changes(with_overrides(recipe, [] if isinstance(changes, Mapping) else list(changes)), **wanted)
    else:
        raise TypeError(f"a recipe is a name, a file, module:function or a lowp.Recipe, not {type(recipe).__name__}")
    if isinstance(changes, Mapping) and changes:
        chosen = with_changes(chosen, **(dict(changes) | wanted))
    return chosen, out


def planned(chosen: Recipe, out: Path | None, data: Path | None, say: Callable[[str], None]) -> Recipe:
    """With a format of its own where it says `wire=plan`. `out`: of a run that goes on."""
    if chosen.wire.format != PLAN:
        return chosen
    from lowp.predict.recipe_plan import planned_recipe

    first = os.environ.get("RANK", "0") == "0"
    return planned_recipe(chosen, out, data=data, say=say if first else lambda text: None)


def _check_place(recipe: Recipe, ranks: int | None) -> None:
    """Can what is asked for be started from this process?"""
    if is_rank():
        check_ranks_of_torchrun(recipe.ranks if ranks is None and recipe.ranks > 1 else ranks)
        return
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "this process is in a process group already, and a training makes its own: call dist.destroy_process_group() "
            "first, or start the whole program with torchrun"
        )
    if recipe.ranks == 1:
        return
    for key, value in flat(recipe.model_dump()).items():
        if isinstance(value, str) and is_plugin(value) and value.startswith("__main__:"):
            raise RecipeError(
                f"{key}: {value!r} is defined in the program itself, and the processes that ranks={recipe.ranks} starts cannot "
                "import it: put it into a module (a file beside the notebook or script), or use virtual_ranks"
            )


def check_ranks_of_torchrun(ranks: int | None) -> None:
    """torchrun has decided how many there are; whoever asks for another number hears it."""
    started = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != started:
        raise ValueError(
            f"ranks={ranks}: a launcher has started this process as one of {started} (WORLD_SIZE), and none can be started "
            "from here: leave ranks out, or unset RANK and WORLD_SIZE if there is no launcher"
        )
