"""`lowp train --on ray`: the ranks of one run as workers of Ray Train's TorchTrainer.

Ray starts the workers, makes their process group and starts all of them again when one dies. A worker does what a process of
`lowp train --ranks` does, with the same recipe and as many threads: the numbers are the same. Rank 0 has the run's directory. A
worker that is started again may be on another node, so all nodes must see that directory; a probe finds out before anything
begins. Checkpoints are the run's own: Ray is given none.

Ray is not told that a run diverged: it would start the workers again for nothing. All ranks of such a run end together, and its
directory says it, where this process reads how the run ended.
"""

import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lowp.lab.on_ray import check_shared, import_ray, start_ray
from lowp.training.divergence import Diverged
from lowp.training.json_lines import read_lines
from lowp.training.launch import RanksFailed
from lowp.training.progress import summary_rows
from lowp.training.reading import read_recipe
from lowp.training.recipe import PLAN, Recipe
from lowp.training.run import run
from lowp.training.rundir import METRICS, RECIPE, check_directory, read_status
from lowp.training.toml import to_toml
from lowp.training.units import loss_text, number_text, share_text
from lowp.training.world import World, threads_of_a_rank

_EVERY = 0.5  # seconds between two looks at what the run has written


def train_on_ray(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    data: Path | None = None,
    max_restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train on `recipe.ranks` workers; the `end` record.

    Args:
        say: is told of every test while the run goes on.

    Raises:
        Diverged: as in a local run.
        RanksFailed: a worker died, and `max_restarts` is used up; the last checkpoint is whole.
    """
    ray = import_ray()
    check_on_ray(recipe)
    check_directory(out, resume)
    recipe = recipe.model_copy(update={"threads": _threads(recipe, out)})
    own = start_ray(ray, recipe.ranks * recipe.threads + 1)
    try:
        on_gpus = _on_gpus(ray, recipe)
        recipe = recipe.model_copy(update={"device": "cuda" if on_gpus else "cpu"})
        beside = out.resolve().parent
        beside.mkdir(parents=True, exist_ok=True)
        check_shared(ray, beside)
        with tempfile.TemporaryDirectory(prefix=".ray-", dir=beside) as folder, _told(out, say):
            _fit(recipe, out.resolve(), data, on_gpus, max_restarts, folder)
    finally:
        if own:
            ray.shutdown()
    return _ended(out)


def check_on_ray(recipe: Recipe) -> None:
    """What can be known before Ray starts."""
    if recipe.wire.format == PLAN:
        raise ValueError(
            "--on ray: wire=plan measures links between processes of this machine, and Ray's workers may be elsewhere; "
            "`lowp plan --cluster FILE` chooses a wire, which --set wire.format=... then takes"
        )


def _threads(recipe: Recipe, out: Path) -> int:
    """As a local run has them: the recipe's, those that a resumed run began with, or those of as many local processes."""
    if not recipe.threads and (out / RECIPE).is_file():
        recorded = int(tomllib.loads((out / RECIPE).read_text(encoding="utf-8")).get("threads", 0))
        if recorded:
            return recorded
    return threads_of_a_rank(recipe.threads, recipe.ranks)


def _on_gpus(ray: Any, recipe: Recipe) -> bool:
    """Does the cluster have what the run needs? Ray itself would wait for it, for ever."""
    there = ray.cluster_resources()
    cpus, gpus, need = int(there.get("CPU", 0)), int(there.get("GPU", 0)), recipe.ranks * recipe.threads
    if cpus < need:
        raise ValueError(
            f"--on ray: {recipe.ranks} ranks of {recipe.threads} threads need {need} CPUs, and the cluster has {cpus}: take "
            "fewer ranks, or --set threads=1"
        )
    if recipe.device == "cuda" and gpus < recipe.ranks:
        raise ValueError(f"--on ray: {recipe.ranks} ranks with device = 'cuda' need as many GPUs, and the cluster has {gpus}")
    return recipe.device == "cuda" or (recipe.device == "auto" and gpus >= recipe.ranks)


def _fit(recipe: Recipe, out: Path, data: Path | None, on_gpus: bool, max_restarts: int, folder: str) -> None:
    train = import_module("ray.train")
    torch_train = import_module("ray.train.torch")
    settings = {
        "recipe": to_toml(recipe, comments=False),
        "out": str(out),
        "data": None if data is None else str(data.resolve()),
        "path": [path for path in sys.path if path],  # workers find the modules that this process finds
    }
    trainer = torch_train.TorchTrainer(
        _work,
        train_loop_config=settings,
        torch_config=torch_train.TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=recipe.ranks, use_gpu=on_gpus, resources_per_worker={"CPU": recipe.threads, "GPU": int(on_gpus)}
        ),
        run_config=train.RunConfig(
            name="lowp",
            storage_path=folder,
            failure_config=train.FailureConfig(max_failures=max_restarts),
        ),
    )
    before = read_status(out)
    try:
        trainer.fit()
    except Exception as error:  # of Ray: workers that died, or raised; which kind it is, is Ray's own matter
        status = read_status(out)
        if status == before:  # these workers may have been refused: what it says need not be about them
            status = {"state": "", "message": ""}
        if status["state"] == "finished":  # all of them had done their work
            return
        raise RanksFailed(f"workers of Ray failed: {_reason(error, status['message'])}") from error


def _reason(error: Exception, said: str) -> str:
    """What the run itself says; else which ranks Ray found dead; else the beginning of what Ray says."""
    if said:
        return said
    if dead := sorted(getattr(error, "worker_failures", {})):
        return f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))} died; Ray's logs say more"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _work(settings: dict[str, Any]) -> None:
    """In a worker. The process that called `fit` has checked that the directory may be used; when workers are started again,
    the run is there already."""
    with tempfile.TemporaryDirectory(prefix="lowp-recipe-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(settings["recipe"], encoding="utf-8")
        recipe = read_recipe(str(file))
    sys.path += [path for path in settings["path"] if path not in sys.path]
    torch.set_num_threads(recipe.threads)
    data = None if settings["data"] is None else Path(settings["data"])
    try:
        run(recipe, Path(settings["out"]), resume=True, data=data, quiet=True, world=_world(recipe))
    except Diverged:
        return


def _world(recipe: Recipe) -> World:
    """The process group is Ray's."""
    device = import_module("ray.train.torch").get_device() if recipe.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = import_module("ray.train").get_context()
    return World(context.get_world_rank(), context.get_world_size(), device)


def _ended(out: Path) -> dict[str, Any]:
    status = read_status(out)
    if status["state"] == "diverged":
        raise Diverged(status["message"])
    return next(record for record in reversed(read_lines(out / METRICS)) if record["kind"] == "end")


@contextmanager
def _told(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While the run goes on, say what its directory says of every test."""
    done = threading.Event()

    def follow() -> None:
        told = len(_tests(out))  # those of before a resume
        while not done.wait(_EVERY):
            found = _tests(out)
            for record in found[told:]:
                say(_line(record))
            told = max(told, len(found))
        for record in _tests(out)[told:]:
            say(_line(record))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tests(out: Path) -> list[dict[str, Any]]:
    path = out / METRICS
    return [record for record in read_lines(path) if record["kind"] == "test"] if path.exists() else []


def _line(record: dict[str, Any]) -> str:
    accuracy = "" if record.get("accuracy") is None else f", accuracy {share_text(record['accuracy'])}"
    return f"epoch {number_text(record.get('epoch'))}: test loss {loss_text(record.get('loss'))}{accuracy}"


def summary(record: dict[str, Any], out: Path) -> str:
    """The table at the end, as a local run prints it."""
    rows = [*summary_rows(record), ("run", str(out))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
